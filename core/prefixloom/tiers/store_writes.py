"""Store writes: data of the host goes to a store, a bounded number of pieces at a poll, and nothing waits for it.

A cell is offered when its content is on the host or about to arrive. A poll hands over some pieces; a thread of the
store reads them from the host's slots, which stay pinned until then. What the store refuses is counted and left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import attrs

from ..device.flight import Work
from ..device.host_pool import HostPool
from ..device.pool import ABSENT
from ..operations.lease import sweep
from ..operations.state import Core, Hold
from ..storage import Backend, Fingerprint, Record, Refused, Stored
from ..tree.radix import Node, path_key, path_up, root_of
from .host_lane import HostCell, HostLane
from .pieces import Spares, links_at, piece_key, said
from .store import Answers, PendingCall, StoreBehind

PER_POLL = 256
"""The most places of edges that are handed over at one poll: about a millisecond of the scheduling thread."""

PER_CALL = 64
"""The most pieces in one call to a store."""

PieceToStore = tuple[bytes, int, int, int]
"""(link, start, end, slot); the store's thread makes the key from the link."""


@attrs.frozen
class Writing:
    """A call that writes ``count`` pieces.

    ``paths`` are what journals are told of each piece that is refused; empty where nobody followed the cache.
    """

    call: PendingCall
    count: int
    paths: Sequence[dict[str, Any]]


