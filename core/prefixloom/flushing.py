"""Flushing: everything cached is invalid at once, and so is every handle that was made before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .policy import serving
from .tables import Tables
from .tree import unlink

if TYPE_CHECKING:
    from .cache import Cache


def forget_everything(cache: Cache) -> None:
    """Free all slots of all tiers, whoever held them, and begin with an empty tree."""
    queues = [serving(cache.composition.policy) for _ in cache._all_lanes]
    cache._flushes += 1
    cache._epoch += 1
    cache._flushed_at = cache._epoch
    for hold in cache._live:
        cache._flight.end_alone(hold)
        hold._cache = None
    cache._live.clear()
    for lane, queue in zip(cache._all_lanes, queues, strict=True):
        for pool in lane.pools:
            pool.reset()
        lane.queue = queue
        lane.reset()
    if cache._tier is not None:
        cache._tier.flushed()
    for root in (*cache._tree.roots.values(), *cache._graves, cache._empty_root):
        unlink(root)
    cache._flight.flushed()
    cache._tables = Tables(cache, cache._tables if cache._flight.works else None)
    cache._keys.forget()
    cache._fresh_tree()
    if cache._debug is not None:
        cache._debug.flushed()
