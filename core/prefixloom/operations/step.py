"""Steps: one forward pass over some sequences, and the ops that belong to it.

The scheduler records, the stream runs: the caller opens a step, calls ``run_ops`` with the stream on which its layers
run, enqueues the layers, and the end of the ``with`` block commits what they compute, whether or not they are over.
Before the layers run the fills of running states and the plugins' own ops; after them what keeps checkpoints. Each op
runs exactly once. A draft step runs none and commits nothing; a step that ends in an exception commits nothing.

A sequence may also be computed alone, outside of steps, from ``fill`` until it commits: the same fills run then. What
ops do with content is the lanes' and the pools' business. In debug mode the race detector hears of each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from types import TracebackType
from typing import Any, Literal

import attrs

from ..contract.values import Op, WalkView
from ..device.flight import Gates, Verdict, Work
from ..device.kernels import index_of
from ..device.pool import ABSENT, PageSpan, Pool, Stage
from ..device.streams import Stream, enqueue
from ..errors import CapacityError, InputError, PluginError, PrefixloomError, ProtocolError
from ..keys.lookahead import Lookahead, Seen
from ..tree.holdings import StateHolding, Track
from ..tree.lane import Lane
from ..tree.state_lane import StateLane
from .retain import commit
from .room import make_room
from .state import CLEAR, Core, Hold, Running

log = logging.getLogger("prefixloom")

DONE, NEW, OPEN, FILLING, READY = range(-1, 4)
"""A step's way: asked for; its block is open; ``run_ops`` has begun; the layers may run. ``DONE``: it has been left."""
INTS = ("torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64")

Batch = tuple[tuple[Any, str], tuple[list[int], list[int]]]
"""(lane, kind), and the slots (src, dst) of fills that run as one op."""


