"""Alone: a sequence that is computed outside of steps, from ``fill`` until ``commit``.

Where its layers run on a stream that runs behind, they are work in flight like those of a step: all that is enqueued
there from ``fill`` on, until the sequence commits or gives something back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import ProtocolError
from .ops import CLEAR, batches, filled, run_fill, run_fills
from .refusals import check_states

if TYPE_CHECKING:
    from .cache import Cache
    from .sequence import Sequence
    from .streams import Stream


def fill_alone(cache: Cache, sequence: Sequence, given: Any) -> None:
    """The fills that are due, on a stream as ``run_ops`` takes it. If one raises, all stay due."""
    stream = cache._inline
    if stream is None or given is not None or cache._flight.works or cache._flight.alone:
        _fill_behind(cache, sequence, cache._stream(given))
    elif sequence._fills:
        for of, holding, kind, source in sequence._fills:
            src = [source] if source != CLEAR else []
            dst = [holding.slot]
            run_fill(cache, stream, of, kind, src, dst)
        filled(cache, sequence)
    held = sequence._lease.held
    for lane in cache._point_lanes:  # from here on its layers may write it
        held[lane.index].ready = False


def _fill_behind(cache: Cache, sequence: Sequence, stream: Stream) -> None:
    """``fill_alone`` where the stream is another than the caller, or work is in flight that it may come after."""
    flight, since = cache._flight, stream.tick
    flight.end_alone(sequence._lease)
    if sequence._fills or flight.unfinished(sequence._lease.fence):
        work = flight.begin()
        work.stream, work.since = stream, since
        mine: tuple[Sequence, ...] = ()  # not before it comes after what the sequence's last step wrote
        try:
            flight.order(work, stream, sequence._lease.fence, sequence)
            mine = (sequence,)
            run_fills(cache, stream, mine, batches(mine))
        finally:
            flight.end(work, stream, mine, f"fill of {sequence!r}")
    if not stream.inline:
        flight.alone[sequence._lease] = stream, since


def check_alone(sequence: Sequence) -> None:
    """Refuse to compute outside of steps what a step has, or where ops are not all that has to run."""
    if sequence._steps:
        raise ProtocolError(f"{sequence!r} is in a step whose block is open: its run_ops fills the states")
    if sequence._lost:
        check_states(sequence)
    cache = sequence._cache
    asked = [lane.name for lane in cache._lanes if lane.hooks.deferred_forward_ops is not None]
    claimed = [op.component for op in sequence._claimed_ops] if cache._match_hooks else []
    for name in (*asked, *claimed):
        raise ProtocolError(f"{sequence!r}: component {name!r} has ops of its own, which run in steps alone")
