"""Steps: one forward pass over some sequences.

The scheduler records, the stream runs: the caller opens a step, calls ``run_ops`` with the stream on which its layers
run, enqueues the layers, and the end of the ``with`` block commits what they compute, whether or not they are over.
What runs before and after the layers stands in ``ops``. A draft step runs no ops and commits nothing; a step that ends
in an exception commits nothing either.

A sequence may also be computed alone, outside of steps, from ``fill`` until it commits: the same fills run then.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ..contract.values import Op
from ..device.flight import Gates, Verdict, Work
from ..device.streams import Stream
from ..errors import InputError, PrefixloomError, ProtocolError
from ..keys.lookahead import Seen
from ..tree.lane import Lane
from .ops import (
    Batch,
    PluginOp,
    batches,
    due,
    enqueued,
    in_slots,
    keep_checkpoints,
    plugin_ops,
    run_due,
    run_fills,
    run_kind,
    select_states,
)
from .retain import commit_row
from .state import Core, Hold, Row, Running

if TYPE_CHECKING:
    import torch

DONE, NEW, OPEN, FILLING, READY = range(-1, 4)
"""A step's way: asked for; its block is open; ``run_ops`` has begun, and has ended. ``DONE``: the block was left."""
INTS = ("torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64")


class Step:
    """The program of one forward pass. Made by ``cache.step``; a context manager; single use."""

    __slots__ = (
        "_accepted", "_ahead", "_core", "_faces", "_gates", "_plugin_ops", "_rows", "_running", "_state", "_watched",
        "_work", "role",
    )  # fmt: skip

    _work: Work[Hold]
    """Made when the block is entered. It has a stream from ``run_ops`` on."""
    _watched: Any
    """What debug mode says of it; None while it is not entered, and if an interrupt came then."""
    _rows: Many[Row]
    """Empty while its block is not open."""
    _plugin_ops: Many[PluginOp]

    def __init__(
        self, core: Core, running: Many[Running], role: Literal["target", "draft"], faces: Many[object] = (),
        ahead: int = 0,
    ) -> None:  # fmt: skip
        """Make a step over ``running``. ``faces`` live as long as the step, so that no sequence is taken for dropped.

        ``ahead``: so many tokens behind the last of each sequence are chosen by the layers themselves.
        """
        self._state = NEW  # first: ``__del__`` looks at it
        self._core = core
        self._running = tuple(running)
        self._faces = tuple(faces)
        self.role = role
        self._ahead = ahead
        self._accepted = False
        self._watched = None
        self._gates: Gates | None = None
        self._rows = ()
        self._plugin_ops = plugin_ops(core, self._running) if role == "target" else ()

    def __repr__(self) -> str:
        number = "" if self._state == NEW else f" {self._work.number}"
        draft = "draft " if self.role == "draft" else ""
        return f"<{draft}step{number} of {len(self._running)} sequences>"

    @property
    def has_plugin_ops(self) -> bool:
        """Whether plugins have ops of their own for it: for tests, no part of the interface."""
        return bool(self._plugin_ops)

    @property
    def ops(self) -> tuple[Op, ...]:
        """What runs, in order: the derived fills, one op per component and kind, then the plugins' own, those that run
        after the layers last. Checkpoints that are due are copied besides, at the end.
        """
        fills = [Op(kind, lane.name, dst=tuple(dst), src=tuple(src)) for (lane, kind), (src, dst) in self._fills()]
        own = [in_slots(self._core, *each) for after in (False, True) for each in due(self._plugin_ops, after)]
        return (*fills, *own)

    # ------------------------------------------------------------ before the layers
    def __enter__(self) -> Step:
        core = self._core
        with core:
            if self._state != NEW:
                raise ProtocolError("a step is used once; ask the cache for a new one")
            self._work = core.flight.begin()
            self._state = OPEN
            self._rows = [Row(core, each, self.role == "draft", self._ahead) for each in self._running]
            if core.watcher is not None:
                self._watched = core.watcher.step_begun(self._rows)
        self._work.enclosed = True  # last: until then a flush ends it
        return self

    def run_ops(self, stream: object = None, *, gated: bool = False) -> None:
        """Run the ops on ``stream``, on which the layers that read their slots are enqueued next.

        A stream is one of ``prefixloom.streams``, a ``torch.cuda.Stream``, or None: the current one, which on a CPU is
        the caller. A second call is refused; a draft step runs no ops, but is ordered after what it reads.
        ``gated``: the caller calls ``gate`` before each layer, and what is being loaded is waited for there.
        """
        if self._state != OPEN:
            if self._state > OPEN:
                raise ProtocolError("the ops of this step have run already; a forward split by layers runs them once")
            raise ProtocolError("run_ops belongs inside of the step's with block")
        core = self._core
        with core:
            on = self._take_stream(stream)
            if gated and not self._has_ops:  # an op may read any of it
                self._gates = Gates(on, core.flight.times)
            self._order(on)
            self._state = FILLING
            if self.role == "target":
                run_fills(core, on, self._running)
            run_due(core, on, self._plugin_ops, after=False)
            self._state = READY

    def gate(self, layer: int) -> None:
        """Make the model's layer ``layer`` wait for what a load brings for it. Call it before each layer, ascending."""
        if self._state != READY:
            raise ProtocolError("gate belongs into the step's with block, after run_ops")
        if self._gates is not None:
            self._gates.open(layer)

    def _fills(self) -> list[Batch]:
        return batches(self._running) if self.role == "target" else []

    @property
    def _has_ops(self) -> bool:
        """True if ``run_ops`` has, or had, something to run."""
        return bool(self._plugin_ops or self._fills())

    def _take_stream(self, given: object) -> Stream:
        work = self._work
        stream = work.stream = self._core.stream(given)
        work.since = stream.tick
        return stream

    def _fence(self) -> int:
        """Return the number up to which all other work must run before this step."""
        if len(self._core.flight.works) < 2:
            return 0
        return max([running.fence for running in self._running], default=0)

    def _order(self, stream: Stream) -> None:
        """Make what is enqueued from now on run after the work up to the fences of all sequences."""
        self._core.flight.order(self._work, stream, self._fence(), self, self._gates)

    # ------------------------------------------------------------ what the layers read
    def table(self, component: str) -> torch.Tensor:
        """Return the pages of each sequence as an int32 tensor (sequences, longest), -1 where a page is absent.

        For a boundary component: the running slots, shape (sequences, 1). It lies on the cache's device, holds true for
        what is enqueued on the step's stream after this call, and is to be read only. Call ``run_ops`` before, which
        says on which stream that is.
        """
        lane = self._core.shape.lane(component)
        table = self._table(lane)
        return table[:, :1] if lane.unit == "boundary" else table

    def rewind_table(self, component: str) -> torch.Tensor:
        """Return ``rewind_slots`` of each sequence, as ``table`` does: (sequences, max_rewind + 1)."""
        lane = self._core.shape.lane(component)
        if lane.unit != "boundary":
            raise InputError(f"component {component!r} has pages, no states after single tokens")
        return self._table(lane)[:, 1:]

    def _table(self, lane: Lane) -> torch.Tensor:
        core = self._core
        with core:
            if self._state == DONE:
                raise ProtocolError("tables belong into the step's with block: nobody waits for what is written later")
            stream = None if self._state == NEW else self._work.stream
            if stream is not None:
                self._order(stream)  # what was published since ``run_ops`` may have put others' pages into the table
            elif core.flight.running:
                raise ProtocolError(
                    "call run_ops first: it says on which stream this step's tables are written and read"
                )
            if core.watcher is not None and self._state != NEW:
                core.watcher.table_read(self._watched, lane)
            table: torch.Tensor = core.tables.of(lane, self._running, stream or core.stream(None))
            return table

    # ------------------------------------------------------------ after the layers
    def accept(self, kept: torch.Tensor) -> None:
        """Keep of each sequence so many of this step's tokens: an int tensor on the device, one figure per sequence.

        Call it after the layers. Each running state that has the states of single tokens (``rewind_slots``) becomes the
        one after so many tokens, at least 1; nothing is read back. When the figures are known here, the first
        ``rewind`` of a sequence tells how many tokens were *not* kept, be it 0.
        """
        if self._state < FILLING or self.role == "draft":
            raise ProtocolError("accept belongs into a target step's with block, after run_ops and the layers")
        if self._accepted:
            raise ProtocolError("accept was called already")
        shape, dtype = tuple(getattr(kept, "shape", ())), str(getattr(kept, "dtype", type(kept).__name__))
        if shape != (len(self._running),) or dtype not in INTS:
            raise InputError(f"accept takes an int tensor with one figure per sequence, got {dtype} of shape {shape}")
        assert self._work.stream is not None
        with self._core:
            self._accepted = True
            select_states(self._core, self._work.stream, kept, self._rows)

    def judge(self, verdict: Verdict) -> None:
        """Have ``verdict()`` say of each sequence, in order, None or an error, once the step is over on its stream.

        A sequence with an error ends as if the step had failed, and the others go on. ``verdict`` reads what the step
        left on the host. It is called where work is found to be over, maybe more than once and by another thread.
        """
        if self._state < OPEN:
            raise ProtocolError("judge belongs inside of the step's with block")
        self._work.verdict = verdict

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._work.enclosed = False
        if kind is not None and self._core.changing:  # the cache is broken: a flush ends this work
            self._state = DONE
            return
        with self._core:
            self._end(kind is None)

    def __del__(self) -> None:
        if getattr(self, "_state", NEW) > NEW:  # nobody can end it any more, and all that comes after would wait
            self._work.enclosed = False
            what = "entered and dropped before its end; it counts as failed"
            self._core.dropped.add(self, what, lambda: self._end(well=False))

    def _end(self, well: bool) -> None:
        """Enqueue what comes after the layers, and commit; if anything of it is refused, the whole step has failed."""
        core, work, rows, before = self._core, self._work, self._rows, self._state
        self._state = DONE
        if work.over or work.event is not None:  # a flush has ended it
            return
        self._rows = ()
        for row in rows:
            row.close()
        stream = work.stream or self._take_stream(None)
        idle = before == OPEN and not self._has_ops
        # Without ``run_ops`` the layers do not come after what they read: it is nobody's last step.
        unordered = before == OPEN and bool(core.flight.unfinished(self._fence(), work))
        failed: PrefixloomError | None = None
        try:
            if self._gates is not None:
                self._gates.finish()
            if core.watcher is not None and self._watched is not None:
                core.watcher.step_ended(self._watched, repr(self), stream, well, not unordered)
            if well and self.role == "target":
                if unordered or not (idle or before == READY):
                    raise ProtocolError("this step has ops that were not run: call step.run_ops() before the layers")
                self._finish(stream, rows)
        except PrefixloomError as error:
            failed = error
        commits = well and failed is None and not unordered
        if not commits:
            work.verdict = None
            if self.role == "target":
                _lose_states(rows, may_have_written=well or idle or before == READY)
        core.flight.end(work, stream, () if unordered else self._running, self)
        for row in rows if commits else ():
            try:
                commit_row(core, row)
            except PrefixloomError as error:  # a reach that is plain Python: the others' states are written too
                failed = failed or error
        if failed is not None:
            raise failed

    def _finish(self, stream: Stream, rows: Many[Row]) -> None:
        """Enqueue what comes after the layers, if all of the sequences can go on."""
        core = self._core
        if self._gates is not None:
            self._gates.check()
        for row in rows:
            row.check()
        if core.shape.tracks_checkpoints:
            copies, fence = keep_checkpoints(core, self._work, rows, self._accepted)
            core.flight.order(self._work, stream, fence, self)
            for lane, (src, dst) in copies.items():
                run_kind(core, stream, lane, lane.kept, src, dst)
        run_due(core, stream, self._plugin_ops, after=True)


