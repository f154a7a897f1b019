"""Cells: what the tree keeps of one component in one pool, on the device or below it.

A *cell* is what one component keeps at one node: the slots of the last pages of its edge. A state is kept as the last
page of the tree before its boundary. ``Cells`` counts and queues cells, and it divides, changes and frees them. It does
not know what a boundary needs, or who covers a cell and why.

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
from ..contract.values import Tier
from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, Pool, present
from .holdings import strip, without_absent
from .journal import Recorder
from .radix import Node


class Cell(Link):
    """What one component keeps at one node.

    ``data``   the slots of the last pages of the edge, *absent* where nothing is held; of a state its slot
    ``pages``  the number of slots that are present
    ``locks``  what covers the cell, as its lane counts that
    ``below``  the number of children with a cell, counted where the reach is closed upward
    """

    __slots__ = ("below", "data", "locks", "node", "pages")

    node: Node

    def __init__(self, node: Node, data: bytes, pages: int) -> None:
        self.node = node
        self.data = data
        self.pages = pages
        self.locks = self.below = 0
        self.next = None


K = TypeVar("K", bound=Cell, default=Any)
"""The cells."""


class Cells(Generic[K]):
    """The cells of one component in one pool.

    ``in_tree`` and ``leased`` count pages, so that a shortage is known before evicting. Where the reach is closed
    upward, a cell goes before the cell above it, which is of use without it.
    """

    __slots__ = (
        "closed_upward", "evicted", "hooks", "in_tree", "index", "leased", "name", "page", "part", "pool", "queue",
        "recorder",
    )  # fmt: skip

    kind: type[K]
    unit = "page"
    tier: Tier = "device"
    whole_above = False
    """True if a cell here stands for the whole path above it, and so does what covers it."""

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, page: int) -> None:
        """Begin without cells. ``page``: the tokens of a page; of a state's, those of a page of the tree."""
        self.index = index
        self.part = part
        self.name = part.name
        self.closed_upward = part.reach.closed_upward
        self.hooks = part.hooks
        self.page = page
        self.pool = pool
        self.queue = queue
        self.in_tree = 0
        self.leased = 0
        self.evicted = 0
        """Pages (or slots), ever."""
        self.recorder: Recorder | None = None
        """The recorder that each change of a cell is reported to; None if nobody follows the cache."""

    def reset(self) -> None:
        """Forget all cells at a flush: nothing is cached or leased, the queue is new."""
        self.in_tree = self.leased = 0

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (self.pool,)

    # ------------------------------------------------------------ cells by node
    def cell(self, node: Node) -> K | None:
        """Return the cell at ``node``, or None."""
        return node.cells[self.index]  # type: ignore[no-any-return]

    def cell_above(self, node: Node) -> K | None:
        """Return the cell at the node above ``node``, or None."""
        return node.parent.cells[self.index]  # type: ignore[no-any-return]

    def cells_below(self, node: Node) -> list[K]:
        """Return the cells at the nodes right below ``node``."""
        return [cell for kid in node.children if (cell := kid.cells[self.index]) is not None]

    def has(self, cell: K) -> bool:
        """Return whether the tree has ``cell``: its node may be unlinked."""
        return cell.node is not None and cell.node.cells[self.index] is cell

    def gap(self, node: Node, at: int, high: int) -> Interval:
        """Return the first absent pages of the edge of ``node`` in [``at``, ``high``): see ``residency.Place``."""
        cell: K | None = node.cells[self.index]
        page = self.page
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

    def edge(self, node: Node) -> array[int]:
        """Return the slot of each page in the edge of ``node``, *absent* where nothing is held."""
        cell: K | None = node.cells[self.index]
        data = b"" if cell is None else cell.data
        count = (node.end - node.parent.end) // self.page
        return array("i", ABSENT_BYTES * (count - len(data) // ID_BYTES) + data)

    def slots_of(self, cell: K | None) -> list[int]:
        """Return the slots that a cell, or None, owns."""
        return [] if cell is None else [slot for slot in array("i", cell.data) if slot != ABSENT]

    # ------------------------------------------------------------ covering
    def pin(self, cell: K) -> None:
        """Protect ``cell`` from eviction until it is unpinned as often as it was pinned."""
        cell.locks += 1
        if cell.locks == 1:
            self.leased += cell.pages
            if cell.next is not None:
                self.queue_of(cell).remove(cell)

    def unpin(self, cell: K, recent: bool = True) -> None:
        """Undo ``pin``. What nobody covers any more may be evicted, and next if it is not ``recent``."""
        cell.locks -= 1
        if cell.locks:
            return
        self.leased -= cell.pages
        if cell.pages:
            self.enter(cell, recent)
        elif self.has(cell):
            self._leave(cell)
            self._unhang(cell)

    def uncovered(self, cell: K) -> bool:
        """Return whether ``cell`` may be freed: nothing covers it, and no cell below depends on it."""
        return not cell.locks and not cell.below

    # ------------------------------------------------------------ the order of eviction
    def queue_of(self, cell: K) -> Queue:
        """Return the queue that ``cell`` is in, or would enter."""
        return self.queue

    def enter(self, cell: K, recent: bool = True) -> None:
        """Enter a cell that may be evicted into its queue, as the next victim if it is not ``recent``."""
        if recent:
            self.queue.add(cell)
        else:
            self.queue.add_first(cell)

    def _inherit(self, upper: K, lower: K, linked: bool) -> None:
        """Give ``upper``, which was split off ``lower``, its history; if ``linked``, enter it behind ``lower``."""
        self.queue.inherit(upper, lower, linked)

    def goes_next(self, cell: K) -> None:
        """Make ``cell``, which is in a queue and which nobody wants any more, the next to be evicted."""
        self.queue_of(cell).remove(cell)
        self.enter(cell, recent=False)

    def strays(self) -> list[Any]:
        """Return the cells that a queue has or remembers and the tree lost, for debug mode: there are none."""
        return [cell for cell in (*self.queue, *self.queue.remembered) if not self.has(cell)]

    # ------------------------------------------------------------ cells change
    def place(self, node: Node, data: bytes, pages: int) -> K:
        """Make a cell at ``node``, which has none. The cell is in no queue yet."""
        cell = self.kind(node, data, pages)
        node.cells[self.index] = cell
        self.in_tree += pages
        if self.closed_upward:
            above = node.parent.cells[self.index]
            if above is not None:
                above.below += 1
        if self.recorder is not None:
            self.recorder.changed(self, node, b"", data)
        return cell

    def change(self, cell: K, slots: array[int]) -> None:
        """Make ``slots`` the last pages of the edge of ``cell``, and drop the cell if none is left and none covers it.

        The caller frees the slots that were taken out.
        """
        before = cell.data
        cell.data = strip(slots.tobytes())
        more = present(cell.data) - cell.pages
        cell.pages += more
        self.in_tree += more
        if cell.locks:
            self.leased += more
        if self.recorder is not None:
            self.recorder.changed(self, cell.node, before, cell.data)
        if not cell.pages and not cell.locks:
            if cell.next is not None:
                self.queue_of(cell).remove(cell)
            self._leave(cell)
            self._unhang(cell)

    def add(self, node: Node, places: list[int], slots: array[int]) -> K:
        """Enter slots for these *places* of ``node``: indices into its edge. A new cell is in no queue yet."""
        data = self.edge(node)
        for place, slot in zip(places, slots, strict=True):
            data[place] = slot
        cell: K | None = node.cells[self.index]
        if cell is None:
            filled = strip(data.tobytes())
            return self.place(node, filled, present(filled))
        self.change(cell, data)
        return cell

    def divide(self, upper: Node, lower: Node) -> None:
        """Divide the cell of ``lower``, off which ``upper`` was split. Copy its locks. A state stays at the end."""
        i = self.index
        cell: K | None = lower.cells[i]
        if cell is None or self.unit == "boundary":
            return
        cut = (lower.end - upper.end) // self.page * ID_BYTES
        data, linked = cell.data, cell.next is not None
        new = self.kind(upper, strip(data[:-cut]), 0)
        new.pages = present(new.data)
        new.locks = min(cell.locks, 1) if self.whole_above else cell.locks
        cell.data = strip(data[-cut:])
        cell.pages -= new.pages
        if new.pages or new.locks:
            upper.cells[i] = new
            self._inherit(new, cell, linked=linked and not self.closed_upward)
        if not cell.pages and not cell.locks:
            if linked:
                self.queue_of(cell).remove(cell)
            self._unhang(cell)
        if self.closed_upward:
            new.below = int(lower.cells[i] is not None)
            if upper.cells[i] is None:
                self._leave(new)

    def retract(self, node: Node, slots: set[int]) -> None:
        """Take ``slots``, whose publication is void, out of the cell of ``node``, and free them."""
        cell: K | None = node.cells[self.index]
        gone = [slot for slot in self.slots_of(cell) if slot in slots]
        if cell is not None and gone:
            self.change(cell, array("i", [ABSENT if slot in slots else slot for slot in array("i", cell.data)]))
            self.pool.give_slots(gone)

    def _unhang(self, cell: K) -> None:
        """Take ``cell``, which stands in no queue, from its node."""
        cell.node.cells[self.index] = None
        self.queue.forget(cell)

    # ------------------------------------------------------------ cells go
    def drop_cell(self, cell: K) -> int:
        """Free a cell that nothing covers, and count the pages."""
        if cell.next is not None:
            self.queue_of(cell).remove(cell)
        self._leave(cell)
        return self.free_victim(cell)

    def evict(self, count: int, freed: list[Node]) -> int:
        """Free at least ``count`` pages if so many may go. Append the nodes that lost their cell to ``freed``."""
        gone: list[bytes] = []
        got = 0
        while got < count:
            cell = self._pop_victim()
            if cell is None:
                break
            freed.append(cell.node)
            got += cell.pages
            self._leave(cell)
            self._detach(cell, gone)
        self._give_all(gone)
        return got

    def take_victims(self, count: int) -> list[K]:
        """Take the next cells to evict, ``count`` pages or all there are. Cells above them may follow at once.

        Each is to be freed (``free_victim``) or put back, the last taken first (``put_back``).
        """
        victims: list[K] = []
        pages = 0
        while pages < count:
            cell = self._pop_victim()
            if cell is None:
                break
            self._leave(cell)
            victims.append(cell)
            self.queue.going(cell, cell.pages)
            pages += cell.pages
        return victims

    def put_back(self, cell: K) -> None:
        """Enter a victim that is not evicted after all into its queue, as used just now."""
        if self.closed_upward:
            cell.node.parent.cells[self.index].below += 1
        self.enter(cell)

    def free_victim(self, cell: K) -> int:
        """Free a cell that has left, and count the pages."""
        gone: list[bytes] = []
        self._detach(cell, gone)
        return self._give_all(gone)

    def _pop_victim(self) -> K | None:
        """Take the next cell to evict off its queue, and return it; None if nothing may be evicted."""
        while True:
            cell: K | None = self.queue.pop()
            if cell is None or not cell.below:  # one with others below enters again when the last of them has gone
                return cell

    def _leave(self, cell: K) -> None:
        """Count ``cell``, which is off the queue, as gone. If it was the last below the cell above, evict that next,
        unless it is covered, or in the queue already for a use of its own.
        """
        if self.closed_upward:
            above = cell.node.parent.cells[self.index]
            if above is not None:
                above.below -= 1
                if not above.below and not above.locks and above.next is None:
                    self.queue.add_first(above)

    def _detach(self, cell: K, gone: list[bytes]) -> None:
        """Take a cell that has left from its node, and add what it had to ``gone``."""
        gone.append(cell.data)
        if self.recorder is not None:
            self.recorder.changed(self, cell.node, cell.data, b"")
        self._unhang(cell)

    def _give_all(self, gone: list[bytes]) -> int:
        """Free what ``_detach`` gathered, and count the pages."""
        data = without_absent(b"".join(gone))
        if data:
            self.pool.give(data)
        pages = len(data) // ID_BYTES
        self.in_tree -= pages
        return pages
