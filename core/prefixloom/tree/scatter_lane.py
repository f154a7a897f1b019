"""Scatter lane: page components whose needs are several intervals, have no closed form, or are widened by a hook.

It works as the window lane does, but with intervals instead of a first position: it is correct for any reach, and
slower. A lease's cover has the node-aligned ranges that it covers, since what lies between them is not covered.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from ..contract.composition import Part
from ..contract.queues import Queue
from ..contract.reach import Interval, Reach, merged
from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, Pool
from .holdings import RetainedHolding, without_absent
from .partial_lane import PartialCell, PartialLane
from .radix import Node, climb


class ScatterHolding(RetainedHolding):
    """A holding whose table keeps a head at the start. Between the head and page ``low`` nothing is present."""

    __slots__ = ("low",)

    def __init__(self, data: bytes, end: int) -> None:
        super().__init__(data, 0, end)
        self.low = 0
        self.whole = False


ScatterCover = tuple[Node, tuple[Interval, ...]]
"""The node at whose end a lease covers cells, and the node-aligned ranges in which they lie."""


class ScatterLane(PartialLane[ScatterCover, ScatterHolding]):
    """The lane of a page component with any reach."""

    __slots__ = ("asks_until", "reach", "spans")
    headless = False

    spans: Callable[[int], tuple[Interval, ...]]

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        self.reach = part.reach
        self.dense = False
        self.asks_until = type(part.reach).until is not Reach.until
        page = self.page
        needs = part.reach.needs
        shape = part.reach.shape
        if shape is not None:
            head, tail = shape.head, shape.tail

            def spans(n: int) -> tuple[Interval, ...]:
                low, high = tail(n) // page * page, -(-min(head, n) // page) * page
                if low <= high or low >= n:
                    return ((0, n),) if low < n else ((0, high),) if high else ()
                return ((0, high), (low, n)) if high else ((low, n),)

        else:

            def spans(n: int) -> tuple[Interval, ...]:
                return merged((lo // page * page, -(-hi // page) * page) for lo, hi in needs(n))

        self.spans = spans

    def _outlook(self, n: int) -> tuple[Interval, ...]:
        """The intervals before ``n`` that may be needed at ``n`` or at a later boundary."""
        if self.reach.convex:
            return self.spans(n)
        if not self.asks_until:
            return ((0, n),) if n else ()
        page, until = self.page, self.reach.until
        later = [(p, p + page) for p in range(0, n, page) if any(until(t) >= n for t in range(p, p + page))]
        return merged((*self.spans(n), *later))

    def read_covered(self, holding: ScatterHolding, cover: ScatterCover | None, boundary: int) -> None:
        """Keep reading what ``boundary`` needs: a hole does not end what the lease covers.

        Of a reach that is convex the lease covers nothing else, so ``until`` does not decide what is read on.
        """
        self.retain(holding, boundary)
        if self.reach.convex and self.reach.shape is None:
            self._read_only(holding, self.spans(boundary), boundary)

    def _read_only(self, holding: ScatterHolding, spans: tuple[Interval, ...], boundary: int) -> None:
        """Of the tree's pages before ``boundary``, those outside of ``spans`` leave the table."""
        page, base, table = self.page, holding.base, holding.table
        for p in range(base, min(boundary // page, holding.owned, base + len(table))):
            if table[p - base] != ABSENT and not any(lo < (p + 1) * page and p * page < hi for lo, hi in spans):
                table[p - base] = ABSENT
                holding.change(p)

    def reads_past(self, holding: ScatterHolding, boundary: int) -> bool:
        """Whether nothing before ``boundary`` is present, which has to be searched for."""
        before = holding.table[: max(0, boundary // self.page - holding.base)]
        return before.count(ABSENT) == len(before)

    def deepest(self, node: Node, boundary: int) -> tuple[Node, int]:
        while boundary:
            hole = self._hole(node, boundary)
            if hole < 0:
                break
            boundary = hole // self.tree_page * self.tree_page
            node = climb(node, boundary)
        return node, boundary

    def _hole(self, node: Node, boundary: int) -> int:
        """An absent position that ``boundary`` needs, below which the search goes on; -1 if nothing is absent."""
        for low, high in reversed(self.spans(boundary)):
            hole = self._hole_in(node, low, high)
            if hole >= 0:
                return hole if self.reach.convex else boundary - 1
        return -1

    def needs(self, boundary: int) -> tuple[Interval, ...]:
        return self.spans(boundary)

    def acquire(self, node: Node) -> ScatterCover | None:
        return self.acquire_wider(node, ())

    def acquire_wider(self, node: Node, positions: tuple[Interval, ...]) -> ScatterCover | None:
        i = self.index
        spans = self._outlook(node.end)
        if positions:
            spans = merged((*spans, *((max(0, lo), min(hi, node.end)) for lo, hi in positions)))
        if not spans:
            return None
        covered: list[Interval] = []
        low = spans[0][0]
        above = node
        while above.end > low:
            start, end = above.parent.end, above.end
            cell = above.cells[i]
            if cell is not None and any(lo < end and start < hi for lo, hi in spans):
                if not cell.locks:
                    self.leased += cell.pages
                    if cell.next is not None:
                        self.queue.remove(cell)
                cell.locks += 1
                covered.append((start, end))
            above = above.parent
        return (node, merged(covered)) if covered else None

    def release(self, cover: ScatterCover, recent: bool = True) -> None:
        node, covered = cover
        i = self.index
        low = covered[0][0]
        while node.end > low:
            start, end = node.parent.end, node.end
            if any(lo <= start and end <= hi for lo, hi in covered):
                cell = node.cells[i]
                cell.locks -= 1
                if not cell.locks:
                    self._settle(cell, recent)
            node = node.parent

    def _kept(self, upto: int, keep: tuple[Interval, ...]) -> tuple[Interval, ...]:
        return merged((*keep, *self.spans(upto)))

    def _slack_pages(self, cell: PartialCell) -> Interval:
        shape = self.reach.shape
        if shape is None or self.hooks.acquire_component_lock is not None:
            return 0, 0
        first, last = super()._slack_pages(cell)
        start = cell.node.end - len(cell.data) // ID_BYTES * self.page
        return max(first, min(last, -(-(shape.head - start) // self.page))), last

    def open(self, node: Node) -> ScatterHolding:
        return ScatterHolding(self.row(node, node.end), node.end // self.page)

    def row(self, node: Node, boundary: int) -> bytes:
        count = node.end // self.page
        every = array("i", self._gather(node, count))
        table = array("i", ABSENT_BYTES * count)
        for low, high in self._outlook(boundary):
            a, b = low // self.page, min(high, boundary) // self.page
            table[a:b] = every[a:b]
        return table[: boundary // self.page].tobytes()

    def retain(self, holding: ScatterHolding, floor: int) -> None:
        shape = self.reach.shape
        if shape is not None:
            head = -(-shape.head // self.page)
            if holding.low < head:
                holding.low = head
            self._forget(holding, self._first_needed(floor) // self.page)
        elif self.asks_until:
            self._forget_by_until(holding, floor)

    def _forget(self, holding: ScatterHolding, page: int) -> None:
        """Give back the pages between the head and ``page``; the head stays in the table."""
        low, base, table = max(holding.low, holding.base), holding.base, holding.table
        page = min(page, base + len(table))
        if page <= low:
            return
        data = table[max(low, holding.owned) - base : page - base].tobytes()
        self.pool.give(without_absent(data) if ABSENT_BYTES in data else data)
        table[low - base : page - base] = array("i", ABSENT_BYTES * (page - low))
        holding.change(low)
        holding.low = page

    def _forget_by_until(self, holding: ScatterHolding, floor: int) -> None:
        page, base, table, until = self.page, holding.base, holding.table, self.reach.until
        gone = array("i")
        for p in range(base, min(floor // page, base + len(table))):
            slot = table[p - base]
            if slot != ABSENT and all(until(t) < floor for t in range(p * page, (p + 1) * page)):
                table[p - base] = ABSENT
                if p >= holding.owned:
                    gone.append(slot)
                holding.change(p)
        if gone:
            self.pool.give(gone.tobytes())
