"""Storing: what the host has goes to a store, a bounded piece of work at a time, and nobody waits for it.

A cell is offered once its content is there or about to come. At a poll so many pieces are handed over; the thread of
the store reads them out of the host's slots, which are pinned until it lets go of them. What the store refuses is
counted and left out.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .addresses import links_at, piece_key
from .graves import sweep
from .pool import ABSENT
from .pool_host import HostPool
from .storage import Backend, Fingerprint, Record, Refused

if TYPE_CHECKING:
    from .flight import Work
    from .lane_host import HostCell, HostLane
    from .shelf import Shelf
    from .tree import Node

PER_POLL = 256
"""Pieces that are handed over at one poll: less than half a millisecond of the scheduling thread."""
PER_CALL = 64
"""Pieces of one call to a store."""
Piece = tuple[bytes, int, int, int]
"""(link, start, end, slot); the key is made of the link on the store's thread."""
REFUSED = object()
"""The answer for a piece that was not asked for, or in vain."""


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
            refused = sum(answer is REFUSED or isinstance(answer, Refused) for answer in call.answers)
            self.refused += min(count, refused)
            self.stored += count - min(count, refused)
        self.calls = going
        left = PER_POLL
        for _ in range(len(self.queue)):
            if left <= 0 or self.shelf.store is None:
                break
            lane, node = self.queue.popleft()
            cell: HostCell | None = node.cells[lane.index] if node.cells else None
            if cell is None or cell.stored:
                continue
            above = node.parent
            if above.parent is not None and above.cells[lane.index] is not None:  # split off since it was offered
                self.queue.append((lane, above))
            left -= self._hand_over(lane, node, cell)

    def _hand_over(self, lane: HostLane, node: Node, cell: HostCell) -> int:
        pieces = self.pieces(lane, node, cell)
        cell.stored = True
        for first in range(0, len(pieces), PER_CALL):
            self._put(lane, node, cell, pieces[first : first + PER_CALL])
        return max(1, len(pieces))

    def rescue(self, lane: HostLane, cell: HostCell) -> None:
        """``cell`` is about to go from the host: what it holds is copied out at once, and handed over."""
        store, pool = self.shelf.store, lane.pool
        assert isinstance(pool, HostPool)
        if store is None or cell.stored:
            return
        pieces = self.pieces(lane, cell.node, cell)
        if self.shelf.copies_to(lane, cell.node):
            self.refused += len(pieces)
            return
        for first in range(0, len(pieces), PER_CALL):
            batch = pieces[first : first + PER_CALL]
            payloads = [content(pool, slot) for *_, slot in batch]
            write = partial(put, told=self.shelf.fingerprints[lane.index], lane=lane, pieces=batch, payloads=payloads)
            call = store.ask(write, refusing(len(batch)), writes=True, size=len(batch) * pool.record_bytes)
            self.handed += len(batch)
            self.calls.append((call, len(batch)))

    def pieces(self, lane: HostLane, node: Node, cell: HostCell) -> list[Piece]:
        """What is to be stored of a cell: as far as it has addresses."""
        cache = self.shelf.cache
        links = links_at(cache._keys, node, cache._tree.page_bytes)
        found: list[Piece] = []
        start, end = node.parent.end, node.end
        if lane.unit == "boundary":
            spans = [(end, end, cell.data)]
        else:
            page = lane.part.page_tokens
            spans = [
                (start + place * page, start + (place + 1) * page, slot)
                for place, slot in enumerate(array("i", cell.data))
                if slot != ABSENT
            ]
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
        resets = pool.resets
        copies = self.shelf.copies_to(lane, node)
        told = self.shelf.fingerprints[lane.index]
        refused = refusing(len(pieces))

        def let_go() -> None:
            if flushes == cache._flushes:
                unpin_span(lane, node, span)
                if cache._graves:
                    sweep(cache)

        def write(backend: Backend) -> tuple[Any, ...]:
            if not all(copied(work) for work in copies):
                return refused("error", "the copy to the host failed")
            payloads = [content(pool, slot) for *_, slot in pieces]
            if pool.resets != resets:  # a flush: the slots may be somebody else's by now
                return refused("closed", "the cache was flushed")
            return put(backend, told, lane, pieces, payloads)

        size = len(pieces) * pool.record_bytes
        self.handed += len(pieces)
        completions = self.shelf.completions
        ticket = completions.open()
        self.let_go[ticket] = let_go
        released = partial(completions.done, ticket, 1)
        call = store.ask(write, refused, writes=True, size=size, released=released)
        self.calls.append((call, len(pieces)))


def content(pool: Any, slot: int) -> memoryview:
    payload = bytearray(pool.record_bytes)
    pool.read_into(slot, payload)
    return memoryview(payload)


def put(
    backend: Backend, told: Fingerprint, lane: HostLane, pieces: Sequence[Piece], payloads: Sequence[memoryview]
) -> tuple[Any, ...]:
    """On the store's thread: keys and checksums cost more than anything else of it."""
    name = lane.device.name
    return backend.put(
        [
            Record(piece_key(lane, told, link, low, high), name, low, high, "record", payload)
            for (link, low, high, _), payload in zip(pieces, payloads, strict=True)
        ]
    )


def refusing(count: int) -> Callable[[Any, str], tuple[Any, ...]]:
    """What is answered for so many pieces where the store is not asked, or fails."""
    return lambda reason, detail: (REFUSED,) * count


def copied(work: Work) -> bool:
    """On the store's thread: wait for a copy, which is soon over; whether it went well."""
    assert work.event is not None and work.stream is not None
    while not work.event.synchronize(1.0):
        pass
    return work.stream.failure(work.since, work.event.tick) is None


def unpin_span(lane: HostLane, node: Node, start: int) -> None:
    """``node``'s cell was pinned when it began at ``start``: so are, after splits, those of pages down from there."""
    if lane.unit == "boundary":
        lane.unpin(node.cells[lane.index])
        return
    while node.end > start:
        lane.unpin(node.cells[lane.index])
        node = node.parent
