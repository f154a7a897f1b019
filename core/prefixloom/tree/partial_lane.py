"""Cells of page lanes that may hold only a part of their edge, and the part of them that is only worth keeping.

``data`` of such a cell stands for the last pages of the edge, with *absent* where nothing is held. What no boundary at
the node's end or below it can need (the part of a long edge that is older than a window) is *slack*: kept while there
is room, since a boundary inside of the edge may be resumed at, and freed before anything else, even when a lease covers
the rest of the cell.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..contract.queues import Link, ListQueue, Queue
from ..contract.reach import Interval, merged
from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, Pool, present
from .holdings import RetainedHolding, strip, without_absent
from .lane import Cell, PageLane
from .radix import Node

if TYPE_CHECKING:
    from ..contract.composition import Part


class SpanCell(Cell):
    """``pages``: how many of ``data`` are present. ``slack``: its place in the queue of slack, if it has any."""

    __slots__ = ("pages", "slack")

    slack: Slack | None

    def __init__(self, node: Node, data: bytes, pages: int, locks: int = 0) -> None:
        self.node = node
        self.data = data
        self.pages = pages
        self.locks = locks
        self.slack = None
        self.next = None


class Slack(Link):
    __slots__ = ("cell",)

    def __init__(self, cell: SpanCell) -> None:
        self.cell = cell
        self.next = None


class SlackLane(PageLane):
    """What the lanes of such cells share: which pages are slack, and the queue of those."""

    __slots__ = ("gapped", "slack", "tail")
    retains = True
    headless = True
    """Whether a boundary needs nothing but its tail."""
    tail: Callable[[int], int]
    gapped: bool
    """Whether there has been a cell with pages absent behind one that is there."""

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        self.gapped = False
        self.slack = ListQueue()
        shape = part.reach.shape
        self.tail = shape.tail if shape is not None else lambda n: 0

    def reset(self) -> None:
        super().reset()
        self.gapped = False
        while (slack := self.slack.pop()) is not None:
            slack.cell.slack = None  # they know each other

    def first_needed(self, boundary: int) -> int:
        return self.tail(boundary) // self.page * self.page

    def slack_pages(self, cell: SpanCell) -> Interval:
        """Indices [first, last) into ``cell.data`` of the pages that are slack."""
        page = self.page
        end = cell.node.end
        needed = end // page - self.tail(end) // page
        count = len(cell.data) // ID_BYTES - needed
        return 0, count if count > 0 else 0

    def find_slack(self, cell: SpanCell) -> None:
        node = cell.node
        if self.tail(node.end) > node.parent.end:
            self.note_slack(cell)

    def note_slack(self, cell: SpanCell) -> None:
        """Slack, if any of the pages is there that may be."""
        first, last = self.slack_pages(cell)
        if last > first and present(cell.data[first * ID_BYTES : last * ID_BYTES]):
            slack = cell.slack = Slack(cell)
            self.slack.add(slack)

    def drop_slack(self, cell: SpanCell) -> None:
        if cell.slack is not None:
            self.slack.drop(cell.slack)
            cell.slack = None

    def read_covered(self, holding: Any, record: Any, boundary: int) -> None:
        """Nothing is read any more that ``boundary`` does not need, and nothing that the lease there does not cover."""
        raise NotImplementedError

    def loose(self) -> int:
        """Slack of covered cells. It walks the queue of slack, and is asked when a shortage seems certain."""
        count = 0
        for slack in self.slack:
            cell = slack.cell
            if cell.locks:
                first, last = self.slack_pages(cell)
                count += present(cell.data[first * ID_BYTES : last * ID_BYTES])
        return count

    def trim(self, count: int, emptied: list[Node]) -> int:
        got = 0
        while got < count:
            slack = self.slack.pop()
            if slack is None:
                break
            got += self.cut_slack(slack.cell)
            if not slack.cell.pages and not slack.cell.locks:
                emptied.append(slack.cell.node)
        return got

    def loses_first(self, count: int) -> list[SpanCell]:
        cells: list[SpanCell] = []
        got = 0
        for slack in self.slack:
            if got >= count:
                break
            first, last = self.slack_pages(slack.cell)
            got += present(slack.cell.data[first * ID_BYTES : last * ID_BYTES])
            cells.append(slack.cell)
        return cells

    def cut_slack(self, cell: SpanCell) -> int:
        cell.slack = None
        first, last = self.slack_pages(cell)
        a, b = first * ID_BYTES, last * ID_BYTES
        gone = without_absent(cell.data[a:b])
        cell.data = strip(cell.data[:a] + ABSENT_BYTES * (last - first) + cell.data[b:])
        lost = self.lose(cell, gone)
        self.look_for_gaps(cell)
        return lost

    def look_for_gaps(self, cell: SpanCell) -> None:
        if cell.pages * ID_BYTES != len(cell.data):
            self.gapped = True

    def retract(self, node: Node, slots: set[int]) -> None:
        """Of a tombstone that was refilled only the refill goes, also if a lease covers the rest of it."""
        cell: SpanCell = node.cells[self.index]
        gone = array("i", [slot for slot in self.slots_of(cell) if slot in slots])
        if gone:
            self.drop_slack(cell)
            left = array("i", [ABSENT if slot in slots else slot for slot in array("i", cell.data)])
            cell.data = strip(left.tobytes())
            self.lose(cell, gone.tobytes())
            self.look_for_gaps(cell)
            if node.cells[self.index] is cell:
                self.find_slack(cell)

    def lose(self, cell: SpanCell, gone: bytes) -> int:
        """``gone`` is no longer part of ``cell``: free it, and the cell if nothing is left of it."""
        pages = len(gone) // ID_BYTES
        cell.pages -= pages
        self.in_tree -= pages
        if cell.locks:
            self.leased -= pages
        self.pool.give(gone)
        if not cell.pages and not cell.locks:
            cell.node.cells[self.index] = None
            if cell.next is not None:
                self.queue.remove(cell)
            self.queue.forget(cell)
        return pages

    # ------------------------------------------------------------ sequences
    def hang(self, node: Node, mine: bytes, first: int, low: int, whole: bool, locks: int = 0) -> SpanCell | None:
        """Our last pages of the node's edge, from ``first`` on, become its cell, if any of them is there.

        ``low``: from where the node's end needs something. ``whole``: all of them are there.
        """
        pages = len(mine) // ID_BYTES
        if not whole:
            mine = strip(mine)
            pages = present(mine)
            if not pages:
                return None
            if pages * ID_BYTES != len(mine):
                self.gapped = True
        cell = SpanCell(node, mine, pages, locks)
        node.cells[self.index] = cell
        self.in_tree += pages
        if low // self.page > first:
            if whole and self.headless:  # what lies before the tail is slack, and there
                slack = Slack(cell)
                cell.slack = slack
                self.slack.add(slack)
            else:
                self.note_slack(cell)
        return cell

    def merge(self, cell: SpanCell, mine: bytes, holding: RetainedHolding) -> None:
        """Fill a tombstone's gaps with ours, give our duplicates back, and read what the tree has.

        ``mine``: our last pages of the cell's edge. It was used just now, even if we bring nothing new.
        """
        if cell.next is not None:
            self.queue.touch(cell)
        if mine.startswith(ABSENT_BYTES):
            mine = strip(mine)
            if not mine:
                return
        node = cell.node
        last = node.end // self.page - holding.base
        first = last - len(mine) // ID_BYTES
        count = (node.end - node.parent.end) // self.page
        if cell.pages == count and ABSENT_BYTES not in mine:  # the tree has it all: ours are duplicates
            self.pool.give(mine)
            holding.table[first:last] = array("i", cell.data[-len(mine) :])
            holding.change(first + holding.base)
            return
        ours = array("i", mine)
        lead = count - len(ours)
        tree = array("i", ABSENT_BYTES * (count - len(cell.data) // ID_BYTES) + cell.data)
        duplicates = array("i")
        filled = 0
        for p, slot in enumerate(ours, lead):
            if slot == ABSENT:
                continue
            if tree[p] == ABSENT:
                tree[p] = slot
                filled += 1
            else:
                duplicates.append(slot)
        if duplicates:
            self.pool.give(duplicates.tobytes())
        if filled:
            self.drop_slack(cell)
            cell.data = strip(tree.tobytes())
            cell.pages += filled
            self.in_tree += filled
            if cell.locks:
                self.leased += filled
            self.look_for_gaps(cell)
            self.find_slack(cell)
        if not cell.locks and cell.next is None:
            self.queue.add(cell)
        # Only what the sequence held is read from the tree now: the lease covers what its boundary needs of it.
        for p, slot in enumerate(ours):
            holding.table[first + p] = ABSENT if slot == ABSENT else tree[lead + p]
        holding.change(first + holding.base)

    def kept(self, upto: int, keep: tuple[Interval, ...]) -> tuple[Interval, ...]:
        return merged((*keep, (self.first_needed(upto), upto)))

    def hold_back(self, holding: RetainedHolding, start: int, upto: int, keep: tuple[Interval, ...]) -> None:
        page, base, table = self.page, holding.base, holding.table
        spans = self.kept(upto, keep)
        gone = array("i")
        for p in range(max(base, start // page), upto // page):
            lo, hi = p * page, (p + 1) * page
            if table[p - base] != ABSENT and not any(a < hi and lo < b for a, b in spans):
                gone.append(table[p - base])
                table[p - base] = ABSENT
                holding.whole = False
        if gone:
            self.pool.give(gone.tobytes())
            holding.change(start // page)

    def needed_pages(self, first: int, length: int) -> list[bool]:
        page, spans = self.page, self.kept(length, ())
        return [
            (p + 1) * page > length or any(low < (p + 1) * page and p * page < high for low, high in spans)
            for p in range(first, -(-length // page))
        ]

    # ------------------------------------------------------------ eviction
    def size(self, cell: SpanCell) -> int:
        return cell.pages

    def detach(self, cell: SpanCell, node: Node, gone: list[bytes]) -> None:
        self.drop_slack(cell)
        node.cells[self.index] = None
        gone.append(cell.data)
        self.queue.forget(cell)

    def give_all(self, gone: list[bytes]) -> int:
        data = b"".join(gone)
        if self.gapped and ABSENT_BYTES in data:
            data = without_absent(data)
        pages = len(data) // ID_BYTES
        self.pool.give(data)
        self.in_tree -= pages
        return pages
