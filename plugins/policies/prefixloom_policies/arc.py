"""ARC: two lists of recency, for what was used once and more often, whose shares are learned from what went too early.

Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache" (FAST 2003). Sizes are tokens, since
edges have any length. What went is remembered by a print of its path (``cells.Prints``). Two things differ, because
room is made before it is known what comes: the target moves after the eviction that makes room, not before it, and the
case of equality in REPLACE, which asks what comes, does not exist.
"""

from __future__ import annotations

from typing import Any

from prefixloom import EvictionPolicy, hookimpl

from .cells import CellQueue, CellRecord, Line, Prints


class Ghosts:
    """What went, oldest first, with its tokens."""

    def __init__(self) -> None:
        self._tokens: dict[Any, int] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def take(self, mark: Any) -> int:
        """The tokens of ``mark``, which is forgotten; 0: it is not here."""
        tokens = self._tokens.pop(mark, 0)
        self.tokens -= tokens
        return tokens

    def put(self, mark: Any, tokens: int) -> None:
        self.take(mark)
        self._tokens[mark] = tokens
        self.tokens += tokens

    def shrink(self, tokens: int) -> None:
        """Forget the oldest until there are at most so many tokens."""
        while self.tokens > max(tokens, 0):
            self.take(next(iter(self._tokens)))


class ArcQueue(CellQueue):
    def __init__(self) -> None:
        super().__init__()
        self.prints = Prints()
        self.once, self.often = Line(), Line()
        self.went_once, self.went_often = Ghosts(), Ghosts()
        self.target = 0.0

    def come(self, cell: Any, record: CellRecord, again: bool) -> None:
        if record.uses == 1 and not again:
            record.uses += self._learn(cell, record)
        line = record.line = self.often if record.uses > 1 else self.once
        line.add(cell)
        line.tokens += record.span

    def _learn(self, cell: Any, record: CellRecord) -> bool:
        """Whether it went before, and was wanted: then its list should have been longer."""
        if not self.went_once and not self.went_often:
            return False
        once, often = self.went_once.tokens, self.went_often.tokens
        for node in self.fresh:
            mark = self.prints.of(node)
            if tokens := self.went_once.take(mark):
                self.target = min(self.tokens, self.target + tokens * max(1.0, often / once))
                return True
            if tokens := self.went_often.take(mark):
                self.target = max(0.0, self.target - tokens * max(1.0, once / often))
                return True
        return False

    def depart(self, cell: Any, record: CellRecord) -> None:
        line = self.often if record.uses > 1 else self.once
        line.tokens -= record.span

    def choose(self) -> Any:
        if self.once.tokens > self.target or self.often.first is None:
            return self.once.first or self.often.first
        return self.often.first

    def gone(self, cell: Any, record: CellRecord) -> None:
        mark = self.prints.of(cell.node)
        if mark is not None:
            (self.went_often if record.uses > 1 else self.went_once).put(mark, record.tokens)
        self.went_once.shrink(self.tokens - self.once.tokens)
        self.went_often.shrink(2 * self.tokens - self.once.tokens - self.often.tokens - self.went_once.tokens)


@hookimpl
def prefixloom_policy() -> EvictionPolicy:
    return EvictionPolicy("arc", make=ArcQueue)
