"""S3-FIFO: a small queue filters what is used once; what was used more often goes round in the main queue.

Source: Yang and others, "FIFO Queues are All You Need for Cache Eviction" (SOSP 2023). Sizes are tokens. The small
queue has a tenth of them. What went from it and comes back enters the main queue. A cell that a lease covers is off the
queues, so it comes back at their end, where S3-FIFO would leave it at its place.
"""

from __future__ import annotations

from typing import Any

from prefixloom import EvictionPolicy, hookimpl

from .arc import Ghosts
from .cells import CellQueue, CellRecord, Line, Prints

SHARE = 10
"""The small queue has one part of so many."""
MOST = 3
"""Uses that count."""


class SmallMainQueue(CellQueue):
    def __init__(self) -> None:
        super().__init__()
        self.prints = Prints()
        self.small, self.main = Line(), Line()
        self.went = Ghosts()
        self._counted: dict[Any, int] = {}  # uses since it came, up to three
        self._in_main: set[Any] = set()

    def come(self, cell: Any, record: CellRecord, again: bool) -> None:
        if again:
            self._counted[cell] = min(MOST, self._counted.get(cell, 0) + 1)
        elif cell not in self._counted:
            self._counted[cell] = min(MOST, record.uses - 1)
            if record.uses > 1 or (self.went and self._came_back()):
                self._in_main.add(cell)
        self._put(cell, record, self.main if cell in self._in_main else self.small)

    def _came_back(self) -> bool:
        return any(self.went.take(self.prints.of(node)) for node in self.fresh)

    def _put(self, cell: Any, record: CellRecord, line: Line) -> None:
        record.line = line
        line.add(cell)
        line.tokens += record.span

    def depart(self, cell: Any, record: CellRecord) -> None:
        (self.main if cell in self._in_main else self.small).tokens -= record.span

    def choose(self) -> Any:
        while True:
            small, main = self.small.first, self.main.first
            if small is None and main is None:
                return None
            if small is not None and (main is None or self.small.tokens * SHARE >= self.tokens):
                if self._counted[small] <= 1:
                    return small
                self._counted[small] = 0
                self._again(small, self.small)
                self._in_main.add(small)
            elif self._counted[main]:
                self._counted[main] -= 1
                self._again(main, self.main)
            else:
                return main

    def _again(self, cell: Any, line: Line) -> None:
        """To the end of the main queue."""
        record = self.known[cell]
        line.remove(cell)
        line.tokens -= record.span
        self._put(cell, record, self.main)

    def gone(self, cell: Any, record: CellRecord) -> None:
        mark = self.prints.of(cell.node) if cell not in self._in_main else None
        if mark is not None:
            self.went.put(mark, record.tokens)
        self.went.shrink(self.tokens - self.small.tokens)

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        if lower in self._counted:
            self._counted[upper] = self._counted[lower]
            if lower in self._in_main:
                self._in_main.add(upper)
        super().inherit(upper, lower, linked)

    def forget(self, cell: Any) -> None:
        self._counted.pop(cell, None)
        self._in_main.discard(cell)
        super().forget(cell)


@hookimpl
def prefixloom_policy() -> EvictionPolicy:
    return EvictionPolicy("s3fifo", make=SmallMainQueue)
