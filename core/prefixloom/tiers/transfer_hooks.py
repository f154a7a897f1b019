"""Transfer hooks: plugins may add copies between tiers, and learn how the copies ended.

A plan is made only if a component or the tier overrides one of these hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

from ..contract.composition import Part, TierPart
from ..contract.reach import Interval, merged
from ..contract.values import Claim, Outcome, Phase, Tier, Transfer, TransferPlan
from ..operations.state import Core
from ..tree.radix import Node, path_key, path_up, root_of
from .host_lane import HostLane

WAYS: dict[Phase, tuple[Tier, Tier]] = {"backup": ("device", "host"), "load": ("host", "device")}


def plan_of(core: Core, phase: Phase, node: Node, pieces: Iterable[tuple[HostLane, Node]]) -> TransferPlan:
    """Make the plan of copies. ``pieces`` says which lanes copy at which nodes; ``node`` is the deepest of these."""
    source, target = WAYS[phase]
    found: dict[Transfer, None] = {}
    for lane, piece in pieces:
        start = piece.end if lane.unit == "boundary" else piece.start
        found[Transfer(lane.device.name, start, piece.end, source, target)] = None
    boundary, extra = node.end, core.keys.extra_in(path_key(node), 0)
    return TransferPlan(phase, root_of(node).namespace, boundary, tuple(found), extra)


def proposed(core: Core, tier: TierPart, plan: TransferPlan) -> dict[str, tuple[Interval, ...]]:
    """Return the positions that plugins want copied as well, by component. One that raises is left out and counted."""
    wanted: dict[str, list[Interval]] = {}
    everything = {lane.name for lane in core.shape.lanes}
    for who in _plugins(core, tier):
        names = everything if who is tier else {who.name}
        for more in core.plugins.ask_softly(who, "build_hicache_transfers", tuple, plan, plan.phase) or ():
            if (
                not isinstance(more, Transfer)
                or more.component not in names
                or (more.source, more.target) != WAYS[plan.phase]
                or not 0 <= more.start <= more.end
            ):
                allowed = f"Transfers of {', '.join(sorted(names))}, {' to '.join(WAYS[plan.phase])}"
                core.plugins.go_on_without(core.plugins.bad_answer(who.name, "build_hicache_transfers", allowed, more))
                continue
            wanted.setdefault(more.component, []).append((more.start, min(more.end, plan.boundary)))
    return {name: merged(spans) for name, spans in wanted.items()}


def tell_outcome(core: Core, tier: TierPart, plan: TransferPlan, outcome: Outcome) -> None:
    """Call the plugins' hooks for the end of a plan."""
    for who in _plugins(core, tier):
        core.plugins.ask_softly(who, "commit_hicache_transfer", Claim, plan, plan.phase, outcome)


def _plugins(core: Core, tier: TierPart) -> tuple[Part | TierPart, ...]:
    """Return the components in their order, then the tier."""
    return (*core.shape.composition.parts, tier)


def nodes_touched(node: Node, spans: Many[Interval]) -> list[Node]:
    """Return the nodes from the root down to ``node`` that ``spans`` touch."""
    path = reversed(path_up(node))
    return [each for each in path if any(low < each.end and each.start < high for low, high in spans)]
