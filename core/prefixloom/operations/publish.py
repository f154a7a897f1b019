"""Publication: a running sequence hands what it computed to the tree.

It walks from the sequence's lease, so a chunk costs the chunk. Where the tree has a node already, duplicates are freed
and tombstones refilled; where it ends, a leaf is attached. Then the lease moves down to the new boundary.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from ..contract.admission import StateView
from ..contract.values import Claim, NodeView, SplitRule, WalkView
from ..device.flight import abandon, own_slots
from ..device.pool import Stage
from ..errors import CapacityError
from ..tree.radix import Node
from ..tree.state_lane import CodedLane, PointLane
from .lease import advance, ask_receipts, conclude, conclude_some, step_down
from .room import make_room
from .step_ops import run_apart

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..cache.sequence import Sequence
    from ..tree.holdings import StateHolding
    from ..tree.lane import Cell, Lane
    from ..tree.radix import Node

    Pairs = Many[tuple[Any, Any]]
    Owned = Many[tuple[Lane, set[int]]]

NOTHING: list[Any] = []
"""What a sequence holds when all has been handed over."""


def split(cache: Cache, node: Node, boundary: int) -> Node:
    """Cut ``node`` at ``boundary`` and divide every component's cell; the upper half is returned."""
    dropping = [lane for lane in cache._lanes if _drops_on_split(cache, lane, node, boundary)]
    upper = cache._tree.split(node, boundary)
    if cache._flight.nodes:
        cache._flight.divided(upper, node)
    if cache._tier is not None:
        cache._tier.divided(upper, node)
    upper.leases += 1  # the caller goes on from here
    for lane in cache._all_lanes:
        lane.divide(upper, node)
    for lane in dropping:
        cell = node.cells[lane.index]
        lane.queue.remove(cell)
        lane.free_cell(cell)
        cache._epoch += 1
    if node.kids is None and not node.leases and cache._tree.prune(node):  # all that it held lies above the cut
        cache._epoch += 1
    upper.leases -= 1
    return upper


def _drops_on_split(cache: Cache, lane: Lane, node: Node, boundary: int) -> bool:
    """Whether a boundary component drops its state on a split; asked first. What a lease covers is not dropped."""
    hook = lane.hooks.redistribute_on_node_split
    cell = node.cells[lane.index]
    if hook is None or cell is None:
        return False
    start, end, boundary_cell = node.start, node.end, lane.unit == "boundary"
    pages = 0 if boundary_cell else lane.size(cell) * (boundary - start) // (end - start)
    views = (
        NodeView(start, boundary, pages, cell.locks),
        NodeView(boundary, end, lane.size(cell) - pages, cell.locks),
    )
    rule = cache._ask_softly(lane, "redistribute_on_node_split", SplitRule, hook, *views)
    return rule is not None and rule.keep == "drop" and boundary_cell and not cell.locks


def stops(sequence: Sequence, upto: int) -> Iterable[int]:
    """Where a publication up to ``upto`` must end a node: at each state's deepest checkpoint, and at ``upto``."""
    for _, holding in sequence._states:
        if holding.tracks:
            break
    else:
        return (upto,)
    found = {upto}
    for lane, holding in sequence._states:
        at = lane.checkpoint(holding, upto)
        if at > sequence.published and not at % sequence._cache._page and lane.shared:
            found.add(at)
    return sorted(found)


def publish_end(cache: Cache, sequence: Sequence) -> None:
    """A sequence ends: publish what is complete, and a state that was not admitted while it ran on, if it is now."""
    upto = sequence.named - cache._lookahead
    if upto > sequence.committed:
        upto = sequence.committed
    upto -= upto % cache._page
    if upto <= sequence.published:
        if cache._admitting:
            _admit_at_end(cache, sequence)
    elif cache._attended or cache._flight.works:
        for stop in stops(sequence, upto) if cache._tracking else (upto,):
            publish(cache, sequence, stop, last=stop == upto, end=upto)
    else:
        run = nodes_for(cache, sequence, upto)
        conclude(cache, sequence._lease, run)
        sequence._lease.held = NOTHING
        sequence.published = upto
        if cache._debug is not None:
            cache._debug.published(run)
        if cache._tier is not None:
            cache._tier.published(run)


