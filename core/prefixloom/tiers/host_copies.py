"""Host copies: the copies between the device and the host, with their lanes, streams and counters.

A copy is work in flight like a step: it runs after the work that writes its source, readers of its target run after it,
slots that are given back meanwhile wait for it, and if it fails, what it should have written is taken out of the tree.
So nothing here waits, and nothing is pinned longer than the operation that records the copy.
"""

from __future__ import annotations

import logging
import weakref
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import Literal

from ..contract.composition import TierPart
from ..contract.values import Outcome, TransferPlan
from ..device.flight import Work
from ..device.host_pool import in_one_piece
from ..device.kernels import move_slots
from ..device.layouts import layers_of
from ..device.pool import Pool, Stage
from ..device.streams import Stream, ThreadStream, enqueue
from ..device.timeline import Kind
from ..errors import InvariantError, PrefixloomError
from ..operations.lease import standing_for_copies
from ..operations.state import Core, Hold
from ..tree.cells import Cells
from ..tree.radix import Node
from .host_lane import HostLane, Pins
from .transfer_hooks import nodes_touched, plan_of, proposed, tell_outcome

log = logging.getLogger("prefixloom")

Sources = Iterable[tuple[HostLane, Node]]
"""The places in the host tier from which a load is copied."""
Way = Literal["down", "up", "fetch"]
"""Where copies go: to the host, to the device, or from what a store brought to the host."""


