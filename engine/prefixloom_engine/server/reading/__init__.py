"""Reading: bodies of clients become tokens in processes apart from the server.

What works on a client's text is here, and must not know the engine. Read ``bodies`` first: it says what is read, and
within which bounds. ``processes`` has the processes in which it runs.
"""
