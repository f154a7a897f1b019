"""The lane of reaches that are closed upward: a boundary needs everything above it.

Residency is closed upward too, so the deepest cell tells the usable depth, leaves go before their parents, and a lease
counts up only to the first ancestor that is protected already: a cell's ``locks`` is its own leases plus its protected
children, and positive exactly while something covers it.
"""

from __future__ import annotations

from array import array

from ..contract.reach import Interval
from ..contract.values import Receipt
from ..device.pool import ID_BYTES
from .cells import Cell
from .holdings import PageHolding, without_absent
from .lane import PageLane
from .radix import Node


class PathLane(PageLane[Cell, Cell]):
    """A cover is the cell that the lease counts at."""

    __slots__ = ()
    kind = Cell
    whole_above = True

    def root_cell(self, root: Node) -> None:
        """Give ``root`` a cell that holds nothing and is always covered, so that every walk upward ends there."""
        cell = root.cells[self.index] = Cell(root, b"", 0)
        cell.locks = 1

    def gap(self, node: Node, at: int, high: int) -> Interval:
        if node.cells[self.index] is None:  # a cell is whole: 2% of a chat turn (0085)
            return node.parent.end // self.page, node.end // self.page
        return high, high

    def row(self, node: Node, boundary: int) -> bytes:
        i = self.index
        parts: list[bytes] = []
        end = node.end
        while node.end:
            parts.append(node.cells[i].data)
            node = node.parent
        parts.reverse()
        data = b"".join(parts)
        return data if boundary == end else data[: boundary // self.page * ID_BYTES]

    # ------------------------------------------------------------ covering
    def acquire(self, node: Node, receipt: Receipt | None = None) -> Cell:
        i = self.index
        cell: Cell | None = node.cells[i]
        while cell is None:
            node = node.parent
            cell = node.cells[i]
        if cell.next is not None:
            self.queue.remove(cell)
        locks = cell.locks
        cell.locks = locks + 1
        if not locks:
            end = node.end
            while not locks:
                node = node.parent
                above: Cell = node.cells[i]
                locks = above.locks
                above.locks = locks + 1
            self.leased += (end - node.end) // self.page
        return cell

    def release(self, cover: Cell, recent: bool = True) -> None:
        if cover.locks == 1:
            self.enter(cover, recent)
        self._uncover(cover)

    def _uncover(self, cell: Cell) -> None:
        """Count one lease less at ``cell``; if that was the last, also at the cell above, and so on upward."""
        locks = cell.locks - 1
        cell.locks = locks
        if not locks:
            i, end = self.index, cell.node.end
            while not locks:
                cell = cell.node.parent.cells[i]
                locks = cell.locks - 1
                cell.locks = locks
            self.leased -= (end - cell.node.end) // self.page

    def pin(self, cell: Cell) -> None:
        self.acquire(cell.node)

    def unpin(self, cell: Cell, recent: bool = True) -> None:
        self.release(cell, recent)

    # ------------------------------------------------------------ a sequence's way
    def open(self, node: Node, cover: Cell | None) -> PageHolding:
        return PageHolding(self.row(node, node.end), node.end // self.page)

    def adopt(self, run: list[Node], holding: PageHolding) -> None:
        """Move pages into cells, but none if the path above has a hole, because residency stays closed upward."""
        i = self.index
        page = self.page
        first = holding.owned
        above = run[0].parent
        if above.cells[i] is None or first != above.end // page:
            return
        table = holding.table
        for node in run:
            last = node.end // page
            mine = table[first:last].tobytes()
            cell: Cell | None = node.cells[i]
            if cell is None:
                self.place(node, mine, last - first)
            else:  # duplicates: an engine that hands in what lies behind them may have none of its own
                self.pool.give(without_absent(mine))
                table[first:last] = array("i", cell.data)
                holding.change(first)
            first = last
        holding.owned = first

    def finish(self, run: list[Node], cover: Cell | None) -> None:
        """Uncover the path as if the sequence had covered the end of ``run``: that was used just now."""
        last = self.acquire(run[-1])
        self.release(last)
        if cover is last:
            self.release(cover)
        elif cover is not None:
            self._uncover(cover)  # it lies above ``last``: to queue it would count as one more use of it

    def retract(self, node: Node, slots: set[int]) -> None:
        """Free the cell of ``node`` if ``slots`` has all of it, and the cells below that are not covered, the deepest
        first, because a boundary needs all above it.
        """
        cell: Cell | None = node.cells[self.index]
        if cell is None or not slots.issuperset(self.slots_of(cell)):
            return
        below = [cell]
        for above in below:
            below += self.cells_below(above.node)
        for each in reversed(below):
            if not each.locks:
                self.drop_cell(each)