class WorkName(str):
    """The name of a copy in messages, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


NAMES: dict[Way, WorkName] = {
    "down": WorkName("a copy to the host"),
    "up": WorkName("a copy to the device"),
    "fetch": WorkName("what a store brought"),
}


class Moves:
    """The copies of one component, from slots ``src`` of ``source`` to slots ``dst`` of ``target``.

    ``lane``    the lane on the host
    ``filled``  the cells that get slots: those on the host, or those on the device
    ``at``      the nodes that are filled, each with its places, in the order of ``dst``
    ``write``   writes what a store brought into ``dst``; then there is no ``src``
    ``raised``  whether a copy could not be enqueued
    """

    __slots__ = ("at", "dst", "filled", "lane", "raised", "source", "src", "target", "write")

    def __init__(self, lane: HostLane, way: Way) -> None:
        self.lane = lane
        self.filled: Cells = lane.device if way == "up" else lane
        self.target = self.filled.pool
        self.source = lane.device.pool if way == "down" else lane.pool
        self.at: list[tuple[Node, list[int]]] = []
        self.src: list[int] = []
        self.dst: list[int] = []
        self.write: Callable[[], object] | None = None
        self.raised = False

    @property
    def sources(self) -> list[tuple[HostLane, Node]]:
        """The places of a load on the host, the deepest first."""
        return [(self.lane, node) for node, _ in reversed(self.at)]


class Filling:
    """Slots that one piece of work fills, and the cells that must stay while it is prepared.

    If its block raises before ``work`` is enqueued, the slots are given back: the tree keeps none that will not be
    written.
    """

    def __init__(self, copies: HostCopies, way: Way, hold: Hold) -> None:
        self.copies = copies
        self.way = way
        self.hold = hold
        self.pins = Pins()
        self.moves = {lane: Moves(lane, way) for lane in copies.lanes}
        self.work: Work[Hold] | None = None

    @property
    def moving(self) -> list[Moves]:
        return [mine for mine in self.moves.values() if mine.at]

    @property
    def nodes(self) -> list[Node]:
        return list(dict.fromkeys(node for mine in self.moving for node, _ in mine.at))

    def __enter__(self) -> Filling:
        return self

    def reserve(self, lane: HostLane, node: Node, places: list[int], sources: Iterable[int] = ()) -> bool:
        """Take slots for these places of ``node``, and enter them: for all, or for none if the host has too few.

        On the device the caller has made room for them.
        """
        mine = self.moves[lane]
        cells = mine.filled
        self.pins.add(cells, cells.cell(node))  # making room must not evict the cell itself
        slots = self.copies.take(lane, len(places)) if cells is lane else cells.pool.take(len(places))
        if slots is None:
            self.copies.dropped += 1
            return False
        mine.at.append((node, places))
        mine.src += sources
        mine.dst += slots
        cells.add(node, places, slots)
        self.pins.add(cells, cells.cell(node))
        return True

    def run(self) -> Work[Hold]:
        """Enqueue the copies into the slots that were taken."""
        self.hold.take_fence(self.copies.core.flight)
        self.work = self.copies.run(self.moving, self.nodes, self.hold, self.way)
        return self.work

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.pins.__exit__()
        if isinstance(error, PrefixloomError) and self.work is None:
            with self.copies.core.because("failed"):
                for mine in self.moving:
                    for node, _ in mine.at:
                        mine.filled.retract(node, set(mine.dst))


class HostCopies:
    """The copies of one cache's host tier, and its counters.

    ``on_copied(lane, node)`` is called when the host has, or is about to have, something new at ``node``.
    """

    def __init__(self, core: Core, part: TierPart, lanes: tuple[HostLane, ...]) -> None:
        self.core = core
        self.part = part
        self.manifest = part.manifest
        self.lanes = lanes
        by_name = {lane.name: lane for lane in lanes}
        self.by_component = tuple(by_name.get(lane.name) for lane in core.shape.lanes)
        self.residencies = tuple(
            lane.residency if host is None else lane.residency.with_place(host)
            for lane, host in zip(core.shape.lanes, self.by_component, strict=True)
        )
        """What the device and the host have together, by component."""
        self.optional = [
            lane
            for lane in core.shape.page_lanes
            if not lane.paged.convex and self.by_component[lane.index] is not None
        ]
        """Lanes of which a sequence may use pages that its boundary does not need."""
        self.on_copied: Callable[[HostLane, Node], None] | None = None
        self.streams: dict[str, Stream] = {}
        self.backed_up = self.dropped = self.evicted = self.failed = 0
        self.restored_tokens = self.restores = self.fallbacks = self.fetched = 0
        self._groups = layer_groups(lanes, self.manifest.gates)
        self._orderly = not core.shape.composition.device.startswith("cuda")  # a CPU copies runs of slots faster
        self.pending: list[Node] = []
        """The nodes whose copies to the host wait for the end of an open step."""
        self.flying: list[tuple[Work[Hold], Callable[[bool], None]]] = []
        """The copies that are not known to be over, and what follows each."""

    # ------------------------------------------------------------ following
    def poll(self) -> None:
        """Find out which copies are over."""
        flying, self.flying = self.flying, []
        for work, then in flying:
            self._after(work, then)

    def _after(self, work: Work[Hold], then: Callable[[bool], None]) -> None:
        """Call ``then``, with whether the copy failed on its stream, when it is over."""
        if work.over:
            then(bool(work.failed))
        else:
            self.flying.append((work, then))

    def follow(self, work: Work[Hold], sources: Sources) -> None:
        """Watch a copy: if it fails on its stream, it is counted, and its ``sources`` are dropped."""

        def then(failed: bool) -> None:
            if failed:
                self.failed += 1
                self.forsake(sources)

        self._after(work, then)

    def watch(self, work: Work[Hold], plan: TransferPlan) -> None:
        """Watch a copy for plugins: they learn its outcome when it is over."""
        self._after(work, lambda failed: tell_outcome(self.core, self.part, plan, Outcome(not failed)))

    def forsake(self, sources: Sources) -> None:
        """Drop host data that could not be copied to the device, so that no later request tries it again."""
        for host, node in sources:
            cell = host.cell(node)
            if cell is not None and not cell.locks:
                with self.core.because("failed"):
                    host.drop_cell(cell)
                self.core.index.prune(node)
        self.core.index.lose()

    def make_pending(self) -> None:
        """Make the copies that had to wait for the end of an open step."""
        if self.pending:
            nodes, self.pending = self.pending, []
            self.backup([node for node in nodes if node.linked])

    def divided(self, upper: Node, lower: Node) -> None:
        """Note that a node was split: if its copy waits for an open step, so does that of its upper half."""
        if lower in self.pending:
            self.pending.append(upper)

    def flushed(self) -> None:
        self.pending, self.flying = [], []

    # ------------------------------------------------------------ down
    def backup(self, nodes: Many[Node], lanes: Iterable[HostLane] | None = None, defer: bool = True) -> None:
        """Copy to the host what these nodes have on the device only. Pages without room there are left out and counted.

        ``defer``: if an open step has yet to write the data, try again after it; otherwise the data is left out.
        """
        core = self.core
        hold = standing_for_copies(core)
        for node in nodes:
            core.unwritten.read_node(hold, node)
        if core.flight.blocked(hold.fence):
            if defer:
                self.pending.extend(nodes)
            else:
                self.dropped += len(nodes)
            return
        lanes = self.lanes if lanes is None else lanes
        pieces = [(lane, node) for lane in lanes for node in nodes if lane.lacks(node)]
        if not pieces:
            return
        plan = None
        if core.shape.has_transfer_hooks:
            deepest = max((node for _, node in pieces), key=lambda node: node.end)
            plan = plan_of(core, "backup", deepest, pieces)
            for name, spans in proposed(core, self.part, plan).items():
                host = self.by_component[core.shape.lane(name).index]
                if host is not None:
                    pieces += self._ordered(hold, host, nodes_touched(deepest, spans))
        self._copy_down(list(dict.fromkeys(pieces)), hold, plan)

    def _ordered(self, hold: Hold, host: HostLane, nodes: Iterable[Node]) -> list[tuple[HostLane, Node]]:
        """Return the ``nodes`` that no open step has yet to write, with ``hold`` ordered after what writes them."""
        found = []
        for node in nodes:
            one = standing_for_copies(self.core)
            self.core.unwritten.read_node(one, node)
            if not self.core.flight.blocked(one.fence):
                self.core.unwritten.read_node(hold, node)
                found.append((host, node))
        return found

    def _copy_down(self, pieces: Many[tuple[HostLane, Node]], hold: Hold, plan: TransferPlan | None) -> None:
        """Reserve host slots and record the copies. On any error, the tree keeps no slot that will not be written."""
        core = self.core
        try:
            with Filling(self, "down", hold) as filling:
                for lane, node in pieces:
                    places, sources = lane.missing(node)
                    if places:
                        filling.reserve(lane, node, places, sources)
                if not filling.nodes:
                    return
                work = filling.run()
                if self.on_copied is not None:
                    for lane, node in pieces:
                        self.on_copied(lane, node)
                self.backed_up += sum(len(mine.src) for mine in filling.moving)
        except PrefixloomError as error:
            if isinstance(error, InvariantError):
                raise
            log.warning("a copy to the host failed with %r; it is left out", error)
            self.failed += 1
            if plan is not None:
                tell_outcome(core, self.part, plan, Outcome(False, repr(error)))
            return
        self.follow(work, ())
        if plan is not None:
            self.watch(work, plan)

    def take(self, lane: HostLane, count: int) -> array[int] | None:
        """Take host slots, after making room if needed; None if there are too few, or an open step may use them."""
        pool, flight = lane.pool, self.core.flight
        missing = count - pool.free
        if missing > lane.in_tree - lane.leased:
            return None
        if missing > 0:
            freed: list[Node] = []
            with self.core.because("room"):
                self.evicted += lane.evict(missing, freed)
            self.core.index.prune_all(freed)
            if pool.free < count:
                return None
        before, flight.taken_early = flight.taken_early, 0  # keep the fence of slots that were taken earlier
        slots = pool.take(count)
        if flight.blocked(flight.taken_early):
            flight.taken_early = before
            pool.give(slots.tobytes())
            return None
        flight.taken_early = max(before, flight.taken_early)
        return slots

    # ------------------------------------------------------------ running copies
    def stream(self, way: str, fence: int) -> Stream:
        """Return the stream of a way: one beside the forward stream, or the calling thread if nothing runs."""
        core = self.core
        known = self.streams.get(way)
        if known is not None:
            return known
        device = core.shape.composition.device
        if device.startswith("cuda"):
            import torch

            raw = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            known = self.streams[way] = core.stream(raw)
            return known
        if not core.flight.unfinished(fence) and not self.manifest.overlap:
            return core.stream(None)
        thread = ThreadStream(f"{self.part.name} tier, {way}")
        weakref.finalize(core, thread.dismiss)
        known = self.streams[way] = core.stream(thread)
        return known

    def _timed(
        self, kind: Kind, stream: Stream, moved: Many[tuple[HostLane, Many[int]]]
    ) -> AbstractContextManager[None]:
        """Time what the block enqueues, if a timeline follows. ``moved``: the slots that are written, by host lane."""
        times = self.core.flight.times
        return nullcontext() if times is None else times.timed(kind, stream, *amounts(moved))

    def run(self, moves: Many[Moves], nodes: list[Node], hold: Hold, way: Way) -> Work[Hold]:
        """Enqueue copies as one piece of work, after all that ``hold`` is ordered after.

        The copies write data of ``nodes``. An inline stream raises here; then nobody may read what was copied.
        """
        flight = self.core.flight
        stream, before = self.stream("up" if way == "up" else "down", hold.fence), flight.launched
        try:
            work = flight.begin()
            work.stream, work.since = stream, stream.tick
            flight.order(work, stream, hold.fence, hold)
            with self._timed(way, stream, [(mine.lane, mine.dst) for mine in moves]):
                for group in self._groups if way == "up" and not stream.inline else ((),):
                    for mine in moves:
                        self._run_one(mine, stream, way, group)
                    if group:
                        work.gates = [*work.gates, (group[1] - 1, stream.record())]
        except PrefixloomError:
            self.end(before, way)
            raise
        self.end(before, way)
        if not work.over:
            work.followers = [hold]
            written = [(mine.filled, set(mine.dst)) for mine in moves]
            self.core.unwritten.add(work, hold, nodes, written, below=way != "up")
        return work

    def end(self, before: int, way: Way) -> None:
        """End all open work with a number above ``before``."""
        flight = self.core.flight
        for work in flight.works[:]:
            if work.number > before and work.event is None and not work.over:
                flight.end(work, work.stream or self.core.stream(None), (), NAMES[way])

    def _run_one(self, mine: Moves, stream: Stream, way: Way, group: tuple[int, ...]) -> None:
        """Enqueue the copies of one component, for a group of the model's layers or for all."""
        source, target = mine.source, mine.target
        source.orderly = target.orderly = self._orderly
        target.enter(mine.dst, Stage.WRITING)
        try:
            copy = partial(copy_between, source, tuple(mine.src), target, tuple(mine.dst), *group)
            enqueue(stream, repr(NAMES[way]), mine.write or copy)
        except PrefixloomError:
            mine.raised = True
            raise
        target.enter(mine.dst, Stage.SEALED)
        watcher = self.core.watcher
        if watcher is not None:
            watcher.accessed(stream, f"copy {way} of {mine.lane.device.pool.name}", target, mine.src, mine.dst, source)
        if way != "up":
            target.enter(mine.dst, Stage.PUBLISHED)


def amounts(moved: Iterable[tuple[HostLane, Many[int]]]) -> tuple[dict[str, int], int]:
    """Return how many slots are moved, by component, and their bytes: as timelines tell them."""
    pages: dict[str, int] = {}
    size = 0
    for lane, slots in moved:
        pages[lane.device.name] = pages.get(lane.device.name, 0) + len(slots)
        size += len(slots) * lane.pool.slot_bytes
    return pages, size


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


def copy_between(source: Pool, src: Many[int], target: Pool, dst: Many[int], low: int = 0, high: int = 1 << 62) -> None:
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
