"""Host lanes: what the tree keeps of one component in the host's memory.

A host lane stands beside the device's lane of the same component. It has a pool and a queue of its own, and its own
cells at the same nodes; so a node may have data on the device, on the host, or on both. A host lane does not know what
a boundary needs: the device's lane answers that, over both tiers (``tree.residency``). If the reach is closed upward, a
cell is evicted before the cells above it: they are of use without it, but it is of no use without them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

from ..contract.composition import Composition, Part, TierPart
from ..contract.policy import serving
from ..contract.queues import Queue
from ..contract.reach import Interval
from ..contract.values import Tier
from ..device.host_pool import DebugHostPool, HostPool, in_one_piece
from ..device.kernels_move import move_slots
from ..device.layouts import layers_of
from ..device.pool import ABSENT, ABSENT_BYTES, ID_BYTES, Pool, present
from ..tree.lane import Cell, Lane, PageLane, gap_in, state_gap_in
from ..tree.radix import Node


class HostCell(Cell):
    """A cell of a host lane.

    ``data``    the page numbers of the whole edge, *absent* where nothing is held; for a state, its slot
    ``pages``   the number of pages that are present
    ``below``   the number of children with a cell, counted where the reach is closed upward
    ``stored``  the number of places, from the first on, whose content was handed to the store with the number ``store``
    """

    __slots__ = ("below", "pages", "store", "stored")

    def __init__(self, node: Node, data: Any, pages: int) -> None:
        super().__init__(node, data)
        self.pages = pages
        self.below = 0
        self.stored = self.store = 0

    @property
    def places(self) -> int:
        return len(self.data) // ID_BYTES if isinstance(self.data, bytes) else 1


class HostLane(Lane):
    """Base of the host lanes of pages and of states. ``leased`` counts pages that are pinned during a copy."""

    __slots__ = ("device", "going")
    tier: Tier = "host"
    going: Callable[[HostLane, HostCell], None] | None
    """A function that is called with each cell that is about to be evicted."""

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int, device: Lane) -> None:
        super().__init__(index, part, pool, queue, tree_page)
        self.device = device
        self.going = None

    def edge(self, node: Node) -> bytes:
        """Return the host's slot of each page in the edge of ``node``, *absent* where it has none."""
        raise NotImplementedError

    def missing(self, node: Node) -> tuple[list[int], list[int]]:
        """The data at ``node`` that the device has and the host has not: (places in the edge, the device's slots)."""
        raise NotImplementedError

    def lacks(self, node: Node) -> bool:
        """Whether the device may have something at ``node`` that the host has not."""
        if self.device.cell(node) is None:
            return False
        cell: HostCell | None = self.cell(node)
        return cell is None or not self.whole(cell)

    def whole(self, cell: HostCell) -> bool:
        """Whether nothing is missing in ``cell``."""
        return True

    def add(self, node: Node, places: list[int], slots: array[int]) -> None:
        """Enter host slots for these places of the edge of ``node``."""
        raise NotImplementedError

    # ------------------------------------------------------------ cells come and go
    def place(self, node: Node, data: Any, pages: int) -> HostCell:
        """Make a new cell at ``node``, which has none."""
        cell = HostCell(node, data, pages)
        self.put(node, cell)
        self.in_tree += pages
        if self.recorder is not None:
            self.recorder.changed(self, node, None, data)
        if self.closed_upward:
            cell.below = len(self.cells_below(node))
            above = self.cell_above(node)
            if above is not None:
                above.below += 1
        self.queue.add(cell)
        return cell

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
        elif self.cell(cell.node) is cell:  # its content never arrived
            self.drop_cell(cell)

    def uncovered(self, cell: HostCell) -> bool:
        return not cell.locks

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
            self.lose_below(cell.node)

    def lose_below(self, node: Node) -> None:
        """Note that ``node`` has no cell any more. If the cell above has no others below, it is evicted next."""
        above = self.cell_above(node)
        if above is not None:
            above.below -= 1
            if not above.below and not above.locks and above.next is None:
                self.queue.add_first(above)

    def put_back(self, cell: HostCell) -> None:
        if self.closed_upward and (above := self.cell_above(cell.node)) is not None:
            above.below += 1
        self.queue.add(cell)

    def _detach(self, cell: HostCell, node: Node, gone: list[int]) -> None:
        slots = self.slots_of(cell)
        self.put(node, None)
        gone += slots
        if self.recorder is not None:
            self.recorder.changed(self, node, cell.data, None)
        self.queue.forget(cell)

    def _give_all(self, gone: list[int]) -> int:
        self.pool.give_slots(gone)
        self.in_tree -= len(gone)
        return len(gone)

    def size(self, cell: HostCell) -> int:
        return cell.pages


