"""Store reads: fetch what a store has of a prompt to the host, from where it can be restored.

A fetch first searches, on the store's thread: how deep the store has the whole path of the components that need all of
it, and then the deepest boundary on that path for which it has the pieces of all other components. Then the fetch reads
the pieces in order, a slice at a time: a poll enters a slice into the tree (nodes, host slots and their content) before
the next one is asked for, so that the memory of a fetch is bounded. At the end the sequence is restored, if it was not
used meanwhile. A fetch waits for another one that is reading the same pieces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from collections.abc import Sequence as Many
from functools import partial

from ..contract.identity import means
from ..contract.reach import Interval
from ..contract.tier_answers import Restored
from ..device.host_pool import HostPool
from ..errors import InvariantError, PrefixloomError
from ..operations.lease import standing_for_copies
from ..operations.match import current, find_again, limit_of, walked_boundary
from ..operations.publish import split
from ..operations.state import Match, Running
from ..storage import Backend, Key, Record
from ..tree.lane import PageLane
from ..tree.radix import Node
from .consensus import LocalConsensus
from .host_copies import Filling
from .host_lane import HostLane
from .pieces import SLICE, Piece, Spares, calls_of, checked, pages_of, piece_key, said, slices, spans_of, total
from .restore import restore_more
from .store import Answers, GuardedStore, PendingCall, StoreBehind

log = logging.getLogger("prefixloom")

LOOK = 64
"""The number of pages or boundaries in one call of a search."""

TOO_SLOW = "the store was too slow"


class StoreReads:
    """The fetches of one cache from its store: those that have not ended, in the order in which they began."""

    def __init__(self, behind: StoreBehind) -> None:
        self.behind = behind
        self.fetches: list[Fetch] = []

    def begin(self, running: Running, restored: Restored) -> None:
        """Look for more of a prompt than the cache has, if that is worth a fetch; the result goes to ``restored``."""
        if not self.behind.find():
            return
        assert self.behind.store is not None
        fetch = Fetch(self, self.behind.store, running, restored)
        if fetch.promises(fetch.limit):
            restored.over = self.behind.component.fetch == "best_effort"
            self.fetches.append(fetch)
            fetch.go_on()

    def poll(self) -> None:
        for fetch in list(self.fetches):
            fetch.poll()

    def forget(self, namespace: str | None = None) -> None:
        """Give up the fetches of one namespace or of all, because it was dropped or the cache flushed."""
        for fetch in list(self.fetches):
            if namespace is None or means(namespace, fetch.match.namespace):
                fetch.forget()


class Fetch:
    """The fetch of one prompt. ``_steps`` is its life: a search, then a read of slices, one after the other.

    ``base``      the boundary that the cache can restore without the store
    ``limit``     the deepest boundary for which it searches
    ``held``      the boundary up to which the cache has the path of the components that need all of it
    ``boundary``  the boundary whose pieces it reads
    ``ahead``     the fetch that reads the same pieces, and for whose end this one waits
    ``calls``     the calls of the search, or of the slice that is read, each with a batch of pieces
    """

    def __init__(self, reads: StoreReads, store: GuardedStore, running: Running, restored: Restored) -> None:
        self.reads = reads
        self.behind = behind = reads.behind
        self.store = store
        self.running: Running | None = running
        self.match = match = current(behind.core, running.match)  # some of it may have left the tier since
        self.restored = restored
        self.key = match.key
        self.base = self.boundary = match.restorable
        self.limit = limit_of(behind.core, match)
        self.held = _held_path(behind, match)
        self.ahead: Fetch | None = None
        self.calls: list[PendingCall] = []
        self.reading = False
        self._batches: list[list[Piece]] = []
        self._life = self._steps()
        self._ticket = -1  # of the search, or of the slice that is read
        self._told = True  # whether the ticket is done on this rank
        self._begun = behind.component.now()
        self._until: float | None = None
        self._links: list[bytes] = []

    def promises(self, boundary: int) -> bool:
        """Return whether ``boundary`` is worth a fetch."""
        return boundary - self.base >= max(self.behind.component.fetch_at_least, self.behind.core.shape.page)

    def _set_deadline(self, pages: int) -> None:
        """Set the time by which so many pages must have arrived, if the tier has a timeout."""
        if self.behind.component.fetch == "timeout":
            self._until = self._begun + self.behind.component.patience(pages)

    def _open_ticket(self) -> None:
        self._ticket, self._told = self.behind.open(self.go_on), False

    def _tell(self, amount: int) -> None:
        self._told = True
        self.behind.completions.done(self._ticket, amount)

    def forget(self) -> None:
        """Give up. Those that wait for this fetch have the same namespace, and are given up as well."""
        self.running = None
        self.restored.over = True
        self.reads.fetches.remove(self)
        if not self._told:
            self._tell(0)

    def poll(self) -> None:
        """Find out whether the calls are over, or have taken too long."""
        if self._told:
            return
        late = self._until is not None and self.behind.component.now() > self._until
        if not self.reading:
            (call,) = self.calls
            if call.over or late:
                boundary, note = (call.answers or ()) if call.over else (self.base, TOO_SLOW)
                self._tell(boundary)
                self.restored.note(note)
            return
        if not late and not self._failed():
            self._ask_more()
        if late or all(call.over for call in self.calls):
            self._tell(self._arrived())

    # ------------------------------------------------------------ one step after the other
    def _steps(self) -> Generator[None, int, None]:
        """Search, and read what was found. Each step waits for the amount of a ticket, or for the fetch ``ahead``."""
        behind, core = self.behind, self.behind.core
        self._set_deadline(0)
        alone = isinstance(behind.consensus, LocalConsensus)
        while True:  # again up to the depth on which the ranks agree, if that is less than some have found
            self._open_ticket()
            self.calls = [behind.ask(self.store, "search", self._find, lambda why: (self.base, why))]
            boundary = yield
            if not self.promises(boundary):
                return
            if alone or boundary == self.limit:
                break
            self.limit = boundary
        self.boundary = self.restored.wanted = boundary
        while ahead := next((other for other in self.reads.fetches if self._comes_after(other)), None):
            self.ahead = ahead
            yield
            self.ahead = None
            match = find_again(core, self.match)
            if match.restorable >= boundary:
                return
            self.held = min(boundary, _held_path(behind, match))
        parts = slices(behind.copies.lanes, self.held, boundary, core.shape.page)
        self.reading = bool(parts)  # or else the cache has all pieces already
        self._set_deadline(sum(map(len, parts)))
        for number, part in enumerate(parts):
            if number:
                self._wake_waiting()  # some may have all pieces by now
            self._open_ticket()
            self._batches, self.calls = calls_of(part), []
            self._ask_more()
            complete = yield
            self._enter(complete)
            if complete < len(self._batches):
                return

    def go_on(self, amount: int | None = None) -> None:
        """Take the next step. After the last one the sequence is restored. An error ends the fetch alone."""
        if self.running is None:  # it was given up
            return
        try:
            try:
                self._life.send(amount)  # type: ignore[arg-type]
            except StopIteration:
                self._end()
        except PrefixloomError as error:
            self._close()
            if isinstance(error, InvariantError):
                raise
            log.warning("what a store brought is left out: %r", error)
            self.restored.note(str(error))

    def _enter(self, complete: int) -> None:
        """Enter the pieces of the calls that are complete."""
        brought = [
            (piece, answer)
            for call, batch in zip(self.calls[:complete], self._batches, strict=False)
            for piece, answer in zip(batch, call.answers or (), strict=True)
        ]
        if brought:
            place(self, brought, complete == len(self._batches))

    def _end(self) -> None:
        """End the fetch: restore the sequence, and let the fetches that wait go on."""
        running, self.running = self.running, None
        assert running is not None
        restore_more(self.behind.copies, running, self.restored)
        if self.restored.ready < self.restored.wanted and not self.restored.why:
            self.restored.note("what the store brought found no room in the tier, or has left it again")
        self._close()

    def _close(self) -> None:
        self.running = None
        self.restored.over = True
        self.calls = []
        if self in self.reads.fetches:
            self.reads.fetches.remove(self)
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Let the fetches that wait for this one go on."""
        for other in [each for each in self.reads.fetches if each.ahead is self]:
            other.go_on()

    # ------------------------------------------------------------ searching
    def _find(self, backend: Backend) -> Answers:
        """Return the deepest boundary that the store can bring, or ``base``, and why it is not deeper.

        It runs on the store's thread, and reads nothing that may change meanwhile.
        """
        page, chain, lanes = self.behind.core.shape.page, self.behind.chain, self.behind.copies.lanes
        if not self._links:
            root = chain.root(self.match.namespace)
            self._links = chain.pages(self.match.tokens, root, end=self.limit // page)
        closed = [lane for lane in lanes if lane.closed_upward]
        others = [lane for lane in lanes if not lane.closed_upward]
        depth: int | None = self.limit
        if closed:
            below = range(self.held, self.limit, page)
            depth = self._first(backend, closed, below, lambda lane, at: pages_of(lane, at, at + page), there=False)
        bounds = range(self.limit if depth is None else depth, self.base, -page)
        found = self._first(backend, others, bounds, lambda lane, at: spans_of(lane.device, at), there=True)
        return (self.base, self._why_not(backend)) if found is None else (found, "")

    def _first(
        self,
        backend: Backend,
        lanes: Many[HostLane],
        bounds: range,
        spans: Callable[[HostLane, int], Iterable[Interval]],
        there: bool,
    ) -> int | None:
        """Return the first of ``bounds`` of which the store has all pieces; if not ``there``, of which it lacks one."""
        for low in range(0, len(bounds), LOOK):
            wanted = {at: [self._key(lane, *span) for lane in lanes for span in spans(lane, at)]
                      for at in bounds[low : low + LOOK]}  # fmt: skip
            keys = list(dict.fromkeys(key for some in wanted.values() for key in some))
            exists = dict(zip(keys, backend.exists(keys), strict=True)) if keys else {}
            for at, some in wanted.items():
                if all(exists[key] for key in some) is there:
                    return at
        return None

    def _why_not(self, backend: Backend) -> str:
        """Return the store's reason for the first missing piece, if it is another one than its absence."""
        page, lane = self.behind.core.shape.page, self.behind.copies.lanes[0]
        if self.base // page >= len(self._links):
            return ""
        end = self.base + page
        start = end if lane.unit == "boundary" else end - lane.page
        (answer,) = backend.get([self._key(lane, start, end)])
        return "" if isinstance(answer, Record) or answer.reason == "absent" else said(answer.reason, answer.detail)

    def _key(self, lane: HostLane, start: int, end: int) -> Key:
        link = self._links[(end - 1) // self.behind.core.shape.page]
        return piece_key(lane, self.behind.fingerprints[lane.index], link, start, end)

    # ------------------------------------------------------------ reading
    def _comes_after(self, other: Fetch) -> bool:
        """Return whether the other fetch brings all that is missing here, or at least half of the path."""
        page, size = self.behind.core.shape.page, self.behind.core.index.tree.page_bytes
        shared = self.boundary
        if other.boundary != shared and any(lane.closed_upward for lane in self.behind.copies.lanes):
            shared = -(-(self.held + self.boundary) // 2 // page) * page
        upto = shared // page * size
        return (
            other.reading
            and (self.held < shared <= other.boundary or other.boundary == self.boundary)
            and other.match.namespace == self.match.namespace
            and other.key[:upto] == self.key[:upto]
        )

    def _ask_more(self) -> None:
        """Make further calls, as long as those that are not over yet ask for no more bytes than a slice has."""
        waiting = sum(total(batch) for call, batch in zip(self.calls, self._batches, strict=False) if not call.over)
        for batch in self._batches[len(self.calls) :]:
            waiting += total(batch)
            if waiting > max(SLICE, total(batch)):
                return
            lanes = [piece.lane for piece in batch]
            self.calls.append(
                self.behind.ask(self.store, "read", partial(self._get, batch), partial(_each, batch), lanes)
            )

    def _get(self, batch: Many[Piece], backend: Backend) -> Answers:
        """Read some pieces in one call. It runs on the store's thread, which computes their keys as well."""
        spares = self.behind.spares
        keys = [self._key(piece.lane, piece.start, piece.end) for piece in batch]
        into = [spares.take(piece.size) for piece in batch]
        answers = backend.get(keys, into)
        if not isinstance(answers, tuple) or len(answers) != len(keys):
            raise TypeError(f"{type(backend).__name__}.get answered {answers!r:.200} for {len(keys)} keys")
        return tuple(map(checked, batch, keys, answers, into))

    def _failed(self) -> bool:
        """Return whether a piece is known to be missing, so that the pieces after it are of no use."""
        return any(isinstance(answer, str) for call in self.calls for answer in call.answers or ())

    def _arrived(self) -> int:
        """Return the number of complete calls, from the first on."""
        for number, (call, batch) in enumerate(zip(self.calls, self._batches, strict=False)):
            if not call.over:
                self.restored.note(TOO_SLOW)
                return number
            for piece, answer in zip(batch, call.answers or (), strict=True):
                if isinstance(answer, str):
                    self.restored.note(f"{piece.lane.device.name} at {piece.end}: {answer}")
                    return number
        if len(self.calls) < len(self._batches):  # the time was over before the others were asked for
            self.restored.note(TOO_SLOW)
        return len(self.calls)


def _each(pieces: Many[Piece], why: str) -> Answers:
    """Return the answers for pieces that the store did not read."""
    return (why,) * len(pieces)


def _held_path(behind: StoreBehind, match: Match) -> int:
    """Return the boundary up to which the cache has the path of the components that need all of it."""
    core = behind.core
    node, boundary = match.walked_to, walked_boundary(core, match)
    for lane in core.shape.lanes:
        host = behind.copies.by_component[lane.index]
        if host is not None and isinstance(lane, PageLane) and host.closed_upward:
            node, boundary = behind.copies.residencies[lane.index].deepest(node, boundary)
    return boundary


# ---------------------------------------------------------------- entering what arrived


Brought = Many[tuple[Piece, Record]]


def place(fetch: Fetch, brought: Brought, whole: bool) -> None:
    """Enter what arrived into the tree and the host, as deep as the whole path arrived, and as far as there is room.

    ``whole``: all that was asked for has arrived.
    """
    core = fetch.behind.core
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
        _fill(fetch, run, brought)
    finally:
        for node in (*reversed(run), root):
            core.index.unprotect(node)


def _path_end(fetch: Fetch, brought: Brought) -> int:
    """Return the boundary up to which the whole path arrived."""
    ends = [
        max((piece.end for piece, _ in brought if piece.lane is lane), default=fetch.held)
        for lane in fetch.behind.copies.lanes
        if lane.closed_upward
    ]
    page = fetch.behind.core.shape.page
    return min(ends, default=0) // page * page


def _fill(fetch: Fetch, run: list[Node], brought: Brought) -> None:
    """Take host slots for what arrived, enter them at the nodes of ``run``, and enqueue the writes of their content."""
    behind, copies = fetch.behind, fetch.behind.copies
    with Filling(copies, "fetch", standing_for_copies(behind.core)) as filling:
        for lane in copies.lanes:  # making room must not evict the path itself
            for node in run if lane.closed_upward else ():
                filling.pins.add(lane, lane.cell(node))
        for lane in copies.lanes:
            mine = {piece.start: answer.payload for piece, answer in brought if piece.lane is lane}
            payloads: list[memoryview] = []
            for node in run:  # what lies deeper than the run has no node
                places = [place for place in lane.absent(node) if lane.span(node, place)[0] in mine]
                is_new = lane.cell(node) is None
                if not places or not filling.reserve(lane, node, places):
                    continue
                payloads += [mine[lane.span(node, place)[0]] for place in places]
                cell = lane.cell(node)
                if is_new and cell is not None and fetch.store is behind.store:
                    cell.store, cell.left = behind.attached, 0
            moves = filling.moves[lane]
            moves.write = partial(_write, behind.spares, lane.pool, moves.dst, payloads)
        if filling.nodes:
            filling.run()
    copies.fetched += sum(len(moves.dst) for moves in filling.moving)


def _write(spares: Spares, pool: HostPool, slots: Many[int], payloads: Many[memoryview]) -> None:
    for slot, payload in zip(slots, payloads, strict=True):
        pool.write_from(slot, payload)
        spares.give(payload)
