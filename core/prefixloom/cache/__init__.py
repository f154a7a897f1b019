"""Cache: what an engine holds and calls.

``Cache`` and ``Sequence`` check the caller's arguments and call operations on the core that lies behind them.
``MatchPlan`` is the public face of a match, and ``session`` finds the installed adapter of a model.

This room must not have an algorithm of its own: what changes the tree or a pool stands in ``operations``, and what only
reads stands in ``insight``. It must not know how a cache is composed, nor which tier lies below it.

Read ``cache`` first, then ``sequence``.
"""
