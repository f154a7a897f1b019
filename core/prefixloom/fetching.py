"""Fetching: what a store has of one prompt comes to the host, to be restored from there.

First it is looked for, on the store's thread: the path of the components that need all of it, as deep as it goes, then
the deepest boundary on it where all the others have what they need. Then it is read, in order, a batch at a time. What
arrived becomes the tree's at a poll, and the sequence, if nothing was done with it meanwhile, goes on from there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import attrs

from .addresses import chain, piece_key, spans_of
from .arrived import place
from .consensus import LocalConsensus
from .errors import InvariantError
from .lane import PageLane
from .storage import Backend, Key, Miss, Record, Refused
from .storage.keys import root_link

if TYPE_CHECKING:
    from .lane_host import HostLane
    from .plan import MatchPlan
    from .restore import Restored
    from .sequence import Sequence
    from .shelf import Shelf

log = logging.getLogger("prefixloom")

LOOK = 64
"""Pages or boundaries that are looked for at a time."""
READ = 32
"""Pieces of one read."""
TOO_SLOW = "the store was too slow"


@attrs.frozen
class Found:
    """The deepest boundary that the store can bring, or the one that is there without it; ``note``: why no more."""

    boundary: int
    note: str = ""


@attrs.frozen
class Piece:
    """``start`` and ``end`` in tokens; of a state both are its boundary."""

    lane: HostLane
    start: int
    end: int


class Fetch:
    """One prompt's. ``limit``: no boundary above it is looked for (any more)."""

    def __init__(self, shelf: Shelf, sequence: Sequence, plan: MatchPlan, told: Restored) -> None:
        self.shelf = shelf
        self.store = shelf.store
        self.sequence: Sequence | None = sequence
        self.plan = plan
        self.told = told
        self.key = plan._key
        self.base = plan.restorable
        self.limit = plan._limit
        self.held = _held_path(shelf, plan)
        self.boundary = self.base
        self.looks = 0
        self.call: Any = None
        self.pieces: list[Piece] = []
        self.calls: list[tuple[Any, list[Piece]]] = []
        self.begun = shelf.component.now()
        self.until: float | None = None
        self.ticket = -1
        self.told_arrived = False
        self.links: list[bytes | None] = []

    @classmethod
    def begin(cls, shelf: Shelf, sequence: Sequence, told: Restored) -> None:
        plan = sequence._plan
        fetch = cls(shelf, sequence, plan, told)
        if not fetch.promises(plan._limit):
            return
        told.over = shelf.component.fetch == "best_effort"
        fetch._hurry(0)
        fetch.look()

    def promises(self, boundary: int) -> bool:
        """Whether it is worth a fetch to get there."""
        return boundary - self.base >= max(self.shelf.component.fetch_at_least, self.shelf.cache._page)

    def _hurry(self, pages: int) -> None:
        """So much has to be there in time, if anybody waits only so long."""
        if self.shelf.component.fetch == "timeout":
            self.until = self.begun + self.shelf.component.patience(pages)

    def forget(self) -> None:
        """The cache was flushed: what is still read is nobody's."""
        self.sequence = None
        self.told.over = True

    # ------------------------------------------------------------ looking
    def look(self) -> None:
        self.looks += 1
        self._expect()
        assert self.store is not None
        self.call = self.store.ask(self._look, lambda reason, detail: (Found(self.base, f"{reason} {detail}".strip()),))

    def _expect(self) -> None:
        self.ticket = self.shelf.completions.open()
        self.shelf.fetches[self.ticket] = self

    def _look(self, backend: Backend) -> tuple[Found]:
        """On the store's thread. It reads nothing that may change meanwhile."""
        cache = self.shelf.cache
        page, size = cache._page, cache._tree.page_bytes
        if not self.links:
            key = self.key[: self.limit // page * size]
            self.links = chain(cache._keys, root_link(self.plan.namespace), key, size)
        whole = next((n for n, link in enumerate(self.links) if link is None), len(self.links))
        depth = min(self.limit, whole * page)
        closed = [lane for lane in self.shelf.tier.lanes if lane.closed]
        if closed:
            depth = self._path_depth(backend, closed, depth)
        others = [lane for lane in self.shelf.tier.lanes if not lane.closed]
        for high in range(depth, self.base, -page * LOOK):
            bounds = range(high, max(self.base, high - page * LOOK), -page)
            wanted = {
                b: [self._key(lane, *span) for lane in others for span in spans_of(lane.device, b)] for b in bounds
            }
            keys = list(dict.fromkeys(key for some in wanted.values() for key in some))
            there = dict(zip(keys, backend.exists(keys), strict=True)) if keys else {}
            for b, some in wanted.items():
                if all(there[key] for key in some):
                    return (Found(b),)
        return (Found(self.base, self._why_not(backend)),)

    def _why_not(self, backend: Backend) -> str:
        """What the store says of the first piece that is not there, if it is more than that."""
        at = min(self.held, self.base)
        if at // self.shelf.cache._page >= len(self.links) or self.links[at // self.shelf.cache._page] is None:
            return ""
        lane = self.shelf.tier.lanes[0]
        end = at + self.shelf.cache._page
        start = end if lane.unit == "boundary" else end - lane.part.page_tokens
        (answer,) = backend.get([self._key(lane, start, end)])
        return "" if isinstance(answer, Record) or answer.reason == "absent" else f"{answer.reason}: {answer.detail}"

    def _path_depth(self, backend: Backend, closed: Many[HostLane], depth: int) -> int:
        """How deep the store has everything of the components that need all, from where the cache has it."""
        page = self.shelf.cache._page
        for low in range(self.held, depth, page * LOOK):
            bounds = range(low, min(depth, low + page * LOOK), page)
            keys = [
                (b, self._key(lane, *span)) for b in bounds for lane in closed for span in _pages(lane, b, b + page)
            ]
            there = backend.exists([key for _, key in keys])
            for (b, _), found in zip(keys, there, strict=True):
                if not found:
                    return b
        return depth

    def _key(self, lane: HostLane, start: int, end: int) -> Key:
        link = self.links[(end - 1) // self.shelf.cache._page]
        assert link is not None
        return piece_key(lane, self.shelf.fingerprints[lane.index], link, start, end)

    # ------------------------------------------------------------ reading
    def _read(self) -> None:
        """Ask for the pieces of ``boundary``: the path from the top, then what belongs to the boundary.

        Where they lie is worked out on the store's thread.
        """
        tier, page = self.shelf.tier, self.shelf.cache._page
        closed = [lane for lane in tier.lanes if lane.closed]
        self.pieces = [
            Piece(lane, *span)
            for at in range(self.held, self.boundary, page)
            for lane in closed
            for span in _pages(lane, at, at + page)
        ]
        self.pieces += [
            Piece(lane, *span)
            for lane in tier.lanes
            if not lane.closed
            for span in spans_of(lane.device, self.boundary)
        ]
        assert self.store is not None
        if not self.pieces:  # the cache has all of it, and does not think it worth a load
            self._end()
            return
        self._hurry(len(self.pieces))
        self._expect()
        for first in range(0, len(self.pieces), READ):
            batch = self.pieces[first : first + READ]
            size = sum(piece.lane.pool.record_bytes for piece in batch)  # type: ignore[attr-defined]

            def read(backend: Backend, batch: Many[Piece] = batch) -> tuple[Any, ...]:
                keys = [self._key(piece.lane, piece.start, piece.end) for piece in batch]
                answers = backend.get(keys)
                if not isinstance(answers, tuple) or len(answers) != len(keys):
                    raise TypeError(f"{type(backend).__name__}.get answered {answers!r:.200} for {len(keys)} keys")
                return tuple(map(judged, batch, keys, answers))

            def instead(reason: Any, detail: str, batch: Many[Piece] = batch) -> tuple[Any, ...]:
                return (f"{reason} {detail}".strip(),) * len(batch)

            self.calls.append((self.store.ask(read, instead, size=size), batch))

    def poll(self) -> None:
        """See whether what was asked is done, or has taken too long."""
        late = self.until is not None and self.shelf.component.now() > self.until
        if self.call is not None:
            if self.call.over or late:
                found = self.call.answers[0] if self.call.over else Found(self.base, TOO_SLOW)
                self.shelf.completions.done(self.ticket, found.boundary)
                self.told.note(found.note)
                self.call = None
        elif self.calls and not self.told_arrived and (late or all(call.over for call, _ in self.calls)):
            self.shelf.completions.done(self.ticket, self._arrived())
            self.told_arrived = True

    def _arrived(self) -> int:
        """How many of the reads are whole, from the first on."""
        for number, (call, batch) in enumerate(self.calls):
            if not call.over:
                self.told.note(TOO_SLOW)
                return number
            for piece, answer in zip(batch, call.answers, strict=True):
                if isinstance(answer, str):
                    self.told.note(f"{piece.lane.device.name} at {piece.end}: {answer}")
                    return number
        return len(self.calls)

    # ------------------------------------------------------------ what all ranks know
    def advance(self, amount: int) -> None:
        """The ranks have agreed how far it comes. Whatever goes wrong then, this fetch is over, and serving goes on."""
        if self.sequence is None:
            return
        try:
            self._advance(amount)
        except BaseException as error:
            self.sequence = None
            self.told.over = True
            if not isinstance(error, Exception) or isinstance(error, InvariantError):
                raise
            log.warning("what a store brought is left out: %r", error)
            self.told.note(str(error))

    def _advance(self, amount: int) -> None:
        if not self.calls:
            settled = isinstance(self.shelf.consensus, LocalConsensus) or (self.looks > 1 and amount == self.limit)
            if not self.promises(amount):
                self._end()
            elif not settled:
                self.limit = amount
                self.look()
            else:
                self.boundary = self.told.wanted = amount
                self._read()
            return
        brought = [
            (piece, answer)
            for call, batch in self.calls[:amount]
            for piece, answer in zip(batch, call.answers, strict=True)
        ]
        if brought:
            place(self, brought)
        self._end()

    def _end(self) -> None:
        sequence, told = self.sequence, self.told
        self.sequence = None
        if sequence is not None:
            from .restore import restore_more  # which knows tiers, as tiers know this

            restore_more(self.shelf.cache, sequence, told)
        told.over = True


def judged(piece: Piece, key: Key, answer: Any) -> Record | str:
    """The piece, or why an answer is not that."""
    if isinstance(answer, Miss | Refused):
        return f"{answer.reason} {answer.detail}".strip()
    if not isinstance(answer, Record):
        return f"error {answer!r:.100} is no answer"
    told = (answer.component, answer.start, answer.end, answer.layout, len(answer.payload))
    wanted = (piece.lane.device.name, piece.start, piece.end, "record", piece.lane.pool.record_bytes)  # type: ignore[attr-defined]
    if told != wanted:
        return f"the store gave {told} for {wanted}"
    return answer if answer.key == key else "the store gave another prompt's"


def _pages(lane: HostLane, low: int, high: int) -> list[tuple[int, int]]:
    page = lane.part.page_tokens
    return [(at, at + page) for at in range(low, high, page)]


def _held_path(shelf: Shelf, plan: MatchPlan) -> int:
    """Up to where the cache has all of the components that need everything above."""
    from .over_tiers import usable

    cache = shelf.cache
    node, boundary = plan._walked_to
    for lane in cache._lanes:
        host = shelf.tier.by_component[lane.index]
        if host is not None and isinstance(lane, PageLane) and host.closed:
            node, boundary = usable(lane, host, node, boundary, cache._page)
    return boundary


__all__ = ["Fetch", "Found", "Piece", "judged"]
