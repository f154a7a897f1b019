"""Debug mode: after every operation, the cache's books are kept a second time and compared.

On with ``PREFIXLOOM_DEBUG=1`` or ``debug=True``; the tests always have it on. It reads everything and changes nothing.
What it finds is an ``InvariantError`` that names the operation after which the books were wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ..device.handles import site
from ..device.pool import Pool, Stage, present
from ..device.race import Race
from ..errors import InvariantError, ProtocolError
from ..tree.radix import Node

if TYPE_CHECKING:
    from ..device.streams import Stream
    from ..operations.lease import Hold
    from ..tiers.host_lane import HostLane
    from ..tree.lane import Lane
    from .cache import Cache
    from .sequence import Sequence
    from .step import Step

    Touched = tuple[Pool, list[int], list[int], set[int]]  # what is read, written, and had content before


class Debug:
    """The second set of books of one cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._thread = threading.get_ident()
        self._leases: WeakSet[Hold] = WeakSet()
        self.race = Race()
        self.checks = 0

    # ------------------------------------------------------------ events
    def enter(self) -> None:
        if threading.get_ident() != self._thread:
            raise ProtocolError("one thread drives a cache; this call came from another (use completions instead)")

    def leased(self, lease: Hold) -> None:
        lease._where = site()
        self._leases.add(lease)

    def released(self, lease: Hold) -> None:
        self._leases.discard(lease)

    def flushed(self) -> None:
        self._leases = WeakSet()

    # ------------------------------------------------------------ steps and slots
    def accessed(
        self, stream: Stream, what: str, pool: Pool, reads: Many[int], writes: Many[int], source: Pool
    ) -> None:
        """Work that reads slots of ``source`` and writes slots of ``pool`` has been enqueued."""
        if source is pool:
            self.race.access(stream, what, pool.name, reads=reads, writes=writes)
        else:
            self.race.access(stream, what, source.name, reads=reads)
            self.race.access(stream, what, pool.name, writes=writes)

    def begin(self, step: Step) -> list[Touched]:
        """The slots that the layers of ``step`` read and write, of every component."""
        return [self._touched(step, lane) for lane in self._cache._lanes]

    def looked_up(self, step: Step, lane: Lane) -> None:
        """The layers were told what is theirs just now: publications since the step began may have changed it."""
        *_, sealed = step._touched[lane.index]
        pool, reads, writes, more = self._touched(step, lane)
        step._touched[lane.index] = pool, reads, writes, sealed | more

    def _touched(self, step: Step, lane: Lane) -> Touched:
        reads: list[int] = []
        writes: list[int] = []
        for k, sequence in enumerate(step._sequences):
            if sequence.open:
                start, end = sequence.committed, sequence.reserved
                if step.role == "target":
                    _, start, end = step._begun[k]
                holding = sequence._holding(lane.name)[1]
                lane.touches(holding, start, end, reads, writes)
                if step.role == "draft" and lane.unit == "boundary":
                    reads.extend(slot for slot in (holding.slot,) if slot >= 0)
        if step.role == "draft" and not lane.part.manifest.lookahead:
            writes = []  # a draft model reads what the target wrote, and writes its own
        sealed = {slot for slot in writes if lane.live.stage_of(slot) == Stage.SEALED}
        lane.live.enter(writes, Stage.WRITING)
        return lane.live, reads, writes, sealed

    def layers(self, step: Step, stream: Stream, well: bool, ended: Many[Sequence]) -> None:
        """The layers of ``step`` have been enqueued on ``stream``; not, if it was the last step of none that it had."""
        stream.run(_nothing)  # the tick of the layers
        for pool, reads, writes, sealed in step._touched:
            for slot in writes:
                if pool.stage_of(slot) == Stage.WRITING:  # else it was given back meanwhile
                    pool.enter((slot,), Stage.SEALED if well or slot in sealed else Stage.RESERVED)
            if ended:
                self.race.access(stream, f"the layers of {step!r}", pool.name, reads=reads, writes=writes)

    def arrived(self, sequence: Sequence, start: int, upto: int) -> None:
        """Content came without a step."""
        for lane, holding in sequence._pairs:
            writes: list[int] = []
            lane.touches(holding, start, upto, [], writes)
            lane.live.enter(writes, Stage.SEALED)

    def published(self, run: list[Node]) -> None:
        """What hangs at these nodes is the tree's; it must have been sealed."""
        for node in run:
            for lane in self._cache._lanes:
                lane.pool.enter(lane.slots_of(node.cells[lane.index]), Stage.PUBLISHED)

    # ------------------------------------------------------------ checks
    def check(self, what: str) -> None:
        """All invariants; InvariantError says which one ``what`` left broken."""
        self.checks += 1
        try:
            nodes = self._check_tree()
            for lane in self._cache._lanes:
                self._check_owners(lane, nodes)
                self._check_locks(lane, nodes)
                self._check_queue(lane, nodes)
            if self._cache._tier is not None:
                for host in self._cache._tier.lanes:
                    self._check_owners(host, nodes)
                    self._check_host(host, nodes)
            self._check_anchors(nodes)
        except InvariantError as error:
            raise InvariantError(f"after {what}: {error}") from None

    def _reachable(self) -> list[Node]:
        """All nodes: those under a root, and those of dropped namespaces that leases still hold."""
        cache = self._cache
        seen: dict[int, Node] = {}
        stack: list[Node] = [*cache._tree.roots.values(), *cache._graves]
        for lease in list(self._leases):
            node = lease._node
            while node.parent is not None:
                node = node.parent
            stack.append(node)
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen[id(node)] = node
            stack += node.children
        return list(seen.values())

    def _check_tree(self) -> list[Node]:
        tree = self._cache._tree
        nodes = self._reachable()
        for node in nodes:
            kids = node.kids
            told_apart = isinstance(kids, dict)
            found = kids if isinstance(kids, dict) else {} if kids is None else {b"": kids}
            for first, kid in found.items():
                if kid.parent is not node:
                    raise InvariantError(f"{kid!r} does not know its parent")
                if kid.first != first or len(first) != tree.page_bytes * told_apart:
                    raise InvariantError(f"{kid!r} stands under the wrong first page")
                if not kid.key or len(kid.key) % tree.page_bytes:
                    raise InvariantError(f"{kid!r} has an edge that is no whole pages")
                if kid.end != node.end + len(kid.key) // tree.element_bytes:
                    raise InvariantError(f"{kid!r} ends at the wrong boundary")
            bare = node.kids is None and not node.leases and all(cell is None for cell in node.cells)
            if node.parent is not None and bare:
                raise InvariantError(f"{node!r} is bare and was not unlinked")
            for cell in node.cells:
                if cell is not None and cell.node is not node:
                    raise InvariantError(f"a cell of {node!r} belongs to another node")
        linked = sum(node.parent is not None for node in nodes)
        if linked != tree.nodes:
            raise InvariantError(f"{tree.nodes} nodes are counted, and there are {linked}")
        return nodes

    def _check_owners(self, lane: Lane, nodes: list[Node]) -> None:
        """Every slot has one owner: the free list, a sequence, a cell (or a span that somebody minted)."""
        owned: list[tuple[int, Any]] = []  # put into words where it is wrong: that took most of the time
        for node in nodes:
            owned.extend((slot, node) for slot in lane.slots_of(node.cells[lane.index]))
        if len(owned) != lane.in_tree:
            raise InvariantError(f"{lane.name}: {len(owned)} pages are cached, the books say {lane.in_tree}")
        live: list[tuple[int, Any]] = []
        for hold in self._cache._live:
            for other, holding in hold.pairs(self._cache):
                if other is lane:
                    owned.extend((slot, hold) for slot in lane.own_slots(holding))
                    live.extend((slot, hold) for slot in lane.live_slots(holding))
        self._check_pool(lane.pool, owned)
        if lane.live is not lane.pool:
            self._check_pool(lane.live, live)

    def _check_pool(self, pool: Pool, owned: list[tuple[int, Any]]) -> None:
        owners: dict[int, Any] = {}
        for slot, who in (*((slot, None) for slot in pool.free_ids()), *owned):
            if not (0 <= slot < pool.capacity):
                raise InvariantError(f"{pool.name}: {_named(who)} has slot {slot}, which does not exist")
            if slot in owners:
                raise InvariantError(
                    f"{pool.name}: slot {slot} is owned by {_named(owners[slot])} and by {_named(who)}"
                )
            owners[slot] = who
        told = len(owners) + pool.minted
        if told != pool.capacity:
            raise InvariantError(f"{pool.name}: {pool.capacity - told} slots are nobody's")

    def _check_locks(self, lane: Lane, nodes: list[Node]) -> None:
        """What covers a cell is exactly what live leases cover."""
        counts: dict[int, int] = {}
        for lease in self._leases:
            record = lease._records[lane.index]
            if record is not None:
                for node in covered_nodes(lane, record):
                    counts[id(node)] = counts.get(id(node), 0) + 1
        closed = lane.part.reach.closed_upward
        leased = 0
        for node in nodes:
            cell = node.cells[lane.index]
            if cell is None:
                if counts.get(id(node)):
                    raise InvariantError(f"{lane.name}: a lease covers {node!r}, which holds nothing")
                continue
            expected = counts.get(id(node), 0)
            if closed:
                kids = [kid.cells[lane.index] for kid in node.children]
                held = [kid for kid in kids if kid is not None]
                expected += sum(1 for kid in held if kid.locks) + (node.parent is None)
                if cell.below != len(held):
                    raise InvariantError(f"{lane.name}: {node!r} counts {cell.below} cells below, not {len(held)}")
                if node.parent is not None and cell.up is not node.parent.cells[lane.index]:
                    raise InvariantError(f"{lane.name}: {node!r} hangs loose")
            if cell.locks != expected:
                raise InvariantError(f"{lane.name}: {node!r} has {cell.locks} locks; live leases give {expected}")
            if cell.locks:
                leased += len(lane.slots_of(cell))
        if leased != lane.leased:
            raise InvariantError(f"{lane.name}: {leased} pages are covered, the books say {lane.leased}")

    def _check_queue(self, lane: Lane, nodes: list[Node]) -> None:
        for node in nodes:
            cell = node.cells[lane.index]
            if cell is None or node.parent is None:
                continue
            if lane.uncovered(cell):
                if cell.next is None:
                    raise InvariantError(f"{lane.name}: {node!r} may be evicted but stands in no queue")
            elif cell.locks and not lane.part.reach.closed_upward and cell.next is not None:
                raise InvariantError(f"{lane.name}: {node!r} is covered but stands in the eviction queue")
            spans = lane.unit == "page" and not lane.part.reach.closed_upward
            if spans and cell.pages != present(cell.data):
                raise InvariantError(f"{lane.name}: {node!r} miscounts its pages")

    def _check_host(self, lane: HostLane, nodes: list[Node]) -> None:
        """Between operations nothing below the device is pinned but for storage; all else stands in its queue."""
        i = lane.index
        pinned = 0
        for node in nodes:
            cell = node.cells[i]
            if cell is None:
                continue
            if cell.pages != len(lane.slots_of(cell)):
                raise InvariantError(f"{lane.pool.name}: {node!r} miscounts its pages")
            below = sum(kid.cells[i] is not None for kid in node.children) if lane.closed_upward else 0
            if cell.below != below:
                raise InvariantError(f"{lane.pool.name}: {node!r} counts {cell.below} cells below, not {below}")
            if not cell.locks and not cell.below and cell.next is None:
                raise InvariantError(f"{lane.pool.name}: {node!r} may be evicted but stands in no queue")
            if cell.locks and cell.next is not None:
                raise InvariantError(f"{lane.pool.name}: {node!r} is pinned but stands in the queue")
            pinned += cell.pages if cell.locks else 0
        if pinned != lane.leased:
            raise InvariantError(f"{lane.pool.name}: {pinned} pages are pinned, the books say {lane.leased}")

    def _check_anchors(self, nodes: list[Node]) -> None:
        counts: dict[int, int] = {}
        for lease in self._leases:
            counts[id(lease._node)] = counts.get(id(lease._node), 0) + 1
        for node in nodes:
            expected = counts.get(id(node), 0)
            if node.leases != expected:
                raise InvariantError(f"{node!r} counts {node.leases} leases; {expected} are live")


def _named(owner: Any) -> str:
    """Who has a slot, in words: a node, what a sequence holds, or nobody."""
    if owner is None:
        return "the free list"
    return repr(owner) if isinstance(owner, Node) else f"the sequence {owner.label!r} made at {owner._where}"


def _nothing() -> None:
    pass


def covered_nodes(lane: Lane, record: Any) -> list[Node]:
    """The nodes on which a lease's record counts."""
    if lane.unit == "boundary" or lane.part.reach.closed_upward:
        return [record.node]
    node, covered = record
    spans = covered if isinstance(covered, tuple) else ((node.end - covered, node.end),)
    found = []
    while node.parent is not None:
        if any(lo <= node.parent.end and node.end <= hi for lo, hi in spans):
            found.append(node)
        node = node.parent
    return found
