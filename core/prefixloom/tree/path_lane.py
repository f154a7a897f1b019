"""The lane of reaches that are closed upward: a boundary needs everything above it.

Residency is closed upward too, so the deepest cell tells the usable depth, leaves go before their parents, and a lease
counts up only to the first ancestor that is protected already: a cell's ``locks`` is its own leases plus its protected
children, and positive exactly while something covers it.
"""

from __future__ import annotations

from array import array
from typing import Any

from ..contract.reach import Interval
from ..contract.values import Receipt
from ..device.pool import ABSENT_BYTES, ID_BYTES
from .holdings import PageHolding, without_absent
from .lane import Cell, Lane, PageLane
from .radix import Node


class PathCell(Cell):
    """``up`` is the parent's cell, ``below`` the number of children that have one."""

    __slots__ = ("below", "up")

    up: PathCell

    def __init__(self, node: Node, data: bytes, up: PathCell) -> None:
        self.node = node
        self.data = data
        self.up = up
        self.below = 0
        self.locks = 0
        self.next = None


class PathLane(PageLane[PathCell, PageHolding]):
    """A cover is the cell that the lease counts at."""

    __slots__ = ()
    whole_above = True

    def root_cell(self, root: Node) -> None:
        """A root has a cell that holds nothing and is always covered, so that every walk upward ends there."""
        cell = PathCell(root, b"", None)  # type: ignore[arg-type]
        cell.locks = 1
        root.cells[self.index] = cell

    # ------------------------------------------------------------ matching
    def gap(self, node: Node, at: int, high: int) -> Interval:
        if node.cells[self.index] is None:
            return node.parent.end // self.page, node.end // self.page
        return high, high

    def row(self, node: Node, boundary: int) -> bytes:
        cell: PathCell = node.cells[self.index]
        if cell.up is None or cell.up.up is None:
            data: bytes = cell.data
        else:
            parts = []
            while cell is not None:
                parts.append(cell.data)
                cell = cell.up
            parts.reverse()
            data = b"".join(parts)
        return data if boundary == node.end else data[: boundary // self.page * ID_BYTES]

    # ------------------------------------------------------------ covering
    def acquire(self, node: Node, receipt: Receipt | None = None) -> PathCell:
        i = self.index
        cell: PathCell = node.cells[i]
        while cell is None:
            node = node.parent
            cell = node.cells[i]
        if cell.next is not None:
            self.queue.remove(cell)
        locks = cell.locks
        cell.locks = locks + 1
        if not locks:
            above = cell.up
            locks = above.locks
            above.locks = locks + 1
            while not locks:
                above = above.up
                locks = above.locks
                above.locks = locks + 1
            self.leased += (node.end - above.node.end) // self.page
        return cell

    def release(self, cover: PathCell, recent: bool = True) -> None:
        if cover.locks == 1:
            if recent:
                self.queue.add(cover)
            else:
                self.queue.add_first(cover)
        self._uncover(cover)

    def _uncover(self, cell: PathCell) -> None:
        """One lease less covers ``cell``, and what lies above it where it was the last."""
        locks = cell.locks - 1
        cell.locks = locks
        if not locks:
            end = cell.node.end
            while not locks:
                cell = cell.up
                locks = cell.locks - 1
                cell.locks = locks
            self.leased -= (end - cell.node.end) // self.page

    def pin(self, cell: PathCell) -> None:
        self.acquire(cell.node)

    def unpin(self, cell: PathCell) -> None:
        self.release(cell)

    # ------------------------------------------------------------ a sequence's way
    def open(self, node: Node) -> PageHolding:
        return PageHolding(self.row(node, node.end), node.end // self.page)

    def adopt(self, run: list[Node], holding: PageHolding) -> None:
        """Nothing, if the path above has a hole: residency stays closed upward."""
        i = self.index
        page = self.page
        first = holding.owned
        above = run[0].parent
        up: PathCell = above.cells[i]
        if up is None or first != above.end // page:
            return
        table = holding.table
        for node in run:
            last = node.end // page
            cell: PathCell = node.cells[i]
            if cell is None:
                up.below += 1
                cell = PathCell(node, table[first:last].tobytes(), up)
                node.cells[i] = cell
                self.in_tree += last - first
                if self.recorder is not None:
                    self.recorder.changed(self, node, None, cell.data)
            else:  # ours are duplicates: they are freed, and the tree's are read
                self._give_duplicates(table[first:last].tobytes())
                table[first:last] = array("i", cell.data)
                holding.change(first)
            up = cell
            first = last
        holding.owned = first

    def _give_duplicates(self, mine: bytes) -> None:
        """The tree has these pages already. An engine that hands in what lies behind them has none of its own."""
        self.pool.give(mine if ABSENT_BYTES not in mine else without_absent(mine))

    def finish(self, run: list[Node], cover: PathCell | None) -> None:
        """Uncover the path as if the sequence had covered the end of ``run``: that was used just now."""
        last = self.acquire(run[-1])
        self.release(last)
        if cover is last:
            self.release(cover)
        elif cover is not None:
            self._uncover(cover)  # it lies above ``last``: to queue it would count as one more use of it

    # ------------------------------------------------------------ cells
    def divide(self, upper: Node, lower: Node) -> None:
        i = self.index
        cell: PathCell = lower.cells[i]
        if cell is None:
            return
        new = PathCell(upper, b"", cell.up)
        new.below = 1
        cut = (upper.end - upper.parent.end) // self.page * ID_BYTES
        new.data, cell.data = cell.data[:cut], cell.data[cut:]
        new.locks = 1 if cell.locks else 0
        cell.up = new
        upper.cells[i] = new
        self.queue.inherit(new, cell, linked=False)

    def retract(self, node: Node, slots: set[int]) -> None:
        """A boundary needs all above it, so whatever lies below goes too, the deepest first."""
        cell: PathCell = node.cells[self.index]
        if cell is None or not slots.issuperset(self.slots_of(cell)):
            return
        i = self.index
        below = [cell]
        for above in below:
            for kid in above.node.children:
                if kid.cells[i] is not None:
                    below.append(kid.cells[i])
        for each in reversed(below):
            if not each.locks:
                self.drop_cell(each)

    def size(self, cell: PathCell) -> int:
        return len(cell.data) // ID_BYTES

    def hangs_from(self, cell: PathCell) -> PathCell:
        return cell.up

    def uncovered(self, cell: PathCell) -> bool:
        return not cell.locks and not cell.below

    # ------------------------------------------------------------ eviction
    def fall(self, nodes: list[Node], lost: Lane[Any, Any]) -> None:
        """Nodes come from the leaves up: a parent left childless is the next, and one with children stays for them."""
        for node in nodes:
            cell = node.cells[self.index]
            if cell is not None and not cell.below:
                super().fall([node], lost)

    def put_back(self, cell: PathCell) -> None:
        cell.up.below += 1
        self.queue.add(cell)

    def _pop_victim(self) -> PathCell | None:
        while True:
            cell: PathCell | None = self.queue.pop()
            if cell is None or not cell.below:  # an inner anchor returns when its last child has gone
                return cell

    def _leave(self, cell: PathCell) -> None:
        """A parent left childless is the next victim, unless its own use was later."""
        up = cell.up
        below = up.below - 1
        up.below = below
        if not below and not up.locks and up.next is None:
            self.queue.add_first(up)
