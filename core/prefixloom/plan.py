"""Match plans: what a prefix can resume from, decided once and frozen.

A plan is pure: making one changes nothing, and no node is shown to the caller. It carries the epoch of its making,
which counts losses only (splits and inserts leave a plan true); a stale plan is planned again, never executed.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from .errors import ProtocolError
from .keys import TOKEN_BYTES, Tokens
from .reach import Interval
from .values import Claim, WalkView

if TYPE_CHECKING:
    from .cache import Cache
    from .tree import Node


class MatchPlan:
    """Where a prefix can resume.

    ``ready``   tokens whose every component is usable on the device
    ``walked``  tokens that the tree's keys agree with, whatever is still held there
    ``branch``  a boundary deeper than ``ready`` where page components could resume but a boundary component has
                nothing: worth a checkpoint while recomputing; None if there is none
    ``limited_by``  the component that kept ``ready`` from being longer; None if the keys did
    """

    __slots__ = (
        "_cache", "_claims", "_epoch", "_key", "_limit", "_node", "_reached", "_single", "_tokens", "branch",
        "key_tokens", "limited_by", "namespace", "ready", "walked",
    )  # fmt: skip

    namespace: str
    key_tokens: int
    ready: int
    walked: int
    branch: int | None
    limited_by: str | None
    _cache: Cache
    _epoch: int
    _limit: int
    _node: Node
    _reached: Node  # the deepest whose whole path the keys agree with
    _key: bytes
    _single: bytes | None  # the tokens with extra keys in place, where there are any
    _tokens: Tokens
    _claims: tuple[Claim | None, ...]

    @property
    def stale(self) -> bool:
        """Whether something was lost since the plan was made."""
        return self._epoch != self._cache._epoch

    @property
    def anchor(self) -> int:
        """The single boundary that every component plans from."""
        return self.ready

    @property
    def need(self) -> dict[str, int]:
        """Slots that opening a sequence here takes at once, per component."""
        return {lane.name: count for lane, count, _ in self._cache._open_wanted(self)}

    @property
    def why(self) -> str:
        """Why the hit is no longer, in a sentence."""
        page, count = self._cache._page, self.key_tokens
        if not count:
            return "the prompt is empty"
        if self.limited_by is not None:
            return (
                f"component {self.limited_by!r} holds nothing usable past {self.ready} of {self.walked} tokens: it was "
                f"never published there, or evicted"
            )
        if self.walked < self._limit:
            if self.namespace not in self._cache._tree.roots:
                return f"nothing is cached in namespace {self.namespace!r}"
            return (
                f"the keys agree to {self.walked} tokens, in whole pages of {page}; nothing longer that begins so was "
                f"published, or it was evicted"
            )
        if self.ready == count:
            return f"the whole prompt of {count} tokens is cached"
        told = f"{self.ready} of {count} tokens: a hit is a multiple of {page}"
        return told if count - self.ready < page else told + ", and some tokens are to be left to compute"

    def pages(self, component: str) -> array[int]:
        """Page numbers of the matched prefix by position, -1 where absent. Only a lease keeps them true."""
        cache = self._cache
        if self.stale:
            raise ProtocolError("this plan is stale: data was evicted since it was made; match again")
        if not self.ready:
            cache._lane(component)
            return array("i")
        return array("i", cache._lane(component).row(self._node, self.ready))

    def candidates(self) -> tuple[Interval, ...]:
        """The ascending set of boundaries from which every component can resume, as closed runs one page apart.

        Computed on demand. 0 is always among them. A stale plan is refused: its candidates may be gone.
        """
        if self.stale:
            raise ProtocolError("this plan is stale: data was evicted since it was made; match again")
        return candidates(self)

    def __repr__(self) -> str:
        limited = f", limited by {self.limited_by}" if self.limited_by else ""
        return f"<MatchPlan {self.ready} of {self.key_tokens} tokens{limited}{', stale' if self.stale else ''}>"


class FrozenPlan(MatchPlan):
    """A plan in debug mode: whoever writes to it is told."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise ProtocolError(f"a plan is frozen: {name} cannot be set")


