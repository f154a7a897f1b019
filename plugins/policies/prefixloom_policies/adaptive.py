"""Adaptive: ranks by what is learned of reuse, and goes by last use where that would have hit more.

The ``memory`` of marks is an LRU pool in small. So at each use of a path it is known how deep an LRU pool of the same
size would have had it, and how deep it was there. The *lead* is the sum of the differences since the order by reuse
began. When it falls below what may be risked, eviction goes by last use, until what is lost is at most half of that.
What may be risked grows with the tokens that were asked for, so what was learned gets another chance, each time later.

The sum never begins anew: hits lie behind those of LRU by about what may be risked, and not by more. What is risked is
a part of all tokens, and beside it what one good decision costs before it pays: a path, or a part of the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from prefixloom import EvictionPolicy, hookimpl

from .ages import Visit
from .cells import CellRecord
from .memory import Mark
from .reuse import NEW, TURNS, ReuseQueue

LEAST = 256
"""Eviction goes by last use until so many paths were used again. Before that too little is learned of them."""
POOLS = 4
"""It goes by last use, too, until so many pools of tokens have missed, which is how far the memory looks back."""
RISK = 0.0003
"""This part of all tokens asked for may be lost against LRU. Beside it, the larger of the next two may be lost."""
PATHS = 1
"""So many paths of average length."""
POOL = 0.01
"""This part of the pool."""
AHEAD = 0.01
"""A lead counts up to this part of all tokens asked for, so that a loss is soon seen."""
PASSED = len(TURNS) * len(NEW)
"""The class of states that have a later one on their path."""


class AdaptiveQueue(ReuseQueue):
    def __init__(self, first: int = 64, new: Sequence[int] = NEW) -> None:
        super().__init__(first, new)
        self._by_use: OrderedDict[Any, None] = OrderedDict()
        self._asked = 0
        self._missed = 0
        self._reused = 0
        self._path = 0.0  # tokens of a path that is used again, on average
        self.lead = 0.0
        """Tokens hit beyond what LRU would have hit."""
        self.by_last_use = True

    def judge(self, asked: int, turn: int, hit: int, with_lru: int) -> None:
        self._asked += asked
        self._missed += asked - hit
        if turn > 1:
            self._reused += 1
            self._path += (asked - self._path) / min(self._reused, 64)
        if self._reused < LEAST or self._missed < POOLS * self.tokens:
            return
        self.lead = min(self.lead + hit - with_lru, AHEAD * self._asked)
        risk = RISK * self._asked + max(PATHS * self._path, POOL * self.tokens)
        if self.by_last_use:
            self.by_last_use = self.lead < -risk / 2
        else:
            self.by_last_use = self.lead < -risk

    def come(self, cell: Any, record: CellRecord, again: bool) -> None:
        super().come(cell, record, again)
        self._by_use[cell] = None

    def depart(self, cell: Any, record: CellRecord) -> None:
        super().depart(cell, record)
        self._by_use.pop(cell, None)

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        super().inherit(upper, lower, linked)
        if linked and not self.is_first(self.known[upper]):
            self._by_use[upper] = None

    def choose(self) -> Any:
        return next(iter(self._by_use), None) if self.by_last_use else super().choose()


class AdaptiveStateQueue(AdaptiveQueue):
    """The same for states, each of which takes one slot and serves one boundary.

    A state differs from the end of a path in three ways. It serves its own boundary alone, so an LRU pool in small
    holds states, each a mark, and a use touches one. A state that has a later one on its path is seldom needed again:
    these are a class of their own. And what a use gains is counted from the state above.
    """

    kinds = PASSED + 1

    def __init__(self) -> None:
        super().__init__()
        self._cells: dict[Any, Any] = {}
        """The cell at each node that has a state."""

    def visit(self, record: CellRecord, again: bool) -> None:
        node = record.node
        own = self._mark_of(node)
        above = self._state_above(node)
        start = 0 if above is None else above.depth
        if again:
            with_lru = self.had.pop(node, None)
            if with_lru is None:
                with_lru = self.in_lru(record)
            turn = 2 if record.key is None else record.key.turn + 1
            self.pass_time(record.depth)
            self.judge(record.depth, turn, record.depth, with_lru)
            if record.key is not None:
                self.ages.end(record.key, True)
        else:
            self.pass_time(record.depth - start)
            gone: Visit | None = self.memory.seen(own)[1]
            turn = 1 if above is None or above.key is None else above.key.turn
            if gone is not None:
                turn = max(turn, gone.turn + 1)
                self.ages.end(gone, gone.kind != PASSED)  # of several on a path, one would have been used
            made = record.depth - start
            self.judge(made, turn, 0, made if self.memory.recent(own) else 0)
            if above is not None:
                self._pass(above)
        self.begin(record, turn, record.depth - start, own)

    def remove(self, cell: Any) -> None:
        """A state that is taken off as soon as it came is copied by the sequence that made it."""
        copied = self.known[cell].last == self.tick
        super().remove(cell)
        if copied:
            self.known[cell].away = False

    def in_lru(self, record: CellRecord) -> int:
        """How deep a request could resume that resumed here, if the pool were an LRU pool."""
        recent = self.memory.recent
        node = record.node
        while node is not None:
            if recent(self.marks_of.get(node, ())):
                return int(node.end)
            node = node.parent
        return 0

    def marks(self, record: CellRecord) -> list[Mark]:
        return self.marks_of.get(record.node, [])

    def _mark_of(self, node: Any) -> list[Mark]:
        if node not in self.marks_of:
            self.marks_of[node] = self.prints.end(node)
            self.held += len(self.marks_of[node])
        return self.marks_of[node]

    def _state_above(self, node: Any) -> CellRecord | None:
        node = node.parent
        while node is not None and node not in self._cells:
            node = node.parent
        return None if node is None else self.known[self._cells[node]]

    def _pass(self, record: CellRecord) -> None:
        """A later state came on the path of a state."""
        visit = record.key
        if visit is None or visit.over or visit.kind == PASSED:
            return
        cell = self._cells[record.node]
        stands = record.line is not None and not self.is_first(record)
        if stands:
            self.leave(cell, record)
        self.ages.change(visit, PASSED)
        if stands:
            self.stand(cell, record, 0)

    def come(self, cell: Any, record: CellRecord, again: bool) -> None:
        self._cells[record.node] = cell
        super().come(cell, record, again)

    def forget(self, cell: Any) -> None:
        node = cell.node
        if self._cells.get(node) is cell:
            del self._cells[node]
        super().forget(cell)


@hookimpl
def prefixloom_policy() -> EvictionPolicy:
    return EvictionPolicy("adaptive", make=AdaptiveQueue, make_states=AdaptiveStateQueue)
