"""Publication and close: a running sequence hands what it computed to the tree.

The life of the slots of a sequence, in tokens of one component of pages:

    0         ready       published      publishable      committed       reserved
    |-----------|-------------|---------------|---------------|---------------|
    |  it hit   | handed over |     whole     | later tokens  | not computed  |
    |           |             |               | are lacking   |               |
    |<- the tree has them --->|<---- the sequence has them, and nobody else ->|
    |   and the lease of the  |
    |   sequence covers them  |

``publish`` moves ``published``, and the lease with it, up to ``publishable``: the slots between the two change hands.
``close`` does the same a last time, gives back all slots from there on, and releases the lease. A state has one slot
instead, which stands for ``committed`` alone: it changes hands if that is where ``published`` moves to, and a sequence
that runs on goes on with a copy of it.

A publication walks from the lease, so a chunk costs the chunk. Where the tree has a node already, duplicates are freed
and tombstones are refilled; where it ends, a leaf is attached.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from functools import partial

from ..contract.admission import StateView
from ..contract.values import Claim, NodeView, Receipt, SplitRule, WalkView
from ..device.pool import ID_BYTES, NO_SLOT, Stage, present
from ..errors import CapacityError, PrefixloomError
from ..keys.tokens import clipped
from ..tree.lane import Lane
from ..tree.radix import Node, path_key, path_up, prioritize, root_of
from ..tree.state_lane import CodedLane, StateCell, StateLane
from .lease import ask_receipts, move_anchor, sweep
from .retain import retain_published
from .room import make_room
from .state import Core, Running
from .step import run_apart
from .teardown import end_half_way, end_running, give_back

log = logging.getLogger("prefixloom")

Slots = Many[tuple[Lane, set[int]]]
RUNS_ON = -1
"""Instead of where a sequence ends."""


# ---------------------------------------------------------------- nodes


def split(core: Core, node: Node, boundary: int) -> Node:
    """Cut ``node`` at ``boundary`` and divide every component's cell; the upper half is returned."""
    index = core.index
    dropping = [lane for lane in core.shape.lanes if _drops_on_split(core, lane, node, boundary)]
    upper = index.tree.split(node, boundary)
    if core.unwritten.nodes:
        core.unwritten.divided(upper, node)
    if core.below is not None:
        core.below.divided(upper, node)
    upper.protect()  # the caller goes on from here
    for lane in core.shape.all_lanes:
        lane.divide(upper, node)
    for lane in dropping:
        with core.because("split"):
            lane.drop_cell(lane.cell(node))
        index.lose()
    index.prune(node)  # all that it held may lie above the cut
    upper.unprotect()
    return upper


