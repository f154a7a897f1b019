"""Contract: what a component, a tier and a policy may say, as plain data.

A component says what it stores (``manifest``), what must be present to resume at a boundary (``reach``), and which
hooks it overrides (``hookspecs``, whose arguments and answers are the frozen ``values``). Policies say which data goes
first (``policy``, ``queues``) and which states the tree takes (``admission``). A tier says what came of a restore, and
its figures (``tier_answers``). ``composition`` is a checked set of all
of these.

This room must not know a tree, a tensor, a device or a running request: everything here can be made, compared and
printed before a cache exists. Above ``errors`` and ``storage`` it is the lowest room.

Read ``reach`` first: the rest of the core follows from it. Then read ``manifest`` and ``hookspecs``.
"""
