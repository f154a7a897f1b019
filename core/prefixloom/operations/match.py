"""Matching: the deepest boundary of a prompt from which every component can resume.

A match is pure: it changes nothing and protects nothing. Its answer is true for one epoch of the index, which counts
losses only: splits and inserts leave it true. A stale match is searched again, never executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any

from ..contract.identity import MARK
from ..contract.reach import Interval
from ..contract.values import Claim, WalkView
from ..errors import InputError, ProtocolError
from ..keys.tokens import Span, Tokens, encode, namespace_of
from ..tree.lane import Lane
from ..tree.radix import Node, climb
from .room import Wanted
from .state import Core, Match

Extra = Iterable[Span]


def ask(core: Core, tokens: Any, namespace: str, leave: int, extra: Extra) -> Match:
    """Return what is asked of a match, checked."""
    if namespace.__class__ is not str:
        namespace = namespace_of(namespace)
    if core.identity is not None and not namespace.startswith(MARK):
        namespace = core.identity.namespace(namespace)
    if leave.__class__ is not int or leave < 0:
        raise InputError(f"leave takes a number of tokens from 0 up, got {leave!r}")
    if tokens.__class__ is not Tokens:
        tokens = encode(tokens)
    if extra:
        tokens = tokens.keyed(extra)
    lookahead = core.shape.lookahead
    key = core.keys.find(tokens) if lookahead or tokens.extra else tokens
    most = tokens.count - leave
    if leave < lookahead:
        most += leave - lookahead
    return Match(tokens, key, namespace, most)


def find(core: Core, match: Match) -> Match:
    """Search, and ask the plugins and the tier below where there are any that have something to say."""
    search(core, match, match.most)
    if "finalize_match_result" in core.shape.hooks:
        match.claims = claims_at(core, match, match.ready)
    if core.below is not None:
        boundary = walked_boundary(core, match)
        match.below, match.restorable = match.node, match.ready
        if boundary > match.ready:
            core.below.restorable(match, match.walked_to, boundary)
    return match


def find_again(core: Core, match: Match) -> Match:
    """Answer the same question as things are now."""
    key = core.keys.find(match.tokens) if match.extra else match.key  # more numbers may be known, or fewer
    return find(core, match.of(key, match.most))


def current(core: Core, match: Match) -> Match:
    """Return ``match`` if it still holds true, or what it has become."""
    if match.epoch == core.index.epoch:
        return match
    if match.epoch < core.index.flushed_at:
        raise ProtocolError("this plan was made before the cache was flushed: match again")
    return find_again(core, match)


def limit_of(core: Core, match: Match) -> int:
    """Return the deepest boundary that was asked for."""
    page = core.shape.page
    return max(0, match.most) // page * page


def walked_boundary(core: Core, match: Match) -> int:
    """Return the deepest boundary up to the one asked for that the keys agree with. It lies in ``walked_to``."""
    return limit_of(core, match) if match.walked > match.most else match.walked


Lowered = list[tuple[str, int, int]]
"""(component, from where, to where): who lowered the boundary of a match, in order."""


def search(core: Core, match: Match, most: int, trace: Lowered | None = None) -> None:
    """Find the deepest boundary up to ``most`` that every component accepts.

    It begins with the deepest boundary that the keys agree with, and lowers this until no component lowers it further.
    A reach that is closed upward is asked once: where it can resume, it can resume anywhere above. 0 needs nothing.
    ``trace`` collects each lowering.
    """
    index, shape = core.index, core.shape
    tree = index.tree
    match.epoch = index.epoch
    node, boundary, match.reached = tree.walk(tree.roots.get(match.namespace, index.empty_root), match.key)
    match.walked = boundary
    if boundary > most:
        boundary = max(0, most) // tree.page * tree.page
        node = climb(node, boundary)
    match.walked_to = node
    match.limited_by = branch = None
    node, boundary = _lower(match, shape.path_lanes, node, boundary, trace)
    lowered = True
    while lowered and boundary:
        before = boundary
        node, paged = _lower(match, shape.partial_lanes, node, boundary, trace)
        boundary = paged
        if paged != before:  # the first may accept less than the last left
            continue
        node, boundary = _lower(match, shape.state_lanes, node, boundary, trace)
        lowered = boundary != paged
        if lowered and branch is None:
            branch = paged
        if not lowered and shape.validators:
            node, lower, name = _narrow(core, match, node, boundary)
            if lower != boundary:
                if trace is not None and name is not None:
                    trace.append((name, boundary, lower))
                match.limited_by, boundary, lowered = name, lower, True
    match.node = node
    match.ready = boundary
    match.branch = branch


def _lower(match: Match, lanes: Many[Lane], node: Node, boundary: int, trace: Lowered | None) -> tuple[Node, int]:
    """Return the deepest boundary that each of ``lanes``, asked one after another, left of ``boundary``."""
    for lane in lanes:
        node, lower = lane.residency.deepest(node, boundary)
        if lower != boundary:
            match.limited_by = lane.name
            if trace is not None:
                trace.append((lane.name, boundary, lower))
            boundary = lower
    return node, boundary


def goes_on(core: Core, match: Match) -> bool:
    """Return whether cached keys continue where they cease to agree with the prompt, or where it ends."""
    index = core.index
    node, boundary, _ = index.tree.walk(index.tree.roots.get(match.namespace, index.empty_root), match.key)
    return boundary < node.end or bool(node.children)


def _narrow(core: Core, match: Match, node: Node, boundary: int) -> tuple[Node, int, str | None]:
    """Ask the plugins' validators, until one lowers the boundary: then ``search`` asks the lanes again."""
    for name, validator in core.shape.validators:
        view = WalkView(match.namespace, boundary, match.count, match.walked, extra=match.extra)
        lower = validated(core, name, validator, view)
        if lower < boundary:
            return climb(node, lower), lower, name
    return node, boundary, None