def make_plan(
    cache: Cache, namespace: str, tokens: Tokens, key: bytes, limit: int, single: bytes | None = None
) -> MatchPlan:
    """The deepest boundary, not above ``limit``, that every component accepts: the common fixpoint from below."""
    plan = MatchPlan()
    plan._cache = cache
    plan._epoch = cache._epoch
    plan._key = key
    plan._single = single
    plan._tokens = tokens
    plan.key_tokens = len(tokens) // TOKEN_BYTES
    plan.namespace = namespace
    tree = cache._tree
    root = tree.roots.get(namespace)
    if root is None:
        root = cache._empty_root
    node, boundary = tree.walk(root, key)
    plan.walked = boundary
    plan._reached = node if node.end == boundary else node.parent
    page = tree.page
    limit = limit // page * page
    plan._limit = limit
    if boundary > limit:
        boundary = limit
        while node.parent is not None and node.parent.end >= boundary:
            node = node.parent
    plan._claims = ()
    plan.branch = plan.limited_by = None
    agree(cache, plan, node, boundary)
    if cache._match_hooks:
        ask_claims(cache, plan)
    if cache._debug is not None:
        plan.__class__ = FrozenPlan
    return plan


def agree(cache: Cache, plan: MatchPlan, node: Node, boundary: int) -> None:
    """Lower ``boundary`` until no component lowers it further, and write it into ``plan``.

    What is closed upward is asked once: where it can resume, it can resume anywhere above. 0 needs nothing.
    """
    for lane in cache._closed_lanes:
        node, lower = lane.deepest(node, boundary)
        if lower != boundary:
            plan.limited_by = lane.name
            boundary = lower
    while not cache._all_closed:
        if boundary:
            before = boundary
            for lane in cache._near_lanes:
                node, lower = lane.deepest(node, boundary)
                if lower != boundary:
                    plan.limited_by = lane.name
                    boundary = lower
            if boundary != before and cache._several_near:
                continue
            paged = boundary
            for point in cache._point_lanes:
                node, lower = point.deepest(node, boundary)
                if lower != boundary:
                    plan.limited_by = point.name
                    boundary = lower
            if boundary != paged:
                if plan.branch is None:
                    plan.branch = paged
                continue
        if cache._validators:
            node, lower = narrow(cache, plan, node, boundary)
            if lower != boundary:
                boundary = lower
                continue
        break
    plan._node = node
    plan.ready = boundary


def narrow(cache: Cache, plan: MatchPlan, node: Node, boundary: int) -> tuple[Node, int]:
    """Ask the plugins' validators; a lower boundary goes through the lanes again, a higher one is no answer."""
    page = cache._tree.page
    for name, validator in cache._validators:
        view = WalkView(plan.namespace, boundary, plan.key_tokens, plan.walked)
        lower = cache._call(name, "create_match_validator", validator, view)
        if not isinstance(lower, int) or isinstance(lower, bool) or lower < 0:
            raise cache._bad_answer(name, "create_match_validator", f"a boundary from 0 to {boundary}", lower)
        lower = lower // page * page
        if lower < boundary:
            plan.limited_by = name
            while node.parent is not None and node.parent.end >= lower:
                node = node.parent
            return node, lower
    return node, boundary


def ask_claims(cache: Cache, plan: MatchPlan) -> None:
    """Collect the claims of ``finalize_match_result`` at the plan's boundary; a reject tries the next candidate."""
    page = cache._tree.page
    while True:
        view = WalkView(plan.namespace, plan.ready, plan.key_tokens, plan.walked)
        claims: list[Claim | None] = []
        for lane in cache._lanes:
            hook = lane.hooks.finalize_match_result
            claim = None if hook is None else cache._ask(lane, "finalize_match_result", Claim, hook, view)
            claims.append(claim)
            if claim is None:
                continue
            if claim.ops:
                cache._check_ops(lane, "finalize_match_result", claim.ops)
            if claim.branch is not None and plan.ready < claim.branch <= plan.key_tokens:
                plan.branch = max(plan.branch or 0, claim.branch // page * page) or None
            if claim.reject and plan.ready:
                plan.limited_by = lane.name
                lower = plan.ready - page
                node = plan._node
                while node.parent is not None and node.parent.end >= lower:
                    node = node.parent
                agree(cache, plan, node, lower)
                break
        else:
            plan._claims = tuple(claims)
            return


def candidates(plan: MatchPlan) -> tuple[Interval, ...]:
    """Every boundary from which all components can resume, the deepest first found and then the next below it."""
    cache, page = plan._cache, plan._cache._page
    runs: list[Interval] = []
    boundary = plan.ready
    while boundary > 0:
        if runs and runs[-1][0] == boundary + page:
            runs[-1] = (boundary, runs[-1][1])
        else:
            runs.append((boundary, boundary))
        key = plan._key[: (boundary - page) * cache._keys.element_bytes]
        boundary = make_plan(cache, plan.namespace, plan._tokens, key, boundary - page).ready
    if runs and runs[-1][0] == page:
        runs[-1] = (0, runs[-1][1])
    else:
        runs.append((0, 0))
    return tuple(reversed(runs))
