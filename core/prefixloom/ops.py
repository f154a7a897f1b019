"""Ops: work on slots that runs on a stream, enqueued by the scheduling thread.

What they do with content is the lanes' and the pools' business; which must run when, a step's. In debug mode the race
detector hears of each.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

from .errors import PluginError
from .kernels import index_of
from .pool import Stage
from .values import Op

if TYPE_CHECKING:
    from .cache import Cache
    from .lane import Lane
    from .pool import Pool
    from .sequence import Sequence
    from .streams import Stream

CLEAR = -1
INTS = ("torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64")


class Fill:
    """A state slot of a running sequence that must get its content: a copy of ``source``, or zeros (``CLEAR``).

    ``kind`` is that of the op: what brings a state of the tree may have to decode it.
    """

    __slots__ = ("holding", "kind", "lane", "source")

    def __init__(self, lane: Lane, holding: Any, source: int, kind: str = "copy") -> None:
        self.lane = lane
        self.holding = holding
        self.source = source
        self.kind = kind if source != CLEAR else "clear"


class Batch:
    """Fills of one component that run as one op."""

    __slots__ = ("dst", "fills", "kind", "lane", "src")

    def __init__(self, kind: str, lane: Any) -> None:
        self.kind = kind
        self.lane = lane
        self.src: list[int] = []
        self.dst: list[int] = []
        self.fills: list[tuple[Sequence, Fill]] = []

    def op(self) -> Op:
        return Op(self.kind, self.lane.name, dst=tuple(self.dst), src=tuple(self.src))


def batches(sequences: Many[Sequence]) -> list[Batch]:
    """The fills that are still due, as few ops as keep the order within each component."""
    out: list[Batch] = []
    for sequence in sequences:
        if sequence._lease._cache is None:
            continue
        for fill in sequence._fills:
            lane, kind = fill.lane, fill.kind
            for batch in reversed(out):
                if batch.lane is lane:
                    break
            else:
                batch = None
            if batch is None or batch.kind != kind:
                batch = Batch(kind, lane)
                out.append(batch)
            batch.dst.append(fill.holding.slot)
            if fill.source != CLEAR:
                batch.src.append(fill.source)
            batch.fills.append((sequence, fill))
    return out


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
    stream.run(lane.work(kind, src, dst))
    if cache._debug is not None:
        source, target = lane.ends(kind)
        cache._debug.accessed(stream, f"{kind} of {lane.name}", target, src, dst, source)


def run_batch(cache: Cache, stream: Stream, batch: Batch) -> None:
    """Give state slots their content, and let go of the sources."""
    lane = batch.lane
    run_kind(cache, stream, lane, batch.kind, batch.src, batch.dst)
    if cache._debug is not None:
        lane.live.enter(batch.dst, Stage.SEALED)  # the tree may take it over, if it has lost its own
    i = lane.index
    for sequence, fill in batch.fills:
        fill.holding.ready = True
        sequence._fills.remove(fill)
        records = sequence._lease._records
        if records[i] is not None:
            record, records[i] = records[i], None
            lane.release(record)


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
