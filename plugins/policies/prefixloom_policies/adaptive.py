"""Adaptive: evict what is least likely to be used again soon, or by last use where that would have hit more.

Source: Wang and others, "KVCache Cache in the Wild: Characterizing and Optimizing KVCache Cache at a Large Cloud
Provider" (USENIX ATC 2025): the time until a cached prompt is used again has a distribution that depends on the kind of
request and on the turn of its conversation, and lasts. There, exponential distributions are fitted in a class given by
the engine. Here a class is a range of turns and of what is new in the last turn. ``ages`` says what is learned of each,
and how it ranks.

Paths that went are followed further (``memory``), so that it is also learned what would come back later than the pool
can hold it. Each cell stands in the line of its class and range of ages, and moves on as it grows old: O(1) per range.
The next cell to evict is the oldest of the first line that has any, in the order of the index.

The ``memory`` of marks is also an LRU pool in small. So at each use of a path it is known how deep an LRU pool of the
same size would have had it, and how deep it was there. The *lead* is the sum of the differences since the order by
reuse began. When it falls below what may be risked, eviction goes by last use, until what is lost is at most half of
it. What may be risked grows with the tokens that were asked for, so what was learned gets another chance, each time
later. The sum never begins anew: hits lie behind those of LRU by about what may be risked, and not by more.

States are evicted by last use. The core evicts most of them before a queue is asked (# 0111).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict
from itertools import takewhile

import attrs

from prefixloom import EvictionPolicy, ListQueue, Queue, hookimpl

from .ages import RANGES, Ages, Visit
from .cells import CellRecord, EvictableCell, PathNode, Prints
from .memory import Mark, PathMemory

TURNS = (1, 2, 3, 5)
"""Where the classes of turns begin."""
NEW = (0, 512, 2048, 8192)
"""Where the classes of tokens begin that were new in the last turn."""
KINDS = len(TURNS) * len(NEW)
MARKS_OF_A_PATH = 64
"""A path has at most so many marks, on average. Where there are more, half of all are forgotten."""
MARKS = 16384
"""All paths in the pool together have at most so many."""
LEARNED = 1000
"""The order is computed anew after so many cells have come, and more often in the beginning."""
FADES = 8192
"""So many cells after which what was learned counts half."""
FURTHEST = 256
"""So many edges above a new cell are looked at, to find the cell whose path it continues."""

LEAST = 256
"""Eviction goes by last use until so many paths were used again. Before that too little is learned of them."""
POOLS = 4
"""It goes by last use, too, until so many pools of tokens have missed, which is how far the memory looks back."""
RISK = 0.0003
"""This part of all tokens asked for may be lost against LRU. Beside it, one path of average length or ``POOL`` may be
lost, which is what one good decision costs before it pays."""
POOL = 0.01
"""This part of the pool."""
AHEAD = 0.01
"""A lead counts up to this part of all tokens asked for, so that a loss is soon seen."""


class AdaptiveQueue(Queue):
    def __init__(self) -> None:
        self.prints = Prints()
        self.ages = Ages(KINDS)
        self.memory = PathMemory(self.ages)
        # what is here
        self.known: dict[EvictableCell, CellRecord] = {}
        self._at: dict[PathNode, CellRecord] = {}
        self._fresh: list[PathNode] = []  # of the newest cell, no known cell has these above it; the deepest first
        self._edges: dict[PathNode, int] = {}  # the tokens of each edge
        self.tokens = 0
        """Tokens of all edges that are here: about the size of the pool, when something must go."""
        self._went: tuple[PathNode, CellRecord] | None = None  # of the cell evicted last: its parent and record
        # the marks of what is here
        self._marks_of: dict[PathNode, list[Mark]] = {}  # of each edge, the deepest first
        self._held = 0  # marks of all edges
        self._least = 0  # the fewest since the last visit began, while requests ran that are not in the tree yet
        self._mask = 0  # the prints of marks have none of these bits
        self._of_a_path = 0.0  # marks of a path, on average
        self._had: dict[PathNode | None, int] = {}  # how deep an LRU pool had a leased path at first
        # the order
        self._front = ListQueue()
        self._by_use: OrderedDict[EvictableCell, None] = OrderedDict()
        self._lines = [[ListQueue() for _ in range(RANGES)] for _ in range(KINDS)]
        self._order: list[ListQueue] = []
        self._position: dict[ListQueue, int] = {}
        self._filled = 0  # a bit for each position whose line has cells
        self._due: list[tuple[int, int, int]] = []
        self._came = 0
        self._next_order = 16
        self._sort()
        # against LRU
        self._asked = 0
        self._missed = 0
        self._reused = 0
        self._path = 0.0  # tokens of a path that is used again, on average
        self.lead = 0.0
        """Tokens hit beyond what LRU would have hit."""
        self.by_last_use = True

    # ------------------------------------------------------------ what the core calls
    def add(self, cell: EvictableCell) -> None:
        record = self.known.get(cell)
        again = record is not None and record.away
        if record is None:
            record = self._meet(cell)
            self._find_fresh(record.node)
            for node in self._fresh:
                self._count(node)
        record.away = record.useless = record.chosen = False
        self._come(cell, record, again)
        self._came += 1
        if self._came >= self._next_order:
            self._next_order = self._came + min(LEARNED, self._came)
            self._sort()
        if self._came % FADES == 0:
            self.ages.fade()

    def add_first(self, cell: EvictableCell) -> None:
        record = self.known.get(cell)
        unused = record is not None and record.away
        if record is None:
            record = self._meet(cell)
            self._count(record.node)
        record.away = False
        record.useless = True
        comes = False
        if self._went is not None and self._went[0] is cell.node:  # its last child went
            child = self._went[1]
            self._went = None
            record.useless = child.useless
            comes = self._left_alone(record, child)
        if comes:
            record.useless = False
            self._come(cell, record, False)
        else:
            record.line = self._front
            self._front.add_first(cell)
        if unused and record.useless and record.visit is not None:  # under LRU it would go next as well
            self.memory.put_first(self._marks(record), record.visit)

    def remove(self, cell: EvictableCell) -> None:
        """Remove a cell whose path is used now, and note how deep an LRU pool has it, before other requests end."""
        record = self.known[cell]
        record.away = True
        self._take(cell, record)
        if record.visit is not None:
            marks = self._marks(record)
            self._had[record.node] = self.memory.recent(marks)
            self.memory.use(marks, record.visit)

    def pop(self) -> EvictableCell | None:
        cell = _first(self._front) or self._choose()
        if cell is not None:
            record = self.known[cell]
            self._take(cell, record)
            record.chosen = not record.useless
            self._went = cell.node.parent, record
        return cell

    def forget(self, cell: EvictableCell) -> None:
        self.tokens -= self._edges.pop(cell.node, 0)
        record = self.known.pop(cell, None)
        if record is None:
            return
        self._forget_visit(record)
        self._had.pop(record.node, None)
        marks = self._marks_of.pop(record.node, ())
        self._held -= len(marks)
        self._least = min(self._least, self._held)
        if not record.chosen:  # another component lost what it needs, and would have under LRU
            self.memory.lose(marks)
        if self._at.get(record.node) is record:
            del self._at[record.node]
        if self._went is not None and self._went[1] is record:
            self._went = self._went[0], attrs.evolve(record, node=self._went[0])

    def inherit(self, upper: EvictableCell, lower: EvictableCell, linked: bool) -> None:
        if lower.node in self._edges:
            self._count(upper.node)
        known = self.known.get(lower)
        if known is None:
            if linked:
                self.add_first(upper)
            return
        # whoever splits an edge goes on from there
        record = attrs.evolve(known, node=upper.node, depth=upper.node.end, away=True, line=None)
        self.known[upper] = self._at[upper.node] = record
        if record.visit is not None:
            record.visit.held += 1
        if not linked:
            return
        if known.line is None:
            self._come(upper, record, False)
        else:
            record.line = known.line
            known.line.inherit(upper, lower, True)
            if known.line is not self._front:
                self._by_use[upper] = None

    # ------------------------------------------------------------ cells
    def _meet(self, cell: EvictableCell) -> CellRecord:
        node = cell.node
        record = self.known[cell] = self._at[node] = CellRecord(node, node.end)
        return record

    def _find_fresh(self, node: PathNode) -> None:
        """Find the nodes from ``node`` up that belong to a new cell, because no known cell is at them."""
        self._fresh = [node]
        node = node.parent
        while node is not None and node.parent is not None and len(self._fresh) < FURTHEST and node not in self._at:
            self._fresh.append(node)
            self._at[node] = CellRecord(node, node.end)  # so that it is known
            node = node.parent

    def _count(self, node: PathNode) -> None:
        edges = self._edges
        if node in edges:
            return
        tokens = edges[node] = node.end - node.parent.end
        self.tokens += tokens
        for below in getattr(node, "children", ()):  # an inner edge was split, of which a queue is not told
            left = below.end - node.end
            if edges.get(below, 0) > left:
                self.tokens -= edges[below] - left
                edges[below] = left
                self._divide_marks(below)

    def _come(self, cell: EvictableCell, record: CellRecord, again: bool) -> None:
        """Make a cell evictable. ``again``: it was evictable before, and was used since."""
        visit = record.visit
        if visit is None or again or visit.over:
            self._use(record, again)
        self._advance()
        self._stand(cell, record, 0)
        self._by_use[cell] = None

    def _take(self, cell: EvictableCell, record: CellRecord) -> None:
        """Take a cell off its line."""
        line = record.line
        assert line is not None
        line.remove(cell)
        record.line = None
        if line is not self._front:
            self._by_use.pop(cell, None)
            if line.empty:
                self._filled &= ~(1 << self._position[line])

    def _left_alone(self, record: CellRecord, child: CellRecord) -> bool:
        """Return whether a cell that lost its last child has an order of its own: only if used after the child."""
        visit, below = record.visit, child.visit
        lives = visit is not None and not visit.over
        if below is None or (visit is not None and lives and visit.at > below.at):
            return lives
        self._forget_visit(record)
        record.visit = below
        below.held += 1
        return False

    # ------------------------------------------------------------ visits
    def _use(self, record: CellRecord, again: bool) -> None:
        """Count a use of a path: end the visit that it continues, and begin one."""
        ages = self.ages
        fresh = self._fresh if not again and self._fresh and self._fresh[0] is record.node else []
        above = self._at.get(fresh[-1].parent) if fresh else record
        there = fresh[-1].parent.end if fresh else record.depth
        for node in fresh:
            if node not in self._marks_of:
                marks_here = self._marks_of[node] = self.prints.marks(node, self._mask)
                self._held += len(marks_here)
        ages.now += record.depth
        marks = self._marks(record)
        deep, before = self.memory.seen(marks)
        if deep < there or before is None:
            deep = there
            before = above.visit if above is not None and (above.away or not fresh) else None
        turn = 1
        if before is not None and 2 * deep >= before.end:
            ages.end(before, True)
            if 2 * deep >= record.depth:
                turn = before.turn + 1
        here = [mark for mark in marks if mark[0] <= there] if fresh else marks
        had = self._had.pop(None if above is None else above.node, None)
        self.memory.shrink(self._least + len(marks) - len(here))  # not so far as its own new tokens made room
        with_lru = self.memory.recent(marks)
        if had is not None and with_lru <= there:
            with_lru = had
        self.judge(record.depth, turn, here[0][0] if here else 0, with_lru)
        self._forget_visit(record)
        kind, mark = self._kind(turn, max(record.depth - deep, 0)), marks[0][1] if marks else -1
        visit = record.visit = Visit(kind, ages.now, turn, record.depth, mark, held=1)
        ages.begin(visit)
        self.memory.shrink(self._least)
        self.memory.use(marks, visit)
        self.memory.shrink(self._held)
        self._least = self._held

    def _kind(self, turn: int, new: int) -> int:
        return (bisect_right(TURNS, turn) - 1) * len(NEW) + bisect_right(NEW, new) - 1

    def _forget_visit(self, record: CellRecord) -> None:
        if record.visit is not None:
            self.ages.release(record.visit)
            record.visit = None

    def judge(self, asked: int, turn: int, hit: int, with_lru: int) -> None:
        """Choose the order: a path was used that was here up to ``hit``, and in an LRU pool up to ``with_lru``."""
        self._asked += asked
        self._missed += asked - hit
        if turn > 1:
            self._reused += 1
            self._path += (asked - self._path) / min(self._reused, 64)
        if self._reused < LEAST or self._missed < POOLS * self.tokens:
            return
        self.lead = min(self.lead + hit - with_lru, AHEAD * self._asked)
        risk = RISK * self._asked + max(self._path, POOL * self.tokens)
        self.by_last_use = self.lead < (-risk / 2 if self.by_last_use else -risk)

    # ------------------------------------------------------------ marks
    def _marks(self, record: CellRecord) -> list[Mark]:
        """Return the marks of a path, the deepest first."""
        found: list[Mark] = []
        node = record.node
        while node is not None:
            found += self._marks_of.get(node, ())
            node = node.parent
        self._of_a_path += (len(found) - self._of_a_path) / 64
        if self._of_a_path > MARKS_OF_A_PATH or self._held > MARKS:
            self._thin()
            found = [mark for mark in found if not mark[1] & self._mask]
        return found

    def _thin(self) -> None:
        """Keep half of the marks."""
        self._mask = 2 * self._mask + 1
        self._of_a_path /= 2
        self._held = 0
        for node, marks in self._marks_of.items():
            kept = self._marks_of[node] = [mark for mark in marks if not mark[1] & self._mask]
            self._held += len(kept)
        self.memory.thin(self._mask)

    def _divide_marks(self, node: PathNode) -> None:
        """Give each edge its own of the marks that the edge of ``node`` had before it was split."""
        marks = self._marks_of.get(node)
        while marks:
            own = self._marks_of[node] = list(takewhile(lambda mark: mark[0] > node.parent.end, marks))  # noqa: B023
            marks, node = marks[len(own) :], node.parent

    # ------------------------------------------------------------ lines
    def _stand(self, cell: EvictableCell, record: CellRecord, at: int) -> None:
        """Put a cell into the line of its class and range of ages. ``at``: the range; 0: the one of its age."""
        visit = record.visit
        assert visit is not None
        bounds = self.ages.bounds
        if not at:
            at = max(0, bisect_right(bounds, self.ages.now - visit.at) - 1)
        line = record.line = self._lines[visit.kind][at]
        if line.empty:
            self._filled |= 1 << self._position[line]
            if at + 1 < RANGES:
                heapq.heappush(self._due, (visit.at + bounds[at + 1], visit.kind, at))
        line.add(cell)

    def _advance(self) -> None:
        """Move cells that have grown too old for their range to the next range."""
        due, now = self._due, self.ages.now
        while due and due[0][0] <= now:
            _, kind, at = heapq.heappop(due)
            line = self._lines[kind][at]
            bound = self.ages.bounds[at + 1]
            while (cell := _first(line)) is not None:
                record = self.known[cell]
                assert record.visit is not None
                if record.visit.at > now - bound:
                    heapq.heappush(due, (record.visit.at + bound, kind, at))
                    break
                line.remove(cell)
                self._stand(cell, record, at + 1)
            if line.empty:
                self._filled &= ~(1 << self._position[line])

    def _sort(self) -> None:
        """Order the lines by the index; of equals, evict the older first."""
        index = self.ages.index()
        order = sorted((index[kind][at], -at, kind) for kind in range(KINDS) for at in range(RANGES))
        self._order = [self._lines[kind][-at] for _, at, kind in order]
        self._position = {line: number for number, line in enumerate(self._order)}
        self._filled = sum(1 << number for number, line in enumerate(self._order) if not line.empty)

    def _choose(self) -> EvictableCell | None:
        """Return the cell to evict next, and leave the cell in its line; None: there is none."""
        if self.by_last_use:
            return next(iter(self._by_use), None)
        filled = self._filled
        return _first(self._order[(filled & -filled).bit_length() - 1]) if filled else None


def _first(line: ListQueue) -> EvictableCell | None:
    return next(iter(line), None)


@hookimpl
def prefixloom_policy() -> EvictionPolicy:
    return EvictionPolicy("adaptive", make=AdaptiveQueue, make_states=ListQueue)
