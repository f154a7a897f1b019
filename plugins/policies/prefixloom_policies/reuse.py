"""Reuse: what is least likely to be used again soon goes first, by class and age, learned online.

Source: Wang and others, "KVCache Cache in the Wild: Characterizing and Optimizing KVCache Cache at a Large Cloud
Provider" (USENIX ATC 2025): the time until a cached prompt is used again has a distribution that depends on the kind of
request and on the turn of its conversation, and lasts. There, exponential distributions are fitted in a class given by
the engine. Here a class is a range of turns and of what is new in the last turn. ``ages`` says what is learned of each,
and how it ranks.

Paths that went are followed further (``memory``), so that it is also learned what would come back later than the pool
can hold it. Each cell stands in the line of its class and range of ages, and moves on as it grows old: O(1) per range.
What goes next is the oldest of the first line that has any, in the order of the index.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from prefixloom import EvictionPolicy, hookimpl

from .ages import RANGES, Ages, Visit
from .cells import CellQueue, CellRecord, Line, Prints
from .memory import Mark, PathMemory

TURNS = (1, 2, 3, 5)
"""Where the classes of turns begin."""
NEW = (0, 512, 2048, 8192)
"""Where the classes of tokens begin that were new in the last turn."""
SPAN = 8
"""When a visit began is known for so many times the tokens of the pool. Older visits count as equally old."""
MARKS_OF_A_PATH = 64
"""A path has at most so many marks, on average. Where there are more, half of all are forgotten."""
MARKS = 16384
"""All paths in the pool together have at most so many."""
LEARNED = 1000
"""The order is computed anew after so many cells have come, and more often in the beginning."""
FADES = 8192
"""So many cells after which what was learned counts half."""


class ReuseQueue(CellQueue):
    """``first``: where the second range of ages begins, and ``new``: where classes of new tokens begin, in tokens."""

    kinds = len(TURNS) * len(NEW)

    def __init__(self, first: int = 64, new: Sequence[int] = NEW) -> None:
        super().__init__()
        self.prints = Prints()
        self.ages = Ages(self.kinds, first)
        self.memory = PathMemory(self.ages)
        self._new = new
        self.marks_of: dict[Any, list[Mark]] = {}
        """Of each edge that is here, the deepest first."""
        self.held = 0
        """Marks of all edges."""
        self._least = 0  # the fewest since the last visit began, while requests ran that are not in the tree yet
        self._mask = 0
        """The prints of marks have none of these bits."""
        self.had: dict[Any, int] = {}
        """How deep an LRU pool had the paths that a lease covers, when it came."""
        self._of_a_path = 0.0  # marks of a path, on average
        self._lines = [[Line() for _ in range(RANGES)] for _ in range(self.kinds)]
        self._order: list[Line] = []
        self._position: dict[Line, int] = {}
        self._filled = 0  # a bit for each position whose line has cells
        self._due: list[tuple[int, int, int]] = []
        self._came = 0
        self._next_order = 16
        self._sort()

    # ------------------------------------------------------------ what comes
    def come(self, cell: Any, record: CellRecord, again: bool) -> None:
        old: Visit | None = record.key
        if old is None or again or old.over:
            self.visit(record, again)
        self._advance()
        self.stand(cell, record, 0)

    def add(self, cell: Any) -> None:
        super().add(cell)
        self._came += 1
        if self._came >= self._next_order:
            self._next_order = self._came + min(LEARNED, self._came)
            self._sort()
        if self._came % FADES == 0:
            self.ages.fade()

    def visit(self, record: CellRecord, again: bool) -> None:
        """A path was used: end the visit that it goes on from, and begin one."""
        ages = self.ages
        fresh = self.made(record, again)
        there = fresh[-1].parent.end if fresh else record.depth
        for node in fresh:
            self._mark(node)
        self.pass_time(record.depth)
        marks = self.marks(record)
        deep, before = self.memory.seen(marks)
        if deep < there or before is None:
            deep, before = there, self._before(record, fresh)
        turn = 1
        if before is not None and 2 * deep >= before.end:
            ages.end(before, True)
            if 2 * deep >= record.depth:
                turn = before.turn + 1
        here = [mark for mark in marks if mark[0] <= there] if fresh else marks
        above = self._at.get(fresh[-1].parent) if fresh else record
        had = self.had.pop(None if above is None else above.node, None)
        self.memory.shrink(self._least + len(marks) - len(here))  # not so far as its own new tokens made room
        with_lru = self.memory.recent(marks)
        if had is not None and with_lru <= there:
            with_lru = had
        self.judge(record.depth, turn, here[0][0] if here else 0, with_lru)
        self.begin(record, turn, record.depth - deep, marks)

    def made(self, record: CellRecord, again: bool) -> list[Any]:
        """The nodes that a use made of a path, the deepest first; none if the path was there."""
        return self.fresh if not again and self.fresh and self.fresh[0] is record.node else []

    def pass_time(self, asked: int) -> None:
        self.ages.now += asked
        self.ages.horizon = SPAN * self.tokens

    def begin(self, record: CellRecord, turn: int, new: int, marks: Sequence[Mark]) -> None:
        """Begin the visit of a path that uses ``marks``."""
        self.forget_visit(record)
        kind, mark = self.kind(turn, max(new, 0)), marks[0][1] if marks else -1
        visit = record.key = Visit(kind, self.ages.now, turn, record.depth, mark, held=1)
        self.ages.begin(visit)
        self.memory.shrink(self._least)
        self.memory.use(marks, visit)
        self.memory.shrink(self.held)
        self._least = self.held

    def remove(self, cell: Any) -> None:
        """A path is used from now on: note what an LRU pool has of it, before other requests that run are done."""
        super().remove(cell)
        record = self.known[cell]
        if record.key is not None:
            marks = self.marks(record)
            self.had[record.node] = self.memory.recent(marks)
            self.memory.use(marks, record.key)

    def add_first(self, cell: Any) -> None:
        """A path that a lease gave back unused goes next under LRU as well."""
        record = self.known.get(cell)
        unused = record is not None and record.away
        super().add_first(cell)
        if record is not None and unused and record.useless and record.key is not None:
            self.memory.put_first(self.marks(record), record.key)

    def _before(self, record: CellRecord, fresh: list[Any]) -> Visit | None:
        """The visit of the path that a new one goes on from, if that is here."""
        above = self._at.get(fresh[-1].parent) if fresh else record
        found: Visit | None = above.key if above is not None and (above.away or not fresh) else None
        return found

    def kind(self, turn: int, new: int) -> int:
        return (bisect_right(TURNS, turn) - 1) * len(NEW) + bisect_right(self._new, new) - 1

    def judge(self, asked: int, turn: int, hit: int, with_lru: int) -> None:
        """A path was used that was here up to ``hit``, and in an LRU pool up to ``with_lru``.

        Nothing, unless a policy compares.
        """

    # ------------------------------------------------------------ marks
    def _mark(self, node: Any) -> None:
        if node not in self.marks_of:
            marks = self.marks_of[node] = self.prints.marks(node, self._mask)
            self.held += len(marks)

    def marks(self, record: CellRecord) -> list[Mark]:
        """The marks of a path, the deepest first."""
        found: list[Mark] = []
        node = record.node
        while node is not None:
            found += self.marks_of.get(node, ())
            node = node.parent
        self._of_a_path += (len(found) - self._of_a_path) / 64
        if self._of_a_path > MARKS_OF_A_PATH or self.held > MARKS:
            self._thin()
            found = [mark for mark in found if not mark[1] & self._mask]
        return found

    def _thin(self) -> None:
        """Keep half of the marks."""
        self._mask = 2 * self._mask + 1
        self._of_a_path /= 2
        self.held = 0
        for node, marks in self.marks_of.items():
            kept = self.marks_of[node] = [mark for mark in marks if not mark[1] & self._mask]
            self.held += len(kept)
        self.memory.thin(self._mask)

    # ------------------------------------------------------------ lines
    def stand(self, cell: Any, record: CellRecord, at: int) -> None:
        visit = record.key
        if not at:
            at = max(0, _range(self.ages, visit))
        line = record.line = self._lines[visit.kind][at]
        if line.first is None:
            self._filled |= 1 << self._position[line]
            if at + 1 < RANGES:
                heapq.heappush(self._due, (visit.at + self.ages.bounds[at + 1], visit.kind, at))
        line.add(cell)

    def _advance(self) -> None:
        """Move what has grown too old for its range to the next one."""
        due, now = self._due, self.ages.now
        while due and due[0][0] <= now:
            _, kind, at = heapq.heappop(due)
            line = self._lines[kind][at]
            oldest = now - self.ages.bounds[at + 1]
            while (cell := line.first) is not None:
                record = self.known[cell]
                if record.key.at > oldest:
                    heapq.heappush(due, (record.key.at + self.ages.bounds[at + 1], kind, at))
                    break
                line.remove(cell)
                self.stand(cell, record, at + 1)
            if line.first is None:
                self._filled &= ~(1 << self._position[line])

    def _sort(self) -> None:
        """Put the lines in the order of the index; of equals, the older goes first."""
        index = self.ages.index()
        order = sorted((index[kind][at], -at, kind) for kind in range(self.kinds) for at in range(RANGES))
        self._order = [self._lines[kind][-at] for _, at, kind in order]
        self._position = {line: number for number, line in enumerate(self._order)}
        self._filled = sum(1 << number for number, line in enumerate(self._order) if line.first is not None)

    def depart(self, cell: Any, record: CellRecord) -> None:
        line = self._left
        if line is not None and line.first is None:
            self._filled &= ~(1 << self._position[line])

    def is_first(self, record: CellRecord) -> bool:
        """Whether a cell goes next, before all order."""
        return record.line is self._front

    def leave(self, cell: Any, record: CellRecord) -> None:
        """Take a cell off the line in which it stands."""
        line = record.line
        assert line is not None
        line.remove(cell)
        record.line = None
        if line.first is None:
            self._filled &= ~(1 << self._position[line])

    def _take(self, cell: Any, record: CellRecord) -> None:
        self._left = record.line if record.line is not self._front else None
        super()._take(cell, record)

    # ------------------------------------------------------------ what goes
    def choose(self) -> Any:
        filled = self._filled
        if not filled:
            return None
        return self._order[(filled & -filled).bit_length() - 1].first

    def bared(self, record: CellRecord, child: CellRecord) -> bool:
        """What is left of a path goes next, unless it was used itself after its end was."""
        visit, below = record.key, child.key
        if below is None or (visit is not None and not visit.over and visit.at > below.at):
            return visit is not None and not visit.over
        self.forget_visit(record)
        record.key = below
        below.held += 1
        return False

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        super().inherit(upper, lower, False)
        record, old = self.known.get(upper), self.known.get(lower)
        if record is not None and old is not None and record.key is not None:
            record.key.held += 1
        if linked:
            if record is None or old is None:
                self.add_first(upper)
            elif old.line is None:
                self.come(upper, record, False)
            else:
                record.line = old.line
                old.line.add_behind(upper, lower)

    def divided(self, upper: Any, lower: Any) -> None:
        marks = self.marks_of.get(lower)
        node = lower
        while marks:
            own = self.marks_of[node] = list(takewhile(lambda mark: mark[0] > node.parent.end, marks))  # noqa: B023
            marks, node = marks[len(own) :], node.parent

    def forget(self, cell: Any) -> None:
        record = self.known.get(cell)
        if record is not None:
            self.forget_visit(record)
            self.had.pop(record.node, None)
            marks = self.marks_of.pop(record.node, ())
            self.held -= len(marks)
            self._least = min(self._least, self.held)
            if not record.chosen:  # another component lost what it needs, and would have under LRU
                self.memory.lose(marks)
        super().forget(cell)

    def forget_visit(self, record: CellRecord) -> None:
        if record.key is not None:
            self.ages.release(record.key)
            record.key = None


def _range(ages: Ages, visit: Visit) -> int:
    return bisect_right(ages.bounds, ages.now - visit.at) - 1


@hookimpl
def prefixloom_policy() -> EvictionPolicy:
    return EvictionPolicy("reuse", make=ReuseQueue)
