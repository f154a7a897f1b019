"""Ops: what runs on streams beside the layers of a step. Each op runs exactly once.

Before the layers run the fills of running states and the plugins' own ops; after them the copies that keep checkpoints.
What ops do with content is the lanes' and the pools' business. In debug mode the race detector hears of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs

from ..contract.values import Op, WalkView
from ..device.flight import Work
from ..device.kernels import index_of
from ..device.pool import ABSENT, NO_SLOT, PageSpan, Pool, Stage
from ..device.streams import Stream, enqueue
from ..errors import CapacityError, PluginError, PrefixloomError
from ..tree.holdings import StateHolding, Track
from ..tree.state_lane import StateLane
from .lease import release_part
from .room import make_room
from .state import CLEAR, Core, Hold, Row, Running

if TYPE_CHECKING:
    import torch

Slots = tuple[list[int], list[int]]
"""Sources and targets of one op."""
Batch = tuple[tuple[StateLane, str], Slots]
"""(lane, kind), and the slots of fills that run as one op."""
PluginOp = tuple[Running | None, Op]
"""An op of a plugin, with its sequence. A claimed one names none; of one that is added and names none there is None."""


# ---------------------------------------------------------------- fills


def batches(sequences: Many[Running]) -> list[Batch]:
    """Return the fills that are due of ``sequences``, one op for each component and kind.

    In any order: a source is the tree's or a single step's, a target is a running slot, so none is both.
    """
    out: dict[tuple[StateLane, str], Slots] = {}
    for running in sequences:
        if running.fills and running.core is not None:
            for lane, holding, kind, source in running.fills:
                src, dst = out.setdefault((lane, kind), ([], []))
                dst.append(holding.slot)
                if source != CLEAR:
                    src.append(source)
    return list(out.items())


def run_fills(core: Core, stream: Stream, sequences: Many[Running]) -> None:
    """Give the running states of ``sequences`` the content that is due, and uncover the sources.

    If an op raises, all of the fills are still due.
    """
    for (lane, kind), (src, dst) in batches(sequences):
        run_kind(core, stream, lane, kind, src, dst)
        if core.watcher is not None:
            lane.live.enter(dst, Stage.SEALED)  # the tree may take it over, if it has lost its own
    for running in sequences:
        if running.fills and running.core is not None:
            for lane, _, _, _ in running.fills:
                release_part(running, lane)
            running.fills = []


# ---------------------------------------------------------------- states after a step


def select_states(core: Core, stream: Stream, kept: torch.Tensor, rows: Many[Row]) -> None:
    """Let the running states of ``rows`` continue from those after so many tokens as ``kept`` says.

    ``kept`` has a figure for each row. Where the layers wrote no states of single tokens, nothing changes.
    """
    for lane in core.shape.state_lanes:
        found: list[tuple[int, StateHolding]] = []
        for at, row in enumerate(rows):
            holding = row.running.held[lane.index] if row.running.core is not None else None
            if holding is not None and 0 < row.end - row.start <= len(holding.steps):
                found.append((at, holding))
        if found:
            _select(core, stream, lane, kept, found)
            stream.reads(kept)


def _select(
    core: Core, stream: Stream, lane: StateLane, kept: torch.Tensor, found: Many[tuple[int, StateHolding]]
) -> None:
    choices = [list(holding.steps) for _, holding in found]
    dst = [holding.slot for _, holding in found]
    at = [row for row, _ in found]
    for _, holding in found:
        holding.accepted = True

    def work() -> None:
        mine = kept if len(at) == len(kept) else kept.index_select(0, index_of(at, [kept]))
        lane.live.select(choices, mine - 1, dst)

    reads = [slot for row in choices for slot in row]
    _run_watched(core, stream, f"select of {lane.name}", lane.live, work, reads, dst)


def keep_checkpoints(
    core: Core, own: Work[Hold], rows: Many[Row], accepted: bool
) -> tuple[dict[StateLane, Slots], int]:
    """Track the states that are due at the end of a step over ``rows``; return the copies to run, and their fence.

    ``own``: the step's work. A running state that is a device's choice (``accepted``) stands for no boundary that is
    known here. Nor does any of a sequence that a later step has, whose layers may have written over it already.
    """
    copies: dict[StateLane, Slots] = {}
    fence = 0
    for row in rows:
        running = row.running
        written_over = bool(running.steps) and running.steps[-1].end > row.end
        for lane, holding in running.states if running.core is not None and not written_over else ():
            due = holding.due(lane.track_every, row.start, row.end) if lane.track_every else None
            if due is None or (accepted and due[1] == holding.slot):
                continue
            at, source = due
            slot = holding.oldest_track()
            if slot == NO_SLOT:
                slot, behind = slot_to_keep(core, running, lane, at, 0, own)
                fence = max(fence, behind)
            if slot != NO_SLOT:
                holding.tracks.append(Track(at, slot))
                src, dst = copies.setdefault(lane, ([], []))
                src.append(source)
                dst.append(slot)
                if core.watcher is not None:
                    lane.pool.enter((slot,), Stage.SEALED)
    return copies, fence


def slot_to_keep(
    core: Core, running: Running, lane: StateLane, boundary: int, fence: int, own: Work[Hold] | None = None
) -> tuple[int, int]:
    """Return a slot to keep the state of ``boundary`` in, or NO_SLOT if it is left out: a checkpoint is optional.

    The copy comes after the work up to ``fence``, and up to the fence that is returned. Without room the state is left
    out, and so it is if a step up to there has an open block: nothing can come after that yet.
    """
    try:
        make_room(core, [(lane, 1)], "checkpoint", who=running)
    except CapacityError:
        core.left_out(lane, running, boundary, "room")
        return NO_SLOT, 0
    slot = lane.pool.take_one()
    flight = core.flight
    fence = max(fence, flight.taken_early)
    if any(work.event is None for work in flight.unfinished(fence, own)):
        flight.taken_early = 0
        lane.pool.give_slots([slot])
        core.left_out(lane, running, boundary, "room")
        return NO_SLOT, 0
    running.take_fence(flight)
    return slot, fence


# ---------------------------------------------------------------- plugins' ops


def plugin_ops(core: Core, sequences: Many[Running]) -> list[PluginOp]:
    """Return the ops that plugins have claimed for ``sequences``, and those that they add to a step over these."""
    found: list[PluginOp] = [(running, op) for running in sequences for op in running.claimed_ops]
    for lane in core.shape.lanes if "deferred_forward_ops" in core.shape.hooks else ():
        if lane.hooks.deferred_forward_ops is not None:
            batch = tuple(
                WalkView(
                    each.namespace, each.committed, each.names.count, each.reserved, each.published,
                    extra=each.names.extra,
                )
                for each in sequences
            )  # fmt: skip
            more = core.plugins.ask(lane, "deferred_forward_ops", tuple, batch) or ()
            for op in core.plugins.check_ops(lane, "deferred_forward_ops", more, len(batch)):
                found.append((None if op.sequence is None else sequences[op.sequence], op))
    return found


def due(ops: Iterable[PluginOp], after: bool) -> list[PluginOp]:
    """Return those of ``ops`` that have to run before the layers, or ``after`` them. A claimed op runs once in all."""
    return [
        (running, op)
        for running, op in ops
        if op.after == after
        and (running is None or (running.core is not None and (op.sequence is not None or op in running.claimed_ops)))
    ]


def run_due(core: Core, stream: Stream, ops: Iterable[PluginOp], after: bool) -> None:
    """Run those of ``ops`` that are ``due``."""
    for running, op in due(ops, after):
        with_slots = in_slots(core, running, op)  # only now, since what the sequence owns may have changed
        if running is not None and op.sequence is None:
            left = list(running.claimed_ops)
            left.remove(op)
            running.claimed_ops = left
        run_op(core, with_slots, stream)


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


def run_op(core: Core, op: Op, stream: Stream) -> None:
    """Run an op that a plugin asked for: the core's own kinds on the pool, any other by its component."""
    lane = core.shape.lane(op.component)
    pool, hook = lane.live, lane.hooks.run_forward_op
    reads = op.src
    work: Callable[[], object]
    if op.kind == "clear":
        work = partial(pool.clear, op.dst)
    elif op.kind not in ("copy", "track"):
        assert hook is not None  # or it had been refused
        work = partial(core.plugins.call, op.component, "run_forward_op", hook, op, stream)
    elif op.selector is None:
        work = partial(pool.copy, op.src, op.dst)
    else:
        reads = tuple(slot for row in op.src for slot in row)
        work = partial(pool.select, op.src, op.selector, op.dst)
    _run_watched(core, stream, f"{op.kind} of {op.component}", pool, work, reads, op.dst)
    if op.selector is not None:
        stream.reads(op.selector)


