"""GDSF with the cost of computing: what saves most work for its size, and is used most, stays.

Sources: Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy" (1998); and Pan
and others, "Marconi: Prefix Caching for the Era of Hybrid LLMs" (MLSys 2025), from which the cost comes: the floating
point operations that a hit saves for each byte. A token at depth d costs its share of the weights, and attention over d
tokens before it. In a dense model with hidden size h the two are equal at about d = 6 h, the ``KNEE``.

    rank = age + uses * cost / size        age: the rank of what went last, so that what is not used grows old

A queue is not told whether it holds pages or states, so size is counted in tokens.
"""

from __future__ import annotations

from typing import Any

from prefixloom import EvictionPolicy, hookimpl

from .cells import CellRecord, RankedQueue

KNEE = 24576
"""The depth at which attention costs as much as the weights: six times a hidden size of 4,096."""


class GreedyDualQueue(RankedQueue):
    def __init__(self, knee: int = KNEE) -> None:
        super().__init__()
        self._knee = knee
        self._age = 0.0
        self._ranks: dict[Any, float] = {}

    def rank(self, cell: Any, record: CellRecord) -> float:
        middle = record.depth - record.tokens / 2
        rank = self._age + record.uses * (1 + middle / self._knee)
        self._ranks[cell] = rank
        return rank

    def gone(self, cell: Any, record: CellRecord) -> None:
        self._age = max(self._age, self._ranks.get(cell, 0.0))

    def forget(self, cell: Any) -> None:
        self._ranks.pop(cell, None)
        super().forget(cell)


@hookimpl
def prefixloom_policy() -> EvictionPolicy:
    return EvictionPolicy("gdsf", make=GreedyDualQueue)