def resumable(core: Core, node: Node, boundary: int) -> int:
    """Return the deepest boundary up to ``boundary``, in the edge of ``node``, at which all components can resume."""
    before = -1
    while boundary != before:
        before = boundary
        for lane in core.shape.lanes:
            node, boundary = lane.residency.deepest(node, boundary)
    return boundary


def validated(core: Core, name: str, validator: Callable[[WalkView], int], view: WalkView) -> int:
    """Return what a plugin's validator says of a boundary, checked, on the grid of the tree."""
    lower = core.plugins.call(name, "create_match_validator", validator, view)
    if not isinstance(lower, int) or isinstance(lower, bool) or lower < 0:
        raise core.plugins.bad_answer(name, "create_match_validator", f"a boundary from 0 to {view.boundary}", lower)
    page = core.shape.page
    return min(lower // page * page, view.boundary)


def claims_at(core: Core, match: Match, boundary: int) -> tuple[Claim | None, ...]:
    """Return what the components claim at ``boundary``, and take the deepest branch that they name."""
    page = core.shape.page
    view = WalkView(match.namespace, boundary, match.count, match.walked, extra=match.extra)
    claims: list[Claim | None] = []
    for lane in core.shape.lanes:
        claim = core.plugins.ask(lane, "finalize_match_result", Claim, view)
        claims.append(claim)
        if claim is None:
            continue
        if claim.ops:
            core.plugins.check_ops(lane, "finalize_match_result", claim.ops)
        if claim.branch is not None and boundary < claim.branch <= match.count:
            match.branch = max(match.branch or 0, claim.branch // page * page) or None
    return tuple(claims)


def candidates(core: Core, match: Match) -> tuple[Interval, ...]:
    """Return the ascending boundaries from which all components can resume, as closed runs one page apart."""
    page = core.shape.page
    runs: list[Interval] = []
    boundary = match.ready
    while True:
        if runs and runs[-1][0] == boundary + page:
            runs[-1] = (boundary, runs[-1][1])
        else:
            runs.append((boundary, boundary))
        if not boundary:
            return tuple(reversed(runs))
        key = match.key[: (boundary - page) * core.keys.element_bytes]
        boundary = find(core, match.of(key, boundary - page)).ready


# ---------------------------------------------------------------- what is missing


def lowerings(core: Core, match: Match) -> Lowered:
    """Return who kept ``match`` from being deeper, from the deepest boundary that the keys agree with down."""
    trace: Lowered = []
    again = match.of(match.key, match.most)
    search(core, again, match.most, trace)
    return trace


def wanted_at(core: Core, match: Match) -> Wanted:
    """Return the slots that opening at ``match`` takes: those of running states, and what plugins claim."""
    need: dict[Lane, int] = {lane: lane.per_sequence for lane in core.shape.state_lanes}
    for each, claim in zip(core.shape.lanes, match.claims, strict=False):
        if claim is not None and claim.need:
            need[each] = need.get(each, 0) + claim.need
    return [(lane.room, count) for lane, count in need.items()]
