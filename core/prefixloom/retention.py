"""Retention: what a running sequence keeps of what it has, and when it gives the rest back.

What any boundary that it may still publish or rewind to can need is kept. The rest is kept while there is room, since
it serves boundaries inside of a long prompt once it is published.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .lease import release_part

if TYPE_CHECKING:
    from .cache import Cache
    from .lane import Lane
    from .lease import Hold
    from .sequence import Sequence


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
