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


def retain(sequence: Sequence, committed: int, published: bool = False) -> None:
    """After a commit or a publication: which boundary is the lowest that still matters, and what may go.

    That goes at once when less than an eighth of the pool is free, and else whenever somebody needs it.
    """
    cache = sequence._cache
    if committed > sequence._high:
        sequence._high = committed
    if not cache._sparing:
        return
    floor = sequence.named - cache._lookahead
    floor = (committed if committed < floor else floor) - cache._max_rewind
    floor = floor // cache._page * cache._page
    if floor < sequence.published:
        floor = sequence.published
    if cache._tracking:
        for lane, holding in sequence._states:
            floor = lane.floor(holding, floor)
    for lane, holding in sequence._paged:
        if lane.retains:
            if published:  # what the tree owns now is read no further than the lease covers it
                holding.floor = sequence.published
                let_go(cache, sequence._lease, lane, holding)
                lane.read_covered(holding, sequence._lease._records[lane.index], sequence.published)
            holding.floor = floor
            pool = lane.pool
            if len(pool._free) << 3 < pool.capacity:
                let_go(cache, sequence._lease, lane, holding)
            else:
                lane.sparing[sequence._lease] = holding


def let_go(cache: Cache, hold: Hold, lane: Lane, holding: Any) -> None:
    """A running sequence gives back, and uncovers, what no boundary that it may still come to can need."""
    lane.retain(holding, holding.floor)
    if hold._records[lane.index] is not None and lane.passed(holding, hold._node.end):
        release_part(cache, hold, lane)


def reclaim(cache: Cache, lane: Lane, pages: int) -> None:
    """Running sequences give back what they keep beyond what they may still need, until ``pages`` are nobody's."""
    pool, sparing = lane.pool, lane.sparing
    while sparing and pool.free < pages:
        hold, holding = sparing.popitem()
        let_go(cache, hold, lane, holding)
