"""Scatter lane: page components whose needs are several intervals, have no closed form, or are widened by a hook.

It works as the window lane does, but with intervals instead of a first position, so it is correct for any reach. A
lease's cover has the node-aligned ranges that it covers, since what lies between them is not covered.
"""

from __future__ import annotations

from array import array

from ..contract.composition import Part
from ..contract.queues import Queue
from ..contract.reach import Interval, merged
from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, Pool
from .holdings import RetainedHolding, without_absent
from .paged_reach import Intervals, PagedReach, overlap
from .partial_lane import PartialCell, PartialLane
from .radix import Node, climb


class ScatterHolding(RetainedHolding):
    """A holding whose table begins at page 0.

    ``looked``: what no boundary from so many pages on can need was given back. It was not looked for behind that.
    """

    __slots__ = ("looked",)

    looked: int


EVERY_PAGE = 1 << 62
"""More pages than any path has."""
ScatterCover = tuple[Node, tuple[Interval, ...]]
"""The node at whose end a lease covers cells, and the edges of these cells as they were then, the deepest first."""


class ScatterLane(PartialLane[ScatterCover, ScatterHolding]):
    """The lane of a page component with any reach."""

    __slots__ = ("paged", "shape")

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        self.paged = PagedReach(part.reach, self.page, part.name)
        self.shape = part.reach.shape
        if self.shape is None or self.hooks.acquire_component_lock is not None:
            self.head = EVERY_PAGE
        else:
            self.head = -(-self.shape.head // self.page)

    def _edges(self, node: Node, spans: Intervals) -> list[Node]:
        """The nodes of the path to ``node`` whose edges have something of ``spans``, the deepest first."""
        found = []
        for low, high in reversed(spans):
            while node.end > low:
                above = node.parent
                if above.end < high:
                    found.append(node)
                node = above
        return found

    # ------------------------------------------------------------ match
    def deepest(self, node: Node, boundary: int) -> tuple[Node, int]:
        while boundary:
            gap = self._gap(node, boundary)
            if gap is None:
                break
            boundary = self._before(boundary, *gap)
            node = climb(node, boundary)
        return node, boundary

    def _gap(self, node: Node, boundary: int) -> Interval | None:
        """Absent positions, of which ``boundary`` needs something; None if all that it needs is there."""
        i, page = self.index, self.page
        spans = self.paged.needs[boundary]
        for low, high in reversed(spans):
            while node.end > low:
                above = node.parent
                if above.end < high:
                    cell = node.cells[i]
                    if cell is None:
                        return above.end, node.end
                    if cell.pages * page != node.end - above.end:  # not all of the edge is held
                        gap = self._gap_in(cell, above.end, spans)
                        if gap is not None:
                            return gap
                node = above
        return None

    def _gap_in(self, cell: PartialCell, start: int, spans: Intervals) -> Interval | None:
        """``_gap`` in one edge, which begins at ``start``."""
        page, data, end = self.page, cell.data, cell.node.end
        first = end - len(data) // ID_BYTES * page
        gapped = cell.pages * ID_BYTES != len(data)
        for low, high in reversed(spans):
            if high <= start:
                break
            if low < first and start < first:
                return start, first
            if gapped and low < end:
                at = data.find(
                    ABSENT_BYTES, (max(low, first) - first) // page * ID_BYTES, (high - first) // page * ID_BYTES
                )
                if at >= 0:
                    low = first + at // ID_BYTES * page
                    return low, low + page
        return None

    def _before(self, boundary: int, low: int, high: int) -> int:
        """The deepest boundary before ``boundary`` that may do without [low, high), of which that one needs some."""
        needs, page = self.paged.needs, self.tree_page
        if self.paged.convex:  # behind what is needed of it, every boundary needs that, and so up to ``high`` if dense
            needed = low if self.paged.dense else next(max(low, lo) for lo, hi in needs[boundary] if hi > low)
            return needed // page * page
        boundary -= page
        while boundary > low and overlap(needs[boundary], low, high):
            boundary -= page
        return boundary

    def needs(self, boundary: int) -> tuple[Interval, ...]:
        return self.paged.needs[boundary]

    # ------------------------------------------------------------ covering
    def acquire(self, node: Node) -> ScatterCover | None:
        return self._cover(node, self._edges(node, self.paged.outlook[node.end]))

    def acquire_wider(self, node: Node, positions: tuple[Interval, ...]) -> ScatterCover | None:
        wider = ((max(0, lo), min(hi, node.end)) for lo, hi in positions)
        return self._cover(node, self._edges(node, merged((*self.paged.outlook[node.end], *wider))))

    def _cover(self, node: Node, edges: list[Node]) -> ScatterCover | None:
        i = self.index
        covered: list[Interval] = []
        for each in edges:
            cell = each.cells[i]
            if cell is not None:
                locks = cell.locks
                cell.locks = locks + 1
                if not locks:
                    self._now_covered(cell)
                covered.append((each.parent.end, each.end))
        return (node, tuple(covered)) if covered else None

    def release(self, cover: ScatterCover, recent: bool = True) -> None:
        node, covered = cover
        i = self.index
        for low, high in covered:
            while node.end > high:
                node = node.parent
            while node.end > low:  # more than one node where a split divided the edge
                cell = node.cells[i]
                locks = cell.locks - 1
                cell.locks = locks
                if not locks:
                    self._settle(cell, recent)
                node = node.parent

    # ------------------------------------------------------------ a sequence's way
    def open(self, node: Node) -> ScatterHolding:
        return self._holding(self.row(node, node.end), node.end)

    def begin(self, node: Node) -> tuple[ScatterCover | None, ScatterHolding]:
        """In one walk: the edges that are read are those that are covered."""
        row, edges = self._read(node, node.end)
        holding = self._holding(row, node.end)
        return self._cover(node, edges), holding

    def _holding(self, row: bytes, end: int) -> ScatterHolding:
        holding = ScatterHolding(row, 0, end // self.page)
        holding.looked = max(0, end - self.replay) // self.page
        return holding

    def row(self, node: Node, boundary: int) -> bytes:
        return self._read(node, boundary)[0]

    def _read(self, node: Node, boundary: int) -> tuple[bytes, list[Node]]:
        """The slots of the outlook at ``boundary``, which lies in ``node``, and the nodes whose edges have some."""
        i, page = self.index, self.page
        edges: list[Node] = []
        parts: list[bytes] = []  # both from the end up
        at = boundary
        start = node.end
        for low, high in reversed(self.paged.outlook[boundary]):
            if high < at:
                parts.append(ABSENT_BYTES * ((at - high) // page))
                at = high
            while at > low:
                while start >= at:
                    start = node.parent.end
                    if start < at:
                        edges.append(node)
                        cell = node.cells[i]
                        held = b"" if cell is None else cell.data
                        first = node.end - len(held) // ID_BYTES * page
                    node = node.parent
                upto = low if low > start else start
                if upto >= first:
                    parts.append(held[(upto - first) // page * ID_BYTES : (at - first) // page * ID_BYTES])
                else:
                    if at > first:
                        parts.append(held[: (at - first) // page * ID_BYTES])
                        at = first
                    parts.append(ABSENT_BYTES * ((at - upto) // page))
                at = upto
        parts.append(ABSENT_BYTES * (at // page))
        parts.reverse()
        return b"".join(parts), edges

    def reads_past(self, holding: ScatterHolding, boundary: int) -> bool:
        """Whether nothing before ``boundary`` is present, which has to be searched for."""
        table = holding.table
        count = min(boundary // self.page, len(table))
        if count and table[0] != ABSENT:
            return False
        return table[:count].tobytes() == ABSENT_BYTES * count

    def read_covered(self, holding: ScatterHolding, cover: ScatterCover | None, boundary: int) -> None:
        """Keep reading what ``boundary`` needs: a hole does not end what the lease covers.

        Of a reach that is convex the lease covers nothing else, so ``until`` does not decide what is read on.
        """
        self.retain(holding, boundary)
        if self.shape is None and self.paged.convex:
            self._forget(holding, self.paged.unneeded[boundary], 0, min(boundary // self.page, holding.owned))

    def _kept(self, upto: int, keep: tuple[Interval, ...]) -> tuple[Interval, ...]:
        return merged((*keep, *self.paged.needs[upto]))

    def retain(self, holding: ScatterHolding, floor: int) -> None:
        high = min(floor // self.page, len(holding.table))
        if high > holding.looked:
            low = self.paged.first_to_leave(holding.looked * self.page)
            self._forget(holding, self.paged.released[floor], low, high)
            holding.looked = high

    def _forget(self, holding: ScatterHolding, gaps: Intervals, low: int, high: int) -> None:
        """Nothing of ``gaps``, as far as they lie in pages [low, high), is present any more.

        Own pages are freed, others only leave the table.
        """
        table, owned = holding.table, holding.owned
        gone: list[bytes] = []
        for first, end in reversed(gaps):
            if end <= low:
                break
            if first < low:
                first = low
            if end > high:
                end = high
            data = table[first:end].tobytes()
            absent = ABSENT_BYTES * (end - first)
            if data == absent:
                continue
            table[first:end] = array("i", absent)
            holding.change(first)
            if first > owned:
                gone.append(data)
                holding.whole = False
            elif end > owned:
                gone.append(data[(owned - first) * ID_BYTES :])
                holding.owned = end
        if gone:
            self.pool.give(without_absent(b"".join(gone)))