# ---------------------------------------------------------------- on a stream


def run_kind(core: Core, stream: Stream, lane: StateLane, kind: str, src: list[int], dst: list[int]) -> None:
    """Run one of the core's own kinds of op on states."""
    source, target = lane.ends(kind)
    _run_watched(core, stream, f"{kind} of {lane.name}", target, lane.work(kind, src, dst), src, dst, source)


def run_apart(core: Core, running: Running, lane: StateLane, kind: str, src: list[int], dst: list[int]) -> None:
    """Run an op that belongs to no step, behind the last one of a sequence."""
    stream = (None if running.work is None else running.work.stream) or core.stream(None)
    with enqueued(core, stream, stream.tick, running, f"{kind} of {lane.name}"):
        run_kind(core, stream, lane, kind, src, dst)


@contextmanager
def enqueued(core: Core, stream: Stream, since: int, running: Running, what: str) -> Iterator[Work[Hold]]:
    """Put what this block enqueues in flight as work of ``running``, behind the work up to the fence of ``running``."""
    flight = core.flight
    work = flight.begin()
    work.stream, work.since = stream, since
    mine: tuple[Running, ...] = ()  # not before it comes after what the sequence's last step wrote
    try:
        flight.order(work, stream, running.fence, running)
        mine = (running,)
        yield work
    except PrefixloomError:
        flight.end(work, stream, mine, what)
        raise
    flight.end(work, stream, mine, what)


def _run_watched(
    core: Core, stream: Stream, what: str, pool: Pool, work: Callable[[], object], reads: Many[int], writes: Many[int],
    source: Pool | None = None,
) -> None:  # fmt: skip
    """Enqueue ``work`` that writes slots of ``pool`` and reads slots of ``source``, by default the same pool."""
    if core.watcher is not None:
        core.watcher.writing(what, pool, writes)
    enqueue(stream, what, work)
    if core.watcher is not None:
        core.watcher.accessed(stream, what, pool, reads, writes, source or pool)
