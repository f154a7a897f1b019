"""Store reads: fetch what a store has of a prompt to the host, from where it can be restored.

A fetch first searches, on the store's thread: how deep the store has the whole path of the components that need all of
it, and then the deepest boundary on that path for which it has the pieces of all other components. Then the fetch reads
the pieces in order, a slice at a time: a poll enters a slice into the tree (nodes, host slots and their content) before
the next one is asked for, so that the memory of a fetch is bounded. At the end the sequence is restored, if it was not
used meanwhile. A fetch waits for another one that is reading the same pieces.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from typing import Any

import attrs

from ..contract.identity import means
from ..contract.tier_answers import Restored
from ..device.pool import ABSENT
from ..errors import InvariantError, PrefixloomError
from ..operations.lease import standing_for_copies
from ..operations.match import current, find_again, limit_of, walked_boundary
from ..operations.publish import split
from ..operations.state import Match, Running
from ..storage import Backend, Key, Record
from ..tree.lane import PageLane
from ..tree.radix import Node
from .consensus import LocalConsensus
from .host_lane import HostLane, Moves, Pins
from .pieces import SLICE, Piece, Spares, calls_of, checked, pages_of, piece_key, slices, spans_of, total
from .restore import restore_more
from .store_link import StoreLink

log = logging.getLogger("prefixloom")

LOOK = 64
"""The number of pages or boundaries in one call of a search."""

TOO_SLOW = "the store was too slow"


@attrs.frozen
class FoundInStore:
    """The result of a search: the deepest boundary that the store can bring, or the one that the cache has.

    ``note`` says why it is not deeper.
    """

    boundary: int
    note: str = ""


class StoreReads:
    """The fetches of one cache from its store."""

    def __init__(self, link: StoreLink) -> None:
        self.link = link
        self.fetches: dict[int, Fetch] = {}
        """The fetches by the ticket for which each waits."""
        self.reading: list[Fetch] = []
        """The fetches that read pieces now."""

    def begin(self, running: Running, restored: Restored) -> None:
        """Look for more of a prompt than the cache has, if that is worth a fetch; the result goes to ``restored``."""
        fetch = Fetch(self, running, restored)
        if fetch.promises(fetch.limit):
            restored.over = self.link.component.fetch == "best_effort"
            fetch.start()

    def poll(self) -> None:
        for fetch in list(self.fetches.values()):
            fetch.poll()

    def advance(self, ticket: int, amount: int) -> None:
        """Go on with the fetch that waits for ``ticket``, after all ranks have agreed on its amount."""
        self.fetches.pop(ticket).advance(amount)

    def forget(self, namespace: str | None) -> None:
        """Give up the fetches of one namespace or of all."""
        for fetch in self.fetches.values():
            if namespace is None or means(namespace, fetch.match.namespace):
                fetch.forget()


class Fetch:
    """The fetch of one prompt. ``limit`` is the deepest boundary for which it searches."""

    def __init__(self, reads: StoreReads, running: Running, restored: Restored) -> None:
        self.reads = reads
        self.link = reads.link
        self.store = reads.link.store
        self.running: Running | None = running
        self.match = match = current(reads.link.core, running.match)  # some of it may have left the tier since
        self.restored = restored
        self.key = match.key
        self.base = match.restorable
        self.limit = limit_of(reads.link.core, match)
        self.held = _held_path(reads.link, match)
        self.boundary = self.base
        self._searches = 0
        self._call: Any = None  # of the search
        self._slices: list[list[Piece]] = []  # to be read after the present one
        self._batches: list[list[Piece]] = []  # of the present slice, one for each call
        self.calls: list[tuple[Any, Many[Piece]]] = []
        self.waiting: list[Fetch] = []  # the fetches that go on when this one is over
        self._begun = reads.link.component.now()
        self._until: float | None = None
        self._ticket: int  # of the search, or of the slice that is read
        self._ticket_done: bool
        self._links: list[bytes] = []

    def start(self) -> None:
        """Begin to search."""
        self._set_deadline(0)
        self._search()

    def promises(self, boundary: int) -> bool:
        """Whether ``boundary`` is worth a fetch."""
        return boundary - self.base >= max(self.link.component.fetch_at_least, self.link.core.shape.page)

    def _set_deadline(self, pages: int) -> None:
        """Set the time by which so many pages must have arrived, if the tier has a timeout."""
        if self.link.component.fetch == "timeout":
            self._until = self._begun + self.link.component.patience(pages)

    def forget(self) -> None:
        """Give up, because the cache was flushed or the namespace dropped."""
        self.running = None
        self.restored.over = True
        if self in self.reads.reading:
            self.reads.reading.remove(self)
        for other in self.waiting:
            other.forget()

    # ------------------------------------------------------------ searching
    def _search(self) -> None:
        """Ask the store how deep it has the prompt."""
        self._searches += 1
        self._open_ticket()
        assert self.store is not None

        def instead(reason: Any, detail: str) -> tuple[FoundInStore]:
            return (FoundInStore(self.base, f"{reason} {detail}".strip()),)

        self._call = self.store.ask(self.link.timed("search", self._find), instead)

    def _open_ticket(self) -> None:
        self._ticket = self.link.completions.open()
        self.reads.fetches[self._ticket] = self

    def _find(self, backend: Backend) -> tuple[FoundInStore]:
        """Find the deepest boundary. It runs on the store's thread, and reads nothing that may change meanwhile."""
        core = self.link.core
        page, chain = core.shape.page, self.link.chain
        if not self._links:
            root = chain.root(self.match.namespace)
            self._links = chain.pages(self.match.tokens, root, end=self.limit // page)
        depth = self.limit
        closed = [lane for lane in self.link.copies.lanes if lane.closed_upward]
        if closed:
            depth = self._path_depth(backend, closed, depth)
        others = [lane for lane in self.link.copies.lanes if not lane.closed_upward]
        for high in range(depth, self.base, -page * LOOK):
            bounds = range(high, max(self.base, high - page * LOOK), -page)
            wanted = {
                b: [self._key(lane, *span) for lane in others for span in spans_of(lane.device, b)] for b in bounds
            }
            keys = list(dict.fromkeys(key for some in wanted.values() for key in some))
            there = dict(zip(keys, backend.exists(keys), strict=True)) if keys else {}
            for b, some in wanted.items():
                if all(there[key] for key in some):
                    return (FoundInStore(b),)
        return (FoundInStore(self.base, self._why_not(backend)),)

    def _why_not(self, backend: Backend) -> str:
        """The store's reason for the first missing piece, if it is another one than its absence."""
        at = self.base
        if at // self.link.core.shape.page >= len(self._links):
            return ""
        lane = self.link.copies.lanes[0]
        end = at + self.link.core.shape.page
        start = end if lane.unit == "boundary" else end - lane.part.page_tokens
        (answer,) = backend.get([self._key(lane, start, end)])
        return "" if isinstance(answer, Record) or answer.reason == "absent" else f"{answer.reason}: {answer.detail}"

    def _path_depth(self, backend: Backend, closed: Many[HostLane], depth: int) -> int:
        """The depth to which the store has the path of the components that need all of it, below that of the cache."""
        page = self.link.core.shape.page
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
        link = self._links[(end - 1) // self.link.core.shape.page]
        return piece_key(lane, self.link.fingerprints[lane.index], link, start, end)

    # ------------------------------------------------------------ reading
    def _read(self) -> None:
        """Ask for the pieces of ``boundary``, or wait for another fetch that reads most of them already."""
        ahead = next((other for other in self.reads.reading if self._comes_after(other)), None)
        if ahead is not None:
            ahead.waiting.append(self)
            return
        self._slices = slices(self.link.copies.lanes, self.held, self.boundary, self.link.core.shape.page)
        if not self._slices:  # the cache has all pieces already
            self._end()
            return
        self.reads.reading.append(self)
        self._set_deadline(sum(map(len, self._slices)))
        self._read_slice()

    def _comes_after(self, other: Fetch) -> bool:
        """Whether the other fetch brings all that is missing here, or at least half of the path."""
        page, size = self.link.core.shape.page, self.link.core.index.tree.page_bytes
        shared = self.boundary
        if other.boundary != shared and any(lane.closed_upward for lane in self.link.copies.lanes):
            shared = -(-(self.held + self.boundary) // 2 // page) * page
        upto = shared // page * size
        return (
            (self.held < shared <= other.boundary or other.boundary == self.boundary)
            and other.match.namespace == self.match.namespace
            and other.key[:upto] == self.key[:upto]
        )

    def _read_slice(self) -> None:
        """Begin to read the next slice, with one ticket for all of its calls."""
        self._open_ticket()
        self._ticket_done = False
        self._batches = calls_of(self._slices.pop(0))
        self.calls = []
        self._ask_more()

    def _ask_more(self) -> None:
        """Make further calls, as long as those that are not over yet ask for no more bytes than a slice has."""
        waiting = sum(total(batch) for call, batch in self.calls if not call.over)
        for batch in self._batches[len(self.calls) :]:
            waiting += total(batch)
            if waiting > max(SLICE, total(batch)):
                return
            self._ask(batch)

    def _ask(self, batch: Many[Piece]) -> None:
        """Ask for some pieces in one call. Their keys are computed on the store's thread."""
        spares = self.link.spares

        def read(backend: Backend) -> tuple[Any, ...]:
            keys = [self._key(piece.lane, piece.start, piece.end) for piece in batch]
            into = [spares.take(piece.size) for piece in batch]
            answers = backend.get(keys, into)
            if not isinstance(answers, tuple) or len(answers) != len(keys):
                raise TypeError(f"{type(backend).__name__}.get answered {answers!r:.200} for {len(keys)} keys")
            return tuple(map(checked, batch, keys, answers, into))

        def instead(reason: Any, detail: str) -> tuple[Any, ...]:
            return (f"{reason} {detail}".strip(),) * len(batch)

        assert self.store is not None
        timed = self.link.timed("read", read, [piece.lane for piece in batch])
        self.calls.append((self.store.ask(timed, instead, size=total(batch)), batch))

    def poll(self) -> None:
        """Find out whether the calls are over, or have taken too long."""
        late = self._until is not None and self.link.component.now() > self._until
        if self._call is not None:
            if self._call.over or late:
                found = self._call.answers[0] if self._call.over else FoundInStore(self.base, TOO_SLOW)
                self._call = None
                self.link.completions.done(self._ticket, found.boundary)
                self.restored.note(found.note)
        elif self.calls and not self._ticket_done:
            if not late and not self._failed():
                self._ask_more()
            if late or all(call.over for call, _ in self.calls):
                self._ticket_done = True
                self.link.completions.done(self._ticket, self._arrived())

    def _failed(self) -> bool:
        """Whether a piece is known to be missing, so that the pieces after it are of no use."""
        return any(isinstance(answer, str) for call, _ in self.calls if call.over for answer in call.answers)

    def _arrived(self) -> int:
        """The number of complete calls, from the first on."""
        for number, (call, batch) in enumerate(self.calls):
            if not call.over:
                self.restored.note(TOO_SLOW)
                return number
            for piece, answer in zip(batch, call.answers, strict=True):
                if isinstance(answer, str):
                    self.restored.note(f"{piece.lane.device.name} at {piece.end}: {answer}")
                    return number
        return len(self.calls)

    # ------------------------------------------------------------ after all ranks have agreed
    def advance(self, amount: int) -> None:
        """Go on, after all ranks have agreed on the amount. An error ends this fetch, and serving goes on."""
        self._guarded(partial(self._advance, amount))

    def _guarded(self, step: Callable[[], None]) -> None:
        if self.running is None:
            return
        try:
            step()
        except PrefixloomError as error:
            self.running = None
            self.restored.over = True
            self._wake_waiting()
            if isinstance(error, InvariantError):
                raise
            log.warning("what a store brought is left out: %r", error)
            self.restored.note(str(error))

    def _advance(self, amount: int) -> None:
        if not self.calls:
            agreed = isinstance(self.link.consensus, LocalConsensus) or (self._searches > 1 and amount == self.limit)
            if not self.promises(amount):
                self._end()
            elif not agreed:  # another rank found less: search again up to there
                self.limit = amount
                self._search()
            else:
                self.boundary = self.restored.wanted = amount
                self._read()
            return
        whole = amount == len(self._batches)
        brought = [
            (piece, answer)
            for call, batch in self.calls[:amount]
            for piece, answer in zip(batch, call.answers, strict=True)
        ]
        if brought:
            place(self, brought, whole)
        if whole and self._slices:
            waiting, self.waiting = self.waiting, []
            for other in waiting:  # some may have all pieces by now
                other.go_on()
            self._read_slice()
        else:
            self._end()

    def _end(self) -> None:
        """End the fetch: restore the sequence, and let the fetches that wait go on."""
        running = self.running
        self.running = None
        self.calls = []
        if running is not None:
            restore_more(self.link.copies, running, self.restored)
            if self.restored.ready < self.restored.wanted and not self.restored.why:
                self.restored.note("what the store brought found no room in the tier, or has left it again")
        self.restored.over = True
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Let the fetches that wait for this one go on."""
        if self in self.reads.reading:
            self.reads.reading.remove(self)
        waiting, self.waiting = self.waiting, []
        for other in waiting:
            other.go_on()

    def go_on(self) -> None:
        """Read what is still missing, after the fetch that this one waited for."""
        self._guarded(self._read_rest)

    def _read_rest(self) -> None:
        assert self.running is not None
        match = find_again(self.link.core, self.running.match)
        if match.restorable >= self.boundary:
            self._end()
            return
        self.held = min(self.boundary, _held_path(self.link, match))
        self._read()


def _held_path(link: StoreLink, match: Match) -> int:
    """The boundary up to which the cache has the path of the components that need all of it."""
    core = link.core
    node, boundary = match.walked_to, walked_boundary(core, match)
    for lane in core.shape.lanes:
        host = link.copies.by_component[lane.index]
        if host is not None and isinstance(lane, PageLane) and host.closed_upward:
            node, boundary = link.copies.residencies[lane.index].deepest(node, boundary)
    return boundary


# ---------------------------------------------------------------- entering what arrived


Brought = Many[tuple[Piece, Any]]


def place(fetch: Fetch, brought: Brought, whole: bool) -> None:
    """Enter what arrived into the tree and the host, as deep as the whole path arrived. Pieces without room are left
    out.

    ``whole``: all that was asked for has arrived.
    """
    core, lanes = fetch.link.core, fetch.link.copies.lanes
    upto = fetch.boundary if whole else _path_end(fetch, brought)
    if upto <= 0:
        return
    width, key, match = core.index.tree.element_bytes, fetch.key, fetch.match
    if match.extra:  # its sequence may have ended, and the numbers of its extra keys have been forgotten
        key = core.keys.name(match.tokens)
    root = core.index.root(match.namespace)
    root.protect()
    run: list[Node] = []
    core.index.tree.extend(root, key[: upto * width], upto, run, partial(split, core))
    for node in run:
        node.protect()  # it may hold nothing yet, or lose what it holds when room is made
    try:
        with Pins() as pins:
            for lane in lanes:  # making room must not evict the path itself
                for node in run if lane.closed_upward else ():
                    cell = lane.cell(node)
                    if cell is not None:
                        pins.add(lane, cell)
            _fill(fetch, run, brought, pins)  # what lies deeper has no node here
    finally:
        for node in (*reversed(run), root):
            node.unprotect()
            core.index.prune(node)


def _path_end(fetch: Fetch, brought: Brought) -> int:
    """The boundary up to which the whole path arrived."""
    ends = [
        max((piece.end for piece, _ in brought if piece.lane is lane), default=fetch.held)
        for lane in fetch.link.copies.lanes
        if lane.closed_upward
    ]
    page = fetch.link.core.shape.page
    return min(ends, default=0) // page * page


def _fill(fetch: Fetch, run: list[Node], brought: Brought, pins: Pins) -> None:
    """Take host slots for what arrived, enter them at the nodes of ``run``, and enqueue the writes of their content."""
    link, copies = fetch.link, fetch.link.copies
    hold = standing_for_copies(link.core)
    moves: list[Moves] = []
    try:
        for lane in copies.lanes:
            moves.append(Moves(lane))
            filled: list[Any] = []
            mine = {piece.start: answer.payload for piece, answer in brought if piece.lane is lane}
            for node in run:
                places, payloads = _missing(lane, node, mine)
                is_new = lane.cell(node) is None
                if not places or not copies.reserve(moves[-1], node, places, pins):
                    continue
                filled += payloads
                if is_new and fetch.store is link.store:
                    cell = lane.cell(node)
                    cell.store, cell.stored = link.attached, cell.places
            moves[-1].write = partial(_write, link.spares, lane.pool, moves[-1].dst, filled)
        hold.take_fence(link.core.flight)
        moving = [each for each in moves if each.dst]
        if moving:
            copies.run(moving, run, hold, "fetch")
    except PrefixloomError:
        for each in moves:
            each.take_back(run)
        raise
    copies.fetched += sum(len(each.dst) for each in moves)


def _missing(lane: HostLane, node: Node, mine: dict[int, Any]) -> tuple[list[int], list[Any]]:
    """The places of ``node``'s edge that arrived and that the host has not, with their content."""
    cell = lane.cell(node)
    if lane.unit == "boundary":
        return ([0], [mine[node.end]]) if cell is None and node.end in mine else ([], [])
    page, start = lane.part.page_tokens, node.start
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
