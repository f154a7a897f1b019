"""Cache: what an engine holds and calls.

``Cache`` and ``Sequence`` check the caller's arguments and call operations on the core that lies behind them.
``MatchPlan`` is the public face of a match. ``stats`` gathers the figures, ``session`` finds the installed adapter of a
model, and ``debug`` is debug mode, which keeps the books a second time and compares.

This room must not have an algorithm of its own: what changes the tree or a pool stands in ``operations``. It must not
know how a cache is composed, nor which tier lies below it.

Read ``cache`` first, then ``sequence``. Read ``debug`` to learn what must always be true.
"""
