"""Dropped handles: sequences, leases, spans and entered steps that went out of use without being ended.

A finalizer runs at any time and in any thread, so it may only say that it happened; the thread that drives the cache
takes the slots back before its next operation.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .lease import release
from .pool import Span
from .sequence import Sequence
from .step import Step

if TYPE_CHECKING:
    from .cache import Cache

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
