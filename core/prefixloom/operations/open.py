"""Opening: a running request begins where its prompt's match ended.

A holding of pages reads what the lease covers, and owns nothing yet. One of a state gets slots, whose content is due.
If a reach or a hook raises, or a slot cannot be had, nothing is kept.

Tokens are named when a sequence is opened and when it goes on: those that have an extra key get a number for it.
"""

from __future__ import annotations

from ..errors import PrefixloomError
from ..keys.elements import extra_numbers
from ..keys.tokens import Tokens
from ..tree.radix import Node, climb, descendants
from .lease import ask_receipts, cover
from .match import limit_of, walked_boundary, wanted_at
from .publish import split
from .room import make_room
from .state import CLEAR, Core, Fill, Match, Running
from .teardown import give_back


def open_at(core: Core, match: Match, label: str, priority: int, until: float, *, arrives: bool = False) -> Running:
    """Return a running request that resumes at ``match``, which is current. CapacityError: a slot cannot be had.

    ``arrives``: all that it will hold was computed elsewhere. It gets no running state, so it does not use the cached
    one where it resumes, and it is not counted as opened.
    """
    shape, flight = core.shape, core.flight
    if flight.works:
        flight.poll(between_operations=False)
    if match.tokens.extra:
        _name_extra(core, match)
    node = anchor(core, match)
    receipts = shape.no_records
    if shape.has_lock_hooks:
        receipts = ask_receipts(core, match.namespace, node.end, match.extra)
    covers = cover(core, node, receipts, shape.page_lanes if arrives else shape.lanes)
    held = [lane.open(node, covers[lane.index]) for lane in shape.lanes]
    fills: list[Fill] = []
    for point in () if arrives else shape.state_lanes:
        state, cell = held[point.index], covers[point.index]
        fills.append((point, state, "clear", CLEAR) if cell is None else (point, state, point.taken, cell.slot))
    running = Running(core, match, node, covers, receipts, held, fills, label, priority, until)
    node.protect()
    try:
        if core.unwritten.nodes:
            core.unwritten.read(running, node)
        if core.watcher is not None:
            core.watcher.leased(running)
        if fills or match.claims:
            _take_slots(core, running)
    except PrefixloomError:
        give_back(core, running)
        raise
    if not arrives:
        counts = core.counts
        counts.opened += 1
        counts.asked_tokens += running.names.count
        counts.hit_tokens += running.ready
        known = walked_boundary(core, match)
        if known > running.ready:
            name = match.limited_by or ""
            counts.missed[name] = counts.missed.get(name, 0) + known - running.ready
        counts.new_tokens += limit_of(core, match) - known
    core.live[running] = None
    core.index.want(node, until)
    return running


def anchor(core: Core, match: Match) -> Node:
    """Return the node that ends where ``match`` resumes, and split one for that if need be."""
    node, boundary = match.node, match.ready
    if not boundary:
        return core.index.root(match.namespace)
    node = climb(node, boundary)
    return node if node.end == boundary else split(core, node, boundary)


def _take_slots(core: Core, running: Running) -> None:
    """Take the slots of a new sequence's running states, and see that there is room for what plugins claim."""
    match, states = running.match, core.shape.state_lanes
    short = bool(match.claims)
    for lane in states:
        short = short or lane.per_sequence > lane.live.at_hand
    if short:
        make_room(core, wanted_at(core, match), "open a sequence", by=running.label)
    for lane in states:
        lane.start(running.held[lane.index])
    if short:
        running.claimed_ops = [op for claim in match.claims if claim is not None for op in claim.ops]
        running.take_fence(core.flight)


# ---------------------------------------------------------------- naming


def _name_extra(core: Core, match: Match) -> None:
    """Give numbers to the extra keys that have none yet: what the sequence publishes must be found under them."""
    forget_unused(core)
    match.key = core.keys.name(match.tokens)


def append(core: Core, running: Running, tokens: Tokens) -> None:
    """Name the tokens that follow the named ones."""
    if tokens.extra:
        forget_unused(core)
    running.names.append(tokens)


def forget_unused(core: Core) -> None:
    """Forget the numbers of extra keys that neither a node nor a sequence uses any more, if there are many numbers.

    It is called before extra keys get numbers.
    """
    keys, index = core.keys, core.index
    if not keys.crowded(index.tree.nodes):
        return
    used: set[int] = set()
    for running in core.live:
        used.update(running.names.extra_numbers)
    for root in (*index.tree.roots.values(), *index.dropped_roots):
        for node in descendants(root):
            used.update(extra_numbers(node.key))
    keys.keep(used)
