"""Steps: one forward pass over some sequences, and the ops that belong to it.

The scheduler records, the stream runs: the caller opens a step, calls ``run_ops`` with the stream on which its layers
run, enqueues the layers, and the end of the ``with`` block commits what they compute, whether or not they are over.
Before the layers run the fills of running states and the plugins' own ops; after them what keeps checkpoints. Each op
runs exactly once. A draft step runs none and commits nothing; a step that ends in an exception commits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ..contract.values import Op
from ..device.flight import Gates
from ..device.pool import Stage
from ..errors import CapacityError, InputError, ProtocolError
from ..operations.retain import commit
from ..operations.room import make_room
from ..operations.running import check_states
from ..operations.step_ops import INTS, Batches, batches, deferred_ops, run_fills, run_kind, run_op, select_states
from ..tree.holdings import SteppedHolding, go_on

if TYPE_CHECKING:
    from ..device.flight import Work
    from ..device.streams import Stream
    from ..tree.holdings import StateHolding, Track
    from ..tree.state_lane import PointLane
    from .cache import Cache
    from .sequence import Sequence

DONE, NEW, OPEN, FILLING, READY = range(-1, 4)
"""A step's way: asked for; its block is open; ``run_ops`` has begun; the layers may run. ``DONE``: it has been left."""


