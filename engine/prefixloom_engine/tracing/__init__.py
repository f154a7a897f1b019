"""Tracing: a file that says what an engine did and when, which Perfetto's viewer opens.

- ``trace``     follows an engine and its cache, and says what becomes an event
- ``timetable`` turns what was said into events, on a thread of its own: tracks, spans that nest, requests that are open
- ``packets``   the bytes of an event, as Perfetto's trace format has them
- ``file``      writes them, with bounded memory and a bounded size, whatever the disk does

Nothing here has a prompt, a token or a tenant's name: requests are known by their numbers. Read ``trace`` first.
"""