class StoreWrites:
    """The writes of one cache to its store: the cells that were offered, and the calls that are not over yet.

    ``handed`` counts the pieces of all calls, ``stored`` and ``refused`` those whose result is known.
    """

    def __init__(self, behind: StoreBehind) -> None:
        self.behind = behind
        self.queue: deque[tuple[HostLane, Node]] = deque()
        self.unseen: list[tuple[Node, bool]] = []
        """The nodes from before the store was attached; and whether all nodes below are from before, too."""
        self.calls: list[Writing] = []
        self.handed = self.stored = self.refused = 0
        self._seen = 0  # the number of the store for which ``unseen`` was made
        for lane in behind.copies.lanes:
            lane.going = self.rescue

    @property
    def outstanding(self) -> int:
        """How much of what is to be written was not answered for by the store: nodes, and pieces of calls."""
        if self.behind.store is None:
            return 0
        written = sum(writing.count for writing in self.calls)
        return len(self.unseen) + len(self.behind.copies.pending) + len(self.queue) + written

    # ------------------------------------------------------------ offers
    def copied(self, lane: HostLane, node: Node) -> None:
        """Offer data that the host has, or is about to have, at ``node``."""
        if self._keeps("through"):
            self.offer(lane, node)

    def used(self, nodes: Sequence[Node]) -> None:
        """Offer nodes that were hit often enough."""
        if self._keeps("selective"):
            for node in nodes:
                self._offer_all(node)

    def _keeps(self, when: str) -> bool:
        return self.behind.store is not None and self.behind.component.keep == when

    def offer(self, lane: HostLane, node: Node) -> None:
        self.queue.append((lane, node))

    def _offer_all(self, node: Node) -> None:
        for lane in self.behind.copies.lanes:
            if lane.cell(node) is not None:
                self.offer(lane, node)

    def _offer_unseen(self) -> None:
        """Offer a few of the nodes from before the store was attached."""
        if self._seen != self.behind.attached:
            self._seen, self.unseen = self.behind.attached, []
            if self._keeps("through"):
                roots = self.behind.core.index.tree.roots.values()
                self.unseen = [(node, True) for root in roots for node in root.children]
        for _ in range(min(PER_POLL, len(self.unseen))):
            node, deep = self.unseen.pop()
            if deep:
                self.unseen.extend((kid, True) for kid in node.children)
            self._offer_all(node)

    def divided(self, upper: Node) -> None:
        """Note that a node was split. Its upper half is a new node; the lower half is the one that is known."""
        if self.unseen:
            self.unseen.append((upper, False))

    def flushed(self) -> None:
        self.queue.clear()
        self.unseen = []

    # ------------------------------------------------------------ handing over
    def poll(self) -> None:
        """Count the results of calls that are over, and hand over more."""
        going = []
        for writing in self.calls:
            if writing.call.over:
                self._count(writing, writing.call.answers or ())
            else:
                going.append(writing)
        self.calls = going
        self._offer_unseen()
        left = PER_POLL
        for _ in range(len(self.queue)):
            if left <= 0 or self.behind.store is None:
                break
            lane, node = self.queue.popleft()
            above = lane.cell_above(node)
            if above is not None and self.left(above):
                self.queue.append((lane, above.node))  # it may have been split off since the offer
            cell = lane.cell(node)
            if cell is not None and (count := min(left, self.left(cell))):
                for batch in self._take(lane, cell, count):
                    self._put(lane, cell, batch)
                if self.left(cell):
                    self.queue.appendleft((lane, node))
                left -= count

    def left(self, cell: HostCell) -> int:
        """Return the number of places of ``cell`` that the present store was not given."""
        if cell.store != self.behind.attached:
            cell.store, cell.left = self.behind.attached, cell.places
        return min(cell.left, cell.places)

    def rescue(self, lane: HostLane, cell: HostCell) -> None:
        """Copy the content of ``cell``, which is about to be evicted from the host, and hand it over."""
        if not self._keeps("back"):
            return
        written = not self.behind.copies_to(lane, cell.node)
        for batch in self._take(lane, cell, self.left(cell)):
            self.handed += len(batch)
            if written:
                payloads = [content(self.behind.spares, lane.pool, slot) for *_, slot in batch]
                call = self._ask(lane, cell.node, batch, partial(self._put_of(lane, batch), payloads=payloads))
                # a store that has refused all of these would refuse the others; a quick one may have taken them by now
                written = not call.over or any(isinstance(answer, Stored) for answer in call.answers or ())
            else:
                self.refused += len(batch)

    def _take(self, lane: HostLane, cell: HostCell, count: int) -> Iterator[list[PieceToStore]]:
        """Return the pieces of the next ``count`` places of a cell, for one call each time."""
        node, page, left = cell.node, self.behind.core.shape.page, self.left(cell)
        cell.left = left - count
        start, edge = node.start, lane.edge(node)
        first = len(edge) - left
        slots = edge[first : first + count]
        found = [(*lane.span(node, place), slot) for place, slot in enumerate(slots, first) if slot != ABSENT]
        if found:
            links = links_at(self.behind.chain, self.behind.core.keys, node, (found[-1][1] - 1 - start) // page + 1)
            pieces = [(links[(high - 1 - start) // page], low, high, slot) for low, high, slot in found]
            for at in range(0, len(pieces), PER_CALL):
                yield pieces[at : at + PER_CALL]

    def _put(self, lane: HostLane, cell: HostCell, pieces: list[PieceToStore]) -> None:
        """Write pieces of ``cell``, which stays pinned until all ranks have read them."""
        behind, core, node, pool = self.behind, self.behind.core, cell.node, lane.pool
        span, flushes, resets = node.start, core.index.flushes, pool.resets
        copies = behind.copies_to(lane, node)
        before = [work for work in core.flight.works if copies and work.number <= copies[-1].number and work.event]
        writers = core.unwritten.writers(node) if copies else []
        lane.pin(cell)

        def unpin(_: int) -> None:
            if flushes == core.index.flushes:
                unpin_span(core, lane, node, span)
                if core.index.dropped_roots:
                    sweep(core)

        pinned = [partial(behind.completions.done, behind.open(unpin), 1)]

        def released() -> None:  # called by ``write``, or when ``write`` will never run
            while pinned:
                pinned.pop()()

        def write(backend: Backend) -> Answers:
            # here, not at the poll after the copies: ranks would differ in when that is, and so in their tickets (0097)
            if not copied(copies, before, writers):  # the copy to the host failed, or what wrote its source
                return (None,) * len(pieces)
            payloads = [content(behind.spares, pool, slot) for *_, slot in pieces]
            stale = pool.resets != resets  # after a flush the slots may have another owner
            released()
            return (None,) * len(pieces) if stale else store(backend, payloads=payloads)

        store = self._put_of(lane, pieces)
        self.handed += len(pieces)
        self._ask(lane, node, pieces, write, released)

    def _put_of(self, lane: HostLane, pieces: list[PieceToStore]) -> Callable[..., Answers]:
        """Return ``put`` for these pieces, under the present fingerprint."""
        return partial(
            put, spares=self.behind.spares, fingerprint=self.behind.fingerprints[lane.index], lane=lane, pieces=pieces
        )

    def _ask(
        self,
        lane: HostLane,
        node: Node,
        pieces: list[PieceToStore],
        write: Callable[[Backend], Answers],
        released: Callable[[], None] | None = None,
    ) -> PendingCall:
        count, store = len(pieces), self.behind.store
        assert store is not None
        call = self.behind.ask(store, "write", write, lambda why: (why,) * count, [lane] * count, released)
        self.calls.append(Writing(call, count, self._paths(lane, node, pieces)))
        return call

    # ------------------------------------------------------------ results
    def _count(self, writing: Writing, answers: Answers) -> None:
        """Count the results of a call, and tell journals of each piece that is not in the store, with the reason."""
        stored = min(writing.count, sum(isinstance(answer, Stored) for answer in answers))
        self.stored += stored
        self.refused += writing.count - stored
        recorder = self.behind.core.recorder
        for path, answer in zip_longest(writing.paths, answers[: len(writing.paths)]):
            if recorder.journals and not isinstance(answer, Stored):
                if isinstance(answer, Refused):
                    answer = said(answer.reason, answer.detail)
                cause = answer if isinstance(answer, str) else "the copy to the host failed"
                recorder.refused(tier="store", cause=cause, **path)

    def _paths(self, lane: HostLane, node: Node, pieces: Sequence[PieceToStore]) -> Sequence[dict[str, Any]]:
        """Return what a journal is told of each piece if the store refuses it."""
        if not self.behind.core.recorder.journals:
            return ()
        tokens, is_state = self.behind.core.keys.tokens_in(path_key(node)), lane.unit == "boundary"
        common = {"component": lane.name, "namespace": root_of(node).namespace, "tokens": tokens}
        return [
            {**common, "boundary": high} if is_state else {**common, "spans": ((low, high),)}
            for _, low, high, _ in pieces
        ]


def content(spares: Spares, pool: HostPool, slot: int) -> memoryview:
    """Copy the content of a host slot into a spare buffer."""
    payload = spares.take(pool.slot_bytes)
    pool.read_into(slot, payload)
    return memoryview(payload)


def put(
    backend: Backend,
    *,
    spares: Spares,
    fingerprint: Fingerprint,
    lane: HostLane,
    pieces: Sequence[PieceToStore],
    payloads: Sequence[memoryview],
) -> Answers:
    """Put pieces into a store. It runs on the store's thread, since keys and checksums are its largest cost."""
    name = lane.device.name
    answers = backend.put(
        [
            Record(piece_key(lane, fingerprint, link, low, high), name, low, high, "record", payload)
            for (link, low, high, _), payload in zip(pieces, payloads, strict=True)
        ]
    )
    for payload in payloads:  # not if it raised: the store may still read them then
        spares.give(payload)
    return answers


def copied(copies: Sequence[Work[Hold]], before: Sequence[Work[Hold]], writers: Sequence[Hold]) -> bool:
    """Wait for copies, which are over soon, and return whether all went well that ``writers`` did ``before`` and there.

    It runs on the store's thread. A copy of what a failed step wrote does not fail itself; the work before a copy is
    over when the copy is. A step in which others failed is no reason to leave out what went well in it.
    """
    for work in copies:
        assert work.event is not None and work.stream is not None
        while not work.stream.until(work.event, 1.0):  # it does not change the scheduling thread's clock
            pass
    lost = [hold for work in before for followers, _ in work.failures() for hold in followers]
    return not any(hold in lost or hold.failed for hold in writers)  # last: the scheduling thread may note it meanwhile


def unpin_span(core: Core, lane: HostLane, node: Node, start: int) -> None:
    """Unpin what was the cell of ``node`` when that began at ``start``: cells may have been split off it since then."""
    run = [node] if lane.unit == "boundary" else path_up(node, start)  # a state is not divided
    for pinned in [lane.cell(each) for each in run]:
        assert pinned is not None
        lane.unpin(pinned)
    for each in run:
        core.index.prune(each)
