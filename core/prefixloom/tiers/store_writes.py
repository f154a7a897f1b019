"""Storing: what the host has goes to a store, a bounded piece of work at a time, and nobody waits for it.

A cell is offered once its content is there or about to come. At a poll so many pieces are handed over; the thread of
the store reads them out of the host's slots, which are pinned until it has. What the store refuses is
counted and left out.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..device.host_pool import HostPool
from ..device.pool import ABSENT
from ..operations.lease import sweep
from ..storage import Backend, Fingerprint, Record, Stored
from .pieces import Spares, links_at, piece_key

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..device.flight import Work
    from ..tree.radix import Node
    from .host_lane import HostCell, HostLane
    from .store import Shelf

PER_POLL = 256
"""Places of edges that are handed over at one poll: about a millisecond of the scheduling thread."""

PER_CALL = 64
"""Pieces of one call to a store."""

Piece = tuple[bytes, int, int, int]
"""(link, start, end, slot); the key is made of the link on the store's thread."""


class Storing:
    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.queue: deque[tuple[HostLane, Node]] = deque()
        self.calls: list[tuple[Any, int]] = []
        self.let_go: dict[int, Callable[[], None]] = {}
        self.handed = self.stored = self.refused = self.unnamed = 0

    def offer(self, lane: HostLane, node: Node) -> None:
        self.queue.append((lane, node))

    def flushed(self) -> None:
        self.queue.clear()

    def handed_of(self, cell: HostCell) -> int:
        """How many of its places the store that is there now was given: none of what another one had."""
        if cell.store != self.shelf.attached:
            cell.store, cell.stored = self.shelf.attached, 0
        return cell.stored

    def advance(self, ticket: int) -> bool:
        """All ranks know that the store has let go of what this ticket pinned."""
        let_go = self.let_go.pop(ticket, None)
        if let_go is not None:
            let_go()
        return let_go is not None

    # ------------------------------------------------------------ scheduling
    def poll(self) -> None:
        """See what became of calls, and hand over more."""
        going = []
        for call, count in self.calls:
            if not call.over:
                going.append((call, count))
                continue
            stored = min(count, sum(isinstance(answer, Stored) for answer in call.answers))
            self.stored += stored
            self.refused += count - stored
        self.calls = going
        left = PER_POLL
        for _ in range(len(self.queue)):
            if left <= 0 or self.shelf.store is None:
                break
            lane, node = self.queue.popleft()
            above = node.parent
            if above.parent is not None:  # split off since it was offered, perhaps with all that was there
                cell: HostCell | None = above.cells[lane.index]
                if cell is not None and self.handed_of(cell) < cell.places:
                    self.queue.append((lane, above))
            cell = node.cells[lane.index]
            if cell is not None and self.handed_of(cell) < cell.places:
                left -= self._hand_over(lane, node, cell, left)

    def _hand_over(self, lane: HostLane, node: Node, cell: HostCell, most: int) -> int:
        """So many of its places; the rest at the next poll."""
        before = cell.stored
        pieces = self.pieces(lane, node, cell, most)
        cell.stored = min(cell.places, before + most)
        if cell.stored < cell.places:
            self.queue.appendleft((lane, node))
        for first in range(0, len(pieces), PER_CALL):
            self._put(lane, node, cell, pieces[first : first + PER_CALL])
        return cell.stored - before

    def rescue(self, lane: HostLane, cell: HostCell) -> None:
        """``cell`` is about to go from the host: what it holds is copied out at once, and handed over."""
        store, pool = self.shelf.store, lane.pool
        assert isinstance(pool, HostPool)
        if store is None or self.handed_of(cell) >= cell.places:
            return
        pieces = self.pieces(lane, cell.node, cell, cell.places)
        if self.shelf.copies_to(lane, cell.node):
            self.refused += len(pieces)
            return
        for first in range(0, len(pieces), PER_CALL):
            batch = pieces[first : first + PER_CALL]
            spares = self.shelf.spares
            payloads = [content(spares, pool, slot) for *_, slot in batch]
            told = self.shelf.fingerprints[lane.index]
            write = partial(put, spares=spares, told=told, lane=lane, pieces=batch, payloads=payloads)
            call = store.ask(write, nothing(len(batch)), writes=True, size=len(batch) * pool.record_bytes)
            self.handed += len(batch)
            self.calls.append((call, len(batch)))
            if call.over:  # it was not taken: nor will the rest be
                self.refused += len(pieces) - first - len(batch)
                return

    def pieces(self, lane: HostLane, node: Node, cell: HostCell, most: int) -> list[Piece]:
        """What is to be stored of the next ``most`` places of a cell: as far as it has addresses."""
        cache = self.shelf.cache
        found: list[Piece] = []
        start, end = node.parent.end, node.end
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
        links = links_at(cache._keys, node, cache._tree.page_bytes, (spans[-1][1] - 1 - start) // cache._page + 1)
        for low, high, slot in spans:
            link = links[(high - 1 - start) // cache._page]
            if link is None:
                self.unnamed += 1
            else:
                found.append((link, low, high, slot))
        return found

    def _put(self, lane: HostLane, node: Node, cell: HostCell, pieces: Sequence[Piece]) -> None:
        cache, store = self.shelf.cache, self.shelf.store
        assert store is not None
        lane.pin(cell)
        span, flushes = node.parent.end, cache._flushes
        pool: Any = lane.pool
        resets, spares = pool.resets, self.shelf.spares
        copies, told = self.shelf.copies_to(lane, node), self.shelf.fingerprints[lane.index]
        before = [work for work in cache._flight.works if copies and work.number <= copies[-1].number and work.event]
        completions = self.shelf.completions
        ticket = completions.open()
        pinned = [partial(completions.done, ticket, 1)]

        def let_go() -> None:
            if flushes == cache._flushes:
                unpin_span(cache, lane, node, cell, span)
                if cache._graves:
                    sweep(cache)

        def released() -> None:  # by ``write``, or when it is known that it will not
            while pinned:
                pinned.pop()()

        def write(backend: Backend) -> tuple[Any, ...]:
            if not copied(copies, before):  # the copy to the host failed, or what wrote what was copied
                return (None,) * len(pieces)
            payloads = [content(spares, pool, slot) for *_, slot in pieces]
            stale = pool.resets != resets  # a flush: the slots may have been somebody else's by then
            released()
            return (None,) * len(pieces) if stale else put(backend, spares, told, lane, pieces, payloads)

        size = len(pieces) * pool.record_bytes
        self.handed += len(pieces)
        self.let_go[ticket] = let_go
        call = store.ask(write, nothing(len(pieces)), writes=True, size=size, released=released)
        self.calls.append((call, len(pieces)))


def content(spares: Spares, pool: Any, slot: int) -> memoryview:
    payload = spares.take(pool.record_bytes)
    pool.read_into(slot, payload)
    return memoryview(payload)


def put(
    backend: Backend,
    spares: Spares,
    told: Fingerprint,
    lane: HostLane,
    pieces: Sequence[Piece],
    payloads: Sequence[memoryview],
) -> tuple[Any, ...]:
    """On the store's thread: keys and checksums cost more than anything else of it."""
    name = lane.device.name
    answers = backend.put(
        [
            Record(piece_key(lane, told, link, low, high), name, low, high, "record", payload)
            for (link, low, high, _), payload in zip(pieces, payloads, strict=True)
        ]
    )
    for payload in payloads:  # where it raises, nobody knows who still reads them
        spares.give(payload)
    return answers


def nothing(count: int) -> Callable[[Any, str], tuple[Any, ...]]:
    """What is answered for so many pieces where the store is not asked, or fails: none of them is stored."""
    return lambda reason, detail: (None,) * count


def copied(copies: Sequence[Work], before: Sequence[Work]) -> bool:
    """On the store's thread: wait for copies, which are soon over; whether they went well, and all that came before.

    A copy of what a failed step wrote is no failure of its own. Whatever it came after is over when it is.
    """
    for work in copies:
        assert work.event is not None and work.stream is not None
        while not work.stream.until(work.event, 1.0):  # and nothing is told to the scheduling thread's clock
            pass
    return not any(
        work.failed or work.stream.failure(work.since, work.event.tick) is not None
        for work in before
        if work.event is not None and work.stream is not None
    )


def unpin_span(cache: Cache, lane: HostLane, node: Node, cell: HostCell, start: int) -> None:
    """``cell``, of ``node``, was pinned when that began at ``start``: so are, after splits, those of pages above it."""
    if lane.unit == "boundary":
        lane.unpin(cell)
        cache._tree.prune(node)
        return
    run: list[Node] = []
    while node.end > start:
        run.append(node)
        lane.unpin(node.cells[lane.index])
        node = node.parent
    for node in run:
        cache._tree.prune(node)
