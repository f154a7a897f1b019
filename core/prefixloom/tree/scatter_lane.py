"""Scatter lane: page components whose boundaries need any positions, such as windows, chunks, sinks or unions.

What a boundary needs are intervals of pages (``paged_reach``). A lease covers the cells whose edges have some of these
pages, and its cover lists them, since cells that lie between them are not covered.
"""

from __future__ import annotations

from array import array

from ..contract.composition import Part
from ..contract.queues import Queue
from ..contract.reach import Interval, merged
from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, Pool
from .holdings import RetainedHolding, without_absent
from .paged_reach import ABSENT_SLOTS, Gaps, Pages
from .partial_lane import PartialCell, PartialLane
from .radix import Node


class ScatterHolding(RetainedHolding):
    """A holding whose table begins at page 0.

    ``looked``: what no boundary from so many pages on can need was given back. It was not looked for behind that.
    """

    __slots__ = ("looked",)

    looked: int


EVERY_PAGE = 1 << 62
"""More pages than any path has."""
ScatterCover = list[tuple[PartialCell, int]]
"""The cells that a lease covers, the deepest first, each with where its edge began then: it may have been split."""


class ScatterLane(PartialLane[ScatterCover, ScatterHolding]):
    """The lane of a page component with any reach."""

    __slots__ = ("shape",)

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        self.shape = part.reach.shape
        if self.shape is None or self.hooks.acquire_component_lock is not None:
            self.head = EVERY_PAGE
        else:
            self.head = -(-self.shape.head // self.page)

    def _cells(self, node: Node, pages: Pages) -> ScatterCover:
        """The cells of the path to ``node`` whose edges have some of ``pages``, the deepest first."""
        i, page = self.index, self.page
        found = []
        end = node.end // page
        for low, high in reversed(pages):
            while end > low:
                above = node.parent
                end = above.end // page
                if end < high:
                    cell = node.cells[i]
                    if cell is not None:
                        found.append((cell, above.end))
                node = above
        return found

    # ------------------------------------------------------------ covering
    def acquire(self, node: Node) -> ScatterCover | None:
        return self._cover(self._cells(node, self.paged.outlook[node.end]))

    def acquire_wider(self, node: Node, positions: tuple[Interval, ...]) -> ScatterCover | None:
        page = self.page
        wider = ((max(0, lo) // page, -(-min(hi, node.end) // page)) for lo, hi in positions if lo < hi)
        return self._cover(self._cells(node, merged((*self.paged.outlook[node.end], *wider))))

    def _cover(self, cells: ScatterCover) -> ScatterCover | None:
        for cell, _ in cells:
            locks = cell.locks
            cell.locks = locks + 1
            if not locks:
                self._now_covered(cell)
        return cells or None

    def release(self, cover: ScatterCover, recent: bool = True) -> None:
        for cell, start in cover:
            while True:
                locks = cell.locks - 1
                cell.locks = locks
                if not locks:
                    self._settle(cell, recent)
                above = cell.node.parent
                if above.end == start:
                    break
                cell = above.cells[self.index]  # a split divided the edge

    # ------------------------------------------------------------ a sequence's way
    def open(self, node: Node) -> ScatterHolding:
        return self._holding(self._cells(node, self.paged.outlook[node.end]), node.end)

    def _holding(self, cells: ScatterCover, end: int) -> ScatterHolding:
        holding = ScatterHolding(self._read(cells, end), 0, end // self.page)
        holding.looked = max(0, end - self.replay) // self.page
        return holding

    def row(self, node: Node, boundary: int) -> bytes:
        return self._read(self._cells(node, self.paged.outlook[boundary]), boundary).tobytes()

    def _read(self, cells: ScatterCover, boundary: int) -> array[int]:
        """The slots of the outlook at ``boundary``, which lies in the edges of ``cells``."""
        page = self.page
        parts = []  # from the end up
        at = boundary // page
        for cell, _ in cells:
            data = cell.data
            end = cell.node.end // page
            if end > at:  # the boundary lies inside of the edge
                data = data[: max(0, len(data) - (end - at) * ID_BYTES)]
            elif end < at:
                parts.append(ABSENT_BYTES * (at - end))
                at = end
            parts.append(data)
            at -= len(data) // ID_BYTES
        parts.append(ABSENT_BYTES * at)
        parts.reverse()
        table = array("i", b"".join(parts))
        for first, end, absent in self.paged.unneeded[boundary]:
            table[first:end] = absent
        return table

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
        return merged((*keep, *self.needs(upto)))

    def retain(self, holding: ScatterHolding, floor: int) -> None:
        high = min(floor // self.page, len(holding.table))
        if high > holding.looked:
            low = self.paged.first_to_leave(holding.looked * self.page)
            self._forget(holding, self.paged.released[floor], low, high)
            holding.looked = high

    def _forget(self, holding: ScatterHolding, gaps: Gaps, low: int, high: int) -> None:
        """Nothing of ``gaps``, as far as they lie in pages [low, high), is present any more.

        Own pages are freed, others only leave the table.
        """
        table, owned, whole = holding.table, holding.owned, holding.whole
        gone = array("i")
        changed = high
        for first, end, absent in reversed(gaps):
            if end <= low:
                break
            if first < low or end > high:
                if first < low:
                    first = low
                if end > high:
                    end = high
                absent = ABSENT_SLOTS * (end - first)
            slots = table[first:end]
            if slots == absent:
                continue
            table[first:end] = absent
            changed = first
            if first > owned:
                gone += slots
                holding.whole = False
            elif end > owned:
                gone += slots[owned - first :]
                holding.owned = end
        if changed < high:
            holding.change(changed)
        if gone:
            self.pool.give(gone.tobytes() if whole else without_absent(gone.tobytes()))
