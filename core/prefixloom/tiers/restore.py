"""Restore: data on the host comes back to the device, for a sequence that was just opened.

A boundary is restorable if every component has what its reach needs there, on either tier: the same question as for a
match, asked of both tiers. One boundary is the anchor of all components. The sources are pinned, either all slots are
reserved or none, the copies are recorded as one piece of work, and the tree has the new slots at once: their readers
are ordered after that work. If slots are missing or a copy fails, the next lower restorable boundary is tried. The
restorable boundaries are a set: a boundary between two of them need not be restorable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many

from ..contract.reach import merged
from ..contract.tier_answers import Restored
from ..contract.values import Claim, TransferPlan, WalkView
from ..device.pool import ABSENT
from ..errors import CapacityError, InvariantError, PrefixloomError
from ..operations.lease import Lease, acquire, release_part, standing_for_copies, swap
from ..operations.match import claims_at, find_again, validated
from ..operations.publish import split
from ..operations.retain import forget_surplus
from ..operations.room import make_room
from ..operations.state import CLEAR, Core, Fill, Match, Running
from ..tree.lane import Lane
from ..tree.paged_reach import Pages, overlap, pages_of
from ..tree.radix import Node, climb, path_up
from ..tree.state_lane import CodedLane, StateLane
from .host_copies import Filling, HostCopies, Sources
from .host_lane import HostLane, Pins
from .transfer_hooks import plan_of, proposed

Source = tuple[HostLane, Node, list[int], list[int]]
"""(lane, node, places, slots): what a load copies of one node."""


def lacking(host: HostLane, node: Node, pins: Pins, wanted: Pages) -> list[Source]:
    """Find those of the pages ``wanted``, on the path to ``node``, that the device lacks and the host has.

    Their cells on the host are pinned, and those that have the others on the device.
    """
    lane, page = host.device, host.page
    absent = lane.residency.absent(node, wanted)
    path: list[Node] = []
    for each in path_up(node, wanted[0][0] * page) if wanted else ():
        path.append(each)
        if lane.whole_above and lane.cell(each) is not None:
            break
    found: list[Source] = []
    for node in reversed(path):
        there, first, end = host.cell(node), node.start // page, node.end // page
        if overlap(wanted, first, end):
            pins.add(lane, lane.cell(node))
        if there is not None and overlap(absent, first, end):
            pins.add(host, there)
            slots = host.edge(node)
            asked = (place - first for low, high in absent for place in range(max(low, first), min(high, end)))
            places = [place for place in asked if slots[place] != ABSENT]
            if places:
                found.append((host, node, places, [slots[place] for place in places]))
    return found


def restorable_at(copies: HostCopies, match: Match, node: Node, boundary: int) -> tuple[Node, int]:
    """Return the deepest boundary up to ``boundary`` in ``node`` that every component has on any tier and accepts.

    If none is worth a load, it is the boundary that ``match`` found on the device. After a failed load, this function
    finds the next one with a lower ``boundary``.
    """
    core = copies.core
    if not any(lane.in_tree for lane in copies.lanes):  # the host has nothing
        return match.node, match.ready
    worth = copies.manifest.load_at_least
    while boundary - match.ready >= worth:
        before = boundary
        for lane in core.shape.lanes:
            node, boundary = copies.residencies[lane.index].deepest(node, boundary)
        for name, validator in core.shape.tier_validators:
            boundary = validated(core, name, validator, _view(match, boundary))
            node = climb(node, boundary)
        if boundary == before:
            break
    return (node, boundary) if boundary - match.ready >= worth else (match.node, match.ready)


def _view(match: Match, boundary: int) -> WalkView:
    return WalkView(match.namespace, boundary, match.count, match.walked, match.ready, extra=match.extra)


def restore(copies: HostCopies, running: Running) -> Restored:
    """Restore the deepest possible boundary for ``running``, which has just been opened."""
    core = copies.core
    match = find_again(core, running.match)
    wanted = limit = match.restorable
    ready, why = running.ready, ""
    while True:
        node, boundary = match.below, match.restorable
        if boundary > limit:
            node, boundary = restorable_at(copies, match, climb(node, limit), limit)
        if not running.ready < boundary <= limit:
            if running.ready == ready and running.node.end == ready:
                claims = claims_at(core, match, ready) if "finalize_match_result" in core.shape.hooks else ()
                why = why or _load_with_more(copies, running, running.node, claims)
            return Restored(wanted, running.ready, why)
        end = node if node.end == boundary else split(core, node, boundary)
        claims = claims_at(core, match, boundary) if "finalize_match_result" in core.shape.hooks else ()
        try:
            left_out = _load_with_more(copies, running, end, claims)
        except CapacityError as error:
            why = why or f"{boundary} tokens did not fit: {error}"
            limit = boundary - _too_much(core, error)
        except LoadFailed as error:
            why = why or f"the copy of {boundary} tokens failed: {error}"
            limit = boundary - core.shape.page
            copies.forsake(error.sources)
        else:
            copies.restores += 1
            copies.restored_tokens += boundary - ready
            return Restored(wanted, running.ready, why or left_out)
        copies.fallbacks += 1
        match = find_again(core, running.match)  # without what was evicted meanwhile, or could not be copied


def _too_much(core: Core, error: CapacityError) -> int:
    """Return the number of tokens by which the boundary must at least be lower, for path components that lack pages."""
    lanes = core.shape.path_lanes
    tokens = max((error.lacking.get(lane.name, 0) * lane.page for lane in lanes), default=0)
    return max(1, -(-tokens // core.shape.page)) * core.shape.page


def restore_more(copies: HostCopies, running: Running, restored: Restored) -> None:
    """Restore more of a sequence, after a store brought more to the host, if the sequence waits and was not used.

    If it does not wait any more, its owner relies on its length, even if the sequence was not used yet.
    """
    used = running.reserved != running.ready or bool(running.steps)
    if restored.over or used or running.core is None:
        restored.note("the sequence was used before the store had answered")
        return
    more = restore(copies, running)
    restored.wanted, restored.ready = max(restored.wanted, more.wanted), more.ready
    restored.note(more.why)


class LoadFailed(PrefixloomError):
    """A copy to the device failed. Nothing was published. The ``sources`` must be dropped."""

    def __init__(self, why: str, sources: Sources = ()) -> None:
        super().__init__(why)
        self.sources = sources


def _load_with_more(copies: HostCopies, running: Running, end: Node, claims: Many[Claim | None]) -> str:
    """Load what the sequence needs at the end of ``end``, and what else it may use there and only the host has.

    Without room for that, or if its copy fails, only what is needed is loaded. The reason is returned.
    """
    sources: Sources = ()
    left_out = ""
    if _has_more(copies, end):
        try:
            _load(copies, running, end, claims, more=True)
            return ""
        except CapacityError as error:
            left_out = f"what it may use beside {end.end} tokens did not fit: {error}"
        except LoadFailed as error:
            left_out = f"the copy of {end.end} tokens, and of what it may use beside them, failed: {error}"
            sources = error.sources
    try:
        if end.end > running.ready:
            _load(copies, running, end, claims)
    finally:
        if sources:  # only now: what is needed may be among them, and its copy may do better
            copies.forsake(sources)
    return left_out


def _has_more(copies: HostCopies, end: Node) -> bool:
    """Return whether the host alone has pages that a sequence at the end of ``end`` may use and does not need."""
    for lane in copies.optional:
        wanted = lane.paged.outlook[end.end]
        lacks = lane.residency.absent(end, wanted)
        if lacks and lacks != copies.residencies[lane.index].absent(end, wanted):
            return True
    return False


def _load(copies: HostCopies, running: Running, end: Node, claims: Many[Claim | None], more: bool = False) -> None:
    """Reserve, copy and publish, and resume the sequence at the end of ``end``: all of it, or nothing on an error.

    ``more``: what it may use there and does not need is loaded as well.
    """
    core = copies.core
    end.protect()  # so that it is not unlinked: it may hold nothing on the device yet
    try:
        with Filling(copies, "up", standing_for_copies(core)) as filling:
            sources, plan = _sources(copies, end, filling.pins, more)
            wanted = Counter[Lane]()
            for host, _, places, _ in sources:
                wanted[host.device] += len(places)
            make_room(core, list(wanted.items()), "restore", end.end, running)
            for source in sources:
                filling.reserve(*source)
            filled = _copy_up(filling, running)
            lease = acquire(core, end, running.namespace)
    finally:
        core.index.unprotect(end)
    _resume_at(core, running, end, lease, filled)
    running.claimed_ops = [op for claim in claims if claim is not None for op in claim.ops]
    if plan is not None and filling.work is not None:
        copies.watch(filling.work, plan)


def _sources(copies: HostCopies, end: Node, pins: Pins, more: bool) -> tuple[list[Source], TransferPlan | None]:
    """Return what is to be loaded, pinned, with what plugins add; and the plan, if a plugin has hooks for it."""
    core = copies.core
    wanted: dict[Lane, Pages] = {lane: lane.paged.needs[end.end] for lane in core.shape.lanes}
    if more:
        wanted |= {lane: lane.paged.outlook[end.end] for lane in copies.optional}
    sources = [each for host in copies.lanes for each in lacking(host, end, pins, wanted[host.device])]
    plan = None
    if core.shape.has_transfer_hooks:
        plan = plan_of(core, "load", end, [(host, node) for host, node, _, _ in sources])
        added = proposed(core, copies.part, plan)
        if added:
            for lane in core.shape.page_lanes:
                wanted[lane] = merged((*wanted[lane], *pages_of(added.get(lane.name, ()), lane.page)))
            sources = [each for host in copies.lanes for each in lacking(host, end, pins, wanted[host.device])]
    return sources, plan


def _copy_up(filling: Filling, running: Running) -> set[Lane]:
    """Record the copies of a load.

    A state is copied into the sequence's slot as well, if nothing has filled that yet, so that no copy from the tree is
    needed later. The lanes of these states are returned.
    """
    copies, hold, core = filling.copies, filling.hold, filling.copies.core
    flight, before = core.flight, core.flight.launched
    slots: dict[Lane, int] = {}
    if not flight.blocked(running.fence):
        slots = {lane: state.slot for lane, state in running.states if not (isinstance(lane, CodedLane) or state.ready)}
    filled: set[Lane] = set()
    for mine in filling.moving:
        lane = mine.lane.device
        if lane in slots:
            filled.add(lane)
            mine.src *= 2
            mine.dst.append(slots[lane])
            hold.fence = max(hold.fence, running.fence)
        for node, _ in mine.at:
            core.unwritten.read_node(hold, node, below=True)
    hold.take_fence(flight)
    if flight.blocked(hold.fence):
        raise LoadFailed("it would have to wait for a step that is still open")
    try:
        work = filling.run()
    except PrefixloomError as error:
        if any(work.number > before and not work.over for work in flight.works):  # some of the copies still run
            running.fence = max(running.fence, before + 1)
        if isinstance(error, InvariantError):
            raise
        copies.failed += 1
        raise LoadFailed(
            repr(error), [each for mine in filling.moving if mine.raised for each in mine.sources]
        ) from error
    if not work.over:  # the running states are written until then, whatever comes next
        running.fence = max(running.fence, work.number)
    for mine in filling.moving:
        restored = sorted([node for node, _ in mine.at], key=lambda node: node.end)
        lane = mine.lane.device
        lane.line_up(restored)
        if isinstance(lane, StateLane):  # it asks itself alone: a reach of pages may raise, and the copies run
            lane.pass_above(restored, restored[-1].end, lane.resumable)
    copies.follow(work, [each for mine in filling.moving for each in mine.sources])
    if core.watcher is not None:
        core.watcher.published(filling.nodes)
    return filled


def _resume_at(core: Core, running: Running, end: Node, lease: Lease, filled: set[Lane]) -> None:
    """Resume the sequence at the end of ``end``, as if it had been opened there; ``lease`` covers that boundary.

    ``filled`` are the lanes whose running state the load itself writes.
    """
    swap(core, running, lease)
    forget_surplus(core, running)
    core.unwritten.read(running, end)
    for lane, holding in running.paged:
        lane.close(holding)
    for lane in core.shape.page_lanes:
        running.held[lane.index] = lane.open(end, running.covers[lane.index])
    fills: list[Fill] = []
    for point, state in running.states:
        state.as_of = end.end
        state.ready = point in filled
        if state.ready:
            release_part(running, point)
        else:
            cell = point.cell(end)
            fills.append((point, state, "clear", CLEAR) if cell is None else (point, state, point.taken, cell.slot))
    running.resume_at(end.end, fills)
    if core.index.expiries is not None:
        core.index.want(end, running.until)
    running.take_fence(core.flight)
