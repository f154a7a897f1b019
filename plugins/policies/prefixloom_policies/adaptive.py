"""Adaptive: ranks by what is learned of reuse, and goes by last use where that would have been better.

What ``reuse`` ranks by is learned. Where too little was learned, or a trace changes, the least recently used may be the
better choice. So it is judged at each reuse of a path whether an LRU pool of the same size would have had it: it would,
if fewer tokens of paths were used since than the pool holds (the stack distance of Mattson and others, "Evaluation
Techniques for Storage Hierarchies", 1970). Paths that went are judged as well, since their ghosts are followed. Where
the pool's own hits fall behind those of LRU, eviction goes on by last use for a while, twice as long after each time.
"""

from __future__ import annotations

from typing import Any

from prefixloom import EvictionPolicy, hookimpl

from .reuse import ReuseQueue

LEAST = 48
"""Paths that must have been used again before what was learned of them counts."""
LAG = 0.001
"""The part of all tokens asked for by which hits may fall behind those of LRU."""
PATHS = 3
"""They may fall behind by so many paths more, since the best choice may pay late."""
AHEAD = 0.01
"""A lead counts up to this part of all tokens asked for."""
PERIOD = 256
"""Cells that come while eviction goes by last use for the first time."""


class AdaptiveQueue(ReuseQueue):
    def __init__(self, first: int = 64, belief: float = 8.0, shared: float = 12.0) -> None:
        super().__init__(first, belief, shared)
        self._judged = 0
        self._asked = 0
        self._path = 0.0  # tokens of a path, on average
        self._lead = 0.0  # tokens hit beyond what LRU would have hit
        self._until = 0
        self._pause = PERIOD

    @property
    def by_last_use(self) -> bool:
        return self._judged < LEAST or self._came < self._until

    def judge(self, tokens: int, here: int, distance: int) -> None:
        self._judged += 1
        if self._came >= self._until:
            with_lru = min(max(self.tokens - (distance - tokens), 0), tokens)
            self._lead = min(self._lead + here - with_lru, AHEAD * self._asked)
            self._path += (tokens - self._path) / 64

    def add(self, cell: Any) -> None:
        super().add(cell)
        self._asked += cell.node.end
        if self._judged >= LEAST and self._came >= self._until:
            least = -LAG * self._asked - PATHS * self._path
            if self._lead < least:
                self._until = self._came + self._pause
                self._pause *= 2
                self._lead = least / 2

    def choose(self) -> Any:
        if not self.by_last_use:
            return super().choose()
        best, last = None, 0
        for row in self._lines:
            for line in reversed(row):
                cell = line.first
                if cell is not None:
                    used = self.known[cell].last
                    if best is None or used < last:
                        best, last = cell, used
                    break
        return best


@hookimpl
def prefixloom_policy() -> EvictionPolicy:
    return EvictionPolicy("adaptive", make=AdaptiveQueue)
