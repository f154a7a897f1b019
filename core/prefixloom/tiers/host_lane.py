"""Host lanes: what the tree keeps of one component in the host's memory.

A host lane stands beside the device's lane of the same component. It has a pool and a queue of its own, and its own
cells at the same nodes; so a node may have data on the device, on the host, or on both. What a boundary needs is asked
of both tiers together (``tree.residency``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from ..contract.composition import Composition, TierPart
from ..contract.policy import serving
from ..contract.queues import Queue
from ..contract.reach import Interval
from ..contract.values import Tier
from ..device.host_pool import DebugHostPool, HostPool
from ..device.pool import ABSENT, ID_BYTES
from ..tree.cells import Cell, Cells
from ..tree.lane import Lane
from ..tree.radix import Node


class HostCell(Cell):
    """``left`` of the cell's places, the last ones, were not handed to the store with the number ``store`` yet."""

    __slots__ = ("left", "store")

    def __init__(self, node: Node, data: bytes, pages: int) -> None:
        super().__init__(node, data, pages)
        self.left = self.store = 0

    @property
    def places(self) -> int:
        return len(self.data) // ID_BYTES


class HostLane(Cells[HostCell]):
    """What the host holds of one component. ``leased`` counts pages that are pinned during a copy.

    A *place* is an index into the pages of a node's edge. A state has the last place.
    """

    __slots__ = ("device", "going", "unit")
    kind = HostCell
    pool: HostPool
    tier: Tier = "host"
    going: Callable[[HostLane, HostCell], None] | None
    """A function that is called with each cell that is about to be evicted."""

    def __init__(self, device: Lane, index: int, pool: HostPool, queue: Queue) -> None:
        super().__init__(index, device.part, pool, queue, device.page)
        self.device = device
        self.unit = device.unit
        self.going = None

    def span(self, node: Node, place: int) -> Interval:
        """Return the positions of a place of ``node``; of a state, its boundary twice."""
        start = node.start + place * self.page
        end = start + self.page
        return (end, end) if self.unit == "boundary" else (start, end)

    def absent(self, node: Node) -> list[int]:
        """Return the places of ``node`` of which the host has nothing."""
        return [place for place, slot in enumerate(self.edge(node)) if slot == ABSENT]

    def lacks(self, node: Node) -> bool:
        """Return whether the device may have something at ``node`` that the host has not."""
        theirs, mine = self.device.cell(node), self.cell(node)
        most = 1 if self.unit == "boundary" else (node.end - node.start) // self.page
        return theirs is not None and (mine is None or mine.pages < most)

    def missing(self, node: Node) -> tuple[list[int], list[int]]:
        """Return the data at ``node`` that the device has and the host has not: places, and the device's slots."""
        theirs = self.device.edge(node)
        places = [place for place in self.absent(node) if theirs[place] != ABSENT]
        return places, [theirs[place] for place in places]

    # ------------------------------------------------------------ cells come and go
    def add(self, node: Node, places: list[int], slots: array[int]) -> HostCell:
        cell = super().add(node, places, slots)
        cell.left = cell.places
        if self.closed_upward:
            cell.below = len(self.cells_below(node))
        return cell

    def divide(self, upper: Node, lower: Node) -> None:
        cell: HostCell | None = self.cell(lower)
        super().divide(upper, lower)
        new: HostCell | None = self.cell(upper)
        if cell is not None and new is not None:
            new.store = cell.store
            new.left = max(0, cell.left - (lower.end - upper.end) // self.page)
            cell.left = min(cell.left, cell.places)

    def _pop_victim(self) -> HostCell | None:
        cell = super()._pop_victim()
        if cell is not None and self.going is not None:
            self.going(self, cell)
        return cell


class Pins:
    """The cells that must not be evicted during an operation. Leaving the block unpins them."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[tuple[Cells, Cell]] = []

    def add(self, lane: Cells, cell: Cell | None) -> None:
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
    return HostLane(lane, index, pool, serving(composition.policy, states=lane.unit == "boundary"))