class Step:
    """The program of one forward pass. Made by ``cache.step``; a context manager; single use."""

    __slots__ = (
        "_accepted", "_ahead", "_begun", "_core", "_faces", "_gates", "_ordered", "_plugin_ops", "_running", "_seen",
        "_state", "_stream", "_tracks", "_watched", "_work", "role",
    )  # fmt: skip

    _stream: Stream | None
    _work: Work[Hold]  # once its block was entered
    _watched: Any  # what debug mode says of it; None while it is not entered, and if an interrupt came then
    _gates: Gates | None
    _tracks: Many[tuple[Running, StateLane, StateHolding, Track, int]]
    _begun: list[tuple[Running, int, int]]  # of a target step in its block: from where, and up to where it computes
    _seen: Many[tuple[Lookahead, Seen]]  # in its block, where content looks ahead: which tokens the layers have
    _plugin_ops: Many[tuple[Running | None, Op]]  # plugins' own ops, each with its sequence; a claimed one names none

    def __init__(
        self,
        core: Core,
        running: Many[Running],
        role: Literal["target", "draft"],
        faces: Many[object] = (),
        ahead: int = 0,
    ) -> None:
        """``faces``: what must live as long as the step, so that its sequences are not taken for dropped.

        ``ahead``: so many tokens behind the last of each sequence are chosen by the layers themselves.
        """
        self._state = NEW  # first: it is looked at when the step goes
        self._core = core
        self._running = tuple(running)
        self._faces = tuple(faces)
        self.role = role
        self._accepted = False
        self._watched = None
        self._stream = self._gates = None
        self._ordered = 0  # the fence that the stream has been made to wait for
        self._begun = []
        self._ahead = ahead
        self._tracks = self._plugin_ops = self._seen = ()
        if core.shape.has_plugin_ops and role == "target":
            claimed = [(each, op) for each in self._running for op in each.claimed_ops]
            added = deferred_ops(core, self._running)
            self._plugin_ops = [
                *claimed, *((None if op.sequence is None else self._running[op.sequence], op) for op in added)
            ]  # fmt: skip

    def __repr__(self) -> str:
        number = "" if self._state == NEW else f" {self._work.number}"
        draft = "draft " if self.role == "draft" else ""
        return f"<{draft}step{number} of {len(self._running)} sequences>"

    @property
    def begun(self) -> Many[tuple[Running, int, int]]:
        """What a target step computes while its block is open: (whose, from where, up to where).

        It is for debug tools and tests, and no part of the public interface.
        """
        return self._begun

    @property
    def has_plugin_ops(self) -> bool:
        """Whether plugins have ops of their own for it. It is for tests, and no part of the public interface."""
        return bool(self._plugin_ops)

    @property
    def ops(self) -> tuple[Op, ...]:
        """What runs, in order: the derived fills, one op per component and kind, then the plugins' own, after the
        layers the checkpoints (known once the block is entered) and the plugins' own again.
        """
        fills = batches(self._running) if self.role == "target" else ()
        before = [Op(kind, lane.name, dst=tuple(dst), src=tuple(src)) for (lane, kind), (src, dst) in fills]
        tracks = [Op(lane.kept, lane.name, (track.slot,), (source,)) for _, lane, _, track, source in self._tracks]
        first, last = ((in_slots(self._core, whose, op) for whose, op in self._due(after)) for after in (False, True))
        return (*before, *first, *tracks, *last)

    # ------------------------------------------------------------ before the layers
    def __enter__(self) -> Step:
        core = self._core
        with core:
            if self._state != NEW:
                raise ProtocolError("a step is used once; ask the cache for a new one")
            self._begin(core)
        self._work.enclosed = True  # last: until then a flush ends it
        return self

    def _begin(self, core: Core) -> None:
        self._work = core.flight.begin()
        self._state = OPEN
        begun = self._begun
        try:
            for running in self._running if self.role == "target" else ():
                start, end = running.begin_step()
                begun.append((running, start, end))
            if core.shape.lookahead:
                self._begin_to_look()
            if core.shape.tracks_checkpoints or core.shape.max_rewind:
                self._begin_states()
            if core.watcher is not None:
                rows = (
                    begun
                    if self.role == "target"
                    else [(each, each.committed, each.reserved) for each in self._running]
                )
                self._watched = core.watcher.step_begun(self.role, rows)
        except PrefixloomError:  # a hook, while a checkpoint's slot was sought
            self._state = DONE
            self._drop_tracks()
            for running, _, _ in begun:
                running.open_steps -= 1
            for looks, seen in self._seen:
                looks.end(seen)
            core.flight.end(self._work, self._take_stream(None), (), repr(self))
            raise

    def _begin_to_look(self) -> None:
        """The layers have the tokens that are named by now."""
        starts = [start for _, start, _ in self._begun] or [each.committed for each in self._running]
        self._seen = [
            (running.looks, running.looks.begin(running.names.count, start, self._ahead))
            for running, start in zip(self._running, starts, strict=True)
            if running.looks is not None
        ]

    def _begin_states(self) -> None:
        """What a device chose in an earlier step is past; have slots for checkpoints that are due (this may raise)."""
        self._tracks = []
        for running, start, end in self._begun:
            for lane, holding in running.states:
                holding.accepted = False
                if lane.track_every and running.core is not None:
                    self._plan_track(running, lane, holding, start, end)

    def _plan_track(self, running: Running, lane: StateLane, holding: StateHolding, start: int, end: int) -> None:
        """Where a checkpoint is due in this step, have a slot to keep it in."""
        due = holding.due(lane.track_every, start, end)
        if due is None:
            return
        old = holding.replaceable()
        if old is None:
            try:
                make_room(self._core, [(lane, 1, holding)], "checkpoint", who=running)
            except CapacityError:
                self._core.left_out(lane, running, due[0], "room")
                return
        at, source = due
        assert isinstance(self._tracks, list)
        self._tracks.append((running, lane, holding, lane.plan_track(holding, at, old), source))
        running.take_fence(self._core.flight)

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
        core = self._core
        with core:
            stream = self._take_stream(stream)
            due = batches(self._running) if self.role == "target" else []
            if gated and not due and not self._plugin_ops:  # an op may read any of it
                self._gates = Gates(stream, core.flight.times)
            if len(core.flight.works) > 1:
                self._order(stream)
            if due:
                self._state = FILLING
                run_fills(core, stream, self._running, due)
            if self._plugin_ops:
                self._state = FILLING
                self._run_plugin_ops(stream, after=False)
            self._state = READY

    def gate(self, layer: int) -> None:
        """Before the model's layer ``layer``, in ascending order: it comes after what a load brings for it."""
        if self._state != READY:
            raise ProtocolError("gate belongs into the step's with block, after run_ops")
        if self._gates is not None:
            self._gates.open(layer)

    def _due(self, after: bool) -> Iterator[tuple[Running | None, Op]]:
        """The plugins' own ops that are still due, those before the layers or those after them."""
        for running, op in self._plugin_ops:
            if op.after == after and (
                running is None or (running.core is not None and (op.sequence is not None or op in running.claimed_ops))
            ):
                yield running, op

    def _run_plugin_ops(self, stream: Stream, after: bool) -> None:
        for running, op in self._due(after):
            due = in_slots(self._core, running, op)  # only now, since what the sequence owns may have changed
            if running is not None and op.sequence is None:
                left = list(running.claimed_ops)
                left.remove(op)
                running.claimed_ops = left
            run_op(self._core, due, stream)

    def _take_stream(self, given: Any) -> Stream:
        stream = self._stream = self._core.stream(given)
        self._work.stream, self._work.since = stream, stream.tick
        return stream

    def _order(self, stream: Stream) -> None:
        """What is enqueued from now on comes after all that the sequences have come to read or to own."""
        fence = self._fence()
        if fence > self._ordered:
            self._core.flight.order(self._work, stream, fence, self, self._gates)
            self._ordered = fence

    def _fence(self) -> int:
        """This step comes after all work up to this number, but for itself."""
        if len(self._core.flight.works) < 2:
            return 0
        return max([running.fence for running in self._running], default=0)

    def _comes_after(self) -> bool:
        return bool(self._core.flight.unfinished(self._fence(), self._work))

    # ------------------------------------------------------------ what the layers read
    def table(self, component: str) -> Any:
        """Page numbers of each sequence as an int32 tensor (sequences, longest), -1 where a page is absent.

        For a boundary component: the running slots, shape (sequences, 1). It lies on the cache's device, holds true for
        what is enqueued on the step's stream after this call, and is to be read only. Call ``run_ops`` before, which
        says on which stream that is.
        """
        lane = self._core.shape.lane(component)
        table = self._table(lane)
        return table[:, :1] if lane.unit == "boundary" else table

    def rewind_table(self, component: str) -> Any:
        """``rewind_slots`` of each sequence of a boundary component, as ``table``: (sequences, max_rewind + 1)."""
        lane = self._core.shape.lane(component)
        if lane.unit != "boundary":
            raise InputError(f"component {component!r} has pages, no states after single tokens")
        return self._table(lane)[:, 1:]

    def _table(self, lane: Lane) -> Any:
        with self._core:
            return self._written_table(lane)

    def _written_table(self, lane: Lane) -> Any:
        core = self._core
        if self._state == DONE:
            raise ProtocolError("tables belong into the step's with block: nobody waits for what is written later")
        stream = self._stream
        if stream is not None:
            self._order(stream)  # what was published since ``run_ops`` may have put others' pages into the table
        elif core.flight.running:
            raise ProtocolError("call run_ops first: it says on which stream this step's tables are written and read")
        if core.watcher is not None and self._state != NEW:
            core.watcher.table_read(self._watched, lane)
        return core.tables.of(lane, self._running, stream or core.stream(None))

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
        if shape != (len(self._running),) or dtype not in INTS:
            raise InputError(f"accept takes an int tensor with one figure per sequence, got {dtype} of shape {shape}")
        with self._core:
            self._accept(kept)

    def _accept(self, kept: Any) -> None:
        self._accepted = True
        assert self._stream is not None
        for lane in self._core.shape.state_lanes:
            rows, holdings = [], []
            for row, (running, start, end) in enumerate(self._begun):
                if running.core is not None:
                    holding = running.held[lane.index]
                    if 0 < end - start <= len(holding.steps):
                        rows.append(row)
                        holdings.append(holding)
            if rows:
                select_states(self._core, self._stream, lane, kept, rows, holdings)
                self._stream.reads(kept)

    def judge(self, verdict: Verdict) -> None:
        """Once the step is over on its stream, ``verdict()`` says of each sequence, in order: None, or an error.

        A sequence with an error ends as if the step had failed, and the others go on. ``verdict`` reads what the step
        left on the host. It is called where work is found to be over, maybe more than once and by another thread.
        """
        if self._state not in (OPEN, FILLING, READY):
            raise ProtocolError("judge belongs inside of the step's with block")
        self._work.verdict = verdict

    # ------------------------------------------------------------ after the layers
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._work.enclosed = False
        core = self._core
        if kind is not None and core.changing:  # the cache is broken: a flush ends this work
            self._state = DONE
            return
        with core:
            self._end(kind is None)

    def _end(self, well: bool) -> None:
        before = self._state
        self._state = DONE
        core, stream, begun = self._core, self._stream, self._begun
        for running, _, _ in begun:
            running.open_steps -= 1
        for looks, seen in self._seen:
            looks.end(seen)
        if stream is None:
            stream = self._take_stream(None)
        if self._gates is not None:
            self._gates.finish()
        refused = before == OPEN and self._comes_after()  # it does not come after it: it is nobody's last step
        followers = () if refused else self._running
        if not well or refused:
            self._work.verdict = None  # nothing is committed
        try:
            if core.watcher is not None and self._watched is not None:
                core.watcher.step_ended(self._watched, repr(self), stream, well, not refused)
            if self.role == "target":
                self._close(stream, well, before)
        except PrefixloomError:
            core.flight.end(self._work, stream, followers, self)
            raise
        core.flight.end(self._work, stream, followers, self)
        if well:
            self._commit()
            if self.role == "draft" and not refused:
                for looks, seen in self._seen:
                    looks.caught_up(seen)

    def _commit(self) -> None:
        """Commit what the layers compute, except what was taken back since, or belongs to a sequence that has ended."""
        core = self._core
        begun = [each for each in self._begun if each[0].core is not None]
        for (looks, seen), (running, _, end) in zip(self._seen, self._begun, strict=False):  # a draft step begins none
            if running.core is not None:
                looks.computed(seen, max(running.committed, min(end, running.planned)), running.names.count)
        failed: PrefixloomError | None = None
        for running, _, end in begun:
            try:
                commit(core, running, max(running.committed, min(end, running.planned)))
            except PrefixloomError as error:  # a reach that is plain Python: the states of the others are written too
                failed = failed or error
        if failed is not None:
            raise failed

    def __del__(self) -> None:
        if getattr(self, "_state", NEW) > NEW:  # nobody can end it any more, and all that comes after would wait
            self._work.enclosed = False
            what = "entered and dropped before its end; it counts as failed"
            self._core.dropped.add(self, what, lambda: self._end(well=False))

    def _close(self, stream: Stream, well: bool, before: int) -> None:
        """Enqueue what comes after the layers, if the step went well and all of its sequences go on: all or none."""
        if not well:
            self._give_up(before)
            return
        try:  # the layers of a step that is refused at its end have run all the same
            if before == OPEN and (batches(self._running) or self._plugin_ops or self._comes_after()):
                raise ProtocolError("this step has ops that were not run: call step.run_ops() before the layers")
            if self._gates is not None:
                self._gates.check()
            self._check_begun()
            if self._tracks:
                self._run_tracks(stream)
            if self._plugin_ops:
                self._run_plugin_ops(stream, after=True)
        except PrefixloomError:
            self._give_up(before)
            raise

    def _check_begun(self) -> None:
        """Refuse to commit what was computed from where a sequence has not come to, unless it has ended."""
        for running, start, _ in self._begun:
            if running.core is not None:
                if running.committed < start:
                    raise ProtocolError(
                        f"{running!r}: this step computed from {start} on, and the step before it failed or has not "
                        f"ended"
                    )
                if running.fills or running.lost:
                    running.check_states()

    def _run_tracks(self, stream: Stream) -> None:
        """Keep the checkpoints that are due, each in its slot; but not of a running state that is a device's choice."""
        by_lane: dict[Any, tuple[list[int], list[int]]] = {}
        for running, lane, holding, track, source in self._tracks:
            if track not in holding.tracks or running.core is None:
                continue
            if self._accepted and source == holding.slot:
                lane.drop_track(holding, track)
                continue
            src, dst = by_lane.setdefault(lane, ([], []))
            src.append(source)
            dst.append(track.slot)
            track.complete = True
            if self._core.watcher is not None:
                lane.pool.enter((track.slot,), Stage.SEALED)
        for lane, (src, dst) in by_lane.items():
            run_kind(self._core, stream, lane, lane.kept, src, dst)

    def _drop_tracks(self) -> None:
        for running, lane, holding, track, _ in self._tracks:
            if track in holding.tracks and running.core is not None:
                lane.drop_track(holding, track)

    def _give_up(self, before: int) -> None:
        """The step failed: if its layers may have begun, what they wrote of the running states is nobody's."""
        self._drop_tracks()
        if before == READY or (before == OPEN and not batches(self._running) and not self._plugin_ops):
            for running, start, end in self._begun:
                if end > start:
                    running.lose_states()
        for running, _, _ in self._begun:
            if not running.lost and running.core is not None:
                due = [holding for _, holding, _, _ in running.fills]
                for _, holding in running.states:  # filled, and not written since: it is what it was
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