def _lose_states(rows: Many[Row], may_have_written: bool) -> None:
    """Note that a step failed: what its layers may have written of running states is nobody's, unless it is due again.

    What layers have not written is what it was before the step.
    """
    for row in rows:
        running = row.running
        due = [holding for _, holding, _, _ in running.fills]
        for lane, holding in running.states if running.core is not None else ():
            lane.forget_tracks(holding, -1, row.start)
            if may_have_written and row.end > row.start and holding not in due:
                running.lost = True
                holding.lose()
            elif not running.lost:
                holding.ready = holding not in due


def next_stop(core: Core, running: Running, budget: int, stops: Iterable[int]) -> int:
    """Return where the next step of ``running`` should end, at most ``budget`` tokens further (# 0086).

    A state is kept only where a step ends. While named tokens are left to compute, a step ends at the first of these:
    ``stops``, the branch, and the deepest boundary at which the same prompt can be resumed; else where the deepest
    checkpoint is due or, without one, at the deepest boundary.
    """
    shape = core.shape
    start, named, page = running.reserved, running.names.count, shape.page
    end = start + budget
    if start >= named:
        return end
    wanted = [*stops]
    if shape.state_lanes:
        resumable = named - max(1, shape.lookahead)
        wanted += [running.branch or 0, resumable // page * page]
        wanted += [
            min(end, named) // lane.track_every * lane.track_every for lane in shape.state_lanes if lane.track_every
        ]
    if end >= named:
        end = named
    elif end // page * page > start:
        end = end // page * page
    return min([at for at in wanted if start < at < end], default=end)


# ---------------------------------------------------------------- without a step


def fill_alone(core: Core, running: Running, given: object) -> None:
    """Run the fills that are due of a sequence that is computed outside of steps, on a stream as ``run_ops`` takes it.

    If one raises, all stay due. On a stream that is not inline, all that is enqueued from here on is work in flight
    like that of a step, until the sequence commits or gives something back.
    """
    flight = core.flight
    stream = core.stream(given)
    since = stream.tick
    if flight.alone:
        flight.end_alone(running)
    if (flight.works and flight.unfinished(running.fence)) or (running.fills and not stream.inline):
        with enqueued(core, stream, since, running, f"fill of {running!r}"):
            run_fills(core, stream, (running,))
    elif running.fills:
        run_fills(core, stream, (running,))
    if not stream.inline:
        flight.alone[running] = stream, since
    for lane in core.shape.state_lanes:  # from here on its layers may write it
        running.held[lane.index].ready = False
    if running.looks is not None:  # and they have what is named
        running.looks.alone = Seen(running.names.count, running.committed, 0)


def check_alone(core: Core, running: Running) -> None:
    """Refuse to compute outside of steps what a step has, or where ops are not all that has to run."""
    if running.steps:
        raise ProtocolError(f"{running!r} is in a step whose block is open: its run_ops fills the states")
    if running.lost:
        running.check_states()
    asked = [lane.name for lane in core.shape.lanes if lane.hooks.deferred_forward_ops is not None]
    for name in (*asked, *(op.component for op in running.claimed_ops)):
        raise ProtocolError(f"{running!r}: component {name!r} has ops of its own, which run in steps alone")
