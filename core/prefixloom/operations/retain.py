"""Retention: what a running sequence keeps of what it has, and when it gives the rest back.

What any boundary that it may still publish or rewind to can need is kept. The rest is kept while there is room, since
it serves boundaries inside of a long prompt once it is published.
"""

from __future__ import annotations

from typing import Any

from ..device.pool import NO_SLOT
from ..errors import InputError, ProtocolError
from ..keys.lookahead import Seen
from ..tree.partial_lane import PartialLane
from .lease import release_part
from .state import Core, Row, Running


def commit(core: Core, running: Running, upto: int, seen: Seen | None = None) -> None:
    """Note that what is computed reaches to ``upto``, and that the running states stand for that.

    ``seen``: which tokens the layers of a step have. Without it they were computed outside of steps.
    """
    running.committed = upto
    if running.looks is not None:
        running.looks.computed(seen or running.looks.alone, upto, running.names.count)
    shape = core.shape
    held = running.held
    for lane in shape.state_lanes:
        held[lane.index].reach(upto)
    if shape.partial_lanes:
        floor = floor_of(core, running)
        for partial in shape.partial_lanes:
            _give_up_below(core, running, partial, floor)


def commit_row(core: Core, row: Row) -> None:
    """Commit what a step computes of a sequence, except what was taken back since. A draft step only catches up."""
    running, looks = row.running, row.running.looks
    if row.draft:
        if looks is not None and row.seen is not None:
            looks.caught_up(row.seen)
    elif running.core is not None:
        commit(core, running, max(running.committed, row.end), row.seen)


def commit_alone(core: Core, running: Running, upto: int | None) -> None:
    """Commit up to ``upto`` (None: all that is reserved) what was computed outside of steps, or arrived."""
    if upto is None:
        upto = running.reserved
    elif upto.__class__ is not int:
        raise InputError(f"commit takes a number of tokens, got {upto!r}")
    elif not running.committed <= upto <= running.reserved:
        told = f"{running.committed} are committed and {running.reserved} reserved (grow reserves)"
        raise ProtocolError(f"{running!r} cannot commit {upto}: {told}")
    if running.fills or running.lost:
        running.check_states()
    if core.flight.alone:
        core.flight.end_alone(running)
    if core.watcher is not None:
        core.watcher.arrived(running, running.committed, upto)
    if core.shape.max_rewind and upto > running.committed:  # what a device chose in an earlier step is past
        for _, holding in running.states:
            holding.accepted = False
    commit(core, running, upto)


def retain_published(core: Core, running: Running) -> None:
    """Stop reading, after a publication, pages of the tree that the lease does not cover.

    The floor is computed again, because since the last commit tokens may have been named, and states have come and
    gone.
    """
    floor = floor_of(core, running)
    published = running.published
    for lane in core.shape.partial_lanes:
        holding = running.held[lane.index]
        covered = running.covers[lane.index]
        lane.read_covered(holding, covered, published)
        if covered is not None and lane.reads_past(holding, published):
            release_part(running, lane)
        _give_up_below(core, running, lane, floor)


def _give_up_below(core: Core, running: Running, lane: PartialLane, floor: int) -> None:
    """Note that no boundary below ``floor`` matters any more. Give back what they needed, at once if less than an
    eighth of the pool is free, and else when somebody needs it (0013).
    """
    holding = running.held[lane.index]
    holding.floor = floor
    pool = lane.pool
    if pool.at_hand << 3 < pool.capacity:
        _let_go(core, running, lane, holding)
    else:
        lane.surplus[running] = holding


def floor_of(core: Core, running: Running) -> int:
    """Return the lowest boundary that still matters: the deepest publishable one, less what may still be rewound."""
    shape = core.shape
    rewound = max(0, running.high - running.committed)  # a rewind is counted from the highest commit
    floor = min(running.names.count - shape.lookahead, running.complete) - max(0, shape.max_rewind - rewound)
    floor = max(floor, running.published)
    if shape.tracks_checkpoints:
        for lane in shape.state_lanes:
            floor = running.held[lane.index].lowest_track(floor)
    return floor