def _admit_at_end(cache: Cache, sequence: Sequence) -> None:
    node = sequence._lease._node
    upto = sequence.published
    lacking: Pairs = tuple(
        (lane, holding)
        for lane, holding in sequence._states
        if lane.admit is not None and lane.shared and node.end and node.cells[lane.index] is None
    )
    pairs = _admitted(cache, sequence, lacking, upto, upto)
    work = sequence._lease.work
    own = own_slots(pairs) if work is not None and not work.over else None
    for lane, holding in pairs:
        lane.adopt([node], holding)
    _published(cache, sequence, [node], own, pairs)


def publish_on(cache: Cache, sequence: Sequence, upto: int) -> None:
    """``publish`` while the sequence runs on, where this is no more than each component's handing over what it has."""
    lease = sequence._lease
    held = lease.held
    work = lease.work
    own = None
    if work is not None and not work.over:
        own = own_slots(sequence._pairs)
    staying: tuple[PointLane, ...] = ()
    for point in cache._point_lanes:
        if not point.live.at_hand and not _has_slot(cache, point, held[point.index], upto):
            staying = (*staying, point)
    run = nodes_for(cache, sequence, upto)
    node = run[-1]
    records = lease._records
    try:
        for lane in cache._in_order:
            record = records[lane.index]
            if lane.unit == "page" or not staying or lane not in staying:
                moved = lane.carry(run, held[lane.index], record)
            else:
                moved = lane.advance(record, node)
            records[lane.index] = moved
        step_down(cache, lease, node)
        for point in cache._point_lanes:
            holding = held[point.index]
            if holding.slot < 0:
                _renew(cache, sequence, point, holding, node)
    except BaseException as error:  # a reach that is plain Python, or an interrupt
        _end_half_way(cache, sequence, run, error)
        raise
    sequence.published = upto
    if own is not None or cache._flight.nodes or cache._follows:
        _published(cache, sequence, run, own, sequence._pairs)


def _has_slot(cache: Cache, lane: PointLane, holding: StateHolding, upto: int) -> bool:
    """Whether a state that is donated at ``upto`` has a slot to go on with. It stays with the sequence else: a
    checkpoint is optional, serving is not.
    """
    if lane.donates(holding, upto):
        try:
            make_room(cache, [(lane, 1, holding)], "checkpoint")
        except CapacityError:
            cache._skipped_checkpoints += 1
            return False
    return True


def publish(cache: Cache, sequence: Sequence, upto: int, last: bool, end: int = -1) -> None:
    """Move the sequence's data of [published, upto) into the tree.

    ``last``: it does not run on afterwards. ``end``: where it ends, if it does; this may be a stop on the way there.
    """
    lease = sequence._lease
    pairs = sequence._shared
    work = lease.work
    own = own_slots(pairs) if work is not None and not work.over else None
    receipts = ask_receipts(cache, sequence.namespace, upto) if cache._lock_hooks else None
    if cache._insert_hooks:
        pairs = _ask_keep(cache, sequence, lease._node.end, upto, last)
    if cache._admitting:
        pairs = _admitted(cache, sequence, pairs, upto, end)
    donors: Pairs = ()
    if not last and cache._point_lanes:
        donors, pairs = _donors(cache, sequence, pairs, upto)
    run = nodes_for(cache, sequence, upto)
    node = run[-1]
    if last and receipts is None and not cache._coded_lanes:
        conclude_some(cache, lease, run, pairs, [pair for pair in sequence._pairs if pair not in pairs])
        sequence._lease.held = NOTHING
    else:
        try:
            for lane, holding in pairs:
                lane.adopt(run, holding)
            advance(cache, lease, node, receipts)
            for lane, holding in donors:
                if holding.slot < 0:  # else the tree had that state already
                    _renew(cache, sequence, lane, holding, node)
        except BaseException as error:  # a reach that is plain Python, or an interrupt
            _end_half_way(cache, sequence, run, error)
            raise
    sequence.published = upto
    if own is not None or cache._flight.nodes or cache._follows:
        _published(cache, sequence, run, own, pairs)


