"""Retention: what a running sequence keeps of what it has, and when it gives the rest back.

What any boundary that it may still publish or rewind to can need is kept. The rest is kept while there is room, since
it serves boundaries inside of a long prompt once it is published.

Rewinding: a sequence takes its last tokens back, in every component. It must not know what a component keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..device.pool import NO_SLOT
from ..errors import InputError, ProtocolError
from .lease import release_part

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..cache.sequence import Sequence
    from ..tree.lane import Lane
    from .lease import Hold


def commit(cache: Cache, sequence: Sequence, upto: int) -> None:
    """What is computed reaches to ``upto``, and the running states stand for that."""
    sequence.committed = upto
    held = sequence._lease.held
    for lane in cache._point_lanes:
        holding = held[lane.index]
        if holding.steps:
            lane.stepped(holding, upto)
        holding.as_of = upto
        holding.ready = True
    if cache._sparing:
        retain(cache, sequence)


def retain_published(sequence: Sequence) -> None:
    """After a publication: what the tree owns now is read no further than the lease covers it. And ``retain``: tokens
    may have been named since the last commit, and states have come and gone.
    """
    cache = sequence._cache
    floor = floor_of(cache, sequence)
    lease = sequence._lease
    published = sequence.published
    for lane in cache._sparing:
        holding = lease.held[lane.index]
        record = lease._records[lane.index]
        lane.read_covered(holding, record, published)
        if record is not None and lane.passed(holding, published):
            release_part(cache, lease, lane)
        spare(cache, lease, lane, holding, floor)


def retain(cache: Cache, sequence: Sequence) -> None:
    """After a commit: which boundary is the lowest that still matters, and what may go."""
    floor = floor_of(cache, sequence)
    lease = sequence._lease
    for lane in cache._sparing:
        holding = lease.held[lane.index]
        spare(cache, lease, lane, holding, floor)


def spare(cache: Cache, hold: Hold, lane: Lane, holding: Any, floor: int) -> None:
    """No boundary below ``floor`` matters any more. What they needed goes at once when less than an eighth of the pool
    is free, and else whenever somebody needs it.
    """
    holding.floor = floor
    pool = lane.pool
    if pool.at_hand << 3 < pool.capacity:
        let_go(cache, hold, lane, holding)
    else:
        lane.sparing[hold] = holding


def retain_again(cache: Cache, sequence: Sequence) -> None:
    """After a rewind: boundaries matter again that did not."""
    floor = floor_of(cache, sequence)
    for lane in cache._sparing:
        holding = sequence._lease.held[lane.index]
        holding.floor = min(holding.floor, floor)


def floor_of(cache: Cache, sequence: Sequence) -> int:
    """The lowest boundary that still matters: the deepest that may be published, less what may be rewound."""
    floor = sequence.named - cache._lookahead
    if floor > sequence.committed:
        floor = sequence.committed
    floor -= cache._max_rewind
    if floor < sequence.published:
        floor = sequence.published
    if cache._tracking:
        for point in cache._point_lanes:
            floor = point.floor(sequence._lease.held[point.index], floor)
    return floor


def let_go(cache: Cache, hold: Hold, lane: Lane, holding: Any) -> None:
    """A running sequence gives back, and uncovers, what no boundary that it may still come to can need."""
    lane.retain(holding, holding.floor // cache._page * cache._page)
    if hold._records[lane.index] is not None and lane.passed(holding, hold._node.end):
        release_part(cache, hold, lane)


def reclaim(cache: Cache, lane: Lane, pages: int) -> None:
    """Running sequences give back what they keep beyond what they may still need, until ``pages`` are nobody's."""
    pool, sparing = lane.pool, lane.sparing
    while sparing and pool.free < pages:
        hold, holding = sparing.popitem()
        let_go(cache, hold, lane, holding)


def rewind(cache: Cache, sequence: Sequence, count: int) -> None:
    """Take the last ``count`` reserved tokens back, names included, or refuse to with nothing changed."""
    if count.__class__ is not int or count < 0:
        raise InputError(f"rewind takes a number of tokens from 0 up, got {count!r}")
    length = sequence.reserved - count
    if length < sequence.published:
        raise ProtocolError(f"{sequence!r} cannot rewind to {length}: {sequence.published} are published")
    if count and sequence.published and length < min(sequence.named, sequence.published + cache._lookahead):
        raise ProtocolError(
            f"{sequence!r} cannot rewind to {length}: {sequence.published} are published, and their keys and content "
            f"depend on {cache._lookahead} tokens more"
        )
    high = max(sequence.committed, sequence._high)  # what is too far below the highest commit was given back
    back = high - length
    limit = cache._rewind_limit
    if limit is not None and back > limit[1]:
        raise ProtocolError(
            f"{sequence!r} cannot rewind {back} committed tokens: component {limit[0]!r} allows {limit[1]}"
        )
    for lane, holding in sequence._states:
        if sequence._steps and length < sequence._planned:
            raise ProtocolError(
                f"{sequence!r} cannot rewind to {length}: an open step computes up to {sequence._planned}, and so "
                f"does the state of component {lane.name!r}. End the step first"
            )
        if count and not (holding.ready or sequence._steps or sequence._lost) and not _due(sequence, holding):
            raise ProtocolError(
                f"{sequence!r} cannot rewind to {length}: since fill, layers may have written the state of component "
                f"{lane.name!r}. Commit first"
            )
        if not lane.can_rewind(holding, length):
            raise ProtocolError(
                f"{sequence!r} cannot rewind to {length}: component {lane.name!r} has the states of single tokens "
                f"only for the last step, and only if that had at most {len(holding.steps)} tokens"
            )
    cache._flight.end_alone(sequence._lease)
    if cache._retaining:
        sequence._high = high
    sequence.reserved = length
    sequence.committed = min(sequence.committed, length)
    sequence._planned = min(sequence._planned, length)
    for lane, holding in sequence._paged:
        lane.rewind(holding, length)
    for lane, holding in sequence._states:
        source = lane.rewind_state(holding, length)
        if source != NO_SLOT:  # instead of what an earlier rewind wanted copied
            sequence._fills = [fill for fill in sequence._fills if fill[1] is not holding]
            sequence._fills.append((lane, holding, "copy", source))
    if count and sequence.named > length:
        sequence._cut(length)
        sequence._reached = None
    if cache._sparing:
        retain_again(cache, sequence)


def _due(sequence: Sequence, holding: Any) -> bool:
    """Whether a running state has yet to be filled, so that no layer has written it."""
    return any(of is holding for _, of, _, _ in sequence._fills)
