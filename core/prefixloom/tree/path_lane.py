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
from ..device.pool import ID_BYTES
from .holdings import Holding
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


class PathLane(PageLane):
    __slots__ = ()

    def root_cell(self, root: Node) -> None:
        """A root has a cell that holds nothing and is always covered, so that every walk upward ends there."""
        cell = PathCell(root, b"", None)  # type: ignore[arg-type]
        cell.locks = 1
        root.cells[self.index] = cell

    def deepest(self, node: Node, boundary: int) -> tuple[Node, int]:
        i = self.index
        while node.cells[i] is None:
            node = node.parent
            boundary = node.end
        return node, boundary

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

    def release(self, record: PathCell, recent: bool = True) -> None:
        locks = record.locks - 1
        record.locks = locks
        if not locks:
            if recent:
                self.queue.add(record)
            else:
                self.queue.add_first(record)
            above = record.up
            locks = above.locks - 1
            above.locks = locks
            while not locks:
                above = above.up
                locks = above.locks - 1
                above.locks = locks
            self.leased -= (record.node.end - above.node.end) // self.page

    def needs(self, boundary: int) -> tuple[Interval, ...]:
        return ((0, boundary),)

    def pin(self, cell: PathCell) -> None:
        self.acquire(cell.node)

    def unpin(self, cell: PathCell) -> None:
        self.release(cell)

    def advance(self, record: PathCell, node: Node) -> PathCell:
        """What is covered below ``record`` keeps it covered."""
        cell = self.acquire(node)
        record.locks -= 1
        return cell

    def carry(self, run: list[Node], holding: Holding, record: PathCell) -> PathCell:
        """Mostly all of it is a leaf below what the lease covers."""
        i = self.index
        page = self.page
        node = run[-1]
        first = holding.owned
        if record.node is not node.parent or node.cells[i] is not None or first != record.node.end // page:
            moved: PathCell = super().carry(run, holding, record)
            return moved
        last = node.end // page
        cell = PathCell(node, holding.table[first:last].tobytes(), record, 1)
        # what the lease had of the cell above stays there: it is of a covered child now
        node.cells[i] = cell
        record.below += 1
        holding.owned = last
        pages = last - first
        self.in_tree += pages
        self.leased += pages
        return cell

    def conclude(self, run: list[Node], holding: Holding, record: PathCell) -> None:
        """As ``adopt`` and ``release``, in one walk where the lease covers the path down to the run; the table is not
        read any more.
        """
        i = self.index
        page = self.page
        first = holding.owned
        above = run[0].parent
        if record.node is not above or first != above.end // page:
            super().conclude(run, holding, record)
            return
        table = holding.table
        up = record
        for node in run:
            last = node.end // page
            data = table[first:last].tobytes()
            cell: PathCell = node.cells[i]
            if cell is None:
                up.below += 1
                cell = PathCell(node, data, up)
                node.cells[i] = cell
                self.in_tree += last - first
            else:
                self.pool.give(data)
            up = cell
            first = last
        holding.owned = first
        if not up.locks:
            if up.next is None:
                self.queue.add(up)
            else:
                self.queue.touch(up)
        locks = record.locks - 1
        record.locks = locks
        if not locks:
            up = record
            while not locks:
                up = up.up
                locks = up.locks - 1
                up.locks = locks
            self.leased -= (above.end - up.node.end) // page
        if len(table) > first:
            self.close(holding)

    def divide(self, upper: Node, lower: Node) -> None:
        i = self.index
        cell: PathCell = lower.cells[i]
        if cell is None:
            return
        new = PathCell(upper, b"", cell.up)
        new.below = 1
        new.data, cell.data = self.page_slice(cell.data, upper.end - upper.parent.end)
        new.locks = 1 if cell.locks else 0
        cell.up = new
        upper.cells[i] = new
        self.queue.inherit(new, cell, linked=False)

    def open(self, node: Node) -> Holding:
        return Holding(self.row(node, node.end), 0, node.end // self.page)

    def begin(self, node: Node) -> tuple[PathCell, Holding]:
        """In one walk: a sequence opens where the path is held."""
        record: PathCell = node.cells[self.index]
        if record.next is not None:
            self.queue.remove(record)
        locks = record.locks
        record.locks = locks + 1
        above = record
        parts = [record.data]
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
        data = b"".join(parts)
        holding = Holding(data, 0, node.end // self.page)
        return record, holding

    def close(self, holding: Holding) -> None:
        table = holding.table
        if len(table) > holding.owned:
            self.pool.give(table[holding.owned :].tobytes())
            holding.owned = len(table)

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

    def adopt(self, run: list[Node], holding: Holding) -> None:
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
            else:
                self.read_theirs(cell.data, holding, first, last)
            up = cell
            first = last
        holding.owned = first

    def read_theirs(self, data: bytes, holding: Holding, first: int, last: int) -> None:
        """Where the tree has a cell, our pages [first, last) are duplicates: freed, and the tree's are read."""
        self.pool.give(holding.table[first:last].tobytes())
        holding.table[first:last] = array("i", data)
        holding.change(first)

    def retain(self, holding: Holding, floor: int) -> None:
        pass

    def pop_victim(self) -> PathCell | None:
        while True:
            cell: PathCell | None = self.queue.pop()
            if cell is None or not cell.below:  # an inner anchor returns when its last child has gone
                return cell

    def size(self, cell: PathCell) -> int:
        return len(cell.data) // ID_BYTES

    def hangs_from(self, cell: PathCell) -> PathCell:
        return cell.up

    def leave(self, cell: PathCell) -> None:
        """A parent left childless is the next victim, unless its own use was later."""
        up = cell.up
        below = up.below - 1
        up.below = below
        if not below and not up.locks and up.next is None:
            self.queue.add_first(up)

    def come_back(self, cell: PathCell) -> None:
        cell.up.below += 1
        self.queue.add(cell)

    def detach(self, cell: PathCell, node: Node, gone: list[bytes]) -> None:
        node.cells[self.index] = None
        gone.append(cell.data)
        self.queue.forget(cell)

    def give_all(self, gone: list[bytes]) -> int:
        data = b"".join(gone)
        pages = len(data) // ID_BYTES
        self.pool.give(data)
        self.in_tree -= pages
        return pages

    def fall(self, nodes: list[Node], lost: Lane) -> None:
        """Nodes come from the leaves up: a parent left childless is the next, and one with children stays for them."""
        for node in nodes:
            cell = node.cells[self.index]
            if cell is not None and not cell.below:
                super().fall([node], lost)

    def evict(self, count: int, freed: list[Node]) -> int:
        queue = self.queue
        if queue.__class__ is not ListQueue:  # one that is told of each
            return super().evict(count, freed)
        i = self.index
        wanted = count * ID_BYTES
        got = 0
        out: list[bytes] = []
        end: Any = queue._end
        after = end.next
        try:
            while got < wanted:
                cell: PathCell = after
                if cell.below:  # as the end has
                    if cell is end:
                        break
                    after = cell.next  # an inner anchor returns when its last child has gone
                    after.prev = end
                    cell.next = None
                    continue
                after = cell.next
                after.prev = end  # two that go must not know each other
                while True:
                    data = cell.data
                    out.append(data)
                    got += len(data)
                    node = cell.node
                    node.cells[i] = None
                    freed.append(node)
                    cell = cell.up
                    below = cell.below = cell.below - 1
                    if below or cell.locks or cell.next is not None:
                        break
                    if got >= wanted:  # a parent left childless is the next victim, unless its own use was later
                        cell.prev = end
                        cell.next = after
                        after.prev = after = cell
                        break
        finally:  # an interrupt: what went stood at the front
            end.next = after
        if out:
            self.pool.give(b"".join(out))
        got //= ID_BYTES
        self.in_tree -= got
        return got

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

    def uncovered(self, cell: PathCell) -> bool:
        return not cell.locks and not cell.below
