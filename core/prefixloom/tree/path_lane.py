"""The lane of reaches that are closed upward: a boundary needs everything above it.

Residency is closed upward too, so the deepest cell tells the usable depth, leaves go before their parents, and a lease
counts up only to the first ancestor that is protected already: a cell's ``locks`` is its own leases plus its protected
children, and positive exactly while something covers it.
"""

from __future__ import annotations

from array import array
from typing import Any

from ..contract.queues import ListQueue
from ..contract.reach import Interval
from ..device.pool import ABSENT_BYTES, ID_BYTES
from .holdings import PageHolding, without_absent
from .lane import Cell, Lane, PageLane
from .radix import Node


class PathCell(Cell):
    """``up`` is the parent's cell, ``below`` the number of children that have one."""

    __slots__ = ("below", "up")

    up: PathCell

    def __init__(self, node: Node, data: bytes, up: PathCell, locks: int = 0) -> None:
        self.node = node
        self.data = data
        self.up = up
        self.below = 0
        self.locks = locks
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
    def acquire(self, node: Node) -> PathCell:
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
        return PageHolding(self.row(node, node.end), 0, node.end // self.page)

    def begin(self, node: Node) -> tuple[PathCell, PageHolding]:
        """In one walk: a sequence opens where the path is held."""
        cover: PathCell = node.cells[self.index]
        if cover.next is not None:
            self.queue.remove(cover)
        locks = cover.locks
        cover.locks = locks + 1
        above = cover
        parts = [cover.data]
        if not locks:
            while not locks:
                above = above.up
                parts.append(above.data)
                locks = above.locks
                above.locks = locks + 1
            self.leased += (node.end - above.node.end) // self.page
        above = above.up
        while above is not None:
            parts.append(above.data)
            above = above.up
        parts.reverse()
        return cover, PageHolding(b"".join(parts), 0, node.end // self.page)

    def hand_over(self, run: list[Node], holding: PageHolding, cover: PathCell | None, ends: bool) -> PathCell | None:
        """Fast path where the run begins at the cover: one walk. Where the sequence ends, duplicates are only freed,
        since nobody reads the table any more.
        """
        i = self.index
        page = self.page
        first = holding.owned
        above = run[0].parent
        if cover is None or cover.node is not above or first != above.end // page:
            return super().hand_over(run, holding, cover, ends)
        table = holding.table
        up = cover
        for node in run:
            last = node.end // page
            cell: PathCell = node.cells[i]
            if cell is None:
                cell = PathCell(node, table[first:last].tobytes(), up)
                up.below += 1
                node.cells[i] = cell
                self.in_tree += last - first
                if self.recorder is not None:
                    self.recorder.changed(self, node, None, cell.data)
            else:
                self._give_duplicates(table[first:last].tobytes())
                if not ends:
                    table[first:last] = array("i", cell.data)
                    holding.change(first)
            up = cell
            first = last
        holding.owned = first
        if ends:
            if not up.locks:  # else a lease covers it
                if up.next is None:
                    self.queue.add(up)
                else:
                    self.queue.touch(up)
            self._uncover(cover)
            if len(table) > first:
                self.close(holding)
            return None
        if up.up is cover and not up.locks and up.next is None:  # a leaf below the cover
            up.locks = 1  # and what the lease had of the cover is its covered child's
            self.leased += (up.node.end - above.end) // page
            return up
        return self._move_down(run, cover)

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

    def follow(self, run: list[Node], holding: PageHolding, cover: PathCell | None) -> PathCell:
        """What is covered below ``cover`` keeps it covered. Above the end of ``run`` no cell may go."""
        assert cover is not None
        return self._move_down(run, cover)

    def _move_down(self, run: list[Node], cover: PathCell) -> PathCell:
        new = self.acquire(run[-1])
        cover.locks -= 1
        return new

    def finish(self, run: list[Node], cover: PathCell | None) -> None:
        assert cover is not None
        cell: PathCell | None = run[-1].cells[self.index]
        if cell is not None and not cell.locks:  # else it is not shared, or a lease covers it
            if cell.next is None:
                self.queue.add(cell)
            else:
                self.queue.touch(cell)
        self._uncover(cover)

    def close(self, holding: PageHolding) -> None:
        table = holding.table
        if len(table) > holding.owned:
            self.pool.give(table[holding.owned :].tobytes())
            holding.owned = len(table)

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
    def evict(self, count: int, freed: list[Node]) -> int:
        queue = self.queue
        if queue.__class__ is not ListQueue:  # one that is told of each
            return super().evict(count, freed)
        i = self.index
        wanted = count * ID_BYTES
        got = 0
        gone: list[bytes] = []
        while got < wanted:
            cell: Any = queue.pop()
            if cell is None:
                break
            while not cell.below:  # else an inner anchor, which returns when its last child has gone
                data = cell.data
                gone.append(data)
                got += len(data)
                node = cell.node
                node.cells[i] = None
                freed.append(node)
                if self.recorder is not None:
                    self.recorder.changed(self, node, data, None)
                cell = cell.up
                below = cell.below = cell.below - 1
                if below or cell.locks or cell.next is not None:
                    break
                if got >= wanted:  # a parent left childless is the next victim, unless its own use was later
                    queue.add_first(cell)
                    break
        if gone:
            got = self._give_all(gone)
        return got

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

    def _detach(self, cell: PathCell, node: Node, gone: list[bytes]) -> None:
        node.cells[self.index] = None
        gone.append(cell.data)
        if self.recorder is not None:
            self.recorder.changed(self, node, cell.data, None)
        self.queue.forget(cell)

    def _give_all(self, gone: list[bytes]) -> int:
        data = b"".join(gone)
        pages = len(data) // ID_BYTES
        self.pool.give(data)
        self.in_tree -= pages
        return pages
