"""Lanes: one component's way through the core, derived from its manifest and reach alone.

A lane owns the component's pool and eviction queue, and answers for it the questions of a request's way: which
boundary is usable, what a lease covers, how a cell divides on a split, what a sequence hands to the tree, what may go.
There is a lane for each kind of reach (a path, positions near an end, a boundary), and none for any component.

Words: a *cell* is what one component keeps at one node. A *holding* is what a running sequence has of one component.
A *cover* is what one lease protects of one component.

How a cell goes: one that is to go is off the queue first. Then it *leaves*, so that what it kept from going may follow;
it is *detached* from its node, which gathers what it had; and what was gathered is given back at once.
"""

from __future__ import annotations

from array import array
from typing import Any, Generic

from typing_extensions import TypeVar

from ..contract.composition import Part
from ..contract.queues import Link, Queue
from ..contract.reach import Interval
from ..contract.values import Receipt, Tier
from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, Pool
from .holdings import PageHolding, without_absent
from .journal import Recorder
from .radix import Node
from .residency import Residency

C = TypeVar("C", default=Any)
"""What one lease covers of one component."""
H = TypeVar("H", default=Any)
"""What a running sequence has of one component."""
P = TypeVar("P", bound=PageHolding, default=Any)


class Cell(Link):
    """``data``: page numbers of a page cell, or the slot of a boundary cell. ``locks``: what covers it, by lane."""

    __slots__ = ("data", "locks", "node")

    node: Node
    data: Any

    def __init__(self, node: Node, data: Any) -> None:
        self.node = node
        self.data = data
        self.locks = 0
        self.next = None