class HostPages(HostLane):
    """The host lane of a page component."""

    __slots__ = ("page",)
    device: PageLane

    def __init__(self, index: int, part: Part, pool: Pool, queue: Queue, tree_page: int, device: Lane) -> None:
        super().__init__(index, part, pool, queue, tree_page, device)
        self.page = part.page_tokens

    def whole(self, cell: HostCell) -> bool:
        return cell.pages * ID_BYTES == len(cell.data)

    def missing(self, node: Node) -> tuple[list[int], list[int]]:
        cell: HostCell | None = self.cell(node)
        if cell is not None and self.whole(cell):
            return [], []
        theirs = array("i", self.device.edge(node))
        if cell is None:
            places = [place for place, slot in enumerate(theirs) if slot != ABSENT]
        else:
            ours = array("i", cell.data)
            places = [place for place, slot in enumerate(theirs) if slot != ABSENT and ours[place] == ABSENT]
        return places, [theirs[place] for place in places]

    def add(self, node: Node, places: list[int], slots: array[int]) -> None:
        cell: HostCell | None = self.cell(node)
        count = (node.end - node.start) // self.page
        data = array("i", ABSENT_BYTES * count if cell is None else cell.data)
        for place, slot in zip(places, slots, strict=True):
            data[place] = slot
        if cell is None:
            self.place(node, data.tobytes(), len(slots))
            return
        before = cell.data
        cell.data = data.tobytes()
        if self.recorder is not None:
            self.recorder.changed(self, node, before, cell.data)
        cell.stored = 0
        cell.pages += len(slots)
        self.in_tree += len(slots)
        if cell.locks:
            self.leased += len(slots)

    def divide(self, upper: Node, lower: Node) -> None:
        cell: HostCell | None = self.cell(lower)
        if cell is None:
            return
        cut = (upper.end - upper.start) // self.page * ID_BYTES
        new = HostCell(upper, cell.data[:cut], present(cell.data[:cut]))
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
                self.lose_below(upper)

    def gap(self, node: Node, at: int, high: int) -> Interval:
        return gap_in(self.cell(node), node, self.page, at, high)

    def edge(self, node: Node) -> bytes:
        cell: HostCell | None = self.cell(node)
        data: bytes = ABSENT_BYTES * ((node.end - node.start) // self.page) if cell is None else cell.data
        return data

    def slots_of(self, cell: HostCell | None) -> list[int]:
        return [] if cell is None else [slot for slot in array("i", cell.data) if slot != ABSENT]

    def retract(self, node: Node, slots: set[int]) -> None:
        """Take out slots of ``node`` whose content was never written."""
        cell: HostCell | None = self.cell(node)
        gone = [slot for slot in self.slots_of(cell) if slot in slots]
        if cell is None or not gone:
            return
        before = cell.data
        cell.data = array("i", [ABSENT if slot in slots else slot for slot in array("i", before)]).tobytes()
        if self.recorder is not None:
            self.recorder.changed(self, node, before, cell.data)
        cell.pages -= len(gone)
        self.in_tree -= len(gone)
        if cell.locks:
            self.leased -= len(gone)
        self.pool.give_slots(gone)
        if not cell.pages and not cell.locks:
            self.drop_cell(cell)


class HostStates(HostLane):
    """The host lane of a boundary component."""

    __slots__ = ()
    unit = "boundary"

    def gap(self, node: Node, at: int, high: int) -> Interval:
        return state_gap_in(self.cell(node), node, self.paged.page, at, high)

    def edge(self, node: Node) -> bytes:
        cell: HostCell | None = self.cell(node)
        absent = (node.end - node.start) // self.paged.page - (cell is not None)
        return ABSENT_BYTES * absent + (b"" if cell is None else array("i", [cell.data]).tobytes())

    def missing(self, node: Node) -> tuple[list[int], list[int]]:
        theirs = self.device.cell(node)
        return ([0], [theirs.data]) if theirs is not None and self.cell(node) is None else ([], [])

    def add(self, node: Node, places: list[int], slots: array[int]) -> None:
        self.place(node, slots[0], 1)

    def divide(self, upper: Node, lower: Node) -> None:
        """Do nothing: the state stays at the node's end, which is that of the lower half."""

    def slots_of(self, cell: HostCell | None) -> list[int]:
        return [] if cell is None else [cell.data]

    def retract(self, node: Node, slots: set[int]) -> None:
        """Take out the slot of ``node`` if its content was never written. A pinned cell stays, without content."""
        cell: HostCell | None = self.cell(node)
        if cell is None or cell.data not in slots:
            return
        if cell.locks:
            self.leased -= cell.pages
            self.drop_cell(cell)
            cell.pages = 0
        else:
            self.drop_cell(cell)


class Pins:
    """The cells that must not be evicted during an operation. Leaving the block unpins them."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[tuple[Any, Any]] = []

    def add(self, lane: Any, cell: Any) -> None:
        lane.pin(cell)
        self._held.append((lane, cell))

    def __enter__(self) -> Pins:
        return self

    def __exit__(self, *_: object) -> None:
        for lane, cell in reversed(self._held):
            lane.unpin(cell)


Way = Literal["down", "up", "fetch"]
"""Where copies go: to the host, to the device, or from what a store brought to the host."""


class Moves:
    """The copies of one component: from slots ``src`` of one of its pools to slots ``dst`` of the other.

    ``write`` writes what a store brought into ``dst``; then there is no ``src``.
    """

    __slots__ = ("dst", "lane", "raised", "src", "write")

    def __init__(self, lane: HostLane) -> None:
        self.lane = lane
        self.src: list[int] = []
        self.dst: list[int] = []
        self.write: Callable[[], object] | None = None
        self.raised = False

    def ends(self, way: Way) -> tuple[Pool, Pool]:
        """Return the pools that copies of this way read and write."""
        host, device = self.lane.pool, self.lane.device.pool
        return (host if way == "fetch" else device, host) if way != "up" else (host, device)

    def take_back(self, nodes: Iterable[Node]) -> None:
        """Give back host slots that were never written, whether ``nodes`` have them already or not."""
        left = set(self.dst)
        for node in nodes:
            held = left.intersection(self.lane.slots_of(self.lane.cell(node)))
            self.lane.retract(node, held)
            left -= held
        self.lane.pool.give_slots([slot for slot in self.dst if slot in left])


def layer_groups(lanes: Iterable[HostLane], count: int) -> tuple[tuple[int, ...], ...]:
    """Divide the model's layers into ``count`` groups of nearly equal size: (first, one past the last).

    A single group is ().
    """
    layers = sorted({layer for lane in lanes for buffer in lane.pool.manifest.buffers for layer in buffer.layers})
    count = min(count, len(layers))
    if count < 2:
        return ((),)
    firsts = [0, *(layers[number * len(layers) // count] for number in range(1, count)), layers[-1] + 1]
    return tuple(pairwise(firsts))


def copy_between(
    source: Pool, src: Sequence[int], target: Pool, dst: Sequence[int], low: int = 0, high: int = 1 << 62
) -> None:
    """Copy the content of slots between tiers, for the model's layers from ``low`` to before ``high``."""
    if "meta" in (source.device, target.device):
        return
    whole = all(low <= layer < high for buffer in source.manifest.buffers for layer in buffer.layers)
    if whole and in_one_piece(source, target):
        move_slots(source.blocks, src, target.blocks, dst)
        return
    for buffer in source.manifest.buffers:
        one, other = source.buffers[buffer.name], target.buffers[buffer.name]
        inside = [low <= layer < high for layer in buffer.layers]
        if all(inside) and not isinstance(one, tuple) and not isinstance(other, tuple):
            sources, targets = [one], [other]
        else:
            sources, targets = (
                [layer for layer, there in zip(layers_of(end), inside, strict=True) if there] for end in (one, other)
            )
        if sources:
            move_slots(sources, src, targets, dst)


def make_host_lanes(composition: Composition, tier: TierPart, lanes: Sequence[Lane]) -> tuple[HostLane, ...]:
    """A host lane for each component that the tier holds, numbered after ``lanes``."""
    kept = [lane for lane in lanes if lane.name in tier.capacity]
    return tuple(_make_host_lane(composition, tier, number, lane) for number, lane in enumerate(kept, len(lanes)))


def _make_host_lane(composition: Composition, tier: TierPart, index: int, lane: Lane) -> HostLane:
    source = lane.pool
    pool = (DebugHostPool if composition.debug else HostPool)(
        f"{tier.name} {lane.name}", source.manifest, source.unit, tier.capacity[lane.name],
        source.entries, layout=tier.manifest.layout, pin=composition.device.startswith("cuda"),
        allocate=composition.device != "meta",
    )  # fmt: skip
    kind = HostStates if lane.unit == "boundary" else HostPages
    queue = serving(composition.policy, states=lane.unit == "boundary")
    return kind(index, lane.part, pool, queue, composition.page, lane)
