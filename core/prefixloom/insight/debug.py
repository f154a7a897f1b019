"""Debug mode: a check of all invariants of a cache after every operation.

It is on with ``PREFIXLOOM_DEBUG=1`` or ``debug=True``; the tests always have it on. It reads everything and changes
nothing. A broken invariant is an ``InvariantError`` that names the operation after which it was found.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Many
from weakref import WeakSet

from ..contract.shares import SharedQueue, owner_of
from ..device.handles import call_site
from ..device.pool import Pool, Stage
from ..device.race import Race
from ..device.streams import Stream
from ..errors import InvariantError, ProtocolError
from ..keys.elements import extra_numbers
from ..operations.state import Core, Hold, Row, Running
from ..tree.cells import Cells
from ..tree.lane import Lane
from ..tree.partial_lane import PartialLane
from ..tree.radix import Node, descendants, path_up, root_of

Owned = tuple[Many[int], Node | Hold]
"""Slots and who owns them."""


class WatchedStep:
    """The slots that the layers of a step touch. By lane: the pool, the slots that are read, those that are written,
    and those of the latter that had content before.
    """

    def __init__(self, rows: Many[Row]) -> None:
        self.rows = rows
        self.touched: list[tuple[Pool, list[int], list[int], set[int]]] = []


class Debug:
    """The watcher of one cache in debug mode: its live leases, the stages of its slots, and the race detector."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.take_over()
        self.leases: WeakSet[Hold] = WeakSet()
        self._race = Race()
        self.checks = 0

    # ------------------------------------------------------------ events
    def enter(self) -> None:
        if threading.get_ident() != self._thread:
            raise ProtocolError(
                "one thread drives a cache; this call came from another (use completions instead, or let threads take "
                "turns with take_over)"
            )

    def take_over(self) -> None:
        self._thread = threading.get_ident()

    def leased(self, lease: Hold) -> None:
        lease.made_at = call_site()
        self.leases.add(lease)

    def released(self, lease: Hold) -> None:
        self.leases.discard(lease)

    def flushed(self) -> None:
        self.leases = WeakSet()

    def follow(self, stream: Stream) -> None:
        self._race.follow(stream)

    # ------------------------------------------------------------ steps and slots
    def accessed(
        self, stream: Stream, what: str, pool: Pool, reads: Many[int], writes: Many[int], source: Pool
    ) -> None:
        """Record that work which reads slots of ``source`` and writes slots of ``pool`` was enqueued."""
        if source is pool:
            self._race.access(stream, what, pool.name, reads=reads, writes=writes)
        else:
            self._race.access(stream, what, source.name, reads=reads)
            self._race.access(stream, what, pool.name, writes=writes)

    def writing(self, what: str, pool: Pool, slots: Many[int]) -> None:
        """Refuse an op that is about to write slots of the tree, or of nobody."""
        for slot in slots:
            stage = pool.stage_of(slot)
            if stage in (Stage.FREE, Stage.PUBLISHED):
                raise InvariantError(f"{what} writes slot {slot} of pool {pool.name!r}, which is {stage.name}")

    def step_begun(self, rows: Many[Row]) -> WatchedStep:
        """Record the begin of a step: the slots that its layers write are being written from now on."""
        step = WatchedStep(rows)
        step.touched = [self._touched(step, lane) for lane in self._core.shape.lanes]
        return step

    def table_read(self, begun: WatchedStep, lane: Lane) -> None:
        """Update the slots of a step, whose layers read the table just now: it may have changed since the begin."""
        *_, sealed = begun.touched[lane.index]
        pool, reads, writes, more = self._touched(begun, lane)
        begun.touched[lane.index] = pool, reads, writes, sealed | more

    def _touched(self, step: WatchedStep, lane: Lane) -> tuple[Pool, list[int], list[int], set[int]]:
        reads: list[int] = []
        writes: list[int] = []
        looks = lane.part.manifest.lookahead
        for row in step.rows:
            running, start, end = row.running, row.start, row.end
            if running.core is None:
                continue
            if row.draft:
                start, end = running.committed, running.reserved
            if looks:  # what waited for a token that is named by now is written again
                start = min(start, running.complete)
            holding = running.held[lane.index]
            written = [] if row.draft and not looks else writes  # a draft model writes its own
            lane.touches(holding, start, end, reads, written)
            if row.draft and lane.unit == "boundary" and holding.slot >= 0:
                reads.append(holding.slot)
        sealed = {slot for slot in writes if lane.live.stage_of(slot) == Stage.SEALED}
        lane.live.enter(writes, Stage.WRITING)
        return lane.live, reads, writes, sealed

    def step_ended(self, begun: WatchedStep, name: str, stream: Stream, well: bool, ordered: bool) -> None:
        stream.run(no_work)  # the tick of the layers
        for pool, reads, writes, sealed in begun.touched:
            for slot in writes:
                if pool.stage_of(slot) == Stage.WRITING:  # else it was given back meanwhile
                    pool.enter((slot,), Stage.SEALED if well or slot in sealed else Stage.RESERVED)
            if ordered and begun.rows:
                self.accessed(stream, f"the layers of {name}", pool, reads, writes, pool)

    def arrived(self, running: Running, start: int, upto: int) -> None:
        for lane, holding in running.pairs:
            writes: list[int] = []
            lane.touches(holding, start, upto, [], writes)
            lane.live.enter(writes, Stage.SEALED)

    def published(self, run: Many[Node]) -> None:
        """Record that the tree owns what these nodes hold; it must have been sealed."""
        for node in run:
            for lane in self._core.shape.lanes:
                lane.pool.enter(lane.slots_of(lane.cell(node)), Stage.PUBLISHED)

    # ------------------------------------------------------------ checks
    def check(self, operation: str) -> None:
        """Check all invariants. The ``InvariantError`` names ``operation``, the last one."""
        self.checks += 1
        try:
            nodes = self._check_tree()
            for lane in self._core.shape.all_lanes:
                self._check_owners(lane, nodes)
                self._check_cells(lane, nodes)
                self._check_queues(lane, nodes)
            self._check_surplus()
            self._check_steps()
        except InvariantError as error:
            raise InvariantError(f"after {operation}: {error}") from None

    def _reachable(self) -> list[Node]:
        """Return all nodes: those under a root, and those of dropped namespaces that a lease still holds."""
        index = self._core.index
        held = [root_of(lease.node) for lease in list(self.leases)]
        roots = dict.fromkeys((*index.tree.roots.values(), *index.dropped_roots, *held))
        return [node for root in roots for node in (root, *descendants(root))]

    def _check_tree(self) -> list[Node]:
        nodes = self._reachable()
        self._core.index.tree.check(nodes, Counter(lease.node for lease in self.leases))
        for node in nodes:
            if not self._core.keys.meant.keys() >= extra_numbers(node.key):
                raise InvariantError(f"{node!r} has a number for an extra key that was forgotten")
        return nodes

    def _check_owners(self, lane: Cells, nodes: list[Node]) -> None:
        """Check that every slot has one owner: the free list, a sequence, a cell, or a minted span."""
        owned: list[Owned] = [(lane.slots_of(lane.cell(node)), node) for node in nodes]
        cached = sum(len(slots) for slots, _ in owned)
        if cached != lane.in_tree:
            raise InvariantError(f"{lane.pool.name}: {cached} pages are cached, the books say {lane.in_tree}")
        held = [(hold, holding) for hold in self._core.live for other, holding in hold.pairs if other is lane]
        if isinstance(lane, Lane):
            owned += [(lane.own_slots(holding), hold) for hold, holding in held]
        _check_pool(lane.pool, owned)
        if isinstance(lane, Lane) and lane.live is not lane.pool:
            _check_pool(lane.live, [(lane.live_slots(holding), hold) for hold, holding in held])
        if lane.unit == "page":  # a load writes a state of a sequence's own as well, which goes its way
            self._check_unwritten(lane, owned)

    def _check_unwritten(self, lane: Cells, owned: list[Owned]) -> None:
        """Check that pages that work in flight has yet to write have no later owner: if it fails, they are freed."""
        for publication in self._core.unwritten.publications:
            for slots in [slots for other, slots in publication.slots if other is lane]:
                for mine, who in owned:
                    if who not in publication.nodes and not slots.isdisjoint(mine):
                        raise InvariantError(f"{lane.name}: {_named(who)} has a slot that older work has yet to write")

    def _check_cells(self, lane: Cells, nodes: list[Node]) -> None:
        """Check what a lane counts of its cells: locks, links, pages and slack. The locks on the device are exactly
        those of live leases; between operations, only a store pins cells of the host.
        """
        name, on_device = lane.pool.name, lane.tier == "device"
        covers = Counter(node for lease in self.leases if on_device for node in _covered(lane, lease))
        leased = 0
        for node in nodes:
            cell, locks = lane.cell(node), covers[node]
            if cell is None:
                if locks:
                    raise InvariantError(f"{name}: a lease covers {node!r}, which holds nothing")
                continue
            pages = len(lane.slots_of(cell))
            if lane.closed_upward:
                kids = lane.cells_below(node)
                locks += sum(1 for kid in kids if kid.locks) + (not node.end)
                if cell.below != len(kids):
                    raise InvariantError(f"{name}: {node!r} counts {cell.below} cells below, not {len(kids)}")
                if on_device and node.end and lane.cell_above(node) is None:
                    raise InvariantError(f"{name}: {node!r} hangs loose")
            if on_device and cell.locks != locks:
                raise InvariantError(f"{name}: {node!r} has {cell.locks} locks; live leases give {locks}")
            if cell.pages != pages:
                raise InvariantError(f"{name}: {node!r} miscounts its pages")
            leased += pages if cell.locks else 0
            if isinstance(lane, PartialLane):
                slack = 0 if cell.slack is None else cell.slack.pages
                if slack != lane.slack_of(cell):
                    raise InvariantError(f"{name}: {node!r} has {lane.slack_of(cell)} pages of slack, unlike its queue")
        if leased != lane.leased:
            raise InvariantError(f"{name}: {leased} pages are covered, the books say {lane.leased}")

    def _check_queues(self, lane: Cells, nodes: list[Node]) -> None:
        """Check that the cells that may be evicted stand in the queues, and no others but inner anchors of a path."""
        name, held = lane.pool.name, Counter[str]()
        if strays := lane.strays():
            raise InvariantError(f"{name}: a queue has or remembers a cell that {strays[0].node!r} has not")
        for node in nodes:
            cell = lane.cell(node)
            if cell is None or not node.end:
                continue
            queued = cell.next is not None
            if not queued and lane.uncovered(cell):
                raise InvariantError(f"{name}: {node!r} may be evicted but stands in no queue")
            if queued and cell.locks and not (lane.closed_upward and lane.tier == "device"):
                raise InvariantError(f"{name}: {node!r} is covered but stands in the eviction queue")
            if isinstance(lane.queue, SharedQueue):
                held[owner_of(root_of(node).namespace)] += len(lane.slots_of(cell))
        if isinstance(lane.queue, SharedQueue) and held != lane.queue.held:
            raise InvariantError(f"{name}: owners keep {dict(held)}, and their shares say {dict(lane.queue.held)}")

    def _check_surplus(self) -> None:
        for lane in self._core.shape.partial_lanes:
            if not lane.surplus.keys() <= self._core.live.keys():
                raise InvariantError(f"{lane.name}: a sequence that has ended is still asked for what it may spare")

    def _check_steps(self) -> None:
        """Check that a step which is open no more is forgotten."""
        if not any(work.event is None for work in self._core.flight.works):
            for running in self._core.live:
                if running.steps or (running.looks is not None and running.looks.open):
                    raise InvariantError(f"{_named(running)} is in a step, and none is open")


