"""Restoring: what lies on the host comes back to the device, for a sequence that was just opened.

A boundary is restorable if every component has what its reach needs there, on either tier: the same question as for a
match, asked of both. One boundary is the anchor of all components. Sources are pinned, every slot is reserved or none,
the copies are recorded as one piece of work, and the tree has them at once: whoever reads them comes after that work.
If a slot cannot be had or a copy fails, the next lower boundary is tried that is restorable; they are a set, and what
lies between two of them need not be.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from ..contract.reach import Interval, merged
from ..contract.values import Claim, TransferPlan
from ..device.pool import ABSENT, ABSENT_BYTES
from ..errors import CapacityError, InvariantError
from ..operations.lease import Hold, acquire, inert, release_part, replaced, swap
from ..operations.match import MatchPlan, again, claims_at, restorable
from ..operations.publish import split
from ..operations.room import make_room
from ..operations.step_ops import CLEAR
from ..tree.holdings import RetainedHolding
from ..tree.lane import PageLane
from ..tree.radix import climb
from ..tree.state_lane import CodedLane, PointLane
from .host_lane import Moves
from .transfer_hooks import plan_of, proposed

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..cache.sequence import Sequence
    from ..device.flight import Work
    from ..tree.lane import Lane
    from ..tree.radix import Node
    from .host_lane import HostLane


class Restored:
    """What came of a restore: the sequence goes on from ``ready``; ``wanted`` was the deepest that any tier had.

    ``why``: what kept it from getting there, in words; empty if nothing did. ``over``: whether a scheduler should go on
    without waiting. Until then ``poll`` may bring more, which counts if nothing else was done with the sequence.
    """

    __slots__ = ("over", "ready", "wanted", "why")

    def __init__(self, wanted: int, ready: int, why: str = "") -> None:
        self.wanted = wanted
        self.ready = ready
        self.why = why
        self.over = True

    def note(self, why: str) -> None:
        if why and why not in self.why:
            self.why = f"{self.why}; {why}" if self.why else why

    def __repr__(self) -> str:
        return f"Restored(wanted={self.wanted}, ready={self.ready}, why={self.why!r}, over={self.over})"


class Part:
    """What one component lacks on the device for a boundary: ``places`` are pages by number, ``src`` the host's."""

    __slots__ = ("host", "lane", "places", "run", "slots", "src")

    def __init__(self, lane: Lane, host: HostLane) -> None:
        self.lane = lane
        self.host = host
        self.places: list[int] = []
        self.src: list[int] = []
        self.run: list[Node] = []
        self.slots: array[int] = array("i")


