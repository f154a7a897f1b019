"""Tracing: a file that says what an engine did and when, which Perfetto's viewer opens.

- ``trace``   follows an engine and its cache, and says what becomes an event
- ``events``  turns what was said into events, on a thread of its own: tracks, and what each request was doing
- ``file``    writes them as JSON, with bounded memory and a bounded size, whatever the disk does

Nothing here has a prompt, a token or a tenant's name: requests are known by their numbers. Read ``trace`` first.
"""
