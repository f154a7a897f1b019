"""The lane of needs that are several intervals, that only Python code can tell, or that a hook widens.

It is the lane of positions near an end, asked for intervals instead of a first position: correct for any reach, and
slower. A lease's record says which node-aligned ranges it covers, since what lies between them is not covered.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..contract.queues import Queue
from ..contract.reach import Interval, Reach, merged
from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, Pool
from .holdings import Holding, RetainedHolding, without_absent
from .lane import PageLane
from .partial_lane import SpanCell
from .radix import Node, climb
from .window_lane import SpanLane

if TYPE_CHECKING:
    from ..contract.composition import Part


class ScatterHolding(RetainedHolding):
    """Its table keeps a head in front; between that and page ``low`` nothing is present any more."""

    __slots__ = ("low",)

    def __init__(self, data: bytes, end: int) -> None:
        super().__init__(data, 0, end)
        self.low = 0
        self.whole = False


class ScatterLane(SpanLane):
    """Needs that are several intervals, that only Python code can tell, or that a hook widens."""

    __slots__ = ("asks_until", "reach", "spans")
    holds = ScatterHolding
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

    def outlook(self, n: int) -> tuple[Interval, ...]:
        """What lies before ``n`` and may be needed at ``n`` or later, of a reach that does not need it all the time."""
        if self.reach.convex:
            return self.spans(n)
        if not self.asks_until:
            return ((0, n),) if n else ()
        page, until = self.page, self.reach.until
        later = [(p, p + page) for p in range(0, n, page) if any(until(t) >= n for t in range(p, p + page))]
        return merged((*self.spans(n), *later))

    def read_covered(self, holding: ScatterHolding, record: Any, boundary: int) -> None:  # type: ignore[override]
        """A hole keeps nothing around it from being covered."""
        self.retain(holding, boundary)

    def passed(self, holding: Holding, boundary: int) -> bool:
        """Heads are read for good, and what is scattered has to be looked for."""
        before = holding.table[: max(0, boundary // self.page - holding.base)]
        return before.count(ABSENT) == len(before)

    def deepest(self, node: Node, boundary: int) -> tuple[Node, int]:
        while boundary:
            hole = self.hole(node, boundary)
            if hole < 0:
                break
            boundary = hole // self.tree_page * self.tree_page
            node = climb(node, boundary)
        return node, boundary

    def hole(self, node: Node, boundary: int) -> int:
        """The lowest known position that ``boundary`` needs and that is absent; -1 if all is there."""
        for low, high in reversed(self.spans(boundary)):
            hole = self.hole_in(node, low, high)
            if hole >= 0:
                return hole if self.reach.convex else boundary - 1
        return -1

    def needs(self, boundary: int) -> tuple[Interval, ...]:
        return self.spans(boundary)

    def acquire(self, node: Node) -> Any:
        return self.acquire_wider(node, ())

    def acquire_wider(self, node: Node, positions: tuple[Interval, ...]) -> Any:
        i = self.index
        spans = self.outlook(node.end)
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

    def begin(self, node: Node) -> tuple[Any, Holding]:
        return PageLane.begin(self, node)

    def carry(self, run: list[Node], holding: RetainedHolding, record: Any) -> Any:
        return PageLane.carry(self, run, holding, record)

    def release(self, record: Any, recent: bool = True) -> None:
        node, covered = record
        i = self.index
        low = covered[0][0]
        while node.end > low:
            start, end = node.parent.end, node.end
            if any(lo <= start and end <= hi for lo, hi in covered):
                cell = node.cells[i]
                cell.locks -= 1
                if not cell.locks:
                    self.settle(cell, recent)
            node = node.parent

    def kept(self, upto: int, keep: tuple[Interval, ...]) -> tuple[Interval, ...]:
        return merged((*keep, *self.spans(upto)))

    def slack_pages(self, cell: SpanCell) -> Interval:
        shape = self.reach.shape
        if shape is None or self.hooks.acquire_component_lock is not None:
            return 0, 0
        first, last = super().slack_pages(cell)
        start = cell.node.end - len(cell.data) // ID_BYTES * self.page
        return max(first, min(last, -(-(shape.head - start) // self.page))), last

    def open(self, node: Node) -> ScatterHolding:
        return ScatterHolding(self.row(node, node.end), node.end // self.page)

    def row(self, node: Node, boundary: int) -> bytes:
        count = node.end // self.page
        every = array("i", self.gather(node, count))
        table = array("i", ABSENT_BYTES * count)
        for low, high in self.outlook(boundary):
            a, b = low // self.page, min(high, boundary) // self.page
            table[a:b] = every[a:b]
        return table[: boundary // self.page].tobytes()

    def retain(self, holding: ScatterHolding, floor: int) -> None:  # type: ignore[override]
        shape = self.reach.shape
        if shape is not None:
            head = -(-shape.head // self.page)
            if holding.low < head:
                holding.low = head
            self.forget(holding, self.first_needed(floor) // self.page)
        elif self.asks_until:
            self.forget_by_until(holding, floor)

    def forget(self, holding: ScatterHolding, page: int) -> None:  # type: ignore[override]
        """Nothing between the head and ``page`` is present any more; the head stays in the table."""
        low, base, table = max(holding.low, holding.base), holding.base, holding.table
        page = min(page, base + len(table))
        if page <= low:
            return
        data = table[max(low, holding.owned) - base : page - base].tobytes()
        self.pool.give(without_absent(data) if ABSENT_BYTES in data else data)
        table[low - base : page - base] = array("i", ABSENT_BYTES * (page - low))
        holding.change(low)
        holding.low = page

    def forget_by_until(self, holding: ScatterHolding, floor: int) -> None:
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
