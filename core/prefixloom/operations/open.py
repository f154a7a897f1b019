"""Opening: a sequence begins where its prompt's match ended.

The lease is taken and the holdings are made in one move, component by component. What one keeps is its lane's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..cache.sequence import Sequence
from ..device.pool import NO_SLOT
from .lease import Hold, acquire, release, uncover
from .match import wanted_at
from .room import make_room
from .step_ops import CLEAR, Fill

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..contract.values import Claim
    from ..tree.keys import Tokens
    from ..tree.radix import Node
    from .match import MatchPlan

    Claims = tuple[Claim | None, ...]


def open_at(
    cache: Cache, node: Node, ready: int, reached: Node, branch: int | None, tokens: Tokens, key: bytes,
    single: bytes | None, namespace: str, label: str, priority: int, claims: Claims, plan: MatchPlan | None,
) -> Sequence:  # fmt: skip
    """A sequence that resumes at ``ready``, in ``node``. If a reach or a hook raises, or a slot is short, nothing is
    kept. ``plan``, if that was made, says the same.

    First the components of pages, which read what the lease covers and own nothing yet; then the states, which have
    slots only where there are some at hand.
    """
    if cache._flight.works:
        cache._flight.poll(between_operations=False)
    if node.end != ready or not ready:
        node = cache._anchor(node, ready, namespace)
    if cache._opens_apart or (cache._several_states and _lacks_states(cache)):
        lease, fills = _begin_apart(cache, node, namespace, label)
        short = True
    else:
        short = False
        records = [*cache._nothing]
        held = [*cache._nothing]
        fills = []
        try:
            for lane in cache._page_lanes:
                record, holding = lane.begin(node)
                records[lane.index] = record
                held[lane.index] = holding
        except BaseException:  # a reach that is plain Python may raise
            uncover(cache, records)
            raise
        for point in cache._point_lanes:
            cell, state = point.begin(node)
            records[point.index] = cell
            held[point.index] = state
            fills.append((point, state, "clear", CLEAR) if cell is None else (point, state, point.taken, cell.data))
            if state.slot == NO_SLOT:
                short = True
        lease = Hold(cache, node, records, None, held, label)
        node.leases += 1
        if cache._flight.nodes:
            cache._flight.read(lease, node)
    sequence = Sequence(cache, lease, tokens, key, single, namespace, ready, reached, branch, fills, priority)
    if short:
        _have_slots(cache, sequence, claims)
    cache._opened += 1
    cache._asked += sequence.named
    cache._hit += ready
    cache._live[lease] = None
    if cache._asks_more:
        _look_on(cache, sequence, plan)
    return sequence


def _look_on(cache: Cache, sequence: Sequence, plan: MatchPlan | None) -> None:
    """A tier below may have more of what was opened, and debug mode keeps books of it."""
    if cache._debug is not None:
        cache._debug.leased(sequence._lease)  # first: a copy down may be interrupted
    if cache._tier is not None:
        sequence._plan = plan  # type: ignore[assignment]
        cache._tier.used(sequence._lease._node)
    if cache._debug is not None:
        cache._leave("open")


def _lacks_states(cache: Cache) -> bool:
    """Whether a slot is short: then no state is to have one before there is room for all."""
    return any(lane.per_sequence > lane.live.at_hand for lane in cache._point_lanes)


def _begin_apart(cache: Cache, node: Node, namespace: str, label: str) -> tuple[Hold, list[Fill]]:
    """What ``open_at`` begins with where hooks may widen what the lease covers, or more than one state takes slots and
    they are not at hand, or more than states does. Nothing has a slot yet.
    """
    lease = acquire(cache, node, namespace, Hold)
    held = [*cache._nothing]
    fills = []
    try:
        for lane in cache._in_order:
            held[lane.index] = lane.open(node)
    except BaseException:
        release(cache, lease)
        raise
    for point in cache._point_lanes:
        cell, state = lease._records[point.index], held[point.index]
        fills.append((point, state, "clear", CLEAR) if cell is None else (point, state, point.taken, cell.data))
    lease.label = label
    lease.held = held
    return lease, fills


def _have_slots(cache: Cache, sequence: Sequence, claims: Claims) -> None:
    """Make room for what the sequence lacks to begin with: running states, what is rebuilt, and what plugins claim."""
    lease = sequence._lease
    lacking = [(lane, state) for lane, state in sequence._states if state.slot == NO_SLOT]
    try:
        make_room(cache, wanted_at(cache, sequence.ready, claims, [lane for lane, _ in lacking]), "open a sequence")
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
    sequence._claimed_ops = [op for claim in claims if claim is not None for op in claim.ops]
    lease.claim(cache._flight)
