"""Match plans: what a prefix can resume from, decided once and frozen.

A plan is pure: making one changes nothing, and no node is shown to the caller. It carries the epoch of its making,
which counts losses only (splits and inserts leave a plan true); a stale plan is planned again, never executed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from .errors import ProtocolError
from .keys import TOKEN_BYTES, Tokens
from .over_tiers import usable
from .reach import Interval
from .tree import climb
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
    ``restorable``  tokens whose every component is on the device or on a tier below: ``Sequence.restore`` brings them
                    back. ``ready`` if that is not worth a load
    """

    __slots__ = (
        "_below", "_cache", "_claims", "_epoch", "_key", "_limit", "_node", "_reached", "_single", "_tokens",
        "_walked_to", "branch", "key_tokens", "limited_by", "namespace", "ready", "restorable", "walked",
    )  # fmt: skip

    namespace: str
    key_tokens: int
    ready: int
    walked: int
    branch: int | None
    limited_by: str | None
    restorable: int
    _below: Node  # where ``restorable`` lies
    _walked_to: tuple[Node, int]  # with a tier: the deepest boundary, up to the limit, that the keys agree with
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
    plan.restorable = plan.ready
    plan._below = plan._node
    if cache._tier is not None:
        plan._walked_to = node, boundary
        if boundary > plan.ready:
            plan._below, plan.restorable = restorable(cache, plan, node, boundary)
    if cache._debug is not None:
        plan.__class__ = FrozenPlan
    return plan


def restorable(cache: Cache, plan: MatchPlan, node: Node, boundary: int) -> tuple[Node, int]:
    """The deepest boundary, not below ``boundary`` in ``node``, that every component has on any tier and accepts.

    The plan's own, if there is none that is worth a load.
    """
    tier = cache._tier
    assert tier is not None
    hook = tier.part.hooks.finalize_match_result
    worth = tier.manifest.load_at_least
    while boundary - plan.ready >= worth:
        before = boundary
        for lane in cache._lanes:
            node, boundary = usable(lane, tier.by_component[lane.index], node, boundary, cache._page)
        for name, validator in cache._tier_validators:
            view = WalkView(plan.namespace, boundary, plan.key_tokens, plan.walked, plan.ready)
            boundary = valid(cache, name, validator, view)
            node = climb(node, boundary)
        if boundary == before:
            claim = None
            if hook is not None and boundary > plan.ready:
                view = WalkView(plan.namespace, boundary, plan.key_tokens, plan.walked, plan.ready)
                claim = cache._ask(tier.part, "finalize_match_result", Claim, hook, view)
            rejected = claim is not None and claim.reject
            if not rejected and cache._match_hooks and boundary > plan.ready:
                rejected = claims_at(cache, plan, boundary)[1] is not None
            if not rejected:
                break
            boundary -= cache._page
            node = climb(node, boundary)
    return (node, boundary) if boundary - plan.ready >= worth else (plan._node, plan.ready)


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
    for name, validator in cache._validators:
        view = WalkView(plan.namespace, boundary, plan.key_tokens, plan.walked)
        lower = valid(cache, name, validator, view)
        if lower < boundary:
            plan.limited_by = name
            return climb(node, lower), lower
    return node, boundary


def valid(cache: Cache, name: str, validator: Callable[[WalkView], int], view: WalkView) -> int:
    """What a plugin's validator says of a boundary, checked, on the grid of the tree."""
    lower = cache._call(name, "create_match_validator", validator, view)
    if not isinstance(lower, int) or isinstance(lower, bool) or lower < 0:
        raise cache._bad_answer(name, "create_match_validator", f"a boundary from 0 to {view.boundary}", lower)
    return min(lower // cache._page * cache._page, view.boundary)


def ask_claims(cache: Cache, plan: MatchPlan) -> None:
    """Collect the claims of ``finalize_match_result`` at the plan's boundary; a reject tries the next candidate."""
    while True:
        claims, rejected_by = claims_at(cache, plan, plan.ready)
        if rejected_by is None:
            plan._claims = claims
            return
        plan.limited_by = rejected_by
        lower = plan.ready - cache._page
        agree(cache, plan, climb(plan._node, lower), lower)


def claims_at(cache: Cache, plan: MatchPlan, boundary: int) -> tuple[tuple[Claim | None, ...], str | None]:
    """What the components claim at ``boundary``, and who rejects it. 0 cannot be rejected."""
    view = WalkView(plan.namespace, boundary, plan.key_tokens, plan.walked)
    claims: list[Claim | None] = []
    for lane in cache._lanes:
        hook = lane.hooks.finalize_match_result
        claim = None if hook is None else cache._ask(lane, "finalize_match_result", Claim, hook, view)
        claims.append(claim)
        if claim is None:
            continue
        if claim.ops:
            cache._check_ops(lane, "finalize_match_result", claim.ops)
        if claim.branch is not None and boundary < claim.branch <= plan.key_tokens:
            plan.branch = max(plan.branch or 0, claim.branch // cache._page * cache._page) or None
        if claim.reject and boundary:
            return (), lane.name
    return tuple(claims), None


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
