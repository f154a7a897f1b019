"""What plugins have to say about copies between tiers: more of them before, and how they ended after.

Only where a component or the tier overrides the hooks is a plan made at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..contract.reach import Interval, merged
from ..contract.values import Claim, Outcome, Phase, Tier, Transfer, TransferPlan
from ..tree.radix import Root

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..contract.composition import Hooks
    from ..tree.radix import Node
    from .host_lane import HostLane

WAYS: dict[Phase, tuple[Tier, Tier]] = {"backup": ("device", "host"), "load": ("host", "device")}


class Copying:
    """What a copy is called where somebody is told of it."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return self.what


COPY = {
    "down": Copying("a copy to the host"),
    "up": Copying("a copy to the device"),
    "fetch": Copying("what a store brought"),
}


class Asked:
    """A tier, as far as calling its hooks goes; components are asked as their lanes."""

    def __init__(self, name: str, hooks: Hooks) -> None:
        self.name = name
        self.hooks = hooks


def plan_of(phase: Phase, node: Node, pieces: Iterable[tuple[HostLane, Node]]) -> TransferPlan:
    """``pieces``: what each component moves at which nodes, of which ``node`` is the deepest."""
    source, target = WAYS[phase]
    found: dict[Transfer, None] = {}
    for lane, piece in pieces:
        start = piece.end if lane.unit == "boundary" else piece.parent.end
        found[Transfer(lane.device.name, start, piece.end, source, target)] = None
    boundary = node.end
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return TransferPlan(phase, node.namespace, boundary, tuple(found))


def proposed(cache: Cache, plan: TransferPlan) -> dict[str, tuple[Interval, ...]]:
    """Positions that plugins want moved as well, by component. Who raises is passed over and counted."""
    wanted: dict[str, list[Interval]] = {}
    names = {lane.name for lane in cache._lanes}
    for who in asked(cache):
        hook = who.hooks.build_hicache_transfers
        for more in cache._ask_softly(who, "build_hicache_transfers", tuple, hook, plan, plan.phase) or ():
            if (
                not isinstance(more, Transfer)
                or more.component not in names
                or (more.source, more.target) != WAYS[plan.phase]
                or not 0 <= more.start <= more.end
            ):
                told = f"Transfers of {', '.join(sorted(names))}, {' to '.join(WAYS[plan.phase])}"
                cache._without_answer(cache._bad_answer(who.name, "build_hicache_transfers", told, more))
                continue
            wanted.setdefault(more.component, []).append((more.start, min(more.end, plan.boundary)))
    return {name: merged(spans) for name, spans in wanted.items()}


def tell(cache: Cache, plan: TransferPlan, outcome: Outcome) -> None:
    """A plan has ended."""
    for who in asked(cache):
        hook = who.hooks.commit_hicache_transfer
        cache._ask_softly(who, "commit_hicache_transfer", Claim, hook, plan, plan.phase, outcome)


def asked(cache: Cache) -> Sequence[Any]:
    """Who may have something to say: the components in their order, then the tier."""
    tier = cache._tier
    return cache._lanes if tier is None else (*cache._lanes, Asked(tier.part.name, tier.part.hooks))


def on_path(node: Node, spans: Sequence[Interval]) -> list[Node]:
    """The nodes from the root down to ``node`` that ``spans`` touch."""
    found = []
    while node.parent is not None:
        if any(low < node.end and node.parent.end < high for low, high in spans):
            found.append(node)
        node = node.parent
    return found[::-1]