def _let_go(core: Core, running: Running, lane: PartialLane, holding: Any) -> None:
    """Give back, and uncover, pages that no boundary needs that the sequence may still publish or rewind to."""
    page = core.shape.page
    lane.retain(holding, holding.floor // page * page)
    if running.covers[lane.index] is not None and lane.reads_past(holding, running.node.end):
        release_part(running, lane)


def reclaim(core: Core, lane: PartialLane, pages: int) -> None:
    """Let running sequences give back what they may not need any more, until ``pages`` are free."""
    pool, surplus = lane.pool, lane.surplus
    while surplus and pool.free < pages:
        running, holding = surplus.popitem()
        _let_go(core, running, lane, holding)


def forget_surplus(core: Core, running: Running) -> None:
    """Ask back nothing more of what a running sequence held so far: it is not its own any more."""
    for lane in core.shape.partial_lanes:
        lane.surplus.pop(running, None)


# ---------------------------------------------------------------- rewinding


def rewind(core: Core, running: Running, count: int) -> None:
    """Take the last ``count`` reserved tokens back, names included, or refuse to with nothing changed."""
    shape = core.shape
    length = _checked_length(core, running, count)
    core.flight.end_alone(running)
    if shape.state_lanes or shape.partial_lanes:
        running.high = max(running.committed, running.high)
    running.reserved = length
    running.committed = min(running.committed, length)
    for row in running.steps:
        row.end = min(row.end, length)
    for lane, holding in running.paged:
        lane.rewind(holding, length)
    for point, holding in running.states:
        source = point.rewind_state(holding, length)
        if source != NO_SLOT:  # instead of what an earlier rewind wanted copied
            running.fills = [fill for fill in running.fills if fill[1] is not holding]
            running.fills.append((point, holding, "copy", source))
    cut = count > 0 and running.names.count > length
    if cut:
        running.names.cut(length)
        running.reached = None
    if count and running.looks is not None:
        running.looks.rewind(length, cut)
    if shape.partial_lanes:  # boundaries matter again that did not
        floor = floor_of(core, running)
        for lane in shape.partial_lanes:
            holding = running.held[lane.index]
            holding.floor = min(holding.floor, floor)


def _checked_length(core: Core, running: Running, count: int) -> int:
    """Return the reserved length after ``count`` tokens have been taken back, if they can be."""
    shape = core.shape
    if count.__class__ is not int or count < 0:
        raise InputError(f"rewind takes a number of tokens from 0 up, got {count!r}")
    length = running.reserved - count
    if length < running.published:
        raise ProtocolError(f"{running!r} cannot rewind to {length}: {running.published} are published")
    if count and running.published and length < min(running.names.count, running.published + shape.lookahead):
        raise ProtocolError(
            f"{running!r} cannot rewind to {length}: {running.published} are published, and their keys and content "
            f"depend on {shape.lookahead} tokens more"
        )
    back = max(running.committed, running.high) - length  # what is too far below the highest commit was given back
    limit = shape.rewind_limit
    if limit is not None and back > limit[1]:
        raise ProtocolError(
            f"{running!r} cannot rewind {back} committed tokens: component {limit[0]!r} allows {limit[1]}"
        )
    for lane, holding in running.states:
        if running.steps and length < running.steps[-1].end:
            raise ProtocolError(
                f"{running!r} cannot rewind to {length}: an open step computes up to {running.steps[-1].end}, and so "
                f"does the state of component {lane.name!r}. End the step first"
            )
        if count and not (holding.ready or running.steps or running.lost) and not _has_fill(running, holding):
            raise ProtocolError(
                f"{running!r} cannot rewind to {length}: since fill, layers may have written the state of component "
                f"{lane.name!r}. Commit first"
            )
        if not holding.can_rewind(length):
            raise ProtocolError(
                f"{running!r} cannot rewind to {length}: component {lane.name!r} has the states of single tokens "
                f"only for the last step, and only if that had at most {len(holding.steps)} tokens"
            )
    return length


def _has_fill(running: Running, holding: Any) -> bool:
    """Return whether a running state has yet to be filled, so that no layer has written the state."""
    return any(of is holding for _, of, _, _ in running.fills)
