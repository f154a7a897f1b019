"""Ops: work on slots that runs on a stream, enqueued by the scheduling thread.

What they do with content is the lanes' and the pools' business; which must run when, a step's. In debug mode the race
detector hears of each.

Alone: a sequence that is computed outside of steps, from ``fill`` until ``commit``.

Where its layers run on a stream that runs behind, they are work in flight like those of a step: all that is enqueued
there from ``fill`` on, until the sequence commits or gives something back.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from ..contract.values import Op, WalkView
from ..device.kernels import index_of
from ..device.pool import Stage
from ..errors import PluginError, ProtocolError
from .running import check_states

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..cache.sequence import Sequence
    from ..device.pool import Pool
    from ..device.streams import Stream

CLEAR = -1

INTS = ("torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64")

Fill = tuple[Any, Any, str, int]
"""(lane, holding, kind, source): a running state whose slot must get its content, by an op of this kind.

It is a copy of ``source`` (a ``decode`` of what the tree has in another form), or a ``clear``: zeros, of ``CLEAR``. A
holding has one at most.
"""

Batches = dict[tuple[Any, str], tuple[list[int], list[int]]]
"""Of each (lane, kind) the slots (src, dst) of fills that run as one op."""


def batches(sequences: Many[Sequence]) -> Batches:
    """The fills that are due of ``sequences``, one op for each component and kind.

    In any order: a source is the tree's or a single step's, a target is a running slot, so none is both.
    """
    out: Batches = {}
    for sequence in sequences:
        if sequence._fills and sequence._lease._cache is not None:
            for lane, holding, kind, source in sequence._fills:
                src, dst = out.setdefault((lane, kind), ([], []))
                dst.append(holding.slot)
                if source != CLEAR:
                    src.append(source)
    return out


def deferred_ops(cache: Cache, sequences: Many[Sequence]) -> list[Op]:
    """The ops that plugins add to a step over ``sequences``."""
    ops: list[Op] = []
    for lane in cache._lanes:
        hook = lane.hooks.deferred_forward_ops
        if hook is not None:
            batch = tuple(WalkView(s.namespace, s.committed, s.named, s.reserved, s.published) for s in sequences)
            more = cache._ask(lane, "deferred_forward_ops", tuple, hook, batch) or ()
            ops.extend(cache._check_ops(lane, "deferred_forward_ops", more))
    return ops


# ---------------------------------------------------------------- running


def select_states(cache: Cache, stream: Stream, lane: Any, kept: Any, rows: list[int], holdings: list[Any]) -> None:
    """Have each of ``holdings`` go on from the state after so many tokens as ``kept`` says, at its row of ``rows``."""
    choices = [list(holding.steps) for holding in holdings]
    dst = [holding.slot for holding in holdings]
    for holding in holdings:
        holding.accepted = True

    def work() -> None:
        mine = kept if len(rows) == len(kept) else kept.index_select(0, index_of(rows, [kept]))
        lane.live.select(choices, mine - 1, dst)

    reads = [slot for row in choices for slot in row]
    run_told(cache, stream, f"select of {lane.name}", lane.live, work, reads, dst)


def run_kind(cache: Cache, stream: Stream, lane: Any, kind: str, src: list[int], dst: list[int]) -> None:
    """One of the core's own kinds of op on states."""
    work = lane.work(kind, src, dst)
    stream.run(work)
    if cache._debug is not None:
        source, target = lane.ends(kind)
        cache._debug.accessed(stream, f"{kind} of {lane.name}", target, src, dst, source)


def run_fills(cache: Cache, stream: Stream, sequences: Many[Sequence], due: Batches) -> None:
    """Give the running states of ``sequences`` the content that is ``due``, and let go of the sources.

    If an op raises, all of the fills are still due.
    """
    for (lane, kind), (src, dst) in due.items():
        run_fill(cache, stream, lane, kind, src, dst)
    for sequence in sequences:
        if sequence._fills and sequence._lease._cache is not None:
            filled(cache, sequence)


def run_fill(cache: Cache, stream: Stream, lane: Any, kind: str, src: list[int], dst: list[int]) -> None:
    run_kind(cache, stream, lane, kind, src, dst)
    if cache._debug is not None:
        lane.live.enter(dst, Stage.SEALED)  # the tree may take it over, if it has lost its own


def filled(cache: Cache, sequence: Sequence) -> None:
    """Its fills have run: the sources, which were covered until then, may go."""
    records = sequence._lease._records
    for point in cache._point_lanes:
        record = records[point.index]
        if record is not None:
            records[point.index] = None
            point.release(record)
    sequence._fills = []


def run_apart(cache: Cache, sequence: Sequence, lane: Any, kind: str, src: list[int], dst: list[int]) -> bool:
    """An op that belongs to no step, run behind the last one of a sequence; whether it is over."""
    lease, flight = sequence._lease, cache._flight
    stream = lease.stream or cache._stream(None)
    work = flight.begin()
    work.stream, work.since = stream, stream.tick
    try:
        flight.order(work, stream, lease.fence, lease)
        run_kind(cache, stream, lane, kind, src, dst)
    finally:
        flight.end(work, stream, (sequence,), f"{kind} of {lane.name}")
    return work.over


def run_op(cache: Cache, op: Op, stream: Stream) -> None:
    """An op that a plugin asked for: the core's own kinds on the pool, any other by its component."""
    lane = cache._lane(op.component)
    pool = lane.live
    reads = op.src
    if op.kind in ("copy", "track") and op.selector is not None:
        reads = tuple(slot for row in op.src for slot in row)
        work: Callable[[], object] = lambda: pool.select(op.src, op.selector, op.dst)  # noqa: E731
    elif op.kind in ("copy", "track"):
        work = lambda: pool.copy(op.src, op.dst)  # noqa: E731
    elif op.kind == "clear":
        work = lambda: pool.clear(op.dst)  # noqa: E731
    elif lane.hooks.run_forward_op is None:
        raise PluginError(f"component {op.component!r} has no run_forward_op for {op!r}")
    else:
        hook = lane.hooks.run_forward_op
        work = lambda: cache._call(op.component, "run_forward_op", hook, op, stream)  # noqa: E731
    run_told(cache, stream, f"{op.kind} of {op.component}", pool, work, reads, op.dst)


def run_told(
    cache: Cache,
    stream: Stream,
    what: str,
    pool: Pool,
    work: Callable[[], object],
    reads: Many[int],
    writes: Many[int],
) -> None:
    """``work`` that reads and writes these slots of ``pool``."""
    stream.run(work)
    if cache._debug is not None:
        cache._debug.accessed(stream, what, pool, reads, writes, pool)


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