class Step:
    """The program of one forward pass. Made by ``cache.step``; a context manager; single use."""

    __slots__ = (
        "_accepted", "_begun", "_cache", "_gates", "_ordered", "_plugins", "_sequences", "_state",
        "_stream", "_touched", "_tracks", "_work", "role",
    )  # fmt: skip

    _stream: Stream | None
    _work: Work  # once its block was entered
    _gates: Gates | None
    _tracks: Many[tuple[Sequence, PointLane, StateHolding, Track, int]]
    _begun: list[tuple[Sequence, int, int]]  # of a target step in its block: from where, and up to where it computes
    _plugins: Many[tuple[Sequence | None, Op]]  # plugins' own ops, each with the sequence that it was claimed for

    def __init__(self, cache: Cache, sequences: Many[Sequence], role: Literal["target", "draft"]) -> None:
        self._state = NEW  # first: it is looked at when the step goes
        self._cache = cache
        self._sequences = tuple(sequences)
        self.role = role
        self._accepted = False
        self._stream = self._gates = None
        self._ordered = 0  # the fence that the stream has been made to wait for
        self._begun = []
        self._tracks = self._plugins = ()
        if cache._plugin_ops and role == "target":
            if cache._match_hooks:
                self._plugins = [(sequence, op) for sequence in self._sequences for op in sequence._claimed_ops]
            self._plugins = [*self._plugins, *((None, op) for op in deferred_ops(cache, self._sequences))]

    def __repr__(self) -> str:
        number = "" if self._state == NEW else f" {self._work.number}"
        draft = "draft " if self.role == "draft" else ""
        return f"<{draft}step{number} of {len(self._sequences)} sequences>"

    @property
    def ops(self) -> tuple[Op, ...]:
        """What runs, in order: the derived fills, one op per component and kind, then the plugins' own, after the
        layers the checkpoints (known once the block is entered) and the plugins' own again.
        """
        fills = batches(self._sequences).items() if self.role == "target" else ()
        before = [Op(kind, lane.name, dst=tuple(dst), src=tuple(src)) for (lane, kind), (src, dst) in fills]
        own = [op for sequence, op in self._plugins if sequence is None or op in sequence._claimed_ops]
        tracks = [Op(lane.kept, lane.name, (track.slot,), (source,)) for _, lane, _, track, source in self._tracks]
        return (*before, *(op for op in own if not op.after), *tracks, *(op for op in own if op.after))

    # ------------------------------------------------------------ before the layers
    def __enter__(self) -> Step:
        if self._state != NEW:
            raise ProtocolError("a step is used once; ask the cache for a new one")
        cache = self._cache
        self._work = cache._flight.begin()
        self._state = OPEN
        begun = self._begun
        try:
            for sequence in self._sequences if self.role == "target" else ():
                start = sequence.committed
                end = sequence.reserved
                if sequence._steps and sequence._planned > start:  # its layers go on from where the steps before it end
                    start = sequence._planned
                begun.append((sequence, start, end))
                sequence._steps += 1
                if end > start:
                    sequence._planned = end
            if cache._tracking or cache._max_rewind:
                self._begin_states()
            if cache._debug is not None:
                self._touched = cache._debug.begin(self)
        except BaseException:  # a hook or an interrupt, while a checkpoint's slot was sought
            self._state = DONE
            self._drop_tracks()
            for sequence, _, _ in begun:
                sequence._steps -= 1
            cache._flight.end(self._work, self._take_stream(None), (), repr(self))
            raise
        return self

    def _begin_states(self) -> None:
        """What a device chose in an earlier step is past; have slots for checkpoints that are due (this may raise)."""
        self._tracks = []
        for sequence, start, end in self._begun:
            go_on(sequence._states)
            for lane, holding in sequence._states:
                if lane.track_every and sequence._lease._cache is not None:
                    self._plan_track(sequence, lane, holding, start, end)

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
        inline = cache._inline if stream is None else None
        stream = self._stream = cache._stream(stream) if inline is None else inline
        self._work.since = stream.tick
        due: Batches = {}
        if self.role == "target":
            due = batches(self._sequences)
        if gated and not due and not self._plugins:  # an op may read any of it
            self._gates = Gates(stream)
        if len(cache._flight.works) > 1:
            self._order(stream)
        if due:
            self._state = FILLING
            run_fills(cache, stream, self._sequences, due)
        if self._plugins:
            self._state = FILLING
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
        for sequence, op in self._plugins:
            if op.after != after:
                continue
            if sequence is not None:
                if not sequence.open or op not in sequence._claimed_ops:  # another step may have run it
                    continue
                sequence._claimed_ops.remove(op)
            run_op(self._cache, op, stream)

    def _take_stream(self, given: Any) -> Stream:
        stream = self._stream = self._cache._stream(given)
        self._work.since = stream.tick
        return stream

    def _order(self, stream: Stream) -> None:
        """What is enqueued from now on comes after all that the sequences have come to read or to own."""
        fence = self._fence()
        if fence > self._ordered:
            self._cache._flight.order(self._work, stream, fence, self, self._gates)
            self._ordered = fence

    def _fence(self) -> int:
        """This step comes after all up to this one, but for itself."""
        if len(self._cache._flight.works) < 2:
            return 0
        return max([sequence._lease.fence for sequence in self._sequences], default=0)

    def _comes_after(self) -> bool:
        return bool(self._cache._flight.unfinished(self._fence(), self._work))

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
            for row, (sequence, start, end) in enumerate(self._begun):
                if sequence._lease._cache is not None:
                    holding = sequence._holding(lane.name)[1]
                    if 0 < end - start <= len(holding.steps):
                        rows.append(row)
                        holdings.append(holding)
            if rows:
                select_states(self._cache, self._stream, lane, kept, rows, holdings)

    # ------------------------------------------------------------ after the layers
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        before = self._state
        self._state = DONE
        cache, stream, begun = self._cache, self._stream, self._begun
        plain = kind is None and before == READY and not self._tracks and not self._plugins
        for sequence, start, _ in begun:
            sequence._steps -= 1
            if sequence.committed < start or sequence._fills or sequence._lost:
                plain = False
        if stream is None:
            stream = self._take_stream(None)
        if self._gates is not None:
            self._gates.finish()
            plain = False
        refused = not plain and before == OPEN and self._comes_after()  # it does not: it is nobody's last step
        ended = () if refused else self._sequences
        try:
            if cache._debug is not None:
                cache._debug.layers(self, stream, kind is None, ended)
            if not plain and self.role == "target":
                self._close(stream, kind is None, before)
        finally:
            cache._flight.end(self._work, stream, ended, self)
        if kind is None:
            try:
                for sequence, _, end in begun:
                    if sequence._lease._cache is not None:
                        if end > sequence._planned:  # what was taken back since is not computed
                            end = sequence._planned
                        if end < sequence.committed:
                            end = sequence.committed
                        commit(cache, sequence, end)
            except BaseException:  # a reach that is plain Python, when it was asked what need not be kept
                self._commit_after(sequence)
                raise
        if cache._debug is not None:
            cache._leave("step")

    def _commit_after(self, failed: Sequence) -> None:
        """One of the sequences could not be committed: the states of those after it have been written as well."""
        cache, rest = self._cache, iter(self._begun)
        for sequence, _, _ in rest:
            if sequence is failed:
                break
        for sequence, _, end in rest:
            if sequence._lease._cache is not None:
                with suppress(Exception):
                    commit(cache, sequence, max(sequence.committed, min(end, sequence._planned)))

    def __del__(self) -> None:
        if self._state > NEW:  # nobody can end it any more, and all that comes after would wait
            self._cache._dropped.append(self)

    def _close(self, stream: Stream, well: bool, before: int) -> None:
        """Enqueue what comes after the layers, if the step went well and all of its sequences go on: all or none."""
        if not well:
            self._give_up(before)
            return
        try:  # the layers of a step that is refused at its end have run all the same
            if before == OPEN and (batches(self._sequences) or self._plugins or self._comes_after()):
                raise ProtocolError("this step has ops that were not run: call step.run_ops() before the layers")
            if self._gates is not None:
                self._gates.check()
            self._look_back()
            if self._tracks:
                self._run_tracks(stream)
            if self._plugins:
                self._run_plugins(stream, after=True)
        except BaseException:
            self._give_up(before)
            raise

    def _look_back(self) -> None:
        """Refuse to commit what was computed from where a sequence has not come to, unless it has ended."""
        for sequence, start, _ in self._begun:
            if sequence._lease._cache is not None:
                if sequence.committed < start:
                    raise ProtocolError(
                        f"{sequence!r}: this step computed from {start} on, and the step before it failed or has not "
                        f"ended"
                    )
                check_states(sequence)

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
        if before == READY or (before == OPEN and not batches(self._sequences) and not self._plugins):
            self._lose_states()
        for sequence, _, _ in self._begun:
            if not sequence._lost and sequence._lease._cache is not None:
                due = [holding for _, holding, _, _ in sequence._fills]
                for _, holding in sequence._states:  # filled, and not written since: it is what it was
                    holding.ready = holding not in due

    def _lose_states(self) -> None:
        for sequence, start, end in self._begun:
            if end > start:
                for _, holding in sequence._states:
                    sequence._lost = True
                    holding.ready = False
                    if isinstance(holding, SteppedHolding):
                        holding.steps_from = -1  # the states of single tokens were written over, too
