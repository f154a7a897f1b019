"""Opening: a sequence begins where its prompt's match ended.

The lease is taken and the holdings are made in one move, component by component. What one keeps is its lane's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .evict import make_room
from .lane_point import NO_SLOT
from .lease import Hold, acquire, release
from .ops import CLEAR, Fill
from .plan import wanted_at
from .sequence import Sequence

if TYPE_CHECKING:
    from .cache import Cache
    from .plan import MatchPlan
    from .tree import Node


def open_at(cache: Cache, plan: MatchPlan, label: str, priority: int) -> Sequence:
    """A sequence that resumes where ``plan`` says. If a reach or a hook raises, or a slot is short, nothing is kept.

    First the components of pages, which read what the lease covers and own nothing yet; then the states, which have
    slots only where there are some at hand.
    """
    if cache._flight.works:
        cache._flight.poll(between_operations=False)
    node = plan._node
    ready = plan.ready
    if node.end != ready or not ready:
        node = cache._anchor(plan)
    short = cache._opens_apart or (cache._several_states and _lacks_states(cache))
    if short:
        lease, paged, states, fills = _begin_apart(cache, node, plan.namespace, label)
    else:
        records = [*cache._no_records]
        paged, states, fills = [], [], []
        try:
            for lane in cache._page_lanes:
                records[lane.index], holding = lane.begin(node)
                paged.append((lane, holding))
        except BaseException:  # a reach that is plain Python may raise
            for each, record in zip(cache._lanes, records, strict=True):
                if record is not None:
                    each.release(record)
            raise
        for point in cache._point_lanes:
            cell, state = point.begin(node)
            records[point.index] = cell
            states.append((point, state))
            fills.append((point, state, "clear", CLEAR) if cell is None else (point, state, point.taken, cell.data))
            if state.slot == NO_SLOT:
                short = True
        lease = Hold(cache, node, records, None)
        lease.label = label
        lease.pairs = paged + states if states else paged
        node.leases += 1
        if cache._flight.nodes:
            cache._flight.read(lease, node)
    sequence = Sequence(cache, lease, plan, paged, states)
    sequence._fills = fills
    sequence.priority = priority
    if short:
        _have_slots(cache, sequence, plan)
    cache._opened += 1
    cache._asked += sequence.named
    cache._hit += ready
    cache._live[lease] = None
    if cache._asks_more:
        _look_on(cache, sequence, plan)
    return sequence


def _look_on(cache: Cache, sequence: Sequence, plan: MatchPlan) -> None:
    """A tier below may have more of what was opened, and debug mode keeps books of it."""
    if cache._debug is not None:
        cache._debug.leased(sequence._lease)  # first: a copy down may be interrupted
    if cache._tier is not None:
        sequence._plan = plan
        cache._tier.used(sequence._lease._node)
    if cache._debug is not None:
        cache._leave("open")


def _lacks_states(cache: Cache) -> bool:
    """Whether a slot is short: then no state is to have one before there is room for all."""
    return any(lane.per_sequence > len(lane.live._free) for lane in cache._point_lanes)


def _begin_apart(cache: Cache, node: Node, namespace: str, label: str) -> tuple[Hold, list[Any], list[Any], list[Fill]]:
    """What ``open_at`` begins with where hooks may widen what the lease covers, or more than one state takes slots and
    they are not at hand, or more than states does. Nothing has a slot yet.
    """
    lease = acquire(cache, node, namespace, Hold)
    try:
        paged = [(lane, lane.open(node)) for lane in cache._page_lanes]
    except BaseException:
        release(cache, lease)
        raise
    states, fills = [], []
    for lane in cache._point_lanes:
        state = lane.open(node)
        states.append((lane, state))
        cell = lease._records[lane.index]
        fills.append((lane, state, "clear", CLEAR) if cell is None else (lane, state, lane.taken, cell.data))
    lease.label = label
    lease.pairs = [*paged, *states]
    return lease, paged, states, fills


def _have_slots(cache: Cache, sequence: Sequence, plan: MatchPlan) -> None:
    """Make room for what the sequence lacks to begin with: running states, what is rebuilt, and what plugins claim."""
    lease = sequence._lease
    lacking = [(lane, state) for lane, state in sequence._states if state.slot == NO_SLOT]
    try:
        make_room(cache, wanted_at(cache, plan, [lane for lane, _ in lacking]), "open a sequence")
        for lane, state in lacking:
            lane.start(state)
        for lane, holding in sequence._paged:
            if lane.replay:
                lane.make_replayed(holding)
    except BaseException:
        for lane, holding in sequence._pairs:
            lane.close(holding)
        release(cache, lease)
        raise
    sequence._claimed_ops = [op for claim in plan._claims if claim is not None for op in claim.ops]
    lease.claim(cache._flight)
