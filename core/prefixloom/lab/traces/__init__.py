"""What a replay is driven with: requests, read from files or made.

This room knows tokens and files. It must not know a cache, nor how requests overlap in time.

Read ``requests`` first: what one request is. ``reading`` reads files of them, line by line (``lines``; of recordings
``recorded``), and ``synthetic`` makes conversations where nobody has recorded any.
"""