def _end_half_way(cache: Cache, sequence: Sequence, run: list[Node], error: BaseException) -> None:
    """Some of what the sequence owned is the tree's by now, and its lease does not cover that: so it cannot go on."""
    abandon(cache, sequence._lease, error)
    sequence._lease.held = NOTHING
    for lane in cache._lanes:
        lane.line_up(run)  # what it took over and no lease came to cover
    cache._tree.prune(run[-1])


def _published(cache: Cache, sequence: Sequence, run: list[Node], own: Owned | None, pairs: Pairs) -> None:
    """The nodes of ``run`` have what the sequence handed over: what follows from that.

    ``own``: what it owned before, if its last step is not over.
    """
    flight, lease = cache._flight, sequence._lease
    if own is not None:
        flight.publishing(lease, run, own)
    if flight.nodes:
        flight.read(lease, run[-1])
    if cache._coded_lanes:
        flying = encode_states(cache, sequence, run[-1], pairs)
        if flying:
            flight.publishing(lease, run, flying)
    if cache._debug is not None:
        cache._debug.published(run)
    if cache._tier is not None:
        cache._tier.published(run)
    if cache._thins:
        _thin(cache, sequence, pairs, run[-1])


def nodes_for(cache: Cache, sequence: Sequence, upto: int) -> list[Node]:
    """The nodes below the sequence's lease that its key spells, each below the last, to ``upto``: a leaf, if need be.

    Down to where the match has compared keys already they are found from below.
    """
    node = sequence._lease._node
    run = []
    reached = sequence._reached
    if reached is not None and reached.end <= upto:
        sequence._reached = None  # from now on the lease is as deep
        if node.end < reached.end and reached.first is not None:
            run.append(reached)
            above = reached.parent
            while above.end > node.end:
                run.insert(0, above)
                above = above.parent
            node = reached
    key = sequence._key_between(node.end, upto)
    spell(cache, node, key, upto, run)
    priority = sequence.priority
    if priority:
        for node in run:
            if priority > node.priority:
                node.priority = priority
    return run


