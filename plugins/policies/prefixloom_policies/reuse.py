"""Reuse: what is least likely to be used again soon goes first, by turn and age, learned online.

Source: Wang and others, "KVCache Cache in the Wild: Characterizing and Optimizing KVCache Cache at a Large Cloud
Provider" (USENIX ATC 2025): the time until a cached prompt is used again has a distribution that depends on the kind of
request and on the turn of its conversation, and lasts. There, exponential distributions are fitted in a class given by
the engine. Here a class is a range of turns, and ``ages`` says what is learned of each and how it ranks.

Paths that went are followed further as ghosts, so that it is also learned what would come back later than the pool can
hold it. Each cell stands in the line of its class and range of ages, and moves on as it grows old: O(1) per range. What
goes next is the oldest of the first line that has any, in the order of the index.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from typing import Any

from prefixloom import EvictionPolicy, hookimpl

from .ages import RANGES, Ages, Visit
from .cells import CellQueue, CellRecord, Line, Prints

TURNS = (1, 2, 3, 4, 6, 10)
"""Where the classes of turns begin."""
HORIZON = 8
"""Ghosts are followed for so many times the tokens of the pool."""
MOST_GHOSTS = 1 << 16
LEARNED = 512
"""The order is computed anew after so many cells have come, and more often in the beginning."""
FADES = 8192
"""So many cells after which what was learned counts half."""


class ReuseQueue(CellQueue):
    def __init__(self, first: int = 64, belief: float = 8.0, shared: float = 12.0) -> None:
        super().__init__()
        self.prints = Prints()
        self.ages = Ages(len(TURNS), first, belief=belief, shared=shared)
        self._ghosts: dict[Any, Visit] = {}
        self._lines = [[Line() for _ in range(RANGES)] for _ in TURNS]
        self._places = {line: (kind, at) for kind, row in enumerate(self._lines) for at, line in enumerate(row)}
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
            self._visit(record, old if again else None)
        self._advance()
        self._stand(cell, record, 0)

    def add(self, cell: Any) -> None:
        super().add(cell)
        self._came += 1
        if self._came >= self._next_order:
            self._next_order = self._came + min(LEARNED, self._came)
            self._sort()
        if self._came % FADES == 0:
            self.ages.fade()

    def _visit(self, record: CellRecord, old: Visit | None) -> None:
        ages = self.ages
        ages.horizon = HORIZON * self.tokens
        tokens = record.span
        turn = 1
        if old is not None:
            turn, tokens = old.turn + 1, self._used(old, old.end) or record.span
        elif record.node.parent is not None and self.fresh and self.fresh[0] is record.node:
            ages.now += record.span
            turn, more = self._history(record)
            tokens += more
        kind = 0
        while kind + 1 < len(TURNS) and turn >= TURNS[kind + 1]:
            kind += 1
        visit = record.key = Visit(kind, ages.now, turn, tokens, record.depth)
        ages.begin(visit)

    def _history(self, record: CellRecord) -> tuple[int, int]:
        """The turn that a new path is, and the tokens of what it goes on."""
        turn, tokens = 1, 0
        fresh = self.fresh
        above = self._at.get(fresh[-1].parent)
        if above is not None and above.key is not None and above.away:
            if 2 * above.depth >= above.key.end:
                tokens = self._used(above.key, above.depth)
            if 2 * above.depth >= record.depth:
                turn = above.key.turn + 1
        if self._ghosts:
            for node in reversed(fresh):
                ghost = self._ghosts.pop(self.prints.of(node), None)
                if ghost is None:
                    continue
                self._used(ghost, fresh[-1].parent.end)
                if 2 * ghost.end >= record.depth:
                    turn = max(turn, ghost.turn + 1)
        return turn, tokens

    def _used(self, visit: Visit, depth: int) -> int:
        """A path was used again, and its first ``depth`` tokens were there. Its tokens that no other path shares."""
        if visit.over:
            return 0
        distance = self.ages.end(visit, True)
        here = min(max(depth - (visit.end - visit.tokens), 0), visit.tokens)
        self.judge(visit.tokens, here, distance)
        return visit.tokens

    def judge(self, tokens: int, here: int, distance: int) -> None:
        """A path of so many tokens was used again, of which ``here`` were there. Nothing, unless a policy compares.

        ``distance``: the tokens that an LRU pool needs to have all of it.
        """

    # ------------------------------------------------------------ lines
    def _stand(self, cell: Any, record: CellRecord, at: int) -> None:
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
                self._stand(cell, record, at + 1)
            if line.first is None:
                self._filled &= ~(1 << self._position[line])

    def _sort(self) -> None:
        """Put the lines in the order of the index; of equals, the older goes first."""
        index = self.ages.index()
        order = sorted((index[kind][at], -at, kind) for kind in range(len(TURNS)) for at in range(RANGES))
        self._order = [self._lines[kind][-at] for _, at, kind in order]
        self._position = {line: number for number, line in enumerate(self._order)}
        self._filled = sum(1 << number for number, line in enumerate(self._order) if line.first is not None)

    def depart(self, cell: Any, record: CellRecord) -> None:
        line = self._left
        if line is not None and line.first is None:
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

    def gone(self, cell: Any, record: CellRecord) -> None:
        visit = record.key
        if visit is None or visit.over:
            return
        mark = self.prints.of(cell.node)
        if mark is None:
            self.ages.end(visit, False)
            return
        ghosts = self._ghosts
        ghosts[mark] = visit
        horizon = self.ages.now - HORIZON * self.tokens
        while ghosts:
            oldest = next(iter(ghosts))
            ghost = ghosts[oldest]
            if ghost.at > horizon and len(ghosts) <= MOST_GHOSTS:
                break
            del ghosts[oldest]
            if not ghost.over:
                self.ages.end(ghost, False)

    def bared(self, record: CellRecord, child: CellRecord) -> bool:
        """What is left of a path goes next, unless it was used itself after its end was."""
        visit, below = record.key, child.key
        if below is None or (visit is not None and not visit.over and visit.at > below.at):
            return visit is not None and not visit.over
        record.key = below
        return False

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        super().inherit(upper, lower, False)
        if linked:
            record, old = self.known.get(upper), self.known.get(lower)
            if record is None or old is None:
                self.add_first(upper)
            elif old.line is None:
                self.come(upper, record, False)
            else:
                record.line, record.key = old.line, old.key
                old.line.add_behind(upper, lower)

    def forget(self, cell: Any) -> None:
        record = self.known.get(cell)
        if record is not None and record.away and record.key is not None and not record.key.over:
            self.ages.end(record.key, False)  # it was dropped, or used to the end
        super().forget(cell)


def _range(ages: Ages, visit: Visit) -> int:
    return bisect_right(ages.bounds, ages.now - visit.at) - 1


@hookimpl
def prefixloom_policy() -> EvictionPolicy:
    return EvictionPolicy("reuse", make=ReuseQueue)
