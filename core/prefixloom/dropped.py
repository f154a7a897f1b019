"""Dropped handles: sequences, leases and spans that went out of use without being released.

A finalizer runs at any time and in any thread, so it may only say that it happened; the thread that drives the cache
takes the slots back before its next operation.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .lease import release
from .pool import Span
from .sequence import Sequence

if TYPE_CHECKING:
    from .cache import Cache

log = logging.getLogger("prefixloom")


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
            where = (
                item._lease if isinstance(item, Sequence) else item
            )._where or "a place that PREFIXLOOM_DEBUG=1 tells"
            log.warning("%r was dropped without release (made at %s); its slots were taken back", item, where)
            if isinstance(item, Sequence):
                item._give_back(cache)
            elif isinstance(item, Span):
                item.free()
            else:
                release(cache, item)
