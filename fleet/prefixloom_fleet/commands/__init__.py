"""Commands: ``prefixloom fleet`` and what it can do. A command is imported only when it runs.

Read ``fleet`` first.
"""
