"""Flushing: everything cached is invalid at once, and so is every handle that was made before.

Dropped handles: sequences, leases, spans and entered steps that went out of use without being ended.

A finalizer runs at any time and in any thread, so it may only say that it happened; the thread that drives the cache
takes the slots back before its next operation.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..cache.sequence import Sequence
from ..cache.step import Step
from ..contract.policy import serving
from ..device.pool import Span
from ..tree.radix import unlink
from .lease import release
from .tables import Tables

if TYPE_CHECKING:
    from ..cache.cache import Cache


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


log = logging.getLogger("prefixloom")


class Abandoned(Exception):
    """How a step ends that was entered and then lost."""


class Dropped(list[Any]):
    """What was dropped and not yet taken back."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self._cache = cache

    def append(self, item: Any) -> None:
        super().append(item)
        self._cache._guarded = True

    def recover(self) -> None:
        cache = self._cache
        cache._guarded = cache._debug is not None  # first: what is dropped meanwhile sets it again
        while self:
            item = self.pop()
            cache._recovered += 1
            if isinstance(item, Step):
                log.warning("%r was entered and dropped before its end; it counts as failed", item)
                item.__exit__(Abandoned, None, None)
                continue
            made = item._lease if isinstance(item, Sequence) else item
            where = getattr(made, "_where", None) or "a place that PREFIXLOOM_DEBUG=1 tells"
            log.warning("%r was dropped without release (made at %s); its slots were taken back", item, where)
            if isinstance(item, Sequence):
                item._give_back(cache)
            elif isinstance(item, Span):
                item.free()
            else:
                release(cache, item)
