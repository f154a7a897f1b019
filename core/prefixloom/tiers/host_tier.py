"""The host tier of one cache: a second place where the tree's data may lie, and the copies down to it.

What is kept there follows from the components: each that shares data has a host lane beside its own (``lane_host``),
with a pool of the same slots. When something is copied down is the tier's manifest's to say: at once when it is
published, after so many hits, or when the device is about to lose it. The way back up is ``restore``'s.

A copy is work in flight like a step's: it comes after what writes its source, whoever reads what it writes comes after
it, slots that are given back meanwhile wait for it, and if it fails, what it was to bring is taken back. So nothing
here waits, and nothing is pinned longer than the operation that records the copy.
"""

from __future__ import annotations

import logging
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..contract.policy import serving
from ..contract.values import Outcome, TransferPlan
from ..device.host_pool import DebugHostPool, HostPool
from ..device.pool import Stage
from ..device.streams import Stream, ThreadStream
from ..errors import InvariantError
from ..operations.lease import Hold, inert
from ..tree.radix import Node
from .host_lane import HostLane, HostPages, HostStates, Moves, copy_between, layer_groups
from .match_below import usable
from .store import Shelf
from .transfer_hooks import COPY, on_path, plan_of, proposed, tell

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..contract.composition import TierPart
    from ..device.flight import Work
    from ..tree.lane import Lane
    from .restore import Part

log = logging.getLogger("prefixloom")

Job = tuple[HostLane, list[int], Callable[[], object]]
"""(where, which slots, what writes them)"""