# ---------------------------------------------------------------- fills


def batches(sequences: Many[Running]) -> list[Batch]:
    """The fills that are due of ``sequences``, one op for each component and kind.

    In any order: a source is the tree's or a single step's, a target is a running slot, so none is both.
    """
    out: dict[tuple[Any, str], tuple[list[int], list[int]]] = {}
    for running in sequences:
        if running.fills and running.core is not None:
            for lane, holding, kind, source in running.fills:
                src, dst = out.setdefault((lane, kind), ([], []))
                dst.append(holding.slot)
                if source != CLEAR:
                    src.append(source)
    return list(out.items())


def run_fills(core: Core, stream: Stream, sequences: Many[Running], due: Iterable[Batch]) -> None:
    """Give the running states of ``sequences`` the content that is ``due``, and let go of the sources.

    If an op raises, all of the fills are still due.
    """
    for (lane, kind), (src, dst) in due:
        run_kind(core, stream, lane, kind, src, dst)
        if core.watcher is not None:
            lane.live.enter(dst, Stage.SEALED)  # the tree may take it over, if it has lost its own
    for running in sequences:
        if running.fills and running.core is not None:
            for point in core.shape.state_lanes:
                covered = running.covers[point.index]
                if covered is not None:
                    running.covers[point.index] = None
                    point.release(covered)
            running.fills = []


