"""Retention: what a running sequence keeps of what it has, and when it gives the rest back.

What any boundary that it may still publish or rewind to can need is kept. The rest is kept while there is room, since
it serves boundaries inside of a long prompt once it is published.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .lease import release_part
from .straight import straight

if TYPE_CHECKING:
    from .cache import Cache
    from .lane import Lane
    from .lease import Hold
    from .sequence import Sequence


@straight
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


@straight
def retain_published(sequence: Sequence) -> None:
    """After a publication: what the tree owns now is read no further than the lease covers it."""
    cache = sequence._cache
    lease = sequence._lease
    published = sequence.published
    for lane in cache._sparing:
        holding = lease.held[lane.index]
        lane.retain(holding, published)
        if lane.passed(holding, published) and lease._records[lane.index] is not None:
            release_part(cache, lease, lane)
        lane.read_covered(holding, lease._records[lane.index], published)
        if not cache._tracking:
            if holding.floor < published:
                holding.floor = published
            spare(cache, lease, lane, holding)
    if cache._tracking:  # what states at earlier boundaries needed may not be needed any more
        retain(cache, sequence)


@straight
def retain(cache: Cache, sequence: Sequence) -> None:
    """After a commit, or if states at other boundaries come and go: which is the lowest that still matters?"""
    floor = sequence.named - cache._lookahead
    if floor > sequence.committed:
        floor = sequence.committed
    floor -= cache._max_rewind
    if floor < sequence.published:
        floor = sequence.published
    lease = sequence._lease
    if cache._tracking:
        for point in cache._point_lanes:
            floor = point.floor(lease.held[point.index], floor)
    for lane in cache._sparing:
        holding = lease.held[lane.index]
        holding.floor = floor
        spare(cache, lease, lane, holding)


@straight
def spare(cache: Cache, hold: Hold, lane: Lane, holding: Any) -> None:
    """What nobody needs goes at once when less than an eighth of the pool is free, and else when somebody is short."""
    pool = lane.pool
    if pool.at_hand << 3 < pool.capacity:
        let_go(cache, hold, lane, holding)
    else:
        lane.sparing[hold] = holding


@straight
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
