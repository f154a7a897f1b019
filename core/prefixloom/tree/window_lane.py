"""The lane of windows, chunks and tails: a boundary needs one interval that ends there.

What a cell holds, and what of that is slack, is said in ``partial_lane``. Reaches that need several intervals, or that
only Python code can tell, have the scatter lane.
"""

from __future__ import annotations

from ..contract.queues import ListQueue
from ..device.pool import ABSENT_BYTES, ID_BYTES
from .holdings import RetainedHolding, without_absent
from .partial_lane import PartialLane
from .radix import Node

WindowCover = tuple[Node, int]
"""The node at whose end a lease covers cells, and how many tokens before that they reach."""


class WindowLane(PartialLane[WindowCover, RetainedHolding]):
    __slots__ = ()

    # ------------------------------------------------------------ covering
    def acquire(self, node: Node) -> WindowCover | None:
        i = self.index
        end = node.end
        low = self.tail(end)
        above = node
        while above.end > low:
            cell = above.cells[i]
            if cell is None:  # an unfinished publication: what lies above the hole serves no boundary here
                break
            locks = cell.locks
            if not locks:
                self._now_covered(cell)
            cell.locks = locks + 1
            above = above.parent
        covered = end - above.end
        return (node, covered) if covered else None

    def begin(self, node: Node) -> tuple[WindowCover | None, RetainedHolding]:
        """In one walk: a sequence opens where all that resuming there needs is held."""
        i = self.index
        end = node.end
        low = self.tail(end)
        above = node
        parts = []
        while above.end > low:
            cell = above.cells[i]
            parts.append(cell.data)
            locks = cell.locks
            cell.locks = locks + 1
            if not locks:
                self._now_covered(cell)
            above = above.parent
        last = end // self.page
        first = last
        data = b""
        cover = None
        if parts:
            parts.reverse()
            first = low // self.page
            data = b"".join(parts)[(first - last) * ID_BYTES :]
            cover = node, end - above.end
        return cover, RetainedHolding(data, first, last)

    def release(self, cover: WindowCover, recent: bool = True) -> None:
        node, covered = cover
        stop = node.end - covered
        i = self.index
        while node.end > stop:
            cell = node.cells[i]
            locks = cell.locks - 1
            cell.locks = locks
            if not locks:
                self._settle(cell, recent)
            node = node.parent

    # ------------------------------------------------------------ a sequence's way
    def hand_over(
        self, run: list[Node], holding: RetainedHolding, cover: WindowCover | None, ends: bool
    ) -> WindowCover | None:
        """Fast path where the sequence runs on: see ``_slide``."""
        return (None if ends else self._slide(run, holding, cover)) or super().hand_over(run, holding, cover, ends)

    def _slide(self, run: list[Node], holding: RetainedHolding, cover: WindowCover | None) -> WindowCover | None:
        """Fast path where it is all a leaf below what the lease covers: the cover moves down over the leaf, and keeps
        of the cells above what the leaf's end needs. None: it is not so, and nothing was done. A queue that may count
        uses must hear of the leaf, which is covered at once.
        """
        if self.queue.__class__ is not ListQueue:
            return None
        node = run[-1]
        if cover is None or cover[0] is not node.parent or node.cells[self.index] is not None or not holding.whole:
            return None
        above, covered = cover
        stop = above.end - covered
        end = node.end
        low = self.tail(end)
        if low < stop or low >= end:
            return None
        first, last, base = holding.owned, end // self.page, holding.base
        mine = holding.table[first - base : last - base].tobytes()
        holding.owned = last
        self._hang(node, mine, first, low, whole=True, locks=1)
        self.leased += last - first
        while above.end > low:
            above = above.parent
        if above.end > stop:
            self.release((above, above.end - stop))
        return node, end - above.end

    def open(self, node: Node) -> RetainedHolding:
        end = node.end
        page = self.page
        low = self.tail(end) // page
        return RetainedHolding(self._gather(node, end // page - low), low, end // page)

    def row(self, node: Node, boundary: int) -> bytes:
        low = self._first_needed(boundary) // self.page
        data = ABSENT_BYTES * low + self._gather(node, node.end // self.page - low)
        return data if boundary == node.end else data[: boundary // self.page * ID_BYTES]

    def retain(self, holding: RetainedHolding, floor: int) -> None:
        low = self.tail(floor)
        self._forget(holding, low // self.page)

    def _forget(self, holding: RetainedHolding, page: int) -> None:
        """Nothing before ``page`` is present any more: own pages are freed, borrowed ones only leave the table."""
        base = holding.base
        count = page - base
        if count <= 0:
            return
        table = holding.table
        owned = holding.owned
        if count > len(table):
            count = len(table)
            page = base + count
        if page > owned:
            data = table[owned - base : count].tobytes()
            self.pool.give(data if holding.whole else without_absent(data))
            holding.owned = page
        del table[:count]
        if base < holding.changed:
            holding.changed = base
        holding.base = page

    def read_covered(self, holding: RetainedHolding, cover: WindowCover | None, boundary: int) -> None:
        """Above a hole (what arrived was not all) the lease covers nothing, so nothing is read there any more."""
        low = self.tail(boundary)
        first = low // self.page
        covered = 0 if cover is None else cover[1]
        if boundary - covered > low:
            first = max(first, min((boundary - covered) // self.page, holding.owned))
        self._forget(holding, first)

    def reads_past(self, holding: RetainedHolding, boundary: int) -> bool:
        return holding.base * self.page >= boundary
