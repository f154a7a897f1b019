"""Host lanes: what the tree keeps of one component in the host's memory.

A host lane stands beside the device's lane of the same component. It has a pool and a queue of its own, and its own
cells at the same nodes; so a node may have data on the device, on the host, or on both. A host lane does not know what
a boundary needs: the device's lane answers that, over both tiers (``tree.residency``). If the reach is closed upward, a
cell is evicted before the cells above it: they are of use without it, but it is of no use without them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from ..contract.composition import Composition, Part, TierPart
from ..contract.policy import serving
from ..contract.queues import Queue
from ..contract.reach import Interval
from ..contract.values import Tier
from ..device.host_pool import DebugHostPool, HostPool
from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, present
from ..tree.lane import Cell, Lane, PageLane, gap_in
from ..tree.radix import Node


class HostCell(Cell):
    """A cell of a host lane.

    ``data``    the slots of the whole edge, *absent* where nothing is held; of a state the slot alone
    ``pages``   the number of slots that are present
    ``below``   the number of children with a cell, counted where the reach is closed upward
    ``stored``  the number of places, from the first on, whose content was handed to the store with the number ``store``
    """

    __slots__ = ("below", "pages", "store", "stored")
    data: bytes

    def __init__(self, node: Node, data: bytes) -> None:
        super().__init__(node, data)
        self.pages = present(data)
        self.below = self.stored = self.store = 0

    @property
    def places(self) -> int:
        return len(self.data) // ID_BYTES

    @property
    def whole(self) -> bool:
        """Whether nothing is missing in the cell."""
        return self.pages * ID_BYTES == len(self.data)


class HostLane(Lane):
    """What the host holds of one component. ``leased`` counts pages that are pinned during a copy.

    A *place* is an index into the pages of a node's edge. A state has one place, at the end of the edge.
    """

    __slots__ = ("device", "going", "page", "unit")
    pool: HostPool
    tier: Tier = "host"
    going: Callable[[HostLane, HostCell], None] | None
    """A function that is called with each cell that is about to be evicted."""

    def __init__(self, index: int, part: Part, pool: HostPool, queue: Queue, tree_page: int, device: Lane) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        self.device = device
        self.unit = device.unit
        self.page = self.paged.page
        self.going = None

    # ------------------------------------------------------------ what lies at a node
    def places(self, node: Node) -> int:
        """Return the number of places of ``node``."""
        return 1 if self.unit == "boundary" else (node.end - node.start) // self.page

    def span(self, node: Node, place: int) -> Interval:
        """Return the positions of a place of ``node``; of a state, its boundary twice."""
        if self.unit == "boundary":
            return node.end, node.end
        start = node.start + place * self.page
        return start, start + self.page

    def gap(self, node: Node, at: int, high: int) -> Interval:
        return gap_in(self.cell(node), node, self.page, at, high)

    def edge(self, node: Node) -> bytes:
        """Return the host's slot of each page in the edge of ``node``, *absent* where it has none."""
        cell: HostCell | None = self.cell(node)
        data = b"" if cell is None else cell.data
        return ABSENT_BYTES * ((node.end - node.start) // self.page - len(data) // ID_BYTES) + data

    def absent(self, node: Node) -> list[int]:
        """Return the places of ``node`` of which the host has nothing."""
        cell: HostCell | None = self.cell(node)
        if cell is None:
            return list(range(self.places(node)))
        return [place for place, slot in enumerate(array("i", cell.data)) if slot == ABSENT]

    def lacks(self, node: Node) -> bool:
        """Return whether the device may have something at ``node`` that the host has not."""
        cell: HostCell | None = self.cell(node)
        return self.device.cell(node) is not None and (cell is None or not cell.whole)

    def missing(self, node: Node) -> tuple[list[int], list[int]]:
        """Return the data at ``node`` that the device has and the host has not: places, and the device's slots."""
        device = self.device
        if isinstance(device, PageLane):
            theirs = array("i", device.edge(node))
        else:
            theirs = array("i", device.slots_of(device.cell(node)) or [ABSENT])
        places = [place for place in self.absent(node) if theirs[place] != ABSENT]
        return places, [theirs[place] for place in places]

    def slots_of(self, cell: HostCell | None) -> list[int]:
        return [] if cell is None else [slot for slot in array("i", cell.data) if slot != ABSENT]

    # ------------------------------------------------------------ cells come and go
    def add(self, node: Node, places: list[int], slots: array[int]) -> None:
        """Enter host slots for these places of ``node``."""
        cell: HostCell | None = self.cell(node)
        data = array("i", ABSENT_BYTES * self.places(node) if cell is None else cell.data)
        for place, slot in zip(places, slots, strict=True):
            data[place] = slot
        if cell is None:
            self._place(node, data.tobytes())
        else:
            cell.stored = 0
            self._set(cell, data)

    def retract(self, node: Node, slots: set[int]) -> None:
        """Take out slots of ``node`` whose content was never written."""
        cell: HostCell | None = self.cell(node)
        gone = [slot for slot in self.slots_of(cell) if slot in slots]
        if cell is None or not gone:
            return
        self._set(cell, array("i", [ABSENT if slot in slots else slot for slot in array("i", cell.data)]))
        self.pool.give_slots(gone)
        if not cell.pages and not cell.locks:
            self.drop_cell(cell)

    def _place(self, node: Node, data: bytes) -> None:
        """Make a new cell at ``node``, which has none."""
        cell = HostCell(node, data)
        self.put(node, cell)
        self.in_tree += cell.pages
        if self.recorder is not None:
            self.recorder.changed(self, node, None, data)
        if self.closed_upward:
            cell.below = len(self.cells_below(node))
            above = self.cell_above(node)
            if above is not None:
                above.below += 1
        self.queue.add(cell)

    def _set(self, cell: HostCell, data: array[int]) -> None:
        """Change the slots of a cell, and the counts."""
        before, pages = cell.data, cell.pages
        cell.data = data.tobytes()
        cell.pages = present(cell.data)
        self.in_tree += cell.pages - pages
        if cell.locks:
            self.leased += cell.pages - pages
        if self.recorder is not None:
            self.recorder.changed(self, cell.node, before, cell.data)

    def divide(self, upper: Node, lower: Node) -> None:
        cell: HostCell | None = self.cell(lower)
        if cell is None or self.unit == "boundary":  # a state stays at the end, which is that of the lower half
            return
        cut = (upper.end - upper.start) // self.page * ID_BYTES
        new = HostCell(upper, cell.data[:cut])
        cell.data = cell.data[cut:]
        cell.pages -= new.pages
        new.locks = cell.locks
        new.store = cell.store
        new.stored = min(cell.stored, new.places)
        cell.stored -= new.stored
        linked = cell.next is not None
        if new.pages or new.locks:
            self.put(upper, new)
            self.queue.inherit(new, cell, linked=linked)
        if not cell.pages and not cell.locks:
            self.put(lower, None)
            if linked:
                self.queue.remove(cell)
            self.queue.forget(cell)
        if self.closed_upward:
            new.below = self.cell(lower) is not None
            if self.cell(upper) is None:
                self._lose_below(upper)

    def pin(self, cell: HostCell) -> None:
        """Protect ``cell`` from eviction until it is unpinned as often as it was pinned."""
        if not cell.locks:
            self.leased += cell.pages
            if cell.next is not None:
                self.queue.remove(cell)
        cell.locks += 1

    def unpin(self, cell: HostCell) -> None:
        cell.locks -= 1
        if cell.locks:
            return
        if cell.pages:
            self.leased -= cell.pages
            self.queue.add(cell)
        elif self.has(cell):  # its content never arrived
            self.drop_cell(cell)

    # ------------------------------------------------------------ eviction
    def _pop_victim(self) -> HostCell | None:
        while True:
            cell: HostCell | None = self.queue.pop()
            if cell is None or not cell.below:  # a cell with others below enters again when the last of them is gone
                return cell

    def evict(self, count: int, freed: list[Node]) -> int:
        got = 0
        while got < count:
            cell = self._pop_victim()
            if cell is None:
                break
            if self.going is not None:
                self.going(self, cell)
            freed.append(cell.node)
            got += self.drop_cell(cell)
        return got

    def _leave(self, cell: HostCell) -> None:
        if self.closed_upward:
            self._lose_below(cell.node)

    def _lose_below(self, node: Node) -> None:
        """Note that ``node`` has no cell any more. If the cell above has no others below, it is evicted next."""
        above = self.cell_above(node)
        if above is not None:
            above.below -= 1
            if not above.below and not above.locks and above.next is None:
                self.queue.add_first(above)

    def _detach(self, cell: HostCell, node: Node, gone: list[int]) -> None:
        self.put(node, None)
        gone += self.slots_of(cell)
        if self.recorder is not None:
            self.recorder.changed(self, node, cell.data, None)
        self.queue.forget(cell)

    def _give_all(self, gone: list[int]) -> int:
        self.pool.give_slots(gone)
        self.in_tree -= len(gone)
        return len(gone)

    def size(self, cell: HostCell) -> int:
        return cell.pages


class Pins:
    """The cells that must not be evicted during an operation. Leaving the block unpins them."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[tuple[Lane, Cell]] = []

    def add(self, lane: Lane, cell: Cell | None) -> None:
        if cell is not None:
            lane.pin(cell)
            self._held.append((lane, cell))

    def __enter__(self) -> Pins:
        return self

    def __exit__(self, *_: object) -> None:
        for lane, cell in reversed(self._held):
            lane.unpin(cell)


def make_host_lanes(composition: Composition, tier: TierPart, lanes: Sequence[Lane]) -> tuple[HostLane, ...]:
    """Make a host lane for each component that the tier holds, numbered after ``lanes``."""
    kept = [lane for lane in lanes if lane.name in tier.capacity]
    return tuple(_make_host_lane(composition, tier, number, lane) for number, lane in enumerate(kept, len(lanes)))


def _make_host_lane(composition: Composition, tier: TierPart, index: int, lane: Lane) -> HostLane:
    source = lane.pool
    pool = (DebugHostPool if composition.debug else HostPool)(
        f"{tier.name} {lane.name}", source.manifest, source.unit, tier.capacity[lane.name],
        source.entries, layout=tier.manifest.layout, pin=composition.device.startswith("cuda"),
        allocate=composition.device != "meta",
    )  # fmt: skip
    queue = serving(composition.policy, states=lane.unit == "boundary")
    return HostLane(index, lane.part, pool, queue, composition.page, lane)
