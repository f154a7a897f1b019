"""Recordings: what an engine asked of its cache, written without text, made again, and shrunk.

It knows the public verbs of a cache, the lines of a file and the lab's requests. It must not know
replays, nor any text.

Read ``recording`` first: what is written, and how. ``rerun`` makes the calls again.
"""
