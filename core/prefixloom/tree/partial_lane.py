"""Partial lane: page components whose boundaries need any positions, such as windows, chunks, sinks or unions.

What a boundary needs are intervals of pages (``paged_reach``), so a cell may hold only a part of its edge: its ``data``
are the last pages of the edge, with *absent* where nothing is held. Pages that no boundary at the node's end or below
can need (the part of a long edge that is older than a window) are *slack*. They are kept while there is room, since a
boundary inside of the edge may be resumed at, and freed before anything else, even when a lease covers the rest of the
cell.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from ..contract.composition import Part
from ..contract.queues import Link, Queue
from ..contract.reach import Interval, merged
from ..contract.values import Receipt
from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, Pool, present
from .holdings import PageHolding, strip, without_absent
from .lane import PageLane
from .paged_reach import Pages, gaps, pages_of
from .passing import PassingCell, PassingLane, Resumes
from .radix import Node

ABSENT_SLOTS = array("i", [ABSENT])
EVERY_PAGE = 1 << 62
"""More pages than any path has."""


class PartialCell(PassingCell):
    """``slack`` is the cell's place in the queue of slack, if it has any."""

    __slots__ = ("slack",)

    slack: SlackLink | None

    def __init__(self, node: Node, data: bytes, pages: int) -> None:
        super().__init__(node, data, pages)
        self.slack = None


class SlackLink(Link):
    """The place of a cell in the queue of slack, and how many of its pages are slack."""

    __slots__ = ("cell", "pages")

    def __init__(self, cell: PartialCell, pages: int) -> None:
        self.cell = cell
        self.pages = pages
        self.next = None

    @property
    def node(self) -> Node:
        return self.cell.node


PartialCover = list[tuple[PartialCell, int]]
"""The cells that a lease covers, the deepest first, each with where its edge began then: it may have been split."""


