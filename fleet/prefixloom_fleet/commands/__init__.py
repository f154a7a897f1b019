"""The commands of a fleet. They read arguments, call the other rooms, and print.

Read ``fleet`` first: ``prefixloom fleet``, which knows its sub-commands. Each of these has a file of its own.
"""