def fill_alone(core: Core, running: Running, given: Any) -> None:
    """The fills that are due of a sequence that is computed outside of steps, on a stream as ``run_ops`` takes it.

    If one raises, all stay due. Where its layers run on a stream that runs behind, they are work in flight like those
    of a step: all that is enqueued there from here on, until the sequence commits or gives something back.
    """
    flight = core.flight
    inline = core.inline if given is None else None
    stream = core.stream(given) if inline is None else inline
    since = stream.tick
    if flight.alone:
        flight.end_alone(running)
    if (flight.works and flight.unfinished(running.fence)) or (running.fills and not stream.inline):
        work = flight.begin()
        work.stream, work.since = stream, since
        mine: tuple[Running, ...] = ()  # not before it comes after what the sequence's last step wrote
        try:
            flight.order(work, stream, running.fence, running)
            mine = (running,)
            run_fills(core, stream, mine, batches(mine))
        except PrefixloomError:
            flight.end(work, stream, mine, f"fill of {running!r}")
            raise
        flight.end(work, stream, mine, f"fill of {running!r}")
    elif running.fills:
        due: list[Batch] = []
        for lane, holding, kind, source in running.fills:
            due.append(((lane, kind), ([] if source == CLEAR else [source], [holding.slot])))
        run_fills(core, stream, (running,), due)
    if not stream.inline:
        flight.alone[running] = stream, since
    for lane in core.shape.state_lanes:  # from here on its layers may write it
        running.held[lane.index].ready = False
    if running.looks is not None:  # and they have what is named
        running.looks.alone = Seen(running.names.count, running.committed, 0)