class LowerTier:
    """The mechanism below ``TierManifest``; one per cache."""

    def __init__(self, cache: Cache, part: TierPart) -> None:
        self.cache = cache
        self.part = part
        self.manifest = part.manifest
        kept = [lane for lane in cache._lanes if lane.name in part.capacity]
        self.lanes = tuple(self._make_lane(number, lane) for number, lane in enumerate(kept, len(cache._lanes)))
        self.groups = layer_groups(self.lanes, self.manifest.gates)
        by_name = {lane.name: lane for lane in self.lanes}
        self.by_component = tuple(by_name.get(lane.name) for lane in cache._lanes)
        self._orderly = not cache.composition.device.startswith("cuda")  # a CPU copies runs of slots faster
        self.pending: list[Node] = []
        self.flying: list[tuple[Work, list[Part]]] = []  # copies; ``parts`` of those to the device
        self.watched: list[tuple[Work, TransferPlan]] = []
        self.streams: dict[str, Stream] = {}
        self.backed_up = self.dropped = self.evicted = self.failed = 0
        self.restored_tokens = self.restores = self.fallbacks = self.fetched = 0
        self.shelf = Shelf(cache, self, part.component) if hasattr(part.component, "store") else None
        self.counting = "selective" in (self.manifest.write, getattr(part.component, "keep", ""))

    def _make_lane(self, index: int, lane: Lane) -> HostLane:
        composition = self.cache.composition
        source = lane.pool
        pool = (DebugHostPool if composition.debug else HostPool)(
            f"{self.part.name} {lane.name}", source.manifest, source.unit, self.part.capacity[lane.name],
            source.entries, layout=self.manifest.layout, pin=composition.device.startswith("cuda"),
            allocate=composition.device != "meta",
        )  # fmt: skip
        kind = HostStates if lane.unit == "boundary" else HostPages
        return kind(index, lane.part, pool, serving(composition.policy), composition.page, lane)

    # ------------------------------------------------------------ when
    def published(self, run: Sequence[Node]) -> None:
        """These nodes have new content on the device."""
        if self.manifest.write == "through":
            self.backup(run)

    def used(self, node: Node) -> None:
        """A sequence was opened at ``node``: what it reads was hit once more."""
        if not self.counting:
            return
        due: list[Node] = []
        enough = self.manifest.hits
        while node.parent is not None:
            hits = node.hits = node.hits + 1  # type: ignore[attr-defined]
            if hits >= enough:
                due.append(node)
            node = node.parent
        if due and self.manifest.write == "selective":
            self.backup(due[::-1])
        if due and self.shelf is not None:
            self.shelf.used(due)

    def demotes(self, lane: Lane) -> bool:
        """Whether what the device frees of ``lane`` is copied down before it goes, if it is not below already."""
        return self.manifest.write != "selective" and self.by_component[lane.index] is not None

    def losing(self, lane: Lane, cells: Iterable[Any]) -> None:
        """The device is about to free these cells: what has room below is not lost."""
        host = self.by_component[lane.index]
        if host is not None and self.demotes(lane):
            self.backup([cell.node for cell in cells], (host,), defer=False)

    def gone(self, lane: Lane, nodes: list[Node]) -> list[Node]:
        """Those of ``nodes`` whose end cannot be resumed at with what of ``lane`` lies below either."""
        host = self.by_component[lane.index]
        if host is None or not host.in_tree:
            return nodes
        gone = [node for node in nodes if node.cells[host.index] is None]
        if lane.part.reach.closed_upward or not lane.feeds:
            return gone
        page = self.cache._page
        return [node for node in gone if usable(lane, host, node, node.end, page)[1] < node.end]

    def forsake(self, parts: Iterable[Part]) -> None:
        """These could not be copied to the device: whoever asks again is not to try it for ever."""
        for part in parts:
            for node in reversed(part.run):
                cell = node.cells[part.host.index]
                if cell is not None and not cell.locks:
                    part.host.drop_cell(cell)
                    self.cache._tree.prune(node)
        self.cache._epoch += 1

    def poll(self) -> None:
        """See which loads are over, and make the copies that had to wait for the end of an open step."""
        flying, self.flying = self.flying, []
        for work, parts in flying:
            self.follow(work, parts)
        watched, self.watched = self.watched, []
        for work, plan in watched:
            self.watch(work, plan)
        if self.shelf is not None:
            self.shelf.poll()
        if self.pending:
            nodes, self.pending = self.pending, []
            self.backup([node for node in nodes if node.first is not None])

    def follow(self, work: Work, parts: list[Part]) -> None:
        """See to it that a copy that fails on its stream is counted, and its source forgotten."""
        if not work.over:
            self.flying.append((work, parts))
        elif work.failed:
            self.failed += 1
            self.forsake(parts)

    def divided(self, upper: Node, lower: Node) -> None:
        """A node was split: if its copy has to wait, so has that of its upper half."""
        if lower in self.pending:
            self.pending.append(upper)
        if self.shelf is not None:
            self.shelf.divided(upper)

    def flushed(self) -> None:
        self.pending, self.flying, self.watched = [], [], []
        if self.shelf is not None:
            self.shelf.flushed()

    # ------------------------------------------------------------ down
    def backup(self, nodes: Sequence[Node], lanes: Iterable[HostLane] | None = None, defer: bool = True) -> None:
        """Copy to the host what these nodes have on the device only. What finds no room is left out and counted.

        ``defer``: try again later where an open step has yet to write it, or drop it.
        """
        cache, flight = self.cache, self.cache._flight
        hold = inert(cache)
        for node in nodes:
            flight.copies(hold, node)
        if self.blocked(hold.fence):
            if defer:
                self.pending.extend(nodes)
            else:
                self.dropped += len(nodes)
            return
        pieces = [(lane, node) for lane in (self.lanes if lanes is None else lanes) for node in nodes]
        pieces = [(lane, node) for lane, node in pieces if lane.lacks(node)]
        if not pieces:
            return
        plan = None
        if cache._transfer_hooks:
            deepest = max((node for _, node in pieces), key=lambda node: node.end)
            plan = plan_of("backup", deepest, pieces)
            for name, spans in proposed(cache, plan).items():
                host = self.by_component[cache._lane(name).index]
                if host is not None:
                    pieces += self._ordered(hold, host, on_path(deepest, spans))
        self._copy_down(list(dict.fromkeys(pieces)), hold, plan)

    def _ordered(self, hold: Hold, host: HostLane, nodes: Iterable[Node]) -> list[tuple[HostLane, Node]]:
        """Those of ``nodes`` that can be copied by now, and ``hold`` comes after what writes them."""
        found = []
        for node in nodes:
            one = inert(self.cache)
            self.cache._flight.copies(one, node)
            if not self.blocked(one.fence):
                self.cache._flight.copies(hold, node)
                found.append((host, node))
        return found

    def _copy_down(self, pieces: Sequence[tuple[HostLane, Node]], hold: Hold, plan: TransferPlan | None) -> None:
        """Reserve, and record the copies. Whatever happens, the tree has nothing that is not going to be written."""
        moves: dict[HostLane, Moves] = {}
        before = self.cache._flight._launched
        nodes = list(dict.fromkeys(node for _, node in pieces))
        pinned: list[tuple[HostLane, Any]] = []
        work = None
        try:
            try:
                for lane, node in pieces:
                    self._reserve(moves.setdefault(lane, Moves(lane)), node, pinned)
            finally:
                for host, cell in pinned:
                    host.unpin(cell)
            hold.claim(self.cache._flight)
            moving = [mine for mine in moves.values() if mine.src]
            if moving:
                work = self.run(moving, nodes, hold, "down")
                if self.shelf is not None:
                    for lane, node in pieces:
                        self.shelf.copied(lane, node)
                self.backed_up += sum(len(mine.src) for mine in moving)
        except BaseException as error:
            self.end(before, "down")
            for mine in moves.values():
                mine.take_back(nodes)
            for node in nodes:
                self.cache._tree.prune(node)
            if not isinstance(error, Exception) or isinstance(error, InvariantError):
                raise
            log.warning("a copy to the host failed with %r; it is left out", error)  # and serving goes on
            self.failed += 1
            if plan is not None:
                tell(self.cache, plan, Outcome(False, repr(error)))
            return
        if work is not None:
            self.follow(work, [])
            if plan is not None:
                self.watch(work, plan)

    def watch(self, work: Work, plan: TransferPlan) -> None:
        """Tell plugins when it has ended."""
        if work.over:
            tell(self.cache, plan, Outcome(not work.failed))
        else:
            self.watched.append((work, plan))

    def _reserve(self, moves: Moves, node: Node, pinned: list[tuple[HostLane, Any]]) -> None:
        """Host slots for what the device has of ``node`` and the host has not; all of it or nothing."""
        lane = moves.lane
        places, sources = lane.missing(node)
        if not places:
            return
        cell = node.cells[lane.index]
        if cell is not None:
            lane.pin(cell)
            pinned.append((lane, cell))
        slots = self.take(lane, len(places))
        if slots is None:
            self.dropped += 1
            return
        moves.src += sources
        moves.dst += slots.tolist()  # first: what the tree has and nobody writes would be taken for content
        lane.add(node, places, slots)
        if cell is None:
            cell = node.cells[lane.index]
            lane.pin(cell)
            pinned.append((lane, cell))

    def take(self, lane: HostLane, count: int) -> array[int] | None:
        """Host slots, making room for them if need be; None if there are not so many, or an open step holds them."""
        cache, pool = self.cache, lane.pool
        missing = count - pool.free
        if missing > lane.in_tree - lane.leased:
            return None
        if missing > 0:
            freed: list[Node] = []
            self.evicted += lane.evict(missing, freed)
            cache._epoch += 1
            cache._tree.prune_all(freed)
            if pool.free < count:
                return None
        flight = cache._flight
        before, flight.claimed = flight.claimed, 0  # of slots that were taken before these
        slots = pool.take(count)
        if self.blocked(flight.claimed):
            flight.claimed = before
            pool.give(slots.tobytes())
            return None
        flight.claimed = max(before, flight.claimed)
        return slots

    def blocked(self, fence: int) -> bool:
        """Whether a step up to ``fence`` is still open: nothing can be enqueued behind that yet."""
        return fence > 0 and any(work.event is None for work in self.cache._flight.unfinished(fence))

    # ------------------------------------------------------------ running copies
    def stream(self, way: str, fence: int) -> Stream:
        """Where copies ``way`` ("down", "up") run: beside the forward stream, or at once where nothing is running."""
        cache = self.cache
        known = self.streams.get(way)
        if known is not None:
            return known
        if cache.composition.device.startswith("cuda"):
            import torch

            raw = torch.cuda.Stream(cache.composition.device)  # type: ignore[no-untyped-call]
            known = self.streams[way] = cache._stream(raw)
            return known
        if not cache._flight.unfinished(fence) and not self.manifest.overlap:
            return cache._stream(None)
        thread = ThreadStream(f"{self.part.name} tier, {way}")
        weakref.finalize(cache, thread.dismiss)
        known = self.streams[way] = cache._stream(thread)
        return known

    def bring(self, jobs: Sequence[Job], nodes: list[Node], hold: Hold) -> None:
        """Have what a store brought written into host slots, as work behind all that ``hold`` comes after."""
        flight, debug = self.cache._flight, self.cache._debug
        before = flight._launched
        try:
            work = flight.begin()
            stream = self.stream("down", hold.fence)
            work.stream, work.since = stream, stream.tick
            flight.order(work, stream, hold.fence, hold)
            for lane, slots, write in jobs:
                lane.pool.enter(slots, Stage.WRITING)
                stream.run(write)
                if debug is not None:
                    debug.accessed(stream, f"fetch of {lane.device.name}", lane.pool, (), slots, lane.pool)
                lane.pool.enter(slots, Stage.SEALED)
                lane.pool.enter(slots, Stage.PUBLISHED)
        finally:
            self.end(before, "fetch")
        if not work.over:
            work.holds = [hold]
            flight.carry(work, hold, nodes, [(lane, set(slots)) for lane, slots, _ in jobs], below=True)

    def run(self, moves: Sequence[Moves], nodes: list[Node], hold: Hold, way: str) -> Work:
        """Enqueue copies ``way`` as one piece of work, behind all that ``hold`` comes after; what they write lies at
        ``nodes``.

        What an inline stream raises comes out here, and nothing was copied that anybody may read.
        """
        flight = self.cache._flight
        stream, before = self.stream(way, hold.fence), flight._launched
        try:
            work = flight.begin()
            work.stream, work.since = stream, stream.tick
            flight.order(work, stream, hold.fence, hold)
            for group in self.groups if way == "up" and not stream.inline else ((),):
                for mine in moves:
                    self._run_one(mine, stream, way, group)
                if group:
                    work.gates = [*work.gates, (group[1] - 1, stream.record())]
        finally:
            self.end(before, way)
        if not work.over:
            work.holds = [hold]
            written: list[tuple[Lane, set[int]]] = [
                (mine.lane if way == "down" else mine.lane.device, set(mine.dst)) for mine in moves
            ]
            flight.carry(work, hold, nodes, written, below=way == "down")
        return work

    def end(self, before: int, way: str) -> None:
        """No work that was begun after number ``before`` is left open: an interrupt may come before it has a name."""
        flight = self.cache._flight
        for work in flight.works[:]:
            if work.number > before and work.event is None and not work.over:
                flight.end(work, work.stream or self.cache._stream(None), (), COPY[way])

    def _run_one(self, mine: Moves, stream: Stream, way: str, group: tuple[int, ...]) -> None:
        """Enqueue the copies of one component, of a group of the model's layers or of all."""
        source, target = mine.ends(way)
        source.orderly = target.orderly = self._orderly
        target.enter(mine.dst, Stage.WRITING)
        try:
            stream.run(partial(copy_between, source, tuple(mine.src), target, tuple(mine.dst), *group))
        except BaseException:
            mine.raised = True
            raise
        target.enter(mine.dst, Stage.SEALED)
        debug = self.cache._debug
        if debug is not None:
            debug.accessed(stream, f"copy {way} of {mine.lane.device.pool.name}", target, mine.src, mine.dst, source)
        if way == "down":
            target.enter(mine.dst, Stage.PUBLISHED)
