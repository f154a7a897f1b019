"""T-LRU: what a conversation would hardly miss goes before anything else, the rest by last use.

Source: Zhang and others, "Tail-Optimized Caching for LLM Inference" (2025), T-LRU. A turn is slow when it has more than
a threshold of tokens to compute. As long as what is missing of a conversation stays below the threshold, its next turn
is fast anyway. So the ends of conversations, up to the threshold less what a next prompt adds, are safe to evict. They
go first, by last use; all else is evicted as by LRU.
"""

from __future__ import annotations

from typing import Any

from prefixloom import EvictionPolicy, hookimpl

from .cells import CellRecord, RankedQueue

THRESHOLD = 2048
"""Tokens to compute up to which a turn counts as fast."""
ADDED = 256
"""Tokens that a turn's own prompt is expected to add."""


class TailQueue(RankedQueue):
    def __init__(self, threshold: int = THRESHOLD, added: int = ADDED) -> None:
        super().__init__()
        self._spare = threshold - added
        self._whole: dict[Any, int] = {}

    def rank(self, cell: Any, record: CellRecord) -> tuple[bool, int]:
        """Safe to evict: what would be missing of the whole conversation then is less than what is spared."""
        start = record.depth - record.tokens
        whole = self._whole.setdefault(cell, record.depth)
        return whole - start > self._spare, record.last

    def gone(self, cell: Any, record: CellRecord) -> None:
        """What lies above belongs to the same conversation, unless others share it."""
        self._missing = (cell.node.parent, self._whole.get(cell, record.depth))

    def add_first(self, cell: Any) -> None:
        above, whole = getattr(self, "_missing", (None, 0))
        if above is cell.node:
            self._whole[cell] = max(whole, self._whole.get(cell, 0))
        super().add_first(cell)

    def add(self, cell: Any) -> None:
        self._whole.pop(cell, None)  # it was used: all of it is there
        super().add(cell)

    def forget(self, cell: Any) -> None:
        self._whole.pop(cell, None)
        super().forget(cell)


@hookimpl
def prefixloom_policy() -> EvictionPolicy:
    return EvictionPolicy("tlru", make=TailQueue)
