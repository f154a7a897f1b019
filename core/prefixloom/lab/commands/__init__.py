"""The commands of the lab. They read arguments, call the lab, and print.

This room must not measure anything by itself.

Read ``replay`` first: ``prefixloom replay``. ``plan`` is ``prefixloom plan``, and ``arguments`` is what both share.
"""
