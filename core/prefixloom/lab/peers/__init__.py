"""The cache managers of other engines, driven with the same trace at the same bytes, and one table of all sides.

This room must not know an engine by name: a peer is found by an entry point of the group ``prefixloom.beside``.

Read ``peer`` first: what a peer must answer. ``peer_replay`` drives one, ``beside`` gives it the bytes that ours has,
and ``side_by_side`` makes the table.
"""