def _check_pool(pool: Pool, owned: list[Owned]) -> None:
    everything = [*pool.free_ids()]
    for slots, _ in owned:
        everything += slots
    known = set(everything)
    if known and (len(known) < len(everything) or min(known) < 0 or max(known) >= pool.capacity):
        raise InvariantError(f"{pool.name}: {_wrong(pool, owned)}")
    if pool.outside and not all(map(pool.has, known)):
        raise InvariantError(f"{pool.name}: a slot is owned here, and is with the engine that lends it")
    found = len(known) + pool.minted + pool.outside
    if found != pool.capacity:
        raise InvariantError(f"{pool.name}: {pool.capacity - found} slots are nobody's")


def _wrong(pool: Pool, owned: list[Owned]) -> str:
    """Describe the first slot that does not exist or has two owners."""
    owners: dict[int, Node | Hold | None] = {}
    for slots, who in ((pool.free_ids(), None), *owned):
        for slot in slots:
            if not 0 <= slot < pool.capacity:
                return f"{_named(who)} has slot {slot}, which does not exist"
            if slot in owners:
                return f"slot {slot} is owned by {_named(owners[slot])} and by {_named(who)}"
            owners[slot] = who
    raise AssertionError("every slot exists and has one owner")


def _named(owner: Node | Hold | None) -> str:
    """Name the owner of a slot: a node, a sequence, or the free list."""
    if owner is None:
        return "the free list"
    return repr(owner) if isinstance(owner, Node) else f"the sequence {owner.label!r} made at {owner.made_at}"


def _covered(lane: Cells, lease: Hold) -> Iterator[Node]:
    """Yield the nodes whose cells a lease locks."""
    cover = lease.covers[lane.index]
    if not isinstance(lane, PartialLane):
        yield from () if cover is None else (cover.node,)
        return
    for cell, start in cover or ():
        yield from path_up(cell.node, start)


def no_work() -> None:
    pass
