"""The lanes of positions near an end: windows, chunks, tails, sinks, unions, and arbitrary Python reaches.

A cell's ``locks`` is the number of leases that cover it. What a cell holds, and what of that is slack, is said in
``lane_slack``.

This lane serves reaches whose needs are one interval ending at the boundary; the scatter lane serves all others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..contract.queues import ListQueue, Queue
from ..contract.reach import Interval
from ..device.pool import ABSENT_BYTES, ID_BYTES, Pool, present
from .holdings import Holding, RetainedHolding, strip, without_absent
from .partial_lane import SlackLane, SpanCell
from .radix import Node, climb

if TYPE_CHECKING:
    from ..contract.composition import Part


class SpanLane(SlackLane):
    __slots__ = ("dense", "tree_page")
    holds: type[Holding] = RetainedHolding

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        self.tree_page = tree_page
        shape = part.reach.shape
        self.dense = shape is not None and shape.dense

    # ------------------------------------------------------------ match
    def deepest(self, node: Node, boundary: int) -> tuple[Node, int]:
        i = self.index
        page = self.page
        while boundary:
            low = self.tail(boundary)
            above = node
            while above.end > low:  # mostly all of these edges is held
                cell = above.cells[i]
                parent = above.parent
                if cell is None or cell.pages * page != above.end - parent.end:
                    break
                above = parent
            else:
                break
            hole = self.hole_in(above, low // page * page, min(boundary, above.end))
            if hole < 0:
                break
            boundary = hole // self.tree_page * self.tree_page
            node = climb(node, boundary)
        return node, boundary

    def hole_in(self, node: Node, low: int, high: int) -> int:
        """A hole in positions [low, high) of the path to ``node``; -1 if there is none."""
        i = self.index
        page = self.page
        while high > low:
            start = node.parent.end
            if start >= high:
                node = node.parent
                continue
            cell = node.cells[i]
            if cell is None:
                return start if self.dense or low < start else low
            if cell.pages * page < node.end - start:  # not all of the edge is held
                first = low if low > start else start
                data = cell.data
                offset = node.end - len(data) // ID_BYTES * page
                if first < offset:
                    return start if self.dense else first
                at = data.find(
                    ABSENT_BYTES, (first - offset) // page * ID_BYTES, -(-(high - offset) // page) * ID_BYTES
                )
                if at >= 0:
                    return offset + int(at) // ID_BYTES * page
            high = start
            node = node.parent
        return -1

    def needs(self, boundary: int) -> tuple[Interval, ...]:
        return ((self.first_needed(boundary), boundary),)

    # ------------------------------------------------------------ leases
    def pin(self, cell: SpanCell) -> None:
        if not cell.locks:
            self.leased += cell.pages
            if cell.next is not None:
                self.queue.remove(cell)
        cell.locks += 1

    def unpin(self, cell: SpanCell) -> None:
        cell.locks -= 1
        if not cell.locks:
            self.settle(cell, True)

    def settle(self, cell: SpanCell, recent: bool) -> None:
        """Nothing covers ``cell`` any more."""
        self.leased -= cell.pages
        if not cell.pages:
            cell.node.cells[self.index] = None
            self.queue.forget(cell)
        elif recent:
            self.queue.add(cell)
        else:
            self.queue.add_first(cell)

    def acquire(self, node: Node) -> Any:
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
                if cell.next is not None:
                    self.queue.remove(cell)
                self.leased += cell.pages
            cell.locks = locks + 1
            above = above.parent
        covered = end - above.end
        return (node, covered) if covered else None

    def begin(self, node: Node) -> tuple[Any, Holding]:
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
                self.leased += cell.pages
                if cell.next is not None:
                    self.queue.remove(cell)
            above = above.parent
        last = end // self.page
        first = last
        data = b""
        record = None
        if parts:
            parts.reverse()
            first = low // self.page
            data = b"".join(parts)[(first - last) * ID_BYTES :]
            record = node, end - above.end
        holding = RetainedHolding(data, first, last)
        return record, holding

    def release(self, record: tuple[Node, int], recent: bool = True) -> None:
        node, covered = record
        self.uncover(node, node.end - covered, recent)

    def uncover(self, node: Node, stop: int, recent: bool = True) -> None:
        """Of what a lease covers, the cells from ``node`` up that lie past ``stop``."""
        i = self.index
        while node.end > stop:
            cell = node.cells[i]
            locks = cell.locks - 1
            cell.locks = locks
            if not locks:
                self.settle(cell, recent)
            node = node.parent

    def finish(self, record: Any, node: Node) -> None:
        """What was published is in the queue already, and as recent as it should be."""
        if record is not None:
            self.release(record)

    def conclude(self, run: list[Node], holding: RetainedHolding, record: Any) -> None:
        """As ``adopt``, but nobody reads the table any more: what the tree has all of is only given back."""
        i = self.index
        page = self.page
        base = holding.base
        table = holding.table
        first = holding.owned - base
        for node in run:
            last = node.end // page - base
            if last > first:
                cell: SpanCell = node.cells[i]
                mine = table[first:last].tobytes()
                if cell is None:
                    low = self.tail(node.end)
                    cell = self.hang(node, mine, base + first, low, holding.whole)
                    if cell is not None:
                        self.queue.add(cell)
                elif holding.whole and cell.pages == (node.end - node.parent.end) // page:
                    self.pool.give(mine)
                    if cell.next is not None:
                        self.queue.touch(cell)
                else:
                    self.merge(cell, mine, holding)
                first = last
        holding.owned = base + first
        if record is not None:
            self.release(record)
        if len(table) > first:
            self.close(holding)

    # ------------------------------------------------------------ tree
    def divide(self, upper: Node, lower: Node) -> None:
        i = self.index
        cell: SpanCell = lower.cells[i]
        if cell is None:
            return
        cut = (lower.end - upper.end) // self.page * ID_BYTES
        data = cell.data
        whole = cell.pages
        linked = cell.next is not None
        new = SpanCell(upper, strip(data[:-cut]) if len(data) > cut else b"", 0)
        new.pages = present(new.data)
        cell.data = strip(data[-cut:])
        cell.pages = whole - new.pages
        new.locks = cell.locks
        self.drop_slack(cell)
        if new.pages or new.locks:
            upper.cells[i] = new
            self.queue.inherit(new, cell, linked=linked)
            self.find_slack(new)
        if cell.pages or cell.locks:
            self.find_slack(cell)
        else:
            lower.cells[i] = None
            if linked:
                self.queue.remove(cell)
            self.queue.forget(cell)

    # ------------------------------------------------------------ sequences
    def open(self, node: Node) -> Holding:
        end = node.end
        page = self.page
        low = self.tail(end) // page
        return RetainedHolding(self.gather(node, end // page - low), low, end // page)

    def row(self, node: Node, boundary: int) -> bytes:
        low = self.first_needed(boundary) // self.page
        data = ABSENT_BYTES * low + self.gather(node, node.end // self.page - low)
        return data if boundary == node.end else data[: boundary // self.page * ID_BYTES]

    def gather(self, node: Node, count: int) -> bytes:
        """The last ``count`` pages before the end of ``node``, *absent* where nothing is held."""
        i = self.index
        size = count * ID_BYTES
        page = self.page
        cell = node.cells[i]
        if cell is not None and len(cell.data) >= size:
            return cell.data[-size:] if size else b""
        parts: list[bytes] = []
        got = 0
        while got < size:
            parent = node.parent
            whole = (node.end - parent.end) // page * ID_BYTES
            cell = node.cells[i]
            data = b"" if cell is None else cell.data
            parts.append(data if len(data) == whole else ABSENT_BYTES * ((whole - len(data)) // ID_BYTES) + data)
            got += whole
            node = parent
        parts.reverse()
        joined = b"".join(parts)
        return joined if got == size else joined[got - size :]

    def adopt(self, run: list[Node], holding: RetainedHolding) -> None:
        self.hand_over(run, holding)
        self.line_up(run)

    def carry(self, run: list[Node], holding: RetainedHolding, record: Any) -> Any:
        """Mostly all of it is a leaf below what the lease covers, which keeps what the leaf's end needs of that.

        While the lease covers anything, nothing past it has been given back.
        """
        moved: Any
        node = run[-1]
        first = holding.owned
        if record is None or record[0] is not node.parent or node.cells[self.index] is not None or not holding.whole:
            moved = self.carry_any(run, holding, record)
            return moved
        above, covered = record
        stop = above.end - covered
        end = node.end
        low = self.tail(end)
        last = end // self.page
        if low < stop or low >= end or self.queue.__class__ is not ListQueue:
            moved = self.carry_any(run, holding, record)
            return moved
        base = holding.base
        mine = holding.table[first - base : last - base].tobytes()
        holding.owned = last
        self.hang(node, mine, first, low, whole=True, locks=1)
        self.leased += last - first
        while above.end > low:
            above = above.parent
        moved = node, end - above.end
        self.uncover(above, stop)
        return moved

    def carry_any(self, run: list[Node], holding: RetainedHolding, record: Any) -> Any:
        """``carry``, whatever is there already and whatever is handed over."""
        moved: Any
        if self.queue.__class__ is not ListQueue:  # one that may count uses
            moved = super().carry(run, holding, record)
            return moved
        self.hand_over(run, holding)
        moved = self.acquire(run[-1])
        if moved is None:  # else it covers the last node, too
            self.line_up(run)
        if record is not None:
            self.release(record)
        return moved

    def hand_over(self, run: list[Node], holding: RetainedHolding) -> None:
        """``adopt``, but what hangs at the last node now stands in no queue yet."""
        i = self.index
        page = self.page
        base = holding.base
        table = holding.table
        first = holding.owned - base
        end = run[-1]
        for node in run:
            last = node.end // page - base
            if last > first:  # what lies before all that is held is neither brought nor used
                cell: SpanCell = node.cells[i]
                mine = table[first:last].tobytes()
                if cell is None:
                    low = self.tail(node.end)
                    cell = self.hang(node, mine, base + first, low, holding.whole)
                    holding.owned = base + last
                    if cell is not None and node is not end:
                        self.queue.add(cell)
                else:
                    self.merge(cell, mine, holding)
                    holding.owned = base + last
                first = last

    def retain(self, holding: RetainedHolding, floor: int) -> None:
        low = self.tail(floor)
        self.forget(holding, low // self.page)

    def forget(self, holding: RetainedHolding, page: int) -> None:
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

    def read_covered(self, holding: RetainedHolding, record: Any, boundary: int) -> None:
        """Above a hole (what arrived was not all) the lease covers nothing, so nothing is read there any more."""
        low = self.tail(boundary)
        first = low // self.page
        covered = 0 if record is None else record[1]
        if boundary - covered > low:
            first = max(first, min((boundary - covered) // self.page, holding.owned))
        self.forget(holding, first)

    def passed(self, holding: Holding, boundary: int) -> bool:
        return holding.base * self.page >= boundary
