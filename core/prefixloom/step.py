"""Steps: one forward pass over some sequences, and the ops that belong to it.

The scheduler records, the stream runs: the caller opens a step, calls ``run_ops`` with the stream on which its layers
run, enqueues the layers, and the end of the ``with`` block commits what they compute, whether or not they are over.
Before the layers run the fills of running states and the plugins' own ops; after them what keeps checkpoints. Each op
runs exactly once. A draft step runs none and commits nothing; a step that ends in an exception commits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from .errors import CapacityError, InputError, ProtocolError
from .evict import make_room
from .gates import Gates
from .ops import INTS, Batch, batches, run_batch, run_kind, run_op, select_states
from .pool import Stage
from .values import Op, WalkView

if TYPE_CHECKING:
    from .cache import Cache
    from .flight import Work
    from .lane_point import PointLane, StateHolding, Track
    from .sequence import Sequence
    from .streams import Stream

NEW, OPEN, FILLING, READY, DONE = range(5)
"""A step's way: asked for; its block is open; ``run_ops`` has begun; the layers may run; its block has been left."""


class Step:
    """The program of one forward pass. Made by ``cache.step``; a context manager; single use."""

    __slots__ = (
        "_accepted", "_cache", "_claimed", "_deferred", "_ends", "_gates", "_ordered", "_sequences", "_starts",
        "_state", "_stream", "_touched", "_tracks", "_work", "role",
    )  # fmt: skip

    _stream: Stream | None
    _work: Work | None
    _tracks: Many[tuple[Sequence, PointLane, StateHolding, Track, int]]
    _starts: Many[int]
    _claimed: Many[tuple[Sequence, Op]]
    _deferred: Many[Op]

    def __init__(
        self, cache: Cache, sequences: Many[Sequence], ends: list[int], role: Literal["target", "draft"]
    ) -> None:
        self._state = NEW  # first: it is looked at when the step goes
        self._cache = cache
        self._sequences = tuple(sequences)
        self._ends = ends
        self.role = role
        self._accepted = False
        self._work = self._stream = None
        self._ordered = 0  # the fence that the stream has been made to wait for
        self._starts = self._tracks = self._claimed = self._deferred = ()
        self._gates: Gates | None = None
        if role == "target":
            if cache._match_hooks:
                self._claimed = [(sequence, op) for sequence in self._sequences for op in sequence._claimed_ops]
            if cache._step_hooks:
                self._deferred = self._ask_deferred()

    def _ask_deferred(self) -> tuple[Op, ...]:
        cache = self._cache
        ops: list[Op] = []
        for lane in cache._lanes:
            hook = lane.hooks.deferred_forward_ops
            if hook is not None:
                batch = tuple(
                    WalkView(s.namespace, s.committed, s.named, s.reserved, s.published) for s in self._sequences
                )
                more = cache._ask(lane, "deferred_forward_ops", tuple, hook, batch) or ()
                ops.extend(cache._check_ops(lane, "deferred_forward_ops", more))
        return tuple(ops)

    def __repr__(self) -> str:
        number = "" if self._work is None else f" {self._work.number}"
        draft = "draft " if self.role == "draft" else ""
        return f"<{draft}step{number} of {len(self._sequences)} sequences>"

    def _fills(self) -> list[Batch]:
        """What must be filled before the layers run; until ``run_ops``, a publication may still add to it."""
        return batches(self._sequences) if self.role == "target" else []

    @property
    def ops(self) -> tuple[Op, ...]:
        """What runs, in order: the derived fills in one op per component, then the plugins' own, after the layers
        the checkpoints (known once the block is entered) and the plugins' own again.
        """
        before = [batch.op() for batch in self._fills()]
        claimed = [op for sequence, op in self._claimed if op in sequence._claimed_ops]
        tracks = [Op(lane.kept, lane.name, (track.slot,), (source,)) for _, lane, _, track, source in self._tracks]
        early = [op for op in (*claimed, *self._deferred) if not op.after]
        return (*before, *early, *tracks, *(op for op in (*claimed, *self._deferred) if op.after))

    # ------------------------------------------------------------ before the layers
    def __enter__(self) -> Step:
        if self._state != NEW:
            raise ProtocolError("a step is used once; ask the cache for a new one")
        cache = self._cache
        self._work = cache._flight.begin()
        self._state = OPEN
        try:
            self._begin(self.role == "target")
            if cache._debug is not None:
                self._touched = cache._debug.begin(self)
        except BaseException:  # a hook or an interrupt, while a checkpoint's slot was sought
            self._state = DONE
            self._drop_tracks()
            self._leave()
            cache._flight.end(self._work, self._take_stream(cache._stream(None)), (), repr(self))
            raise
        return self

    def _begin(self, target: bool) -> None:
        """The layers of this step go on from where the steps before it end, and write the running states."""
        starts: list[int] = []
        if target:
            self._starts = starts
        for sequence, end in zip(self._sequences, self._ends, strict=True):
            if end > sequence.reserved and sequence.open:
                raise ProtocolError(
                    f"{sequence!r} was planned up to {end} and has {sequence.reserved} reserved by now: ask the cache "
                    f"for a new step"
                )
            if not target:
                continue
            start = sequence.committed
            if sequence._steps and sequence._planned > start:
                start = sequence._planned
            starts.append(start)
            if end > start:
                sequence._planned = end
            sequence._steps += 1
            for _, holding in sequence._states:
                holding.writing += 1
                holding.accepted = False
        if target and self._cache._tracking:  # this may evict, and raise
            self._tracks = []
            for sequence, start, end in zip(self._sequences, starts, self._ends, strict=True):
                for lane, holding in sequence._states:
                    if lane.track_every and sequence._lease._cache is not None:
                        self._plan_track(sequence, lane, holding, start, end)

    def _leave(self) -> bool:
        """No longer does this step write its sequences' states. Whether all of them can go on from it."""
        well = True
        for sequence, start in zip(self._sequences, self._starts, strict=False):  # fewer, if it never began
            sequence._steps -= 1
            for _, holding in sequence._states:
                holding.writing -= 1
            if sequence.committed < start or sequence._fills or sequence._lost:
                well = False
        return well

    def _plan_track(self, sequence: Sequence, lane: PointLane, holding: StateHolding, start: int, end: int) -> None:
        """Where a checkpoint is due in this step, have a slot to keep it in."""
        due = lane.due(holding, start, end)
        if due is None:
            return
        old = lane.replaceable(holding)
        if old is None:
            try:
                make_room(self._cache, [(lane, 1, holding)], "checkpoint")
            except CapacityError:
                self._cache._skipped_checkpoints += 1
                return
        at, source = due
        assert isinstance(self._tracks, list)
        self._tracks.append((sequence, lane, holding, lane.plan_track(holding, at, old), source))
        sequence._lease.claim(self._cache._flight)

    def run_ops(self, stream: Any = None, *, gated: bool = False) -> None:
        """Run the ops on ``stream``, on which the layers that read their slots are enqueued next.

        A stream is one of ``prefixloom.streams``, a ``torch.cuda.Stream``, or None: the current one, which on a CPU is
        the caller. A second call is refused; a draft step runs no ops, but is ordered after what it reads.
        ``gated``: the caller calls ``gate`` before each layer, and what is being loaded is waited for there.
        """
        if self._state != OPEN:
            if self._state in (FILLING, READY):
                raise ProtocolError("the ops of this step have run already; a forward split by layers runs them once")
            raise ProtocolError("run_ops belongs inside of the step's with block")
        cache = self._cache
        if cache._guarded:
            cache._enter()
        stream = self._take_stream(cache._stream(stream))
        due = batches(self._sequences) if self.role == "target" else []
        if gated and not due and not self._claimed and not self._deferred:  # an op may read any of it
            self._gates = Gates(stream)
        if len(cache._flight.works) > 1:
            self._order(stream)
        if self.role == "target" and (due or self._claimed or self._deferred):
            self._state = FILLING
            for batch in due:
                run_batch(cache, stream, batch)
            if self._claimed or self._deferred:
                self._run_plugins(stream, after=False)
        self._state = READY
        if cache._debug is not None:
            cache._leave("run_ops")

    def gate(self, layer: int) -> None:
        """Before the model's layer ``layer``, in ascending order: it comes after what a load brings for it."""
        if self._state != READY:
            raise ProtocolError("gate belongs into the step's with block, after run_ops")
        if self._gates is not None:
            self._gates.open(layer)

    def _run_plugins(self, stream: Stream, after: bool) -> None:
        """The plugins' own ops, those before the layers or those after them."""
        for sequence, op in self._claimed:
            if op.after == after and sequence.open and op in sequence._claimed_ops:  # another step may have run it
                sequence._claimed_ops.remove(op)
                run_op(self._cache, op, stream)
        for op in self._deferred:
            if op.after == after:
                run_op(self._cache, op, stream)

    def _take_stream(self, stream: Stream) -> Stream:
        work = self._work
        assert work is not None
        self._stream = work.stream = stream
        work.since = stream.tick
        return stream

    def _order(self, stream: Stream) -> None:
        """What is enqueued from now on comes after all that the sequences have come to read or to own."""
        fence = self._fence()
        if fence > self._ordered:
            assert self._work is not None
            self._cache._flight.order(self._work, stream, fence, self, self._gates)
            self._ordered = fence

    def _fence(self) -> int:
        """This step comes after all up to this one, but for itself."""
        if len(self._cache._flight.works) < 2:
            return 0
        return max([sequence._lease.fence for sequence in self._sequences], default=0)

    def _comes_after(self) -> bool:
        fence = self._fence()
        return fence > 0 and bool(self._cache._flight.unfinished(fence, self._work))

    # ------------------------------------------------------------ what the layers read
    def table(self, component: str) -> Any:
        """Page numbers of each sequence as an int32 tensor (sequences, longest), -1 where a page is absent.

        For a boundary component: the running slots, shape (sequences, 1). It lies on the cache's device, holds true for
        what is enqueued on the step's stream after this call, and is to be read only. Call ``run_ops`` before, which
        says on which stream that is.
        """
        table = self._table(component)
        return table[:, :1] if self._cache._lane(component).unit == "boundary" else table

    def _table(self, component: str) -> Any:
        if self._state == DONE:
            raise ProtocolError("tables belong into the step's with block: nobody waits for what is written later")
        stream = self._stream
        if stream is not None:
            self._order(stream)  # what was published since ``run_ops`` may have put others' pages into the table
        elif self._cache._flight.running:
            raise ProtocolError("call run_ops first: it says on which stream this step's tables are written and read")
        if self._cache._debug is not None and self._state != NEW:
            self._cache._debug.looked_up(self, self._cache._lane(component))
        return self._cache._tables.of(self, component)

    def rewind_table(self, component: str) -> Any:
        """``rewind_slots`` of each sequence of a boundary component, as ``table``: (sequences, max_rewind + 1)."""
        if self._cache._lane(component).unit != "boundary":
            raise InputError(f"component {component!r} has pages, no states after single tokens")
        return self._table(component)[:, 1:]

    def accept(self, kept: Any) -> None:
        """How many of this step's tokens each sequence keeps is on the device only: an int tensor, one per sequence.

        Called after the layers. Each running state that has the states of single tokens (``rewind_slots``) becomes the
        one after so many tokens, at least 1; nothing is read back. When the figures are known here, the first
        ``rewind`` of a sequence tells how many tokens were *not* kept, be it 0.
        """
        if self._state not in (FILLING, READY) or self.role == "draft":
            raise ProtocolError("accept belongs into a target step's with block, after run_ops and the layers")
        if self._accepted:
            raise ProtocolError("accept was called already")
        shape, dtype = tuple(getattr(kept, "shape", ())), str(getattr(kept, "dtype", type(kept).__name__))
        if shape != (len(self._sequences),) or dtype not in INTS:
            raise InputError(f"accept takes an int tensor with one figure per sequence, got {dtype} of shape {shape}")
        self._accepted = True
        assert self._stream is not None
        for lane in self._cache._point_lanes:
            rows, holdings = [], []
            for row, sequence in enumerate(self._sequences):
                if sequence._lease._cache is not None:
                    holding = sequence._holding(lane.name)[1]
                    if 0 < self._ends[row] - self._starts[row] <= len(holding.steps):
                        rows.append(row)
                        holdings.append(holding)
            if rows:
                select_states(self._cache, self._stream, lane, kept, rows, holdings)

    # ------------------------------------------------------------ after the layers
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        before, self._state = self._state, DONE
        cache, stream, work = self._cache, self._stream, self._work
        assert work is not None
        goes_on = self._leave()
        if stream is None:
            stream = self._take_stream(cache._stream(None))
        if self._gates is not None:
            self._gates.finish()
        try:
            if cache._debug is not None:
                cache._debug.layers(self, stream, kind is None)
            if self.role == "target":
                self._close(stream, kind is None, before, goes_on)
        finally:
            cache._flight.end(work, stream, self._sequences, self)
        if kind is None and self.role == "target":
            for sequence, end in zip(self._sequences, self._ends, strict=True):
                if sequence._lease._cache is not None:
                    # what was taken back since is not computed; what was reserved since is the next step's
                    upto = end if end < sequence._planned else sequence._planned
                    sequence._commit(upto if upto > sequence.committed else sequence.committed)
        if cache._debug is not None:
            cache._leave("step")

    def __del__(self) -> None:
        if NEW < self._state < DONE:  # nobody can end it any more, and all that comes after would wait
            self._cache._dropped.append(self)

    def _close(self, stream: Stream, well: bool, before: int, goes_on: bool) -> None:
        """Enqueue what comes after the layers, if the step went well and all of its sequences go on: all or none."""
        if not well:
            self._give_up(before)
            return
        try:  # the layers of a step that is refused at its end have run all the same
            if before == OPEN and (self._fills() or self._claimed or self._deferred or self._comes_after()):
                raise ProtocolError("this step has ops that were not run: call step.run_ops() before the layers")
            if self._gates is not None:
                self._gates.check()
            if not goes_on:
                self._look_back()
            if self._tracks:
                self._run_tracks(stream)
            if self._claimed or self._deferred:
                self._run_plugins(stream, after=True)
        except BaseException:
            self._give_up(before)
            raise

    def _look_back(self) -> None:
        """Refuse to commit what was computed from where a sequence has not come to, unless it has ended."""
        for sequence, start in zip(self._sequences, self._starts, strict=True):
            if sequence._lease._cache is not None:
                if sequence.committed < start:
                    raise ProtocolError(
                        f"{sequence!r}: this step computed from {start} on, and the step before it failed or has not "
                        f"ended"
                    )
                if sequence._fills or sequence._lost:
                    sequence._committable()

    def _run_tracks(self, stream: Stream) -> None:
        """Keep the checkpoints that are due, each in its slot; but not of a running state that is a device's choice."""
        by_lane: dict[Any, tuple[list[int], list[int]]] = {}
        for sequence, lane, holding, track, source in self._tracks:
            if track not in holding.tracks or sequence._lease._cache is None:
                continue
            if self._accepted and source == holding.slot:
                lane.drop_track(holding, track)
                continue
            src, dst = by_lane.setdefault(lane, ([], []))
            src.append(source)
            dst.append(track.slot)
            track.complete = True
            if self._cache._debug is not None:
                lane.pool.enter((track.slot,), Stage.SEALED)
        for lane, (src, dst) in by_lane.items():
            run_kind(self._cache, stream, lane, lane.kept, src, dst)

    def _drop_tracks(self) -> None:
        for sequence, lane, holding, track, _ in self._tracks:
            if track in holding.tracks and sequence.open:
                lane.drop_track(holding, track)

    def _give_up(self, before: int) -> None:
        """The step failed: if its layers may have begun, what they wrote of the running states is nobody's."""
        self._drop_tracks()
        if before == FILLING or (before == OPEN and (self._fills() or self._claimed or self._deferred)):
            return
        for sequence, start, end in zip(self._sequences, self._starts, self._ends, strict=True):
            if end > start:
                for _, holding in sequence._states:
                    sequence._lost = True
                    holding.ready = False
                    holding.steps_from = -1  # the states of single tokens were written over, too