class PartialLane(PageLane[PartialCell, PartialCover], PassingLane[PartialCell, PartialCover, PageHolding]):
    """The lane of a page component with any reach but a whole path. Cells with slack stand in a queue of their own."""

    __slots__ = ("head", "shape", "slack", "tail")
    kind = PartialCell
    retains = True
    tail: Callable[[int], int]

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        shape = self.shape = part.reach.shape
        self.tail = shape.tail if shape is not None else lambda n: 0
        self.head = EVERY_PAGE
        """So many pages at the start of a path are never slack: all, where a plugin may want any of them covered."""
        if shape is not None and self.hooks.acquire_component_lock is None:
            self.head = -(-shape.head // self.page)
        self.slack: Queue[SlackLink] = queue.before()

    def reset(self) -> None:
        super().reset()
        for slack in list(self.slack):
            self.slack.remove(slack)
            slack.cell.slack = None  # cut the cycle
        self.slack = self.queue.before()

    def _slack_pages(self, cell: PartialCell) -> Interval:
        """Return the indices [first, last) into ``cell.data`` of the pages that are slack."""
        start = cell.node.end // self.page - len(cell.data) // ID_BYTES
        first, last = max(0, self.head - start), self.tail(cell.node.end) // self.page - start
        return (first, last) if first < last else (0, 0)

    def slack_of(self, cell: PartialCell) -> int:
        """Return how many pages of ``cell`` are slack."""
        first, last = self._slack_pages(cell)
        return present(cell.data[first * ID_BYTES : last * ID_BYTES])

    def strays(self) -> list[Any]:
        """Return the stray cells of all queues, of slack also the cells that do not have their link there."""
        slack = [(link, link.cell) for link in self.slack]
        wrong = [cell for link, cell in slack if not self.has(cell) or cell.slack is not link]
        return [*super().strays(), *wrong]

    def _note_slack(self, cell: PartialCell) -> None:
        """Enter ``cell``, whose pages are new to it, into the queue of slack if it has any."""
        node = cell.node
        if self.tail(node.end) > node.parent.end and (pages := self.slack_of(cell)):
            slack = cell.slack = SlackLink(cell, pages)
            self.slack.add(slack)

    def _drop_slack(self, cell: PartialCell) -> None:
        """Take ``cell``, whose pages change, out of the queue of slack."""
        slack = cell.slack
        if slack is not None:
            self.slack.remove(slack)
            cell.slack = None

    def place(self, node: Node, data: bytes, pages: int) -> PartialCell:
        cell = super().place(node, data, pages)
        self._note_slack(cell)
        return cell

    def change(self, cell: PartialCell, slots: array[int]) -> None:
        self._drop_slack(cell)
        super().change(cell, slots)
        if cell.pages:
            self._note_slack(cell)

    def divide(self, upper: Node, lower: Node) -> None:
        cell: PartialCell | None = lower.cells[self.index]
        if cell is not None:
            self._drop_slack(cell)
            super().divide(upper, lower)
            for half in (upper.cells[self.index], cell):
                if half is not None and half.pages:
                    self._note_slack(half)

    def _detach(self, cell: PartialCell, gone: list[bytes]) -> None:
        self._drop_slack(cell)
        super()._detach(cell, gone)

    @property
    def evictable(self) -> int:
        """The pages that may be evicted, including slack of covered cells."""
        return self.in_tree - self.leased + sum(slack.pages for slack in self.slack if slack.cell.locks)

    def trim(self, cells: list[PartialCell], emptied: list[Node]) -> int:
        """Free the slack of ``cells``, which are of ``trimmed_first``, and add their nodes to ``emptied``."""
        got = 0
        for cell in cells:
            emptied.append(cell.node)
            first, last = self._slack_pages(cell)
            slots = array("i", cell.data)
            gone = without_absent(slots[first:last].tobytes())
            slots[first:last] = ABSENT_SLOTS * (last - first)
            self.change(cell, slots)
            self.pool.give(gone)
            got += len(gone) // ID_BYTES
        return got

    def trimmed_first(self, count: int, unneeded: bool) -> list[PartialCell]:
        """Return the cells to trim for so many pages; if not ``unneeded``, none whose owner keeps less than others."""
        cells: list[PartialCell] = []
        got = 0
        for slack in self.slack if unneeded else self.slack.due():
            if got >= count:
                break
            got += slack.pages
            cells.append(slack.cell)
        return cells

    def _cells(self, node: Node, pages: Pages) -> PartialCover:
        """Return the cells of the path to ``node`` whose edges have some of ``pages``, the deepest first."""
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
    def acquire(self, node: Node, receipt: Receipt | None = None) -> PartialCover | None:
        pages = self.paged.outlook[node.end]
        if receipt is not None:
            positions = [(max(0, low), min(high, node.end)) for low, high in receipt.positions]
            pages = merged((*pages, *pages_of(positions, self.page)))
        cells = self._cells(node, pages)
        for cell, _ in cells:
            self.pin(cell)
            cell.take_back()
        return cells or None

    def release(self, cover: PartialCover, recent: bool = True) -> None:
        for cell, start in cover:
            while True:
                self.unpin(cell, recent)
                above = cell.node.parent
                if above.end == start:
                    break
                cell = above.cells[self.index]  # a split divided the edge

    # ------------------------------------------------------------ a sequence's way
    def open(self, node: Node, cover: PartialCover | None) -> PageHolding:
        return PageHolding(self._read(cover or [], node.end), node.end // self.page)

    def row(self, node: Node, boundary: int) -> bytes:
        return self._read(self._cells(node, self.paged.outlook[boundary]), boundary).tobytes()

    def _read(self, cells: PartialCover, boundary: int) -> array[int]:
        """Return by page the slots of the outlook at ``boundary``, which ``cells`` have; else *absent*."""
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
        for first, end in gaps(self.paged.outlook[boundary], 0, len(table)):
            table[first:end] = ABSENT_SLOTS * (end - first)
        return table

    def reads_past(self, holding: PageHolding, boundary: int) -> bool:
        """Return whether ``holding`` has no page before ``boundary``, which has to be searched for."""
        table = holding.table
        count = min(boundary // self.page, len(table))
        if count and table[0] != ABSENT:
            return False
        return table[:count].tobytes() == ABSENT_BYTES * count

    def read_covered(self, holding: PageHolding, cover: PartialCover | None, boundary: int) -> None:
        """Keep reading what ``boundary`` needs: a hole does not end what the lease covers.

        Of a reach that is convex the lease covers nothing else, so ``until`` does not decide what is read on.
        """
        self.retain(holding, boundary)
        if self.shape is None and self.paged.convex:
            self._forget(holding, self.paged.outlook[boundary], 0, min(boundary // self.page, holding.owned))

    def retain(self, holding: PageHolding, floor: int) -> None:
        high = min(floor // self.page, len(holding.table))
        if high > holding.looked:
            low = self.paged.first_to_leave(holding.looked * self.page)
            self._forget(holding, self.paged.kept[floor], low, high)
            holding.looked = high

    def _forget(self, holding: PageHolding, kept: Pages, low: int, high: int) -> None:
        """Let go of the pages in [low, high) that are not ``kept``: free the own ones, and stop reading the others."""
        table, owned = holding.table, holding.owned
        gone = array("i")
        for first, end in gaps(kept, low, high):
            absent = ABSENT_SLOTS * (end - first)
            slots = table[first:end]
            if slots == absent:
                continue
            table[first:end] = absent
            holding.change(first)
            if first > owned:
                gone += slots
            elif end > owned:
                gone += slots[owned - first :]
                holding.owned = end
        if gone:
            self.pool.give(without_absent(gone.tobytes()))

    # ------------------------------------------------------------ handing over
    def adopt(self, run: list[Node], holding: PageHolding) -> None:
        """Count each cell, new or not, as used in the order of ``run``, so that upper cells are evicted first."""
        page = self.page
        first = holding.owned
        for node in run:
            last = node.end // page
            if last > first:  # the holding has pages of this edge
                cell: PartialCell | None = node.cells[self.index]
                mine = strip(holding.table[first:last].tobytes())
                if cell is not None:
                    self._merge(cell, mine, holding)
                elif mine:
                    self.enter(self.place(node, mine, present(mine)))
                holding.owned = first = last

    def pass_above(self, run: list[Node], boundary: int, resumes: Resumes) -> None:
        self._judge(run[-1], boundary, self.paged.unneeded(run[0].start)[1] * self.page, resumes)

    def _merge(self, cell: PartialCell, mine: bytes, holding: PageHolding) -> None:
        """Fill the gaps of ``cell`` with ``mine``, the sequence's last pages of its edge, and give back duplicates.

        The sequence reads the tree's instead of these: the lease covers what its boundary needs of them. The cell
        counts as used, even if nothing is new.
        """
        if cell.passed or cell.unwanted:
            self._use(cell)
        elif cell.next is not None:
            self.queue.touch(cell)
        if not mine:
            return
        ours, tree = array("i", mine), self.edge(cell.node)
        end = cell.node.end // self.page
        first = end - len(ours)
        holding.change(first)
        if ABSENT not in ours and ABSENT not in tree:  # the usual case: all are duplicates
            self.pool.give(mine)
            holding.table[first:end] = tree[-len(ours) :]
            return
        duplicates = array("i")
        for p in range(-len(ours), 0):
            if ours[p] == ABSENT:
                continue
            if tree[p] == ABSENT:
                tree[p] = ours[p]
            else:
                duplicates.append(ours[p])
                holding.table[end + p] = tree[p]
        if duplicates:
            self.pool.give(duplicates.tobytes())
        if tree.count(ABSENT) < len(tree) - cell.pages:
            self.change(cell, tree)

    def hold_back(self, holding: PageHolding, start: int, upto: int, kept: Pages) -> None:
        """Give back the pages of [start, upto) that are not ``kept``, instead of publishing them."""
        self._forget(holding, kept, start // self.page, upto // self.page)

    def needed_pages(self, first: int, length: int) -> list[bool]:
        page, needs = self.page, self.paged.needs[length]
        return [
            (p + 1) * page > length or any(low <= p < high for low, high in needs)
            for p in range(first, -(-length // page))
        ]
