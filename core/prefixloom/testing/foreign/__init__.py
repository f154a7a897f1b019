"""The kit held against caches that are not ours: the cache manager of another engine, behind a small adapter.

    contract   what an adapter must answer: open, compute, commit, end, evict, who owns which slot, and what it holds
    forward    a simulated forward pass: what it reads and writes, and the number that every entry must hold
    player     the world of an adapted cache, on which scripts are played and everything is checked
    traffic    random scripts
    orders     runs a few requests in every order that the scheduling thread and the device allow
    hits       asks what hits where nothing was evicted, so that a cache that never hits is told so
    command    finds an adapter by its name, and reports on it

An adapter is named ``module:Class``, so this room knows no engine. ``python -m prefixloom.testing.foreign NAME`` runs
everything. Read ``contract`` first, then ``player``.
"""
