"""Leaving: how cells go from a lane, whichever its kind.

A cell that is to go is off the queue first. Then it *leaves*, so that what it kept from going may follow; is *detached*
from its node, which gathers what it had; and what was gathered is given back at once.

Lanes: one component's way through the core, derived from its manifest and reach alone.

A lane owns the component's pool and eviction queue, and answers for it the questions of a request's way: which
boundary is usable, what a lease covers, how a cell divides on a split, what a sequence hands to the tree, what may go.
There is a lane for each kind of reach (a path, positions near an end, a boundary), none for any component; ``lane_for``
chooses.

Words: a *cell* is what one component keeps at one node. A *holding* is what a running sequence has of one component.
A *record* is what one lease covers of one component.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from ..contract.queues import Link, Queue
from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, Pool
from .holdings import Holding, without_absent

if TYPE_CHECKING:
    from ..contract.composition import Part
    from ..contract.queues import Queue
    from ..contract.reach import Interval
    from ..operations.lease import Hold
    from .radix import Node


class Leaving:
    """The part of a lane that eviction asks."""

    __slots__ = ("evicted", "in_tree", "index", "queue")

    index: int
    queue: Queue
    in_tree: int
    evicted: int
    """Pages (or slots), ever."""

    def pop_victim(self) -> Any:
        """The next cell to go, off the queue but not freed; None if nothing may go."""
        return self.queue.pop()

    def fall(self, nodes: list[Node], lost: Lane) -> None:
        """``lost`` lost its cells at ``nodes``: free ours, but for what is covered or still serves a boundary."""
        gone: list[Any] = []
        try:
            for node in nodes:
                cell = node.cells[self.index]
                if cell is None or cell.next is None:
                    continue
                if not lost.closed_upward and lost.deepest(node, node.end)[1] == node.end:
                    continue
                self.queue.drop(cell)
                self.leave(cell)
                self.detach(cell, node, gone)
        finally:  # a reach that is plain Python may raise
            if gone:
                given = self.give_all(gone)
                self.evicted += given

    def size(self, cell: Any) -> int:
        """Pages (or slots) that freeing ``cell`` gives."""
        return 1

    def hangs_from(self, cell: Any) -> Any:
        """The cell without which ``cell`` is worth nothing; None where there is no such thing."""
        return None

    def leave(self, cell: Any) -> None:
        """``cell``, off the queue, counts as gone: what it kept from going may be the next victim."""

    def come_back(self, cell: Any) -> None:
        """``cell`` does not go after all: undo ``leave``, and it was used just now."""
        self.queue.add(cell)

    def detach(self, cell: Any, node: Node, gone: list[Any]) -> None:
        """Take a cell that has left from its ``node``, what it had to ``gone``.

        The queue is told last: where that is interrupted, the cell has gone nevertheless.
        """
        raise NotImplementedError

    def give_all(self, gone: list[Any]) -> int:
        """Free what ``detach`` gathered, and count the pages."""
        raise NotImplementedError

    def free_left(self, cell: Any) -> int:
        """Free a cell that has left, and count the pages."""
        gone: list[Any] = []
        pages = 0
        try:
            self.detach(cell, cell.node, gone)
        finally:
            if gone:
                pages = self.give_all(gone)
        return pages

    def free_cell(self, cell: Any) -> int:
        """Free a cell that is off the queue, and count the pages."""
        self.leave(cell)
        return self.free_left(cell)

    def evict(self, count: int, freed: list[Node]) -> int:
        """Free at least ``count`` pages if so many may go; the nodes that lost their cell are appended to ``freed``."""
        gone: list[Any] = []
        got = 0
        try:
            while got < count:
                cell = self.pop_victim()
                if cell is None:
                    break
                node = cell.node
                freed.append(node)
                self.leave(cell)
                got += self.size(cell)
                self.detach(cell, node, gone)
        finally:
            if gone:
                self.give_all(gone)
        return got

    def trim(self, count: int, emptied: list[Node]) -> int:
        """Free up to about ``count`` pages that no boundary at a node's end or below it can need.

        Nodes that lose their cell by it are added to ``emptied``.
        """
        return 0

    def loses_first(self, count: int) -> list[Any]:
        """The cells that ``trim`` would cut for so many pages."""
        return []

    def uncovered(self, cell: Any) -> bool:
        """Whether nothing stands in the way of freeing ``cell``."""
        return not cell.locks


class Cell(Link):
    """``data``: page numbers of a page cell, or the slot of a boundary cell. ``locks``: what covers it, by lane."""

    __slots__ = ("data", "locks", "node")

    node: Node
    data: Any

    def __init__(self, node: Node, data: Any, locks: int = 0) -> None:
        self.node = node
        self.data = data
        self.locks = locks
        self.next = None


class Lane(Leaving):
    """What every lane has. ``in_tree`` and ``leased`` count pages, so that a shortage is known before evicting."""

    __slots__ = (
        "closed_upward", "feeds", "hooks", "leased", "live", "name", "part", "pool", "replay", "shared",
        "sparing",
    )  # fmt: skip

    holds: type
    """What a running sequence has of it."""
    unit = "page"
    retains = False
    """Whether a running sequence may give something back early."""
    part: Part

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        self.index = index
        self.part = part
        self.name = part.name
        self.closed_upward = part.reach.closed_upward
        self.hooks = part.hooks
        self.pool = pool
        self.live = pool  # of running sequences; another one only where the tree keeps things in another form
        self.queue = queue
        self.in_tree = 0
        self.leased = 0
        self.evicted = 0
        self.feeds: tuple[Lane, ...] = ()
        """Lanes whose cell at a node may serve nothing any more once this lane has lost its own."""
        self.sparing: dict[Hold, Any] = {}
        """What running sequences hold that may be more than they need, since there was room."""
        self.replay = part.manifest.replay
        self.shared = part.manifest.shareable and not self.replay  # what is rebuilt is not worth keeping

    def reset(self) -> None:
        """A flush: nothing is cached or leased, the queue is new."""
        self.in_tree = self.leased = 0
        self.sparing = {}

    @property
    def room(self) -> Lane:
        """Whom a new sequence's slots are asked of."""
        return self

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (self.pool,)

    @property
    def running(self) -> int:
        """Pages owned by sequences (and by whoever minted a span)."""
        return self.pool.capacity - self.pool.free - self.in_tree

    @property
    def evictable(self) -> int:
        return self.in_tree - self.leased + self.loose()

    def loose(self) -> int:
        """Pages of covered cells that may go nevertheless."""
        return 0

    # ------------------------------------------------------------ match
    def deepest(self, node: Node, boundary: int) -> tuple[Node, int]:
        """The deepest boundary, not below ``boundary`` in ``node``, from which this component can resume."""
        raise NotImplementedError

    def row(self, node: Node, boundary: int) -> bytes:
        """Page numbers of what resuming at ``boundary``, which lies in ``node``, needs; *absent* for the rest.

        A boundary component's row is its slot.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ leases
    def acquire(self, node: Node) -> Any:
        """Cover what resuming at the end of ``node`` needs; the record undoes exactly this."""
        raise NotImplementedError

    def acquire_wider(self, node: Node, positions: tuple[Interval, ...]) -> Any:
        """``acquire``, and ``positions`` too as far as they hold data; for lanes whose cover is not all already."""
        return self.acquire(node)

    def release(self, record: Any, recent: bool = True) -> None:
        """Uncover what ``record`` covered; what nobody covers any more may be evicted, the recent last."""
        raise NotImplementedError

    def advance(self, record: Any, node: Node) -> Any:
        """A lease moves down to ``node``: cover the new boundary, then uncover the old one."""
        new = self.acquire(node)
        if record is not None:
            self.release(record)
        return new

    def finish(self, record: Any, node: Node) -> None:
        """``advance`` to ``node`` and release there: what the end of a sequence comes to."""
        new = self.advance(record, node)
        if new is not None:
            self.release(new)

    # ------------------------------------------------------------ tree
    def divide(self, upper: Node, lower: Node) -> None:
        """``upper`` was split off ``lower``: divide the cell, and copy what covers it."""
        raise NotImplementedError

    # ------------------------------------------------------------ sequences
    def open(self, node: Node) -> Any:
        """A holding that reads what a lease at ``node`` covers."""
        raise NotImplementedError

    def begin(self, node: Node) -> tuple[Any, Any]:
        """``acquire`` and ``open``: (record, holding). If the reach raises, nothing is covered."""
        holding = self.open(node)
        return self.acquire(node), holding

    def adopt(self, run: list[Node], holding: Any) -> None:
        """Move what ``holding`` owns of the positions of ``run`` into cells; a duplicate of what is there is freed.

        ``run``: nodes one below the other, from where the holding begins to own.
        """
        raise NotImplementedError

    def carry(self, run: list[Node], holding: Any, record: Any) -> Any:
        """``adopt``, and ``advance`` to the end of ``run``: the sequence runs on there."""
        self.adopt(run, holding)
        moved: Any = self.advance(record, run[-1])
        return moved

    def line_up(self, run: list[Node]) -> None:
        """Cells of ``run`` that may go and stand in no queue come into it."""
        for node in run:
            cell = node.cells[self.index]
            if cell is not None and cell.next is None and self.uncovered(cell):
                self.queue.add(cell)

    def conclude(self, run: list[Node], holding: Any, record: Any) -> None:
        """``adopt``, and the sequence ends there: uncover what its lease covered, and give all else back."""
        self.adopt(run, holding)
        self.finish(record, run[-1])
        self.close(holding)

    def hold_back(self, holding: Any, start: int, upto: int, keep: tuple[Interval, ...]) -> None:
        """Give back what of [start, upto) is neither in ``keep`` nor needed at ``upto``, instead of publishing it."""

    def renew(self, holding: Any) -> None:
        """A fresh slot after a donation; the caller made sure that one is free, and copies into it."""
        raise NotImplementedError

    def passed(self, holding: Any, boundary: int) -> bool:
        """Whether the sequence reads nothing any more of what lies before ``boundary``."""
        return False

    def retain(self, holding: Any, floor: int) -> None:
        """Give back what no boundary from ``floor`` on can need."""
        raise NotImplementedError

    def owned(self, holding: Any) -> int:
        """Pages (or slots) that the sequence owns."""
        raise NotImplementedError

    def close(self, holding: Any) -> None:
        """Give back all that the sequence owns."""
        raise NotImplementedError

    def rewind(self, holding: Any, length: int) -> None:
        """Give back what lies past ``length`` tokens."""
        raise NotImplementedError

    # ------------------------------------------------------------ who owns what
    def slots_of(self, cell: Any) -> list[int]:
        """The slots that a cell, or None, owns."""
        raise NotImplementedError

    def own_slots(self, holding: Any) -> list[int]:
        """The slots of ``pool`` that a running sequence owns."""
        raise NotImplementedError

    def live_slots(self, holding: Any) -> list[int]:
        """The slots of ``live`` that it owns, if that is another pool."""
        return []

    def touches(self, holding: Any, start: int, end: int, reads: list[int], writes: list[int]) -> None:
        """Add the slots that the layers of a step over positions [start, end) read, and those that they write."""
        raise NotImplementedError

    def retract(self, node: Node, slots: set[int]) -> None:
        """What was published in ``slots`` is void: free what ``node`` holds of them, and what needs that."""
        cell = node.cells[self.index]
        if cell is not None and not cell.locks and slots.issuperset(self.slots_of(cell)):
            self.drop_cell(cell)

    def drop_cell(self, cell: Any) -> None:
        """Free a cell that may stand in the queue."""
        if cell.next is not None:
            self.queue.remove(cell)
        self.free_cell(cell)


class PageLane(Lane):
    """What the lanes of page cells share: tables, growth, closing."""

    __slots__ = ("page",)
    holds: type[Holding] = Holding

    def __init__(self, index: int, part: Part, *rest: Any) -> None:
        super().__init__(index, part, *rest)
        self.page = part.page_tokens

    def owned(self, holding: Holding) -> int:
        return len(holding.own_pages()) // ID_BYTES

    def slots_of(self, cell: Any) -> list[int]:
        return [] if cell is None else [slot for slot in array("i", cell.data) if slot != ABSENT]

    def touches(self, holding: Holding, start: int, end: int, reads: list[int], writes: list[int]) -> None:
        table, base = holding.table, holding.base
        last = -(-end // self.page) - base
        first = max(holding.owned, (start - self.replay) // self.page) - base if end > start else last
        reads.extend(slot for slot in table[:first] if slot != ABSENT)
        writes.extend(slot for slot in table[first:last] if slot != ABSENT)

    def own_slots(self, holding: Holding) -> list[int]:
        return array("i", holding.own_pages()).tolist()

    def close(self, holding: Holding) -> None:
        end = holding.base + len(holding.table)
        if end > holding.owned:
            self.pool.give(holding.own_pages())
            holding.owned = end

    def rewind(self, holding: Holding, length: int) -> None:
        keep = max(-(-length // self.page), holding.owned) - holding.base
        dropped = holding.table[keep:].tobytes()
        if dropped:
            self.pool.give(without_absent(dropped) if ABSENT_BYTES in dropped else dropped)
            del holding.table[keep:]
            holding.change(keep + holding.base)

    def edge(self, node: Node) -> bytes:
        """The page of each place in the edge of ``node``, *absent* where nothing is held."""
        cell = node.cells[self.index]
        data: bytes = b"" if cell is None else cell.data
        count = (node.end - node.parent.end) // self.page
        return ABSENT_BYTES * (count - len(data) // ID_BYTES) + data

    def needs(self, boundary: int) -> tuple[Interval, ...]:
        """Ascending intervals of whole pages that resuming at ``boundary`` needs."""
        raise NotImplementedError

    def pin(self, cell: Any) -> None:
        """Cover ``cell`` for the time of one operation."""
        raise NotImplementedError

    def unpin(self, cell: Any) -> None:
        raise NotImplementedError

    def replayed_pages(self, boundary: int) -> int:
        """Pages that rebuilding for a resume at ``boundary`` writes."""
        return boundary // self.page - max(0, boundary - self.replay) // self.page

    def make_replayed(self, holding: Holding) -> None:
        """Own pages for what a resume at the holding's end rebuilds; the caller has made sure that they are free."""
        last = holding.base + len(holding.table)
        count = self.replayed_pages(last * self.page)
        if count:
            first = last - count
            holding.table[max(0, first - holding.base) :] = self.pool.take(count)
            holding.base = min(holding.base, first)
            holding.owned = first
            holding.change(first)

    def needed_pages(self, first: int, length: int) -> list[bool]:
        """For each page from ``first`` on whether resuming at ``length`` needs it, or goes on writing it."""
        return [True] * (-(-length // self.page) - first)

    def page_slice(self, data: bytes, tokens: int) -> tuple[bytes, bytes]:
        cut = tokens // self.page * ID_BYTES
        return data[:cut], data[cut:]