class Pins:
    """What the operation may not lose meanwhile."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: list[tuple[Any, Any]] = []

    def add(self, lane: Any, cell: Any) -> None:
        lane.pin(cell)
        self._held.append((lane, cell))

    def __enter__(self) -> Pins:
        return self

    def __exit__(self, *_: object) -> None:
        for lane, cell in reversed(self._held):
            lane.unpin(cell)


def lacking(lane: Lane, host: HostLane, node: Node, pins: Pins, more: Many[Interval] = ()) -> Part:
    """What a resume at the end of ``node`` needs, and ``more``, that the device has not; what is there is pinned."""
    part = Part(lane, host)
    if not isinstance(lane, PageLane):
        theirs, ours = node.cells[lane.index], node.cells[host.index]
        if theirs is not None:
            pins.add(lane, theirs)
        else:
            pins.add(host, ours)
            part.run, part.src = [node], [ours.data]
        return part
    spans = merged((*lane.needs(node.end), *more)) if more else lane.needs(node.end)
    low = spans[0][0] if spans else node.end
    path: list[Node] = []
    while node.end > low:
        path.append(node)
        if lane.part.reach.closed_upward and node.cells[lane.index] is not None:
            break
        node = node.parent
    for node in reversed(path):
        _lacking_at(part, node, spans, pins)
        if part.src:
            part.run.append(node)
    return part


def _lacking_at(part: Part, node: Node, spans: Any, pins: Pins) -> None:
    lane, host = part.lane, part.host
    assert isinstance(lane, PageLane)
    page, start = lane.page, node.parent.end
    theirs, ours = node.cells[lane.index], node.cells[host.index]
    if theirs is not None:
        pins.add(lane, theirs)
        if lane.part.reach.closed_upward:
            return
    if ours is None:
        return
    pins.add(host, ours)
    device, mine = array("i", lane.edge(node)), array("i", ours.data)
    for place, slot in enumerate(mine):
        at = start + place * page
        if device[place] == ABSENT and slot != ABSENT and any(lo < at + page and at < hi for lo, hi in spans):
            part.places.append(at // page)
            part.src.append(slot)


def restore_and_fetch(cache: Cache, sequence: Sequence) -> Restored:
    """What the host has comes back; what only a store may have is looked for."""
    told = restore(cache, sequence)
    shelf = cache._tier.shelf if cache._tier is not None else None
    if shelf is not None:
        shelf.fetch(sequence, told)
    return told


def restore(cache: Cache, sequence: Sequence) -> Restored:
    """Bring back the deepest boundary that can be had; ``sequence`` has just been opened."""
    tier = cache._tier
    assert tier is not None
    wanted = limit = planned_again(cache, sequence).restorable
    why = ""
    while True:
        plan = planned_again(cache, sequence)  # what was evicted meanwhile, or cannot be copied, is gone
        node, boundary = plan._below, plan.restorable
        if boundary > limit:
            node, boundary = restorable(cache, plan, climb(node, limit), limit)
        if not sequence.ready < boundary <= limit:
            return Restored(wanted, sequence.ready, why)
        anchor = node if node.end == boundary else split(cache, node, boundary)
        try:
            _load(cache, sequence, anchor, claims_at(cache, plan, boundary)[0] if cache._match_hooks else ())
        except CapacityError as error:
            why = why or f"{boundary} tokens did not fit: {error}"
            limit = boundary - too_much(cache, error)
        except LoadFailed as error:
            why = why or f"the copy of {boundary} tokens failed: {error}"
            limit = boundary - cache._page
            tier.forsake(error.parts)
        else:
            tier.restores += 1
            tier.restored_tokens += boundary - plan.ready
            return Restored(wanted, sequence.ready, why)
        tier.fallbacks += 1


def too_much(cache: Cache, error: CapacityError) -> int:
    """By how many tokens a boundary must be lower at least: what needs all that lies before it needs so many less."""
    closed = [lane for lane in cache._page_lanes if lane.part.reach.closed_upward]
    tokens = max((error.lacking.get(lane.name, 0) * lane.page for lane in closed), default=0)
    return max(1, -(-tokens // cache._page)) * cache._page


def restore_more(cache: Cache, sequence: Sequence, told: Restored) -> None:
    """A store brought more to the host: if the sequence waits for it, and was left alone, it goes on from there.

    Whoever was told to go on counts on where the sequence was, though nothing may have been done with it so far.
    """
    used = sequence.reserved != sequence.ready or sequence._steps
    if told.over or used or sequence._lease._cache is None:
        told.note("the sequence was used before the store had answered")
        return
    more = restore(cache, sequence)
    told.wanted, told.ready = max(told.wanted, more.wanted), more.ready
    told.note(more.why)


def planned_again(cache: Cache, sequence: Sequence) -> MatchPlan:
    plan = sequence._plan
    return again(plan, plan._key, plan._most)


class LoadFailed(Exception):
    """A copy to the device could not be made: nothing was published. The sources of ``parts`` are to be forgotten."""

    def __init__(self, why: str, parts: Many[Part]) -> None:
        super().__init__(why)
        self.parts = parts


def _load(cache: Cache, sequence: Sequence, anchor: Node, claims: tuple[Claim | None, ...]) -> None:
    """All of it or nothing: reserve, copy, publish, and have the sequence go on from there."""
    tier = cache._tier
    assert tier is not None
    anchor.leases += 1  # it may hold nothing on the device yet
    try:
        with Pins() as pins:
            parts, plan = _parts(cache, anchor, pins)
            wanted: list[tuple[Any, int, object]] = [(part.lane, len(part.src), None) for part in parts]
            wanted += [(lane, lane.replayed_pages(anchor.end), None) for lane in cache._page_lanes if lane.replay]
            make_room(cache, wanted, "restore", anchor.end, sequence)
            work, filled = _copy_up(cache, sequence, parts)
            hold = acquire(cache, anchor, sequence.namespace, Hold)
    finally:
        anchor.leases -= 1
        if not anchor.leases and cache._tree.prune(anchor):
            cache._epoch += 1
    _resume_at(cache, sequence, anchor, hold, filled)
    sequence._claimed_ops = [op for claim in claims if claim is not None for op in claim.ops]
    if plan is not None:
        tier.watch(work, plan)


def _parts(cache: Cache, anchor: Node, pins: Pins) -> tuple[list[Part], TransferPlan | None]:
    """What is to be loaded, with what plugins want besides, pinned; and the plan of it, if anybody wants to see it."""
    tier = cache._tier
    assert tier is not None
    both = [(lane, tier.by_component[lane.index]) for lane in cache._lanes]
    parts = [lacking(lane, host, anchor, pins) for lane, host in both if host is not None]
    plan = None
    if cache._transfer_hooks:
        plan = plan_of("load", anchor, [(part.host, node) for part in parts for node in part.run])
        more = proposed(cache, plan)
        if more:
            parts = [lacking(part.lane, part.host, anchor, pins, more.get(part.lane.name, ())) for part in parts]
    return [part for part in parts if part.src], plan


def _copy_up(cache: Cache, sequence: Sequence, parts: list[Part]) -> tuple[Work, set[Lane]]:
    """Record the copies, and let the tree have what they bring.

    A state is copied into the sequence's slot as well, if nothing has filled that yet: nothing has to be copied from
    the tree after that. Those lanes are returned.
    """
    tier, flight, lease = cache._tier, cache._flight, sequence._lease
    assert tier is not None
    hold, before = inert(cache), flight._launched
    running = {}
    if not tier.blocked(lease.fence):
        running = {s[0]: s[1].slot for s in sequence._states if not (isinstance(s[0], CodedLane) or s[1].ready)}
    moves: list[Moves] = []
    try:
        for part in parts:
            part.slots = part.lane.pool.take(len(part.src))
            mine = Moves(part.host)
            mine.src, mine.dst = list(part.src), part.slots.tolist()
            if part.lane in running:
                mine.src += part.src
                mine.dst.append(running[part.lane])
                hold.fence = max(hold.fence, lease.fence)
            moves.append(mine)
            for node in part.run:
                flight.copies(hold, node, below=True)
        hold.claim(flight)
        if tier.blocked(hold.fence):
            raise LoadFailed("a step is open that it would have to come after", ())
        nodes = list(dict.fromkeys(node for part in parts for node in part.run))
        work = tier.run(moves, nodes, hold, "up")
    except BaseException as error:
        tier.end(before, "up")
        for part in parts:
            part.lane.pool.give(part.slots.tobytes())
        if any(work.number > before and not work.over for work in flight.works):  # some of the copies still run
            lease.fence = max(lease.fence, before + 1)
        if isinstance(error, LoadFailed | InvariantError) or not isinstance(error, Exception):
            raise
        tier.failed += 1
        broken = [part for part, mine in zip(parts, moves, strict=False) if mine.raised]
        raise LoadFailed(repr(error), broken) from error
    if not work.over:  # the running states are written until then, whatever comes next
        lease.fence = max(lease.fence, work.number)
    tier.follow(work, parts)
    for part in parts:
        _place(part)
    if cache._debug is not None:
        cache._debug.published(nodes)
    return work, {part.lane for part in parts if part.lane in running}


def _place(part: Part) -> None:
    """The device's cells take what was copied for them."""
    lane = part.lane
    if isinstance(lane, PointLane):
        lane.keep(part.run[0], part.slots[0])
        return
    assert isinstance(lane, PageLane)
    first = part.run[0].parent.end // lane.page
    base = 0 if lane.part.reach.closed_upward else first
    holding = RetainedHolding(b"", base, base)
    holding.whole = False
    holding.table = array("i", ABSENT_BYTES * (part.run[-1].end // lane.page - base))
    holding.owned = first
    for place, slot in zip(part.places, part.slots, strict=True):
        holding.table[place - base] = slot
    lane.adopt(part.run, holding)


def _resume_at(cache: Cache, sequence: Sequence, anchor: Node, hold: Hold, filled: set[Lane]) -> None:
    """The sequence goes on from ``anchor`` as if it had been opened there; ``hold`` covers that.

    ``filled``: lanes whose running state the load itself brings.
    """
    lease = sequence._lease
    swap(cache, lease, hold)
    replaced(cache, lease)
    cache._flight.read(lease, anchor)
    for lane, holding in sequence._paged:
        lane.close(holding)
    opened = [(lane, lane.open(anchor)) for lane in cache._page_lanes]
    for lane, holding in opened:
        lease.held[lane.index] = holding
    for lane, holding in sequence._paged:
        if lane.replay:
            lane.make_replayed(holding)
    sequence._fills = []
    for lane, state in sequence._states:
        state.as_of = anchor.end
        state.ready = lane in filled
        if state.ready:
            release_part(cache, lease, lane)
        else:
            cell = anchor.cells[lane.index]
            fill = (lane, state, "clear", CLEAR) if cell is None else (lane, state, lane.taken, cell.data)
            sequence._fills.append(fill)
    sequence.ready = sequence.reserved = sequence.committed = sequence.published = sequence._high = anchor.end
    if sequence.branch is not None and sequence.branch <= anchor.end:
        sequence.branch = None
    lease.claim(cache._flight)
