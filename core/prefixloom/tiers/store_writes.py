"""Store writes: data of the host goes to a store, a bounded number of pieces at a poll, and nothing waits for it.

A cell is offered when its content is on the host or about to arrive. A poll hands over some pieces; a thread of the
store reads them from the host's slots, which stay pinned until then. What the store refuses is counted and left out.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
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
from .pieces import Spares, links_at, piece_key
from .store_link import PendingCall, StoreLink

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
    """The writes of one cache to its store: the cells that were offered, and the calls that are not over yet."""

    def __init__(self, link: StoreLink) -> None:
        self.link = link
        self.queue: deque[tuple[HostLane, Node]] = deque()
        self.calls: list[Writing] = []
        self.let_go: dict[int, Callable[[], None]] = {}
        self.handed = self.stored = self.refused = 0

    def offer(self, lane: HostLane, node: Node) -> None:
        self.queue.append((lane, node))

    def flushed(self) -> None:
        self.queue.clear()

    @property
    def outstanding(self) -> int:
        """What was offered and is not handed over, and the pieces of calls whose results are not counted."""
        return len(self.queue) + sum(writing.count for writing in self.calls)

    def handed_of(self, cell: HostCell) -> int:
        """The number of places of ``cell`` that the present store was given."""
        if cell.store != self.link.attached:
            cell.store, cell.stored = self.link.attached, 0
        return cell.stored

    def advance(self, ticket: int) -> bool:
        """Unpin what this ticket pinned, if it is one of a write: all ranks know that the store is done with it."""
        let_go = self.let_go.pop(ticket, None)
        if let_go is not None:
            let_go()
        return let_go is not None

    # ------------------------------------------------------------ scheduling
    def poll(self) -> None:
        """Count the results of calls that are over, and hand over more."""
        going = []
        for writing in self.calls:
            if not writing.call.over:
                going.append(writing)
                continue
            answers = writing.call.answers or ()
            stored = min(writing.count, sum(isinstance(answer, Stored) for answer in answers))
            self.stored += stored
            self.refused += writing.count - stored
            for path, answer in zip_longest(writing.paths, answers[: len(writing.paths)]):
                self._tell(path, answer)
        self.calls = going
        left = PER_POLL
        for _ in range(len(self.queue)):
            if left <= 0 or self.link.store is None:
                break
            lane, node = self.queue.popleft()
            # its upper half may have been split off since the offer, with part of what was offered
            above: HostCell | None = lane.cell_above(node)
            if above is not None and self.handed_of(above) < above.places:
                self.queue.append((lane, above.node))
            cell: HostCell | None = lane.cell(node)
            if cell is not None and self.handed_of(cell) < cell.places:
                left -= self._hand_over(lane, node, cell, left)

    def _hand_over(self, lane: HostLane, node: Node, cell: HostCell, most: int) -> int:
        """Hand over at most ``most`` places of a cell, and return how many; the others follow at the next poll."""
        before = cell.stored
        pieces = self.pieces(lane, node, cell, most)
        cell.stored = min(cell.places, before + most)
        if cell.stored < cell.places:
            self.queue.appendleft((lane, node))
        for first in range(0, len(pieces), PER_CALL):
            self._put(lane, node, cell, pieces[first : first + PER_CALL])
        return cell.stored - before

    def rescue(self, lane: HostLane, cell: HostCell) -> None:
        """Copy the content of ``cell``, which is about to be evicted from the host, and hand it over."""
        store, pool = self.link.store, lane.pool
        assert isinstance(pool, HostPool)
        if store is None or self.handed_of(cell) >= cell.places:
            return
        pieces = self.pieces(lane, cell.node, cell, cell.places)
        self.handed += len(pieces)
        if self.link.copies_to(lane, cell.node):
            self.refused += len(pieces)
            return
        for first in range(0, len(pieces), PER_CALL):
            batch = pieces[first : first + PER_CALL]
            spares = self.link.spares
            payloads = [content(spares, pool, slot) for *_, slot in batch]
            fingerprint = self.link.fingerprints[lane.index]
            write = partial(put, spares=spares, fingerprint=fingerprint, lane=lane, pieces=batch, payloads=payloads)
            timed = self.link.timed("write", write, [lane] * len(batch))
            call = store.ask(timed, nothing(len(batch)), writes=True, size=len(batch) * pool.record_bytes)
            self.calls.append(Writing(call, len(batch), self._paths(lane, cell.node, batch)))
            if call.over:  # the store did not take it, and would not take the others either
                self.refused += len(pieces) - first - len(batch)
                return

    def pieces(self, lane: HostLane, node: Node, cell: HostCell, most: int) -> list[PieceToStore]:
        """The pieces of the next ``most`` places of a cell to store."""
        core = self.link.core
        found: list[PieceToStore] = []
        start, end = node.start, node.end
        if lane.unit == "boundary":
            spans = [(end, end, cell.data)]
        else:
            page, first = lane.part.page_tokens, cell.stored
            spans = [
                (start + place * page, start + (place + 1) * page, slot)
                for place, slot in enumerate(array("i", cell.data)[first : first + most], first)
                if slot != ABSENT
            ]
        if not spans:
            return found
        links = links_at(self.link.chain, core.keys, node, (spans[-1][1] - 1 - start) // core.shape.page + 1)
        for low, high, slot in spans:
            found.append((links[(high - 1 - start) // core.shape.page], low, high, slot))
        return found

    def _put(self, lane: HostLane, node: Node, cell: HostCell, pieces: Sequence[PieceToStore]) -> None:
        core, store = self.link.core, self.link.store
        assert store is not None
        lane.pin(cell)
        span, flushes = node.start, core.index.flushes
        pool: Any = lane.pool
        resets, spares = pool.resets, self.link.spares
        copies, fingerprint = self.link.copies_to(lane, node), self.link.fingerprints[lane.index]
        before = [work for work in core.flight.works if copies and work.number <= copies[-1].number and work.event]
        writers = core.unwritten.writers(node) if copies else []
        completions = self.link.completions
        ticket = completions.open()
        pinned = [partial(completions.done, ticket, 1)]

        def let_go() -> None:
            if flushes == core.index.flushes:
                unpin_span(core, lane, node, cell, span)
                if core.index.dropped_roots:
                    sweep(core)

        def released() -> None:  # called by ``write``, or when ``write`` will never run
            while pinned:
                pinned.pop()()

        def write(backend: Backend) -> tuple[Any, ...]:
            if not copied(copies, before, writers):  # the copy to the host failed, or what wrote its source
                return (None,) * len(pieces)
            payloads = [content(spares, pool, slot) for *_, slot in pieces]
            stale = pool.resets != resets  # after a flush the slots may have another owner
            released()
            return (None,) * len(pieces) if stale else put(backend, spares, fingerprint, lane, pieces, payloads)

        size = len(pieces) * pool.record_bytes
        self.handed += len(pieces)
        self.let_go[ticket] = let_go
        timed = self.link.timed("write", write, [lane] * len(pieces))
        call = store.ask(timed, nothing(len(pieces)), writes=True, size=size, released=released)
        self.calls.append(Writing(call, len(pieces), self._paths(lane, node, pieces)))

    # ------------------------------------------------------------ journals
    def _paths(self, lane: HostLane, node: Node, pieces: Sequence[PieceToStore]) -> Sequence[dict[str, Any]]:
        """What a journal is told of each piece if the store refuses it."""
        if not self.link.core.recorder.journals:
            return ()
        tokens, is_state = self.link.core.keys.tokens_in(path_key(node)), lane.unit == "boundary"
        common = {"component": lane.name, "namespace": root_of(node).namespace, "tokens": tokens}
        return [
            {**common, "boundary": high} if is_state else {**common, "spans": ((low, high),)}
            for _, low, high, _ in pieces
        ]

    def _tell(self, path: dict[str, Any], answer: Any) -> None:
        """Tell journals if a piece is not in the store, with its reason."""
        recorder = self.link.core.recorder
        if recorder.journals and not isinstance(answer, Stored):
            if isinstance(answer, Refused):
                answer = f"{answer.reason}: {answer.detail}".strip(": ")
            cause = answer if isinstance(answer, str) else "the copy to the host failed"
            recorder.refused(tier="store", cause=cause, **path)


def content(spares: Spares, pool: Any, slot: int) -> memoryview:
    """Copy the content of a host slot into a spare buffer."""
    payload = spares.take(pool.record_bytes)
    pool.read_into(slot, payload)
    return memoryview(payload)


def put(
    backend: Backend,
    spares: Spares,
    fingerprint: Fingerprint,
    lane: HostLane,
    pieces: Sequence[PieceToStore],
    payloads: Sequence[memoryview],
) -> tuple[Any, ...]:
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


def nothing(count: int) -> Callable[[Any, str], tuple[Any, ...]]:
    """Return the function that answers for so many pieces if the store fails: for each, why it is not stored."""
    return lambda reason, detail: (f"{reason}: {detail}".strip(": "),) * count


def copied(copies: Sequence[Work], before: Sequence[Work], writers: Sequence[Hold]) -> bool:
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


def unpin_span(core: Core, lane: HostLane, node: Node, cell: HostCell, start: int) -> None:
    """Unpin ``cell``, pinned when its node began at ``start``, and the cells that were split off it since then."""
    if lane.unit == "boundary":
        lane.unpin(cell)
        core.index.prune(node)
        return
    run = path_up(node, start)
    for each in run:
        lane.unpin(lane.cell(each))
    for each in run:
        core.index.prune(each)
