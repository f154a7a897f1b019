"""Fetching: what a store has of one prompt comes to the host, to be restored from there.

First it is looked for, on the store's thread: the path of the components that need all of it, as deep as it goes, then
the deepest boundary on it where all the others have what they need. Then it is read, in order, a slice at a time: what
arrived becomes the tree's at a poll before more is asked for, so that no fetch is larger than what may wait. In the end
the sequence, if nothing was done with it meanwhile, goes on from there. A fetch that would read what another one is
reading comes after that.

What a store brought becomes the tree's: nodes for its tokens, slots of the host, and the bytes in them.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from ..device.pool import ABSENT
from ..errors import InvariantError
from ..operations.lease import inert
from ..operations.publish import spell
from ..storage import Backend, Key, Record
from ..storage.keys import root_link
from ..tree.lane import PageLane
from .consensus import LocalConsensus
from .host_lane import Moves
from .pieces import SLICE, Piece, calls_of, chain, judged, pages_of, piece_key, slices, spans_of, total

if TYPE_CHECKING:
    from ..cache.sequence import Sequence
    from ..operations.match import MatchPlan
    from ..tree.radix import Node
    from .host_lane import HostLane
    from .host_tier import Job
    from .pieces import Piece, Spares
    from .restore import Restored
    from .store import Shelf

log = logging.getLogger("prefixloom")

LOOK = 64
"""Pages or boundaries that are looked for at a time."""

TOO_SLOW = "the store was too slow"


@attrs.frozen
class Found:
    """The deepest boundary that the store can bring, or the one that is there without it; ``note``: why no more."""

    boundary: int
    note: str = ""


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
        self.slices: list[list[Piece]] = []  # to be read after the one that is being read, whose calls are ``batches``
        self.batches: list[list[Piece]] = []
        self.calls: list[tuple[Any, Many[Piece]]] = []
        self.behind: list[Fetch] = []  # those that go on when this one is over
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
        """The cache was flushed, or the namespace dropped: what is still read is nobody's."""
        self.sequence = None
        self.told.over = True
        if self in self.shelf.reading:
            self.shelf.reading.remove(self)
        for other in self.behind:
            other.forget()

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
        closed = [lane for lane in self.shelf.tier.lanes if lane.closed_upward]
        if closed:
            depth = self._path_depth(backend, closed, depth)
        others = [lane for lane in self.shelf.tier.lanes if not lane.closed_upward]
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
                (b, self._key(lane, *span)) for b in bounds for lane in closed for span in pages_of(lane, b, b + page)
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
        """Ask for the pieces of ``boundary``, or wait for a fetch that asks for most of them already."""
        shelf = self.shelf
        ahead = next((other for other in shelf.reading if self._comes_after(other)), None)
        if ahead is not None:
            ahead.behind.append(self)
            return
        self.slices = slices(shelf.tier.lanes, self.held, self.boundary, shelf.cache._page)
        if not self.slices:  # the cache has all of it, and does not think it worth a load
            self._end()
            return
        shelf.reading.append(self)
        self._hurry(sum(map(len, self.slices)))
        self._read_slice()

    def _comes_after(self, other: Fetch) -> bool:
        """Whether the other one brings all that is lacking here, or half of the path at least."""
        page, size = self.shelf.cache._page, self.shelf.cache._tree.page_bytes
        shared = self.boundary
        if other.boundary != shared and any(lane.closed_upward for lane in self.shelf.tier.lanes):
            shared = -(-(self.held + self.boundary) // 2 // page) * page
        upto = shared // page * size
        return (
            (self.held < shared <= other.boundary or other.boundary == self.boundary)
            and other.plan.namespace == self.plan.namespace
            and other.key[:upto] == self.key[:upto]
        )

    def _read_slice(self) -> None:
        """One ticket for all of it, in calls of which no more wait at a time than fit a slice."""
        self._expect()
        self.told_arrived = False
        self.batches = calls_of(self.slices.pop(0))
        self.calls = []
        self._ask_more()

    def _ask_more(self) -> None:
        waiting = sum(total(batch) for call, batch in self.calls if not call.over)
        for batch in self.batches[len(self.calls) :]:
            waiting += total(batch)
            if waiting > max(SLICE, total(batch)):
                return
            self._ask(batch)

    def _ask(self, batch: Many[Piece]) -> None:
        """Where they lie is worked out on the store's thread."""
        spares = self.shelf.spares

        def read(backend: Backend) -> tuple[Any, ...]:
            keys = [self._key(piece.lane, piece.start, piece.end) for piece in batch]
            into = [spares.take(piece.size) for piece in batch]
            answers = backend.get(keys, into)
            if not isinstance(answers, tuple) or len(answers) != len(keys):
                raise TypeError(f"{type(backend).__name__}.get answered {answers!r:.200} for {len(keys)} keys")
            return tuple(map(judged, batch, keys, answers, into))

        def instead(reason: Any, detail: str) -> tuple[Any, ...]:
            return (f"{reason} {detail}".strip(),) * len(batch)

        assert self.store is not None
        self.calls.append((self.store.ask(read, instead, size=total(batch)), batch))

    def poll(self) -> None:
        """See whether what was asked is done, or has taken too long."""
        late = self.until is not None and self.shelf.component.now() > self.until
        if self.call is not None:
            if self.call.over or late:
                found = self.call.answers[0] if self.call.over else Found(self.base, TOO_SLOW)
                self.shelf.completions.done(self.ticket, found.boundary)
                self.told.note(found.note)
                self.call = None
        elif self.calls and not self.told_arrived:
            if not late and not self._failed():
                self._ask_more()
            if late or all(call.over for call, _ in self.calls):
                self.shelf.completions.done(self.ticket, self._arrived())
                self.told_arrived = True

    def _failed(self) -> bool:
        """Whether something is known not to come, so that what lies behind it is of no use."""
        return any(isinstance(answer, str) for call, _ in self.calls if call.over for answer in call.answers)

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
        self._guarded(partial(self._advance, amount))

    def _guarded(self, step: Callable[[], None]) -> None:
        if self.sequence is None:
            return
        try:
            step()
        except BaseException as error:
            self.sequence = None
            self.told.over = True
            self._let_others()
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
        whole = amount == len(self.batches)
        brought = [
            (piece, answer)
            for call, batch in self.calls[:amount]
            for piece, answer in zip(batch, call.answers, strict=True)
        ]
        if brought:
            place(self, brought, whole)
        if whole and self.slices:
            behind, self.behind = self.behind, []
            for other in behind:  # who has all by now does not wait for the rest
                other.go_on()
            self._read_slice()
        else:
            self._end()

    def _end(self) -> None:
        """Nothing more comes. Those behind it look at what is lacking now."""
        sequence, told = self.sequence, self.told
        self.sequence = None
        self.calls = []
        try:
            if sequence is not None:
                from .restore import restore_more  # which knows tiers, as tiers know this

                restore_more(self.shelf.cache, sequence, told)
        finally:
            told.over = True
            self._let_others()

    def _let_others(self) -> None:
        if self in self.shelf.reading:
            self.shelf.reading.remove(self)
        behind, self.behind = self.behind, []
        for other in behind:
            other.go_on()

    def go_on(self) -> None:
        """What this one waited for is over: read what is still lacking."""
        self._guarded(self._read_rest)

    def _read_rest(self) -> None:
        from .restore import planned_again

        assert self.sequence is not None
        plan = planned_again(self.shelf.cache, self.sequence)
        if plan.restorable >= self.boundary:
            self._end()
            return
        self.held = min(self.boundary, _held_path(self.shelf, plan))
        self._read()


def _held_path(shelf: Shelf, plan: MatchPlan) -> int:
    """Up to where the cache has all of the components that need everything above."""
    from .match_below import usable

    cache = shelf.cache
    node, boundary = plan._walked_to
    for lane in cache._lanes:
        host = shelf.tier.by_component[lane.index]
        if host is not None and isinstance(lane, PageLane) and host.closed_upward:
            node, boundary = usable(lane, host, node, boundary, cache._page)
    return boundary


__all__ = ["Fetch", "Found"]

Brought = Many[tuple["Piece", Any]]


def place(fetch: Fetch, brought: Brought, whole: bool) -> None:
    """As deep as all components that need everything above have arrived; what has no room below is left out.

    ``whole``: nothing of what was asked for is lacking.
    """
    cache = fetch.shelf.cache
    upto = fetch.boundary if whole else _path_end(fetch, brought)
    if upto <= 0:
        return
    width = cache._tree.element_bytes
    root = cache._root(fetch.plan.namespace)
    root.leases += 1
    run: list[Node] = []
    spell(cache, root, fetch.key[: upto * width], upto, run)
    for node in run:
        node.leases += 1  # it may hold nothing yet, or lose what it holds to make room
    pinned: list[tuple[HostLane, Any]] = []
    try:
        for lane in fetch.shelf.tier.lanes:  # what leads there is not to go for the sake of what is there
            for node in run:
                cell = node.cells[lane.index]
                if cell is not None and lane.closed_upward:
                    lane.pin(cell)
                    pinned.append((lane, cell))
        _fill(fetch, run, [(piece, answer) for piece, answer in brought if piece.end <= upto], pinned)
    finally:
        for lane, cell in pinned:
            lane.unpin(cell)
        for node in (*reversed(run), root):
            node.leases -= 1
            cache._tree.prune(node)


def _path_end(fetch: Fetch, brought: Brought) -> int:
    """The boundary up to which all of the path came."""
    ends = [
        max((piece.end for piece, _ in brought if piece.lane is lane), default=fetch.held)
        for lane in fetch.shelf.tier.lanes
        if lane.closed_upward
    ]
    return min(ends, default=0) // fetch.shelf.cache._page * fetch.shelf.cache._page


def _fill(fetch: Fetch, run: list[Node], brought: Brought, pinned: list[tuple[HostLane, Any]]) -> None:
    tier = fetch.shelf.tier
    hold = inert(fetch.shelf.cache)
    jobs: list[Job] = []
    taken: list[Moves] = []
    try:
        for lane in tier.lanes:
            mine = {piece.start: answer.payload for piece, answer in brought if piece.lane is lane}
            for node in run:
                places, payloads = _lacking(lane, node, mine)
                if not places:
                    continue
                cell = node.cells[lane.index]
                if cell is not None:  # it is not to go for the sake of what is to be added to it
                    lane.pin(cell)
                    pinned.append((lane, cell))
                slots = tier.take(lane, len(places))
                if slots is None:
                    tier.dropped += 1
                    continue
                taken.append(Moves(lane))
                taken[-1].dst = slots.tolist()
                lane.add(node, places, slots)
                if cell is None:
                    cell = node.cells[lane.index]
                    lane.pin(cell)
                    pinned.append((lane, cell))
                    if fetch.store is fetch.shelf.store:
                        cell.store, cell.stored = fetch.shelf.attached, cell.places
                write = partial(_write, fetch.shelf.spares, lane.pool, taken[-1].dst, payloads)
                jobs.append((lane, taken[-1].dst, write))
        hold.claim(fetch.shelf.cache._flight)
        if jobs:
            tier.bring(jobs, run, hold)
    except BaseException:
        for each in taken:
            each.take_back(run)
        raise
    tier.fetched += sum(len(filled) for _, filled, _ in jobs)


def _lacking(lane: HostLane, node: Node, mine: dict[int, Any]) -> tuple[list[int], list[Any]]:
    """The places of ``node``'s edge that were brought and that the host has not, with what is to be there."""
    cell = node.cells[lane.index]
    if lane.unit == "boundary":
        return ([0], [mine[node.end]]) if cell is None and node.end in mine else ([], [])
    page, start = lane.part.page_tokens, node.parent.end
    ours = None if cell is None else array("i", cell.data)
    places = [
        place
        for place in range((node.end - start) // page)
        if start + place * page in mine and (ours is None or ours[place] == ABSENT)
    ]
    return places, [mine[start + place * page] for place in places]


def _write(spares: Spares, pool: Any, slots: Many[int], payloads: Many[Any]) -> None:
    for slot, payload in zip(slots, payloads, strict=True):
        pool.write_from(slot, payload)
        spares.give(payload)
