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
from ..contract.reach import merged
from ..contract.values import Claim, NodeView, SplitRule, WalkView
from ..device.pool import ID_BYTES, NO_SLOT, Stage, present
from ..errors import CapacityError, PrefixloomError
from ..keys.tokens import clipped
from ..tree.holdings import Track
from ..tree.lane import Lane
from ..tree.paged_reach import Pages, pages_of
from ..tree.partial_lane import PartialLane
from ..tree.radix import Node, climb, path_up, prioritize
from ..tree.state_lane import CodedLane, StateLane
from .lease import ask_receipts, move_anchor
from .match import resumable
from .ops import run_apart, slot_to_keep
from .retain import retain_published
from .room import make_room
from .state import Core, Running
from .teardown import end_half_way, give_back

log = logging.getLogger("prefixloom")

Slots = Many[tuple[Lane, set[int]]]
RUNS_ON = -1
"""Instead of where a sequence ends."""


# ---------------------------------------------------------------- nodes


def split(core: Core, node: Node, boundary: int) -> Node:
    """Cut ``node`` at ``boundary`` and divide every component's cell. Return the upper half."""
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
    """Return whether ``lane`` drops its state at ``node``, as its plugin says before a split. Covered states stay."""
    cell = lane.cell(node)
    if lane.hooks.redistribute_on_node_split is None or cell is None:
        return False
    start, end, is_state = node.start, node.end, lane.unit == "boundary"
    pages = 0
    if not is_state:  # ``data`` are the last pages of the edge
        pages = present(cell.data[: -((end - boundary) // lane.part.page_tokens * ID_BYTES)])
    extra = core.keys.extra_in(node.key, start)
    views = (
        NodeView(start, boundary, pages, cell.locks, extra=clipped(extra, start, boundary)),
        NodeView(boundary, end, cell.pages - pages, cell.locks, extra=clipped(extra, boundary, end)),
    )
    rule = core.plugins.ask_softly(lane, "redistribute_on_node_split", SplitRule, *views)
    return rule is not None and rule.keep == "drop" and is_state and not cell.locks


def nodes_for(core: Core, running: Running, upto: int) -> list[Node]:
    """Return the nodes below the sequence's lease that its key leads to, each below the last, to ``upto``.

    The last may be a new leaf. Nodes down to where the match has compared keys already are found from below.
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
    run = run or [node]  # nothing lies behind what is published
    if running.priority:
        prioritize(run, leaf, running.priority)
    if core.index.expiries is not None:
        core.index.want(run[-1], running.until)
    return run


# ---------------------------------------------------------------- publishing and closing


def publish(core: Core, running: Running, upto: int) -> None:
    """Hand [published, upto), which is named and complete, to the tree. The sequence runs on."""
    if running.steps:
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
    if running.steps:
        running.hold_states_back()
    if core.flight.alone:
        core.flight.end_alone(running)
    upto = running.publishable
    warns = core.misses_states and not core.index.dropped_roots
    try:
        if upto > running.published:
            for stop in _stops(core, running, upto):
                _hand_over(core, running, stop, upto)
        elif upto and core.shape.has_admission and _has_refused_state(core, running):
            _hand_over(core, running, upto, upto)
    except PrefixloomError:
        if running.core is not None:
            give_back(core, running)
        raise
    if warns:
        _warn_of_no_state(core, running)
    give_back(core, running)


def _has_refused_state(core: Core, running: Running) -> bool:
    """Return whether the tree lacks a state that the sequence still has at its published end: it was refused there."""
    node = running.node
    return any(lane.admit is not None and lane.donates(holding, node) for lane, holding in running.states)


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


def _hand_over(core: Core, running: Running, upto: int, end: int) -> None:
    """Hand [published, upto) to the tree. The sequence ends at ``end``, or it runs on.

    The lease moves with it. But if the sequence ends here, nothing is covered any more and the rest is given back in
    the same walk: a chat turn costs 10 to 15% less by that (# 0086). A plugin that says what becomes recent by a
    release is asked after the lease has moved.
    """
    shape, covers, held = core.shape, running.covers, running.held
    ends, receipts = upto == end, shape.no_records
    if shape.has_lock_hooks:
        ends = False
        receipts = ask_receipts(core, running.namespace, upto, running.names.extra)
    giving: Many[Lane] = shape.in_order
    kept: dict[PartialLane, Pages] = {}
    if "commit_insert" in shape.hooks or shape.has_admission:
        giving = [lane for lane in giving if not _is_refused(core, running, lane, upto, end, kept)]
    run = nodes_for(core, running, upto)
    for state_lane in shape.state_lanes:
        if isinstance(state_lane, CodedLane) or (upto != end and not state_lane.live.at_hand):
            giving = _with_room(core, running, giving, run[-1], upto == end)
            break
    unwritten = None
    if running.work is not None and not running.work.over:
        unwritten = [(lane, set(lane.own_slots(holding))) for lane, holding in running.pairs]
    try:
        for keeping, spans in kept.items():
            keeping.hold_back(held[keeping.index], running.node.end, upto, spans)
        for lane in shape.in_order:
            i = lane.index
            if lane in giving:
                lane.adopt(run, held[i])
            if ends:
                lane.finish(run, covers[i])
                covers[i] = None
                lane.close(held[i])
            else:
                covers[i] = lane.follow(run, held[i], covers[i], receipts[i])
        if shape.passing_lanes:
            boundary = _spared(core, running, run[-1])
            for lane in shape.passing_lanes:
                lane.pass_above(run, boundary, partial(resumable, core))
        if ends:
            running.held = running.covers = []
        move_anchor(core, running, run[-1])
        running.receipts = receipts
        if upto != end:
            _renew_states(core, running)
    except PrefixloomError as error:  # a reach that is plain Python
        end_half_way(core, running, run, error)
        raise
    running.published = upto
    if unwritten is not None:
        core.unwritten.add_owned(running, run, unwritten)
    if core.unwritten.nodes:
        core.unwritten.read(running, run[-1])
    if core.watcher is not None:
        core.watcher.published(run)
    if core.below is not None:
        core.below.published(run)


def _spared(core: Core, running: Running, node: Node) -> int:
    """Return the end of the prompt of ``running``, or that of ``node``: what is behind it counts as passed (# 0111).

    It is the former if the answer is no longer than the prompt, and all components can resume there.
    """
    prompt = running.prompt_end
    if not node.end <= 2 * prompt < 2 * node.end or node.children:
        return node.end
    if running.spares is None:
        above = climb(node, prompt)
        if above.end == prompt:  # it was an end once, and had all that resuming there needs
            running.spares = all(lane.cell(above) is not None for lane in core.shape.lanes)
        else:
            running.spares = not core.shape.state_lanes and resumable(core, above, prompt) == prompt
    return prompt if running.spares else node.end


def _renew_states(core: Core, running: Running) -> None:
    """Go on with a copy of each state that was handed over, which the lease covers until it is copied."""
    for lane in core.shape.state_lanes:
        holding = running.held[lane.index]
        if holding.slot == NO_SLOT:
            holding.slot = lane.live.take_one()
            running.take_fence(core.flight)
            running.fills.append((lane, holding, "copy", running.covers[lane.index].slot))


def _warn_of_no_state(core: Core, running: Running) -> None:
    """Warn, once per cache, of a prompt that was published without any state and so cannot be resumed (# 0086).

    An engine's first steps end at the prompt's end, where no state can be kept, and nothing fails by it. Where a state
    was evicted or left out on purpose, that may be why there is none.
    """
    shape, node = core.shape, running.node
    lacking = [lane for lane in shape.state_lanes if lane.cell(node) is None and not lane.evicted]
    resumable = running.match.count - max(1, shape.lookahead)
    if not lacking or not running.ready < resumable // shape.page * shape.page <= running.published:
        return
    for above in path_up(node, running.ready):
        lacking = [lane for lane in lacking if lane.cell(above) is None]
    if lacking:
        core.misses_states = False
        log.warning(
            "%r: its prompt was computed and no state of %s was kept, so no request can resume it. A state is kept "
            "only if a step ends at a boundary and the sequence is published then: let each step of a prompt end at "
            "sequence.next_stop(budget), and call sequence.publish() after it. This is said once per cache",
            running, " and ".join(repr(lane.name) for lane in lacking),
        )  # fmt: skip


# ---------------------------------------------------------------- what is not handed over


def _is_refused(core: Core, running: Running, lane: Lane, upto: int, end: int, kept: dict[PartialLane, Pages]) -> bool:
    """Return whether a plugin or a policy refuses the state of ``lane`` at ``upto``: it stays with the sequence.

    Pages are never refused. Where a plugin wants to keep some only, ``kept`` gets these and what ``upto`` needs.
    """
    names, holding, at_branch = running.names, running.held[lane.index], upto == running.branch
    keep = None
    if lane.hooks.commit_insert is not None:
        start, last = running.node.end, upto == end
        view = WalkView(running.namespace, upto, names.count, upto, start, at_branch, last, names.extra)
        claim = core.plugins.ask_softly(lane, "commit_insert", Claim, view)
        keep = None if claim is None else claim.keep
    if not isinstance(lane, StateLane):
        if keep is None:
            return False
        if any(isinstance(span, int) for span in keep):
            core.plugins.go_on_without(core.plugins.bad_answer(lane.name, "commit_insert", "intervals to keep", keep))
        elif isinstance(lane, PartialLane) and (upto == end or lane.part.reach.convex):
            kept[lane] = merged(
                (*lane.paged.needs[upto], *pages_of(keep, lane.page))
            )  # or else a later one may need it
        return False
    if holding.checkpoint(upto) != upto:
        return False
    refused = keep is not None and not keep
    if lane.admit is not None and not refused:
        above = lane.above(running.node)
        shown = StateView(
            lane.name, running.namespace, upto, above[0].node.end if above else 0, len(above), at_branch,
            end >= 0 and holding.checkpoint(end) == upto, clipped(names.extra, 0, upto),
            prompt_end=upto == running.prompt_end,
        )  # fmt: skip
        refused = not core.plugins.ask_admission(lane.policy, lane.admit, shown)
    if refused:
        core.left_out(lane, running, upto, "policy")
    return refused


def _with_room(core: Core, running: Running, giving: Many[Lane], node: Node, ends: bool) -> Many[Lane]:
    """Return ``giving`` without the lanes that lack a slot for what handing over their state at ``node`` takes.

    A sequence that runs on goes on with a copy, and a state that rests in another form is encoded into a slot of its
    own. A checkpoint is optional, serving is not.
    """
    unable: list[Lane] = []
    node.protect()  # a new leaf has nothing yet that keeps it
    try:
        for lane in core.shape.state_lanes:
            holding = running.held[lane.index]
            if lane not in giving or not lane.donates(holding, node):
                continue
            if isinstance(lane, CodedLane):
                _encode(core, running, lane, node.end)
            elif not ends and not lane.live.at_hand:
                try:
                    make_room(core, [(lane, 1)], "checkpoint", who=running)
                except CapacityError:
                    unable.append(lane)
                    core.left_out(lane, running, node.end, "room")
    except PrefixloomError:
        core.index.unprotect(node)
        raise
    node.unprotect()
    return [lane for lane in giving if lane not in unable] if unable else giving


def _encode(core: Core, running: Running, lane: StateLane, boundary: int) -> None:
    """Encode the running state into a track, behind the sequence's last step: the tree takes over that."""
    holding = running.held[lane.index]
    slot, _ = slot_to_keep(core, running, lane, boundary, running.fence)
    if slot == NO_SLOT:
        return
    try:
        run_apart(core, running, lane, lane.kept, [holding.slot], [slot])
    except PrefixloomError:
        lane.pool.give_slots([slot])
        raise
    lane.pool.enter((slot,), Stage.SEALED)
    holding.tracks.append(Track(boundary, slot))
