"""Scatter lane: page components whose needs are several intervals, have no closed form, or are widened by a hook.

It works as the window lane does, but with intervals instead of a first position: it is correct for any reach, and
slower. A lease's cover has the node-aligned ranges that it covers, since what lies between them is not covered.
"""

from __future__ import annotations

from array import array

from ..contract.composition import Part
from ..contract.queues import Queue
from ..contract.reach import Interval, merged
from ..device.pool import ABSENT_BYTES, ID_BYTES, Pool
from .holdings import RetainedHolding, without_absent
from .paged_reach import Intervals, PagedReach, overlap
from .partial_lane import PartialCell, PartialLane
from .radix import Node, climb


class ScatterHolding(RetainedHolding):
    """A holding whose table begins at page 0. What is present before page ``low`` is needed for good."""

    __slots__ = ("low",)

    def __init__(self, data: bytes, end: int, low: int) -> None:
        super().__init__(data, 0, end)
        self.low = low


ScatterCover = tuple[Node, tuple[Interval, ...]]
"""The node at whose end a lease covers cells, and the node-aligned ranges in which they lie."""


class ScatterLane(PartialLane[ScatterCover, ScatterHolding]):
    """The lane of a page component with any reach."""

    __slots__ = ("paged", "shape")

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        self.paged = PagedReach(part.reach, self.page)
        self.shape = part.reach.shape

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
        for each in self._edges(node, spans):
            cell = each.cells[i]
            start = each.parent.end
            if cell is None:
                return start, each.end
            if cell.pages * page != each.end - start:  # not all of the edge is held
                gap = self._gap_in(cell, start, spans)
                if gap is not None:
                    return gap
        return None

    def _gap_in(self, cell: PartialCell, start: int, spans: Intervals) -> Interval | None:
        """``_gap`` in one edge, which begins at ``start``."""
        page, data, end = self.page, cell.data, cell.node.end
        first = end - len(data) // ID_BYTES * page
        if first > start and overlap(spans, start, first):
            return start, first
        if cell.pages * ID_BYTES != len(data):
            for low, high in spans:
                if low < end and first < high:
                    at = data.find(
                        ABSENT_BYTES, (max(low, first) - first) // page * ID_BYTES, (high - first) // page * ID_BYTES
                    )
                    if at >= 0:
                        low = first + at // ID_BYTES * page
                        return low, low + page
        return None

    def _before(self, boundary: int, low: int, high: int) -> int:
        """The deepest boundary before ``boundary`` that may do without [low, high), of which ``boundary`` needs some."""
        needs, page = self.paged.needs, self.tree_page
        if self.paged.convex:  # until behind what is needed of it, every boundary needs that
            needed = next(max(low, start) for start, end in needs[boundary] if end > low)
            return needed // page * page
        boundary -= page
        while boundary > low and overlap(needs[boundary], low, high):
            boundary -= page
        return boundary

    def needs(self, boundary: int) -> tuple[Interval, ...]:
        return self.paged.needs[boundary]

    # ------------------------------------------------------------ covering
    def acquire(self, node: Node) -> ScatterCover | None:
        return self._cover(node, self.paged.outlook[node.end])

    def acquire_wider(self, node: Node, positions: tuple[Interval, ...]) -> ScatterCover | None:
        wider = ((max(0, lo), min(hi, node.end)) for lo, hi in positions)
        return self._cover(node, merged((*self.paged.outlook[node.end], *wider)))

    def _cover(self, node: Node, spans: Intervals) -> ScatterCover | None:
        i = self.index
        covered: list[Interval] = []
        low = high = -1
        for each in self._edges(node, spans):
            cell = each.cells[i]
            if cell is None:
                continue
            if not cell.locks:
                self.leased += cell.pages
                if cell.next is not None:
                    self.queue.remove(cell)
            cell.locks += 1
            if each.end != low:
                if low >= 0:
                    covered.append((low, high))
                high = each.end
            low = each.parent.end
        if low < 0:
            return None
        covered.append((low, high))
        covered.reverse()
        return node, tuple(covered)

    def release(self, cover: ScatterCover, recent: bool = True) -> None:
        node, covered = cover
        i = self.index
        for low, high in reversed(covered):
            while node.end > low:
                if node.end <= high:
                    cell = node.cells[i]
                    cell.locks -= 1
                    if not cell.locks:
                        self._settle(cell, recent)
                node = node.parent

    # ------------------------------------------------------------ reading the path
    def row(self, node: Node, boundary: int) -> bytes:
        page = self.page
        spans = self.paged.outlook[boundary]
        first = spans[0][0] // page if spans else boundary // page
        held = self._gather(node, node.end // page - first)
        return ABSENT_BYTES * first + self._only(spans, held, first, boundary // page)

    def _only(self, spans: Intervals, held: bytes, first: int, end: int) -> bytes:
        """Of ``held``, the slots of the pages from ``first`` on, those in ``spans``; *absent* for others before ``end``."""
        page = self.page
        parts = []
        at = first
        for low, high in spans:
            low, high = low // page, min(high // page, end)
            parts.append(ABSENT_BYTES * (low - at))
            parts.append(held[(low - first) * ID_BYTES : (high - first) * ID_BYTES])
            at = high
        parts.append(ABSENT_BYTES * (end - at))
        return b"".join(parts)

    # ------------------------------------------------------------ a sequence's way
    def open(self, node: Node) -> ScatterHolding:
        end, page = node.end, self.page
        low = min(self.paged.first_to_leave(end), max(0, end - self.replay) // page)
        return ScatterHolding(self.row(node, end), end // page, low)

    def reads_past(self, holding: ScatterHolding, boundary: int) -> bool:
        """Whether nothing before ``boundary`` is present, which has to be searched for."""
        before = holding.table[: max(0, boundary // self.page - holding.base)]
        return before.tobytes() == ABSENT_BYTES * len(before)

    def read_covered(self, holding: ScatterHolding, cover: ScatterCover | None, boundary: int) -> None:
        """Keep reading what ``boundary`` needs: a hole does not end what the lease covers.

        Of a reach that is convex the lease covers nothing else, so ``until`` does not decide what is read on.
        """
        self.retain(holding, boundary)
        if self.shape is None and self.paged.convex:
            self._read_only(holding, self.paged.needs[boundary], boundary)

    def _read_only(self, holding: ScatterHolding, spans: Intervals, boundary: int) -> None:
        """Of the tree's pages before ``boundary``, those outside of ``spans`` leave the table."""
        table = holding.table
        count = min(boundary // self.page, holding.owned, len(table))
        held = table[:count].tobytes()
        kept = self._only(spans, held, 0, count)
        if kept != held:
            table[:count] = array("i", kept)
            holding.change(0)

    def _kept(self, upto: int, keep: tuple[Interval, ...]) -> tuple[Interval, ...]:
        return merged((*keep, *self.paged.needs[upto]))

    def _slack_pages(self, cell: PartialCell) -> Interval:
        shape = self.shape
        if shape is None or self.hooks.acquire_component_lock is not None:
            return 0, 0
        first, last = super()._slack_pages(cell)
        start = cell.node.end - len(cell.data) // ID_BYTES * self.page
        return max(first, min(last, -(-(shape.head - start) // self.page))), last

    def retain(self, holding: ScatterHolding, floor: int) -> None:
        page, low = self.page, holding.low
        end = min(floor // page, len(holding.table))
        for start, stop in reversed(self.paged.kept[floor]):
            if end <= low:
                break
            self._forget(holding, max(low, stop // page), end)
            end = start // page
        self._forget(holding, low, end)
        holding.low = max(low, self.paged.first_to_leave(floor))

    def _forget(self, holding: ScatterHolding, first: int, end: int) -> None:
        """Nothing of the pages [first, end) is present any more: own pages are freed, others only leave the table."""
        table = holding.table
        absent = ABSENT_BYTES * (end - first)
        data = table[first:end].tobytes()
        if data == absent:
            return
        table[first:end] = array("i", absent)
        holding.change(first)
        if end > holding.owned:
            own = data[max(0, holding.owned - first) * ID_BYTES :]
            self.pool.give(own if holding.whole else without_absent(own))
            holding.whole = False
