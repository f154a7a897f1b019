"""Match plans: what a prefix can resume from, decided once and frozen.

A plan is pure: making one changes nothing, and no node is shown to the caller. It carries the epoch of its making,
which counts losses only (splits and inserts leave a plan true); a stale plan is planned again, never executed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..contract.reach import Interval
from ..contract.values import Claim, WalkView
from ..errors import ProtocolError
from ..tiers.match_below import usable
from ..tree.keys import TOKEN_BYTES, Tokens
from ..tree.radix import climb

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..tree.lane import Lane
    from ..tree.radix import Node
    from ..tree.state_lane import PointLane

    Wanted = list[tuple[Lane, int, object]]
    Looked = tuple[Node, int, Node, Node, int, str | None, int | None]
    """(node, boundary in its edge or at its end, deepest node whose path agrees, deepest boundary that was tried lies
    in, tokens that the keys agree with, who limits it, a branching point)"""


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
        "_below", "_cache", "_claims", "_epoch", "_key", "_most", "_node", "_reached", "_restorable", "_single",
        "_tokens", "_walked_to", "branch", "limited_by", "namespace", "ready", "walked",
    )  # fmt: skip

    namespace: str
    ready: int
    walked: int
    branch: int | None
    limited_by: str | None
    _below: Node  # where ``restorable`` lies; this and the next two where the cache has a tier below the device
    _restorable: int
    _walked_to: tuple[Node, int]  # the deepest boundary, up to the limit, that the keys agree with
    _cache: Cache
    _epoch: int
    _most: int  # so many tokens at most were to be resumed; less than 0 if not even 0 leaves as many as wanted
    _node: Node
    _reached: Node  # the deepest whose whole path the keys agree with
    _key: bytes
    _single: bytes | None  # the tokens with extra keys in place, where there are any
    _tokens: Tokens
    _claims: tuple[Claim | None, ...]

    @property
    def key_tokens(self) -> int:
        return len(self._tokens) // TOKEN_BYTES

    @property
    def restorable(self) -> int:
        return self.ready if self._cache._tier is None else self._restorable

    @property
    def _limit(self) -> int:
        """The deepest boundary that was asked for."""
        return max(0, self._most) // self._cache._page * self._cache._page

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
        cache = self._cache
        wanted = wanted_at(cache, self.ready, self._claims, cache._point_lanes)
        return {lane.name: count for lane, count, _ in wanted}

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


def again(old: MatchPlan, key: bytes, most: int) -> MatchPlan:
    """Asked as ``old`` was, of ``key`` and with ``most`` tokens at most, and answered as things are."""
    cache = old._cache
    plan = MatchPlan()
    plan._cache = cache
    plan._epoch = cache._epoch
    plan._claims = ()
    plan._tokens = old._tokens
    plan._key = key
    plan._single = old._single
    plan.namespace = old.namespace
    plan._most = most
    tell(cache, plan, *look(cache, plan.namespace, plan._tokens, key, most))
    return plan


def tell(
    cache: Cache, plan: MatchPlan, node: Node, ready: int, reached: Node, walked_to: Node, walked: int,
    limited_by: str | None, branch: int | None,
) -> None:  # fmt: skip
    """``plan`` says what was found (``look``), and what else is asked where there are claims, a tier or debug mode."""
    plan._node = node
    plan.ready = ready
    plan._reached = reached
    plan.walked = walked
    plan.limited_by = limited_by
    plan.branch = branch
    if cache._asks_more:
        boundary = walked
        if boundary > plan._most:
            boundary = plan._limit
        complete(cache, plan, walked_to, boundary)


def complete(cache: Cache, plan: MatchPlan, node: Node, boundary: int) -> None:
    """What a plan has besides where there are claims, a tier or debug mode; the keys agree to ``boundary``."""
    if cache._match_hooks:
        ask_claims(cache, plan)
    if cache._tier is not None:
        plan._below, plan._restorable = plan._node, plan.ready
        plan._walked_to = node, boundary
        if boundary > plan.ready:
            plan._below, plan._restorable = restorable(cache, plan, node, boundary)
    if cache._debug is not None:
        plan.__class__ = FrozenPlan


def restorable(cache: Cache, plan: MatchPlan, node: Node, boundary: int) -> tuple[Node, int]:
    """The deepest boundary, not below ``boundary`` in ``node``, that every component has on any tier and accepts.

    The plan's own, if there is none that is worth a load.
    """
    tier = cache._tier
    assert tier is not None
    if not any(lane.in_tree for lane in tier.lanes):  # nothing is below
        return plan._node, plan.ready
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


def look(cache: Cache, namespace: str, tokens: Tokens, key: bytes, most: int) -> Looked:
    """The deepest boundary up to ``most`` that every component accepts: the fixpoint from below.

    It begins with the deepest that the keys agree with, and lowers this until no component lowers it further. What is
    closed upward is asked once: where it can resume, it can resume anywhere above. 0 needs nothing.
    """
    tree = cache._tree
    root = tree.roots.get(namespace)
    if root is None:
        root = cache._empty_root
    node, boundary, reached = tree.walk(root, key)
    walked = boundary
    if boundary > most:
        boundary = max(0, most) // tree.page * tree.page
        node = climb(node, boundary)
    walked_to = node
    limited_by = branch = None
    for lane in cache._closed_lanes:
        node, lower = lane.deepest(node, boundary)
        if lower != boundary:
            limited_by = lane.name
            boundary = lower
    while not cache._all_closed:
        if boundary:
            paged = boundary
            for lane in cache._near_lanes:
                node, lower = lane.deepest(node, boundary)
                if lower != boundary:
                    limited_by = lane.name
                    boundary = lower
            if cache._several_near and boundary != paged:
                continue
            paged = boundary
            for point in cache._point_lanes:
                node, lower = point.deepest(node, boundary)
                if lower != boundary:
                    limited_by = point.name
                    boundary = lower
            if boundary != paged:
                if branch is None:
                    branch = paged
                continue
        if cache._validators:
            node, lower, name = narrow(cache, namespace, tokens, walked, node, boundary)
            if lower != boundary:
                limited_by = name
                boundary = lower
                continue
        break
    return node, boundary, reached, walked_to, walked, limited_by, branch


def narrow(
    cache: Cache, namespace: str, tokens: Tokens, walked: int, node: Node, boundary: int
) -> tuple[Node, int, str | None]:
    """Ask the plugins' validators; a lower boundary goes through the lanes again, a higher one is no answer."""
    for name, validator in cache._validators:
        view = WalkView(namespace, boundary, len(tokens) // TOKEN_BYTES, walked)
        lower = valid(cache, name, validator, view)
        if lower < boundary:
            return climb(node, lower), lower, name
    return node, boundary, None


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
        branch = plan.branch
        found = look(cache, plan.namespace, plan._tokens, plan._key, plan.ready - cache._page)
        plan._node, plan.ready, plan._reached, _, plan.walked, limited_by, plan.branch = found
        plan.limited_by = limited_by or rejected_by
        if branch is not None:
            plan.branch = branch


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
        boundary = again(plan, key, boundary - page).ready
    if runs and runs[-1][0] == page:
        runs[-1] = (0, runs[-1][1])
    else:
        runs.append((0, 0))
    return tuple(reversed(runs))


def wanted_at(cache: Cache, ready: int, claims: tuple[Claim | None, ...], lanes: Iterable[PointLane]) -> Wanted:
    """Slots that opening at ``ready`` takes: states that run in ``lanes``, what is rebuilt, and what plugins claim."""
    if not claims and not cache._replay:
        return [(lane.room, lane.per_sequence, None) for lane in lanes]
    need = {lane.name: lane.per_sequence for lane in lanes}
    for paged in cache._page_lanes:
        if paged.replay and ready:
            need[paged.name] = paged.replayed_pages(ready)
    for each, claim in zip(cache._lanes, claims, strict=False):
        if claim is not None and claim.need:
            need[each.name] = need.get(each.name, 0) + claim.need
    return [(each.room, need[each.name], None) for each in cache._lanes if need.get(each.name)]
