"""Commands: ``prefixloom fleet`` and what it can do. No action imports Ray before it runs.

Read ``fleet`` first.
"""