class Lane(Generic[C, H]):
    """What every lane has. ``in_tree`` and ``leased`` count pages, so that a shortage is known before evicting."""

    __slots__ = (
        "closed_upward", "evicted", "feeds", "hooks", "in_tree", "index", "leased", "live", "name", "paged", "part",
        "pool", "queue", "recorder", "residency", "surplus",
    )  # fmt: skip

    unit = "page"
    tier: Tier = "device"
    whole_above = False
    """True if a cell here stands for the whole path above it."""
    retains = False
    """Whether a running sequence may give something back early."""

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        self.index = index
        self.part = part
        self.name = part.name
        self.closed_upward = part.reach.closed_upward
        self.residency = Residency.of(part, (self,), tree_page)
        """What this lane alone has along a path."""
        self.paged = self.residency.paged
        self.hooks = part.hooks
        self.pool = pool
        self.live = pool
        """The pool of running sequences: another one only where the tree keeps things in another form."""
        self.queue = queue
        self.in_tree = 0
        self.leased = 0
        self.evicted = 0
        """Pages (or slots), ever."""
        self.feeds: tuple[Lane[Any, Any], ...] = ()
        """Lanes whose cell at a node may serve nothing any more once this lane has lost its own."""
        self.surplus: dict[Any, H] = {}
        """What running sequences hold that may be more than they need, since there was room."""
        self.recorder: Recorder | None = None
        """Who is told of each change of a cell; None where nobody follows the cache."""

    def reset(self) -> None:
        """A flush: nothing is cached or leased, the queue is new."""
        self.in_tree = self.leased = 0
        self.surplus = {}

    # ------------------------------------------------------------ counting
    @property
    def room(self) -> Any:
        """Whom a new sequence's slots are asked of."""
        return self

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (self.pool,)

    @property
    def running(self) -> int:
        """Pages owned by sequences (and by whoever minted a span)."""
        return self.pool.capacity - self.pool.outside - self.pool.free - self.in_tree

    @property
    def evictable(self) -> int:
        """Pages that may go, those of covered cells included that no boundary there needs."""
        return self.in_tree - self.leased

    # ------------------------------------------------------------ cells by node
    def cell(self, node: Node) -> Any:
        """Return the cell at ``node``, or None."""
        return node.cells[self.index]

    def put(self, node: Node, cell: Any) -> None:
        """Make ``cell``, or None, the cell at ``node``. Nothing is counted."""
        node.cells[self.index] = cell

    def cell_above(self, node: Node) -> Any:
        """Return the cell at the node above ``node``, or None."""
        return node.parent.cells[self.index]

    def cells_below(self, node: Node) -> list[Any]:
        """Return the cells at the nodes right below ``node``."""
        return [cell for kid in node.children if (cell := kid.cells[self.index]) is not None]

    # ------------------------------------------------------------ matching
    def gap(self, node: Node, at: int, high: int) -> Interval:
        """Return the first absent pages of the edge of ``node`` in [``at``, ``high``): see ``residency.Place``."""
        raise NotImplementedError

    def row(self, node: Node, boundary: int) -> bytes:
        """Page numbers of what resuming at ``boundary``, which lies in ``node``, needs; *absent* for the rest.

        A boundary component's row is its slot.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ covering
    def acquire(self, node: Node, receipt: Receipt | None = None) -> C | None:
        """Cover what resuming at the end of ``node`` needs; ``release`` undoes exactly this.

        If a plugin gave a ``receipt``, cover its positions too, as far as the cover can be wider and they hold data.
        """
        raise NotImplementedError

    def release(self, cover: C, recent: bool = True) -> None:
        """Uncover what ``cover`` covers; what nobody covers any more may be evicted, the recent last."""
        raise NotImplementedError

    def pin(self, cell: Any) -> None:
        """Cover ``cell`` for the time of one operation."""
        raise NotImplementedError

    def unpin(self, cell: Any) -> None:
        """Undo ``pin``."""
        raise NotImplementedError

    # ------------------------------------------------------------ a sequence's way
    def open(self, node: Node) -> H:
        """A holding that reads what a lease at ``node`` covers."""
        raise NotImplementedError

    def adopt(self, run: list[Node], holding: H) -> None:
        """Move the pages that ``holding`` owns of the positions of ``run`` into cells, and free duplicates.

        ``run``: nodes one below the other, from where the holding begins to own. Call ``follow``, ``finish`` or
        ``line_up`` next: the end of a path, and states, stand in no queue yet.
        """
        raise NotImplementedError

    def follow(self, run: list[Node], holding: H, cover: C | None, receipt: Receipt | None = None) -> C | None:
        """The sequence runs on at the end of ``run``: cover what that needs instead of ``cover``."""
        new = self.acquire(run[-1], receipt)
        if cover is not None:
            self.release(cover)
        return new

    def finish(self, run: list[Node], cover: C | None) -> None:
        """The sequence ends at the end of ``run``, which was used just now: cover nothing any more."""
        if cover is not None:
            self.release(cover)

    def line_up(self, run: list[Node]) -> None:
        """Cells of ``run`` that may go and stand in no queue come into it."""
        for node in run:
            cell = node.cells[self.index]
            if cell is not None and cell.next is None and self.uncovered(cell):
                self.queue_of(cell).add(cell)

    def hold_back(self, holding: H, start: int, upto: int, keep: tuple[Interval, ...]) -> None:
        """Give back what of [start, upto) is neither in ``keep`` nor needed at ``upto``, instead of publishing it."""

    def rewind(self, holding: H, length: int) -> None:
        """Give back what lies past ``length`` tokens."""
        raise NotImplementedError

    def close(self, holding: H) -> None:
        """Give back all that the sequence owns."""
        raise NotImplementedError

    # ------------------------------------------------------------ who owns what
    def owned(self, holding: H) -> int:
        """Pages (or slots) that the sequence owns."""
        raise NotImplementedError

    def slots_of(self, cell: Any) -> list[int]:
        """The slots that a cell, or None, owns."""
        raise NotImplementedError

    def own_slots(self, holding: H) -> list[int]:
        """The slots of ``pool`` that a running sequence owns."""
        raise NotImplementedError

    def live_slots(self, holding: H) -> list[int]:
        """The slots of ``live`` that it owns, if that is another pool."""
        return []

    def slot_at(self, holding: H, place: int, own: bool) -> int:
        """The slot that an op names as ``place``, or *absent*. ``own``: only if the sequence owns it."""
        raise NotImplementedError

    def touches(self, holding: H, start: int, end: int, reads: list[int], writes: list[int]) -> None:
        """Add the slots that the layers of a step over positions [start, end) read, and those that they write."""
        raise NotImplementedError

    # ------------------------------------------------------------ cells
    def divide(self, upper: Node, lower: Node) -> None:
        """``upper`` was split off ``lower``: divide the cell, and copy what covers it."""
        raise NotImplementedError

    def retract(self, node: Node, slots: set[int]) -> None:
        """What was published in ``slots`` is void: free what ``node`` holds of them, and what needs that."""
        cell = node.cells[self.index]
        if cell is not None and not cell.locks and slots.issuperset(self.slots_of(cell)):
            self.drop_cell(cell)

    def drop_cell(self, cell: Any) -> int:
        """Free a cell that nothing covers, and count the pages."""
        if cell.next is not None:
            self.queue_of(cell).remove(cell)
        self._leave(cell)
        return self.free_victim(cell)

    def size(self, cell: Any) -> int:
        """Pages (or slots) that freeing ``cell`` gives."""
        return 1

    def hangs_from(self, cell: Any) -> Any:
        """The cell without which ``cell`` is worth nothing; None where there is no such cell."""
        return None

    def uncovered(self, cell: Any) -> bool:
        """Whether nothing stands in the way of freeing ``cell``."""
        return not cell.locks

    def queue_of(self, cell: Any) -> Queue:
        """The queue in which ``cell`` stands, or would stand."""
        return self.queue

    def goes_next(self, cell: Any) -> None:
        """Nobody wants ``cell``, which stands in a queue, any more: it is the next to go."""
        self.queue.remove(cell)
        self.queue.add_first(cell)

    def strays(self) -> list[Any]:
        """The cells that the queue has or remembers, and the tree has not any more: none. For debug mode."""
        return [cell for cell in (*self.queue, *self.queue.remembered) if not self.has(cell)]

    def has(self, cell: Any) -> bool:
        """Whether the tree has ``cell``; not so of one whose node has gone."""
        return cell.node is not None and cell.node.cells[self.index] is cell

    # ------------------------------------------------------------ eviction
    def evict(self, count: int, freed: list[Node]) -> int:
        """Free at least ``count`` pages if so many may go; the nodes that lost their cell are appended to ``freed``."""
        gone: list[Any] = []
        got = 0
        while got < count:
            cell = self._pop_victim()
            if cell is None:
                break
            node = cell.node
            freed.append(node)
            self._leave(cell)
            got += self.size(cell)
            self._detach(cell, node, gone)
        if gone:
            self._give_all(gone)
        return got

    def trim(self, cells: list[Any], emptied: list[Node]) -> int:
        """Free what no boundary at a node's end or below it can need of ``cells``, which are of ``trimmed_first``.

        Nodes that may have lost their cell by it are added to ``emptied``.
        """
        return 0

    def trimmed_first(self, count: int, unneeded: bool) -> list[Any]:
        """The cells to trim for so many pages; if not ``unneeded``, none of which the owner keeps less than others."""
        return []

    def fall(self, nodes: list[Node], lost: Lane[Any, Any]) -> None:
        """``lost`` lost its cells at ``nodes``: free ours, but for what is covered or still serves a boundary."""
        going = []
        for node in nodes:  # asked first: a reach that is plain Python may raise
            cell = node.cells[self.index]
            if cell is None or cell.next is None:
                continue
            if not lost.closed_upward and lost.residency.deepest(node, node.end)[1] == node.end:
                continue
            going.append(cell)
        gone: list[Any] = []
        for cell in going:
            self.queue_of(cell).remove(cell)
            self._leave(cell)
            self._detach(cell, cell.node, gone)
        if gone:
            self.evicted += self._give_all(gone)

    def take_victims(self, count: int) -> list[Any]:
        """The next cells to go, ``count`` pages or all there are, taken as gone so that what they uncover follows.

        Each is to be freed (``free_victim``) or put back, the last taken first (``put_back``).
        """
        victims: list[Any] = []
        pages = 0
        while pages < count:
            cell = self._pop_victim()
            if cell is None:
                break
            self._leave(cell)
            victims.append(cell)
            self.queue.going(cell, self.size(cell))
            pages += self.size(cell)
        return victims

    def put_back(self, cell: Any) -> None:
        """A victim does not go after all, and was used just now."""
        self.queue_of(cell).add(cell)

    def free_victim(self, cell: Any) -> int:
        """Free a cell that has left, and count the pages."""
        gone: list[Any] = []
        self._detach(cell, cell.node, gone)
        return self._give_all(gone) if gone else 0

    def _pop_victim(self) -> Any:
        """The next cell to go, off the queue but not freed; None if nothing may go."""
        return self.queue.pop()

    def _leave(self, cell: Any) -> None:
        """``cell``, off the queue, counts as gone: what it kept from going may be the next victim."""

    def _detach(self, cell: Any, node: Node, gone: list[Any]) -> None:
        """Take a cell that has left from its ``node``, and add what it had to ``gone``."""
        node.cells[self.index] = None
        gone.append(cell.data)
        if self.recorder is not None:
            self.recorder.changed(self, node, cell.data, None)
        self.queue.forget(cell)

    def _give_all(self, gone: list[Any]) -> int:
        """Free what ``_detach`` gathered, and count the pages."""
        raise NotImplementedError


def gap_in(cell: Any, node: Node, page: int, at: int, high: int) -> Interval:
    """Return ``Lane.gap`` for a cell whose ``data`` are the last pages of the edge, of which ``pages`` are present."""
    if cell is None:
        return node.parent.end // page, node.end // page
    data = cell.data
    first = node.end // page - len(data) // ID_BYTES
    if at < first:
        return node.parent.end // page, first
    if cell.pages * ID_BYTES != len(data):
        absent = data.find(ABSENT_BYTES, (at - first) * ID_BYTES, (high - first) * ID_BYTES)
        if absent >= 0:
            at = first + absent // ID_BYTES
            return at, at + 1
    return high, high


def state_gap_in(cell: Any, node: Node, page: int, at: int, high: int) -> Interval:
    """Return ``Lane.gap`` for the cell of a state, which stands for the last page of the edge of ``node``."""
    start, end = node.parent.end // page, node.end // page
    if cell is None:
        return start, end
    return (start, end - 1) if at < end - 1 else (high, high)


class PageLane(Lane[C, P]):
    """What the lanes of page cells share: tables, growth, closing."""

    __slots__ = ("page",)

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        self.page = part.page_tokens

    # ------------------------------------------------------------ what is needed
    def gap(self, node: Node, at: int, high: int) -> Interval:
        return gap_in(node.cells[self.index], node, self.page, at, high)

    def needs(self, boundary: int) -> tuple[Interval, ...]:
        """Return ascending intervals of positions, in whole pages, that resuming at ``boundary`` needs."""
        return self.residency.positions(self.paged.needs[boundary])

    def needed_pages(self, first: int, length: int) -> list[bool]:
        """For each page from ``first`` on whether resuming at ``length`` needs it, or goes on writing it."""
        return [True] * (-(-length // self.page) - first)

    def edge(self, node: Node) -> bytes:
        """The page of each place in the edge of ``node``, *absent* where nothing is held."""
        cell = node.cells[self.index]
        data: bytes = b"" if cell is None else cell.data
        count = (node.end - node.parent.end) // self.page
        return ABSENT_BYTES * (count - len(data) // ID_BYTES) + data

    def _give_all(self, gone: list[bytes]) -> int:
        data = b"".join(gone)
        if ABSENT_BYTES in data:
            data = without_absent(data)
        pages = len(data) // ID_BYTES
        self.pool.give(data)
        self.in_tree -= pages
        return pages

    # ------------------------------------------------------------ a sequence's way
    def close(self, holding: P) -> None:
        end = len(holding.table)
        if end > holding.owned:
            self.pool.give(holding.own_pages())
            holding.owned = end

    def rewind(self, holding: P, length: int) -> None:
        keep = max(-(-length // self.page), holding.owned)
        dropped = holding.table[keep:].tobytes()
        if dropped:
            self.pool.give(without_absent(dropped) if ABSENT_BYTES in dropped else dropped)
            del holding.table[keep:]
            holding.change(keep)

    # ------------------------------------------------------------ who owns what
    def owned(self, holding: P) -> int:
        return len(holding.own_pages()) // ID_BYTES

    def slots_of(self, cell: Any) -> list[int]:
        if cell is None:
            return []
        slots = array("i", cell.data).tolist()
        return [slot for slot in slots if slot != ABSENT] if ABSENT_BYTES in cell.data else slots

    def own_slots(self, holding: P) -> list[int]:
        return array("i", holding.own_pages()).tolist()

    def slot_at(self, holding: P, place: int, own: bool) -> int:
        at, first = place // self.page, holding.owned if own else 0
        return holding.table[at] if first <= at < len(holding.table) else ABSENT

    def touches(self, holding: P, start: int, end: int, reads: list[int], writes: list[int]) -> None:
        table = holding.table
        last = -(-end // self.page)
        first = max(holding.owned, start // self.page) if end > start else last
        reads.extend(slot for slot in table[:first] if slot != ABSENT)
        writes.extend(slot for slot in table[first:last] if slot != ABSENT)