def check_alone(core: Core, running: Running) -> None:
    """Refuse to compute outside of steps what a step has, or where ops are not all that has to run."""
    if running.open_steps:
        raise ProtocolError(f"{running!r} is in a step whose block is open: its run_ops fills the states")
    if running.lost:
        running.check_states()
    asked = [lane.name for lane in core.shape.lanes if lane.hooks.deferred_forward_ops is not None]
    for name in (*asked, *(op.component for op in running.claimed_ops)):
        raise ProtocolError(f"{running!r}: component {name!r} has ops of its own, which run in steps alone")


# ---------------------------------------------------------------- ops


def deferred_ops(core: Core, sequences: Many[Running]) -> list[Op]:
    """The ops that plugins add to a step over ``sequences``."""
    ops: list[Op] = []
    for lane in core.shape.lanes:
        hook = lane.hooks.deferred_forward_ops
        if hook is not None:
            batch = tuple(
                WalkView(
                    each.namespace,
                    each.committed,
                    each.names.count,
                    each.reserved,
                    each.published,
                    extra=each.names.extra,
                )
                for each in sequences
            )
            more = core.plugins.ask(lane, "deferred_forward_ops", tuple, hook, batch) or ()
            ops.extend(core.plugins.check_ops(lane, "deferred_forward_ops", more, len(batch)))
    return ops


