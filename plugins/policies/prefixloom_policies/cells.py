"""Cells: what all queues of this package share. A line of cells, what is known of a cell, and the base of the queues.

A queue sees cells of the tree's edges. They have any length, are split, and on a path only the last one stands in the
queue. The base turns what the core tells (see ``prefixloom.contract.queues``) into the words of published algorithms:
a cell *comes* with a number of uses, *comes again*, is *chosen* and *goes*.

The base also says what a path's history is. A prompt that goes on from a cell makes a new cell below it. Where at least
half of the new path was there before, it is the old path that was used again, so the new cell begins with its uses.
"""

from __future__ import annotations

import zlib
from heapq import heapify, heappop, heappush
from typing import Any

import attrs

from prefixloom import Queue

FURTHEST = 256
"""So many edges above a new cell are looked at, to find what it goes on from."""


class _Ends:
    __slots__ = ("next", "prev")

    prev: Any
    next: Any


class Line:
    """Cells one behind the other, linked by their own ``prev`` and ``next``: every operation O(1)."""

    __slots__ = ("_ends", "tokens")

    def __init__(self) -> None:
        ends = self._ends = _Ends()
        ends.prev = ends.next = ends
        self.tokens = 0
        """For whoever counts them."""

    def __del__(self) -> None:
        ends = getattr(self, "_ends", None)
        if ends is not None:
            ends.prev = ends.next = None

    @property
    def first(self) -> Any:
        """The first cell; None if there is none."""
        first = self._ends.next
        return None if first is self._ends else first

    def add(self, cell: Any) -> None:
        ends = self._ends
        last = ends.prev
        cell.prev, cell.next = last, ends
        last.next = ends.prev = cell

    def add_first(self, cell: Any) -> None:
        self.add_behind(cell, self._ends)

    def add_behind(self, cell: Any, other: Any) -> None:
        after = other.next
        cell.prev, cell.next = other, after
        other.next = after.prev = cell

    def remove(self, cell: Any) -> None:
        before, after = cell.prev, cell.next
        before.next, after.prev = after, before
        cell.prev = cell.next = None


@attrs.define(slots=True, eq=False)
class CellRecord:
    """What a queue knows of a cell.

    ``node``     where it hangs
    ``tokens``   of its edge, ``depth``: from the root to its end
    ``span``     tokens of the path that it stands for: inner cells that no queue knows, and its own
    ``uses``     how often it was used, its path's uses included
    ``last``     when it was used last, by the count of the queue's calls
    ``away``     whether a lease covers it
    ``useless``  whether it goes next since others lost what it needs, or nobody wants it
    ``chosen``   whether it went because the queue chose it
    ``line``     the line it stands in; None: in none, or in a heap
    """

    node: Any
    tokens: int
    depth: int
    span: int
    uses: int = 1
    last: int = 0
    away: bool = False
    useless: bool = False
    chosen: bool = False
    line: Line | None = None
    key: Any = None