def _drops_on_split(core: Core, lane: Lane, node: Node, boundary: int) -> bool:
    """Whether a boundary component drops its state on a split; asked first. What a lease covers is not dropped."""
    hook = lane.hooks.redistribute_on_node_split
    cell = lane.cell(node)
    if hook is None or cell is None:
        return False
    start, end, is_state = node.start, node.end, lane.unit == "boundary"
    pages = 0
    if not is_state:  # ``data`` are the last pages of the edge
        pages = present(cell.data[: -((end - boundary) // lane.part.page_tokens * ID_BYTES)])
    extra = core.keys.extra_in(node.key, start)
    views = (
        NodeView(start, boundary, pages, cell.locks, extra=clipped(extra, start, boundary)),
        NodeView(boundary, end, lane.size(cell) - pages, cell.locks, extra=clipped(extra, boundary, end)),
    )
    rule = core.plugins.ask_softly(lane, "redistribute_on_node_split", SplitRule, hook, *views)
    return rule is not None and rule.keep == "drop" and is_state and not cell.locks


def nodes_for(core: Core, running: Running, upto: int) -> list[Node]:
    """The nodes below the sequence's lease that its key leads to, each below the last, to ``upto``.

    The last may be a new leaf. Down to where the match has compared keys already, they are found from below.
    """
    node = running.node
    run: list[Node] = []
    reached = running.reached
    if reached is not None and reached.end <= upto:
        running.reached = None  # from now on the lease is as deep
        if node.end < reached.end and reached.linked:
            run = path_up(reached, node.end)[::-1]
            node = reached
    leaf = core.index.tree.extend(node, running.names.key_between(node.end, upto), upto, run, partial(split, core))
    if running.priority:
        prioritize(run, leaf, running.priority)
    if core.index.expiries is not None:
        core.index.want(run[-1], running.until)
    return run


# ---------------------------------------------------------------- publishing and closing


def publish(core: Core, running: Running, upto: int) -> None:
    """Hand [published, upto), which is named and complete, to the tree. The sequence runs on."""
    if running.open_steps:
        running.hold_states_back()
    for stop in _stops(core, running, upto):
        _hand_over(core, running, stop, RUNS_ON)
    if core.shape.tracks_checkpoints:
        for lane, state in running.states:
            lane.forget_tracks(state, upto, running.reserved)
    if core.shape.partial_lanes:
        retain_published(core, running)


def close(core: Core, running: Running) -> None:
    """Hand [published, publishable) to the tree, and give everything else back. The sequence ends."""
    if running.open_steps:
        running.hold_states_back()
    if core.flight.alone:
        core.flight.end_alone(running)
    upto = running.publishable
    warns = core.misses_states and not _is_dropped(core, running.node)
    try:
        if upto > running.published:
            for stop in _stops(core, running, upto):
                _hand_over(core, running, stop, upto)
        elif core.shape.has_admission:
            _admit_late(core, running)
    except PrefixloomError:
        if running.held:
            give_back(core, running)
        raise
    if warns:
        _warn_of_no_state(core, running)
    if running.held:
        give_back(core, running)


def _hand_over(core: Core, running: Running, upto: int, end: int) -> None:
    """Hand [published, upto) to the tree. The sequence ends at ``end``, or it runs on.

    The lease moves with it. But if the sequence ends here, nothing is covered any more and the rest is given back in
    the same walk, unless what follows needs its slots or its lease: a chat turn costs 10 to 15% less by that (# 0086).
    """
    shape, covers, held = core.shape, running.covers, running.held
    ends = upto == end and not shape.publication_ends_later
    unwritten = _unwritten_slots(running)
    receipts = None
    if shape.has_lock_hooks:
        receipts = ask_receipts(core, running.namespace, upto, running.names.extra)
    giving = _giving(core, running, upto, end)
    run = nodes_for(core, running, upto)
    try:
        for lane in shape.in_order:
            i = lane.index
            if lane in giving:
                lane.adopt(run, held[i])
            if ends:
                lane.finish(run, covers[i])
                covers[i] = None
                lane.close(held[i])
            else:
                covers[i] = lane.follow(run, held[i], covers[i])
        if ends:
            _end(core, running, run[-1])
        else:
            if receipts is not None:
                _cover_wider(core, running, run[-1], receipts)
            move_anchor(core, running, run[-1])
            if upto != end:
                _renew_states(core, running)
    except PrefixloomError as error:  # a reach that is plain Python
        end_half_way(core, running, run, error)
        raise
    running.published = upto
    _follow_up(core, running, run, unwritten, giving)


def _cover_wider(core: Core, running: Running, node: Node, receipts: list[Receipt | None]) -> None:
    """Cover what the plugins want covered at the end of ``node`` besides what resuming there needs."""
    running.receipts = receipts
    for lane in core.shape.page_lanes:
        receipt, cover = receipts[lane.index], running.covers[lane.index]
        if receipt is not None:
            running.covers[lane.index] = lane.acquire_wider(node, receipt.positions)
            if cover is not None:
                lane.release(cover)


def _renew_states(core: Core, running: Running) -> None:
    """Go on with a copy of each state that was handed over, which the lease covers until it is copied."""
    for lane in core.shape.state_lanes:
        holding = running.held[lane.index]
        if holding.slot == NO_SLOT:
            holding.slot = lane.live.take_one()
            running.take_fence(core.flight)
            running.fills.append((lane, holding, "copy", running.covers[lane.index].data))


def _end(core: Core, running: Running, node: Node) -> None:
    """End a sequence that has handed over or given back all that it held, and covers nothing any more."""
    end_running(core, running)
    running.core = None
    core.live.pop(running, None)
    running.held = []
    if core.watcher is not None:
        core.watcher.released(running)
    running.node.unprotect()  # it is not bare: ``node`` lies below it
    running.node = node
    index = core.index
    if core.shape.lanes[0].cell(node) is None:
        index.prune(node)
    if index.dropped_roots:
        sweep(core)


def _stops(core: Core, running: Running, upto: int) -> Many[int]:
    """Return where a publication up to ``upto`` must end a node: at each state's deepest checkpoint, and at its end."""
    if not core.shape.tracks_checkpoints:
        return (upto,)
    found = {upto}
    for _, holding in running.states:
        at = holding.checkpoint(upto)
        if at > running.published and not at % core.shape.page:
            found.add(at)
    return sorted(found)


def _admit_late(core: Core, running: Running) -> None:
    """Hand over a state at the end that was not admitted while the sequence ran on: now it is the last."""
    node, upto = running.node, running.published
    if node.end:
        lacking = [lane for lane in core.shape.state_lanes if lane.cell(node) is None]
        giving = _admitted(core, running, [lane for lane in lacking if lane.admit is not None], upto, upto)
        unwritten = _unwritten_slots(running)
        for lane in giving:
            lane.adopt([node], running.held[lane.index])
        _follow_up(core, running, [node], unwritten, giving)


def _unwritten_slots(running: Running) -> Slots | None:
    """Return what the sequence owns by lane, if work in flight has yet to write it."""
    if running.work is None or running.work.over:
        return None
    return [(lane, set(lane.own_slots(holding))) for lane, holding in running.pairs]


def _is_dropped(core: Core, node: Node) -> bool:
    """Return whether the namespace of ``node`` was dropped."""
    dropped = core.index.dropped_roots
    return bool(dropped) and root_of(node) in dropped


def _warn_of_no_state(core: Core, running: Running) -> None:
    """Warn, once per cache, of a prompt that was published without any state and so cannot be resumed (# 0086).

    An engine's first steps end at the prompt's end, where no state can be kept, and nothing fails by it. Where a state
    was evicted or left out on purpose, that may be why there is none.
    """
    shape = core.shape
    resumable = running.match.count - max(1, shape.lookahead)
    if not running.ready < resumable // shape.page * shape.page <= running.published:
        return
    if any(lane.evicted for lane in shape.state_lanes):
        core.misses_states = False
        return
    lacking: Many[StateLane] = shape.state_lanes
    for node in path_up(running.node, running.ready):
        lacking = [lane for lane in lacking if lane.cell(node) is None]
    if lacking:
        core.misses_states = False
        names = " and ".join(repr(lane.name) for lane in lacking)
        log.warning(
            "%r: its prompt was computed and no state of %s was kept, so no request can resume it. A state is kept "
            "only if a step ends at a boundary and the sequence is published then: let each step of a prompt end at "
            "sequence.next_stop(budget), and call sequence.publish() after it. This is said once per cache",
            running, names,
        )  # fmt: skip


# ---------------------------------------------------------------- what is kept back


def _giving(core: Core, running: Running, upto: int, end: int) -> Many[Lane]:
    """Return the lanes that hand over what they have at ``upto``, unless a plugin, a policy or lack of room objects."""
    shape = core.shape
    giving: Many[Lane] = shape.in_order
    if shape.has_insert_hooks:
        giving = _kept_by_plugins(core, running, giving, upto, last=upto == end)
    if shape.has_admission:
        giving = _admitted(core, running, giving, upto, end)
    if upto != end:
        for lane in shape.state_lanes:
            if not lane.live.at_hand:
                return _with_slots_to_go_on(core, running, giving, upto)
    return giving


def _kept_by_plugins(core: Core, running: Running, giving: Many[Lane], upto: int, last: bool) -> Many[Lane]:
    """What the plugins want kept of the span: the rest is given back, a state stays with the sequence."""
    start = running.node.end
    names, at_branch = running.names, upto == running.branch
    view = WalkView(running.namespace, upto, names.count, upto, start, at_branch, last, names.extra)
    left = []
    for lane in giving:
        hook = lane.hooks.commit_insert
        claim = core.plugins.ask_softly(lane, "commit_insert", Claim, hook, view)
        if claim is not None and claim.keep is not None:
            if lane.unit == "boundary":
                if not claim.keep:
                    if running.held[lane.index].checkpoint(upto) == upto:
                        core.left_out(lane, running, upto, "policy")
                    continue
            elif any(isinstance(span, int) for span in claim.keep):
                core.plugins.go_on_without(
                    core.plugins.bad_answer(lane.name, "commit_insert", "intervals to keep", claim.keep)
                )
            elif last or lane.part.reach.convex:  # or else a later boundary may need what this one does not
                lane.hold_back(running.held[lane.index], start, upto, claim.keep)
        left.append(lane)
    return left


def _admitted(core: Core, running: Running, giving: Many[Lane], upto: int, end: int) -> list[Lane]:
    """Without the lanes whose state at ``upto`` the policy does not want; asked before anything moves."""
    left: list[Lane] = []
    for lane in giving:
        if isinstance(lane, StateLane) and lane.admit is not None:
            holding = running.held[lane.index]
            if holding.checkpoint(upto) == upto:
                above = lane.above(running.node)
                deepest = above[0].node.end if above else 0
                last = end >= 0 and holding.checkpoint(end) == upto
                at_branch = upto == running.branch
                prompt = running.match.tokens.count - core.shape.lookahead
                view = StateView(
                    lane.name, running.namespace, upto, deepest, len(above), at_branch, last,
                    clipped(running.names.extra, 0, upto), prompt_end=upto <= prompt < upto + core.shape.page,
                )  # fmt: skip
                if core.plugins.ask_policy(lane.policy, "admit", "True or False", bool, lane.admit, view) is False:
                    core.left_out(lane, running, upto, "policy")
                    continue
        left.append(lane)
    return left


def _with_slots_to_go_on(core: Core, running: Running, giving: Many[Lane], upto: int) -> Many[Lane]:
    """Without the lanes whose running state would be donated and could not be replaced: a checkpoint is optional,
    serving is not.
    """
    unable = []
    for lane in core.shape.state_lanes:
        if not lane.live.at_hand and lane in giving and lane.donates(running.held[lane.index], upto):
            try:
                make_room(core, [(lane, 1, None)], "checkpoint", who=running)
            except CapacityError:
                core.left_out(lane, running, upto, "room")
                unable.append(lane)
    return [lane for lane in giving if lane not in unable] if unable else giving


# ---------------------------------------------------------------- what follows


def _follow_up(core: Core, running: Running, run: list[Node], unwritten: Slots | None, giving: Many[Lane]) -> None:
    """Do what follows from a publication: the nodes of ``run`` have what the sequence handed over."""
    if unwritten is not None:
        core.unwritten.add_owned(running, run, unwritten)
    if core.unwritten.nodes:
        core.unwritten.read(running, run[-1])
    if core.shape.coded_lanes:
        encoding = _encode_states(core, running, run[-1], giving)
        if encoding:
            core.unwritten.add_owned(running, run, encoding)
    if core.watcher is not None:
        core.watcher.published(run)
    if core.below is not None:
        core.below.published(run)
    if core.shape.limits_states_per_path:
        _thin(core, running, giving, run[-1])


def _encode_states(core: Core, running: Running, node: Node, giving: Many[Lane]) -> list[tuple[CodedLane, set[int]]]:
    """Encode the running states that a publication down to ``node`` hands over, behind the sequence's last step.

    The slots that the tree took, where the stream has yet to write them. A checkpoint without room is left out, and so
    is one in a slot that a step may still write that is open: nothing can come after that yet.
    """
    flying = []
    for lane in core.shape.coded_lanes:
        holding = running.held[lane.index]
        if lane not in giving or not lane.to_encode(node, holding):
            continue
        try:
            make_room(core, [(lane, 1, None)], "checkpoint", who=running)
        except CapacityError:
            core.left_out(lane, running, node.end, "room")
            continue
        slot = lane.pool.take_one()
        running.take_fence(core.flight)
        if core.flight.blocked(running.fence):
            lane.pool.give_slots([slot])
            core.left_out(lane, running, node.end, "room")
            continue
        try:
            over = run_apart(core, running, lane, "encode", [holding.slot], [slot])
        except PrefixloomError:
            lane.pool.give_slots([slot])
            raise
        lane.pool.enter((slot,), Stage.SEALED)
        lane.keep(node, slot)
        if not over:
            flying.append((lane, {slot}))
    return flying


def _thin(core: Core, running: Running, giving: Many[Lane], node: Node) -> None:
    """Where a path may have only so many states, a new one at ``node`` may cost an older one. All has moved by now."""
    for lane in giving:
        if isinstance(lane, StateLane) and lane.per_path is not None and lane.cell(node) is not None:
            above = lane.above(node)[1:]
            if len(above) < lane.per_path:
                continue
            victim = _worth_least(core, running, lane, above)
            if victim is not None:
                if core.below is not None:
                    core.below.losing(lane, [victim])
                with core.because("path limit"):
                    lane.drop_cell(victim)
                lane.evicted += 1
                core.index.lose()


def _worth_least(core: Core, running: Running, lane: StateLane, above: list[StateCell]) -> StateCell | None:
    """Of the states above a new one, the nearest first, which one goes: none that somebody is copying.

    Without a policy the nearest, but for those where paths part: they serve several continuations.
    """
    free = [(number, cell) for number, cell in enumerate(above) if not cell.locks]
    if lane.worth is not None:
        worths = []
        for number, cell in free:
            below, node = above[number + 1 :], cell.node
            view = StateView(
                lane.name, running.namespace, node.end, below[0].node.end if below else 0, len(below),
                node.forks, extra=core.keys.extra_in(path_key(node), 0),
            )  # fmt: skip
            worth = core.plugins.ask_policy(lane.policy, "worth", "a number", int | float, lane.worth, view)
            if worth is None:
                break
            worths.append(worth)
        else:
            return free[worths.index(min(worths))][1] if free else None
    return next((cell for _, cell in free if not cell.node.forks), None)