def in_slots(core: Core, running: Running | None, op: Op) -> Op:
    """Return the op of a plugin with the slots of the places that it names."""
    if not (op.dst or op.src):
        return op
    lane = core.shape.lane(op.component)

    def slot_at(place: int | PageSpan, own: bool = False) -> int:
        slot = ABSENT
        if not isinstance(place, PageSpan):
            assert running is not None
            slot = lane.slot_at(running.held[lane.index], place, own)
        elif place.pool is lane.live and len(place) == 1:
            (slot,) = place.ids
        if slot == ABSENT:
            why = "does not own it: write what it has reserved and not published" if own else "has nothing there"
            raise PluginError(f"component {op.component!r}: an op names place {place} of {running!r}, which {why}")
        return slot

    chosen = op.selector is not None
    src = tuple([tuple(map(slot_at, place)) if chosen else slot_at(place) for place in op.src])
    return attrs.evolve(op, dst=tuple([slot_at(place, own=True) for place in op.dst]), src=src)


def select_states(core: Core, stream: Stream, lane: Any, kept: Any, rows: list[int], holdings: list[Any]) -> None:
    """Have each of ``holdings`` go on from the state after so many tokens as ``kept`` says, at its row of ``rows``."""
    choices = [list(holding.steps) for holding in holdings]
    dst = [holding.slot for holding in holdings]
    for holding in holdings:
        holding.accepted = True

    def work() -> None:
        mine = kept if len(rows) == len(kept) else kept.index_select(0, index_of(rows, [kept]))
        lane.live.select(choices, mine - 1, dst)

    reads = [slot for row in choices for slot in row]
    _run_watched(core, stream, f"select of {lane.name}", lane.live, work, reads, dst)


def run_kind(core: Core, stream: Stream, lane: Any, kind: str, src: list[int], dst: list[int]) -> None:
    """One of the core's own kinds of op on states."""
    source, target = lane.ends(kind)
    _run_watched(core, stream, f"{kind} of {lane.name}", target, lane.work(kind, src, dst), src, dst, source)


def run_apart(core: Core, running: Running, lane: Any, kind: str, src: list[int], dst: list[int]) -> None:
    """Run an op that belongs to no step, behind the last one of a sequence."""
    flight = core.flight
    last = None if running.work is None else running.work.stream
    stream = last or core.stream(None)
    work = flight.begin()
    work.stream, work.since = stream, stream.tick
    try:
        flight.order(work, stream, running.fence, running)
        run_kind(core, stream, lane, kind, src, dst)
    except PrefixloomError:
        flight.end(work, stream, (running,), f"{kind} of {lane.name}")
        raise
    flight.end(work, stream, (running,), f"{kind} of {lane.name}")


def run_op(core: Core, op: Op, stream: Stream) -> None:
    """An op that a plugin asked for: the core's own kinds on the pool, any other by its component."""
    lane = core.shape.lane(op.component)
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
        work = lambda: core.plugins.call(op.component, "run_forward_op", hook, op, stream)  # noqa: E731
    _run_watched(core, stream, f"{op.kind} of {op.component}", pool, work, reads, op.dst)
    if op.selector is not None:
        stream.reads(op.selector)


def _run_watched(
    core: Core,
    stream: Stream,
    what: str,
    pool: Pool,
    work: Callable[[], object],
    reads: Many[int],
    writes: Many[int],
    source: Pool | None = None,
) -> None:
    """Enqueue ``work`` that writes slots of ``pool`` and reads slots of ``source``, by default the same pool."""
    if core.watcher is not None:
        core.watcher.writing(what, pool, writes)
    enqueue(stream, what, work)
    if core.watcher is not None:
        core.watcher.accessed(stream, what, pool, reads, writes, source or pool)