class Prints:
    """Prints of paths, by which a path is known again after it was evicted, however its edges were divided.

    A print is a checksum of one token of 64, and of the first tokens of an edge. What was computed is kept for the last
    paths that were asked for.
    """

    stride = 64
    head = 16
    kept = 1024

    def __init__(self) -> None:
        self._ends: dict[Any, int] = {}

    def of(self, node: Any) -> tuple[int, int] | None:
        """The print of what lies above ``node``, and of how its edge begins. None: the tree does not tell keys."""
        key = getattr(node, "key", None)
        if not key:
            return None
        start = node.parent.end
        width = len(key) // (node.end - start)
        return start, zlib.crc32(key[: self.head * width], self._to_end(node.parent, width))

    def end(self, node: Any) -> list[tuple[int, int]]:
        """The print of the path to the end of ``node``, with its depth; nothing if the tree does not tell keys."""
        key = getattr(node, "key", None)
        if not key:
            return []
        width = len(key) // (node.end - node.parent.end)
        return [(node.end, zlib.crc32(node.end.to_bytes(8, "little") + key[-width:], self._to_end(node, width)))]

    def marks(self, node: Any, mask: int) -> list[tuple[int, int]]:
        """Of the positions that are printed in the edge of ``node``, those whose print has no bit of ``mask``.

        Each as the depth up to which it stands for the edge, and the print of the path up to it, the deepest first.
        """
        key = getattr(node, "key", None)
        if not key:
            return []
        start, stride = node.parent.end, self.stride
        width = len(key) // (node.end - start)
        found = self._to_end(node.parent, width)
        some = self._some(node, width)
        depth = start + -start % stride + stride
        marks = []
        for at in range(0, len(some), 4):
            found = zlib.crc32(some[at : at + 4], found)
            if not found & mask:
                marks.append((min(depth, node.end), found))
            depth += stride
        self._ends[node] = found
        marks.reverse()
        return marks

    def _some(self, node: Any, width: int) -> bytes:
        """The first four bytes of each token that is printed of an edge."""
        skipped = -node.parent.end % self.stride
        return memoryview(node.key).cast("I")[skipped * width // 4 :: self.stride * width // 4].tobytes()

    def _to_end(self, node: Any, width: int) -> int:
        ends = self._ends
        edges = []
        while node.parent is not None and node not in ends:
            edges.append(node)
            node = node.parent
        found = ends.get(node, 0)
        if len(ends) > self.kept:
            ends.clear()
        for below in reversed(edges):
            found = zlib.crc32(self._some(below, width), found)
            ends[below] = found
        return found


class CellQueue(Queue):
    """The base: the seven methods that the core calls, in terms of four that a policy has.

    ``come(cell, record, again)``  it may go from now on; ``again``: it was here before and was used since
    ``depart(cell, record)``       it may not go any more, and is off its line
    ``choose()``                   the cell that goes next, not yet off its line; None: there is none
    ``gone(cell, record)``         it was chosen, and is off its line
    """

    def __init__(self) -> None:
        self.tick = 0
        self.tokens = 0
        """Of all edges that are here: about the size of the pool, when something must go."""
        self._edges: dict[Any, int] = {}
        """The tokens of each of them."""
        self.known: dict[Any, CellRecord] = {}
        self._at: dict[Any, CellRecord] = {}
        self._front = Line()
        self.fresh: list[Any] = []
        """The nodes of the newest cell that no known cell has above it, the deepest first."""
        self._above: Any = None  # the parent of the cell that went last, and the record of that

    # ------------------------------------------------------------ what a policy has
    def come(self, cell: Any, record: CellRecord, again: bool) -> None:
        raise NotImplementedError

    def depart(self, cell: Any, record: CellRecord) -> None:
        """Nothing, unless a policy counts."""

    def choose(self) -> Any:
        raise NotImplementedError

    def gone(self, cell: Any, record: CellRecord) -> None:
        """Nothing, unless a policy remembers what went."""

    def bared(self, record: CellRecord, child: CellRecord) -> bool:
        """The last child of a cell went. Whether the cell comes; else it goes next, as the core asks."""
        return False

    def parted(self, upper: CellRecord, lower: CellRecord) -> None:
        """A cell was split, and so was its record. Nothing, unless a policy notes more."""

    # ------------------------------------------------------------ what the core calls
    def add(self, cell: Any) -> None:
        self.tick += 1
        record = self.known.get(cell)
        if record is None:
            record = self._meet(cell)
            above = self.above(record)
            if above is not None:
                record.span = record.depth - above.depth
                if above.away and 2 * above.depth >= record.depth:
                    record.uses += above.uses
            for node in self.fresh:
                self._count(node)
            again = False
        else:
            again = record.away
            record.uses += again
            record.away = False
        record.last = self.tick
        record.useless = record.chosen = False
        self.come(cell, record, again)

    def add_first(self, cell: Any) -> None:
        record = self.known.get(cell)
        if record is None:
            record = self._meet(cell)
            self._count(record.node)
        record.away = False
        above, child = self._above or (None, None)
        comes = False
        record.useless = True
        if above is cell.node and child is not None:
            self._above = None
            record.useless = child.useless
            record.last = max(record.last, child.last)
            record.span = max(child.span - child.tokens, record.tokens)
            comes = self.bared(record, child)
        if comes:
            record.useless = False
            self.come(cell, record, False)
        else:
            record.line = self._front
            self._front.add_first(cell)

    def remove(self, cell: Any) -> None:
        record = self.known[cell]
        record.away = True
        self._take(cell, record)

    def touch(self, cell: Any) -> None:
        self.remove(cell)
        self.add(cell)

    def pop(self) -> Any:
        cell = self._front.first
        if cell is None:
            cell = self.choose()
            if cell is None:
                return None
        record = self.known[cell]
        self._take(cell, record)
        record.chosen = not record.useless
        self.gone(cell, record)
        self._above = (cell.node.parent, record)
        return cell

    def forget(self, cell: Any) -> None:
        self.tokens -= self._edges.pop(cell.node, 0)
        record = self.known.pop(cell, None)
        if record is not None:
            if self._at.get(record.node) is record:
                del self._at[record.node]
            if self._above is not None and self._above[1] is record:
                self._above = (self._above[0], attrs.evolve(record, node=None))

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        if lower.node in self._edges:
            self._count(upper.node)
        known = self.known.get(lower)
        if known is None:
            if linked:
                self.add_first(upper)
            return
        depth = upper.node.end
        record = attrs.evolve(known, node=upper.node, depth=depth, tokens=depth - upper.node.parent.end)
        record.away = not linked  # whoever splits an edge goes on from there
        record.span = min(record.span, record.tokens)
        known.tokens -= record.tokens
        if known.line is not None and not linked:
            known.line.tokens -= min(known.span - known.tokens, record.tokens)
        known.span = max(known.tokens, known.span - record.tokens)
        self.known[upper] = self._at[upper.node] = record
        line = record.line
        record.line = None
        self.parted(record, known)
        if not linked:
            return
        if line is None:
            self.come(upper, record, False)
        else:
            record.line = line
            line.add_behind(upper, lower)

    # ------------------------------------------------------------ what is known
    def _take(self, cell: Any, record: CellRecord) -> None:
        line = record.line
        if line is None:
            cell.prev = cell.next = None
        else:
            line.remove(cell)
            record.line = None
        if line is not self._front:
            self.depart(cell, record)

    def _meet(self, cell: Any) -> CellRecord:
        node = cell.node
        depth = node.end
        record = self.known[cell] = self._at[node] = CellRecord(
            node, depth - node.parent.end, depth, depth - node.parent.end, last=self.tick
        )
        return record

    def _count(self, node: Any) -> None:
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
                self.divided(node, below)

    def divided(self, upper: Any, lower: Any) -> None:
        """The edge of ``upper`` was split off that of ``lower``. Nothing, unless a policy notes more of edges."""

    def above(self, record: CellRecord) -> CellRecord | None:
        """The nearest known cell above a new one."""
        node = record.node
        self.fresh = fresh = [node]
        node = node.parent
        while node is not None and node.parent is not None and len(fresh) < FURTHEST:
            found = self._at.get(node)
            if found is not None:
                return found
            fresh.append(node)
            tokens = node.end - node.parent.end
            self._at[node] = CellRecord(node, tokens, node.end, tokens)  # so that it is known
            node = node.parent
        return None


class RankedQueue(CellQueue):
    """A queue in the order of ``rank``, the lowest first, and of equals the one that came first.

    A heap with lazy deletion: O(log n), in C.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[Any, int, Any]] = []
        self._number = 0

    def rank(self, cell: Any, record: CellRecord) -> Any:
        """Where the cell stands. It is asked when the cell comes, and holds until the cell leaves."""
        raise NotImplementedError

    def bared(self, record: CellRecord, child: CellRecord) -> bool:
        return True

    def come(self, cell: Any, record: CellRecord, again: bool) -> None:
        self._number += 1
        record.key = self._number
        record.line = None
        cell.prev = cell.next = self
        heappush(self._heap, (self.rank(cell, record), self._number, cell))
        if len(self._heap) > 4 * len(self.known) + 64:
            self._heap = [entry for entry in self._heap if self._stands(entry)]
            heapify(self._heap)

    def _stands(self, entry: tuple[Any, int, Any]) -> bool:
        record = self.known.get(entry[2])
        return record is not None and record.key == entry[1] and entry[2].next is self

    def choose(self) -> Any:
        while self._heap:
            entry = heappop(self._heap)
            if self._stands(entry):
                return entry[2]
        return None