def spell(cache: Cache, node: Node, key: bytes, upto: int, run: list[Node]) -> None:
    """Add to ``run`` the nodes below ``node`` that ``key`` spells, down to ``upto``: the last may be a new leaf."""
    tree = cache._tree
    start = node.end
    at = 0
    kids = node.kids
    while kids is not None:
        child, second = tree.below(kids, key, at)
        if child is None:
            break
        rest = child.rest
        if key.startswith(rest, second):
            node = child
            at = second + len(rest)
        else:
            second += tree.agreed(key, second, rest)
            if second == at:
                break
            at = second
            node = split(cache, child, start + at // tree.element_bytes)
        run.append(node)
        kids = node.kids
    if at < len(key):
        leaf = tree.attach(node, key, upto, at)
        run.append(leaf)


def _admitted(cache: Cache, sequence: Sequence, pairs: Pairs, upto: int, end: int) -> Pairs:
    """Without the boundary components whose state at ``upto`` is not wanted; asked before anything moves."""
    out: list[tuple[Lane, Any]] = []
    for lane, holding in pairs:
        if isinstance(lane, PointLane) and lane.admit is not None and lane.checkpoint(holding, upto) == upto:
            above = lane.above(sequence._lease._node)
            deepest = above[0].node.end if above else 0
            last = end >= 0 and lane.checkpoint(holding, end) == upto
            view = StateView(lane.name, sequence.namespace, upto, deepest, len(above), upto == sequence.branch, last)
            if cache._ask_policy(lane.policy, "admit", "True or False", bool, lane.admit, view) is False:
                continue
        out.append((lane, holding))
    return tuple(out)


def _thin(cache: Cache, sequence: Sequence, pairs: Pairs, node: Node) -> None:
    """Where a path may have only so many states, a new one at ``node`` may cost an older one. All has moved by now."""
    for lane, _ in pairs:
        if isinstance(lane, PointLane) and lane.per_path is not None and node.cells[lane.index] is not None:
            above = lane.above(node.parent)
            if len(above) < lane.per_path:
                continue
            victim = _worth_least(cache, sequence, lane, above)
            if victim is not None:
                if cache._tier is not None:
                    cache._tier.losing(lane, [victim])
                lane.drop_cell(victim)
                lane.evicted += 1
                cache._epoch += 1


def _worth_least(cache: Cache, sequence: Sequence, lane: PointLane, above: list[Cell]) -> Cell | None:
    """Of the states above a new one, the nearest first, which one goes: none that somebody is copying.

    Without a policy the nearest, but for those where paths part: they serve several continuations.
    """
    free = [(number, cell) for number, cell in enumerate(above) if not cell.locks]
    if lane.worth is not None:
        worths = []
        for number, cell in free:
            below, node = above[number + 1 :], cell.node
            view = StateView(
                lane.name, sequence.namespace, node.end, below[0].node.end if below else 0, len(below),
                node.forks,
            )  # fmt: skip
            worth = cache._ask_policy(lane.policy, "worth", "a number", int | float, lane.worth, view)
            if worth is None:
                break
            worths.append(worth)
        else:
            return free[worths.index(min(worths))][1] if free else None
    return next((cell for _, cell in free if not cell.node.forks), None)


def _ask_keep(cache: Cache, sequence: Sequence, start: int, upto: int, last: bool) -> Pairs:
    """What the plugins want kept of the span: the rest is given back, a state stays with the sequence."""
    view = WalkView(sequence.namespace, upto, sequence.named, upto, start, upto == sequence.branch, last)
    pairs = []
    for lane, holding in sequence._shared:
        hook = lane.hooks.commit_insert
        claim = cache._ask_softly(lane, "commit_insert", Claim, hook, view)
        if claim is not None and claim.keep is not None:
            if lane.unit == "boundary":
                if not claim.keep:
                    continue
            elif any(isinstance(span, int) for span in claim.keep):
                cache._without_answer(cache._bad_answer(lane.name, "commit_insert", "intervals to keep", claim.keep))
            elif last or lane.part.reach.convex:  # or else a later boundary may need what this one does not
                lane.hold_back(holding, start, upto, claim.keep)
        pairs.append((lane, holding))
    return tuple(pairs)


def _donors(cache: Cache, sequence: Sequence, pairs: Pairs, upto: int) -> tuple[list[tuple[Lane, Any]], Pairs]:
    """Boundary components whose running state stands for ``upto`` and that have a slot to go on with."""
    states = [pair for pair in pairs if isinstance(pair[0], PointLane)]
    unable = [pair for pair in states if not _has_slot(cache, *pair, upto)]
    donors = [pair for pair in states if pair not in unable and pair[0].donates(pair[1], upto)]
    return donors, tuple([pair for pair in pairs if pair not in unable]) if unable else pairs


def _renew(cache: Cache, sequence: Sequence, lane: Lane, holding: Any, node: Node) -> None:
    """After a donation the sequence goes on with a copy."""
    lane.renew(holding)
    lease = sequence._lease
    lease.claim(cache._flight)
    record = lease._records[lane.index]
    if record is None:
        record = lane.acquire(node)
        lease._records[lane.index] = record
    sequence._fills.append((lane, holding, "copy", record.data))


def encode_states(
    cache: Cache, sequence: Sequence, node: Node, pairs: Iterable[tuple[Any, Any]]
) -> list[tuple[CodedLane, set[int]]]:
    """Encode the running states that a publication down to ``node`` hands over, behind the sequence's last step.

    The slots that the tree took, where the stream has yet to write them. A checkpoint without room is left out, and so
    is one in a slot that a step may still write that is open: nothing can come after that yet.
    """
    lease, flight = sequence._lease, cache._flight
    flying = []
    for lane, holding in pairs:
        if not isinstance(lane, CodedLane) or not lane.to_encode(node, holding):
            continue
        try:
            make_room(cache, [(lane, 1, None)], "checkpoint")
        except CapacityError:
            cache._skipped_checkpoints += 1
            continue
        slot = lane.pool.take_one()
        lease.claim(flight)
        if any(work.event is None for work in flight.unfinished(lease.fence)):
            lane.pool.give_slots([slot])
            cache._skipped_checkpoints += 1
            continue
        try:
            over = run_apart(cache, sequence, lane, "encode", [holding.slot], [slot])
        except BaseException:
            lane.pool.give_slots([slot])
            raise
        lane.pool.enter((slot,), Stage.SEALED)
        lane.keep(node, slot)
        if not over:
            flying.append((lane, {slot}))
    return flying
