"""Tier: which components the tier of a composition holds, and how much of each. Nothing is allocated here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ..contract.composition import Hooks, TierPart
from ..contract.manifest import Layout, Manifest, TierManifest, parse_memory
from ..device.codecs import Coder
from ..errors import CompositionError
from .sizing import Demand, equal_tokens, from_mapping, from_tokens, sizing_lines

if TYPE_CHECKING:
    from ..tiers.consensus import Consensus
    from .capabilities import TierCandidate

TIER_HOOKS = ("build_hicache_transfers", "commit_hicache_transfer")
"""The hooks that a tier may override; the other hooks are for components."""


def tier_part(candidate: TierCandidate, demands: Mapping[str, Demand], page: int, hooks: Hooks) -> TierPart:
    """Return the tier of a composition, with the pages or states of each component that it holds."""
    unknown = [name for name in hooks.overridden if name not in TIER_HOOKS]
    if unknown:
        raise CompositionError(
            f"{candidate} overrides hooks that are never called on a tier: {', '.join(unknown)}. Hooks of a tier: "
            f"{', '.join(TIER_HOOKS)}"
        )
    held = [_stored(demand, candidate.manifest.layout) for demand in demands.values() if _is_cached(demand.manifest)]
    if not held:
        raise CompositionError(f"{candidate}: no component of this composition shares anything that it could hold")
    try:
        sizes = _agreed(candidate, _sizes(held, page, candidate.manifest))
    except CompositionError as error:
        raise CompositionError(f"{candidate}: {error}") from error
    sizing = tuple(f"{candidate.name} {line}" for line in sizing_lines(held, sizes, "the tier below the device"))
    return TierPart(candidate.name, candidate.component, candidate.manifest, sizes, hooks, candidate.origin, sizing)


def _agreed(candidate: TierCandidate, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """The sizes that all ranks can hold, if the tier serves several: their caches must make the same decisions."""
    consensus: Consensus | None = getattr(candidate.component, "consensus", None)
    if consensus is None:
        return sizes
    manifest = candidate.manifest
    names = ("write", "hits", "load_at_least")
    consensus.agree_same({name: str(getattr(manifest, name)) for name in names})
    return consensus.agree_min(sizes)


def _is_cached(manifest: Manifest) -> bool:
    return not manifest.replay


def _stored(demand: Demand, layout: Layout) -> Demand:
    """The demand of a component below the device, where all its slots have the form in which the tree keeps them."""
    manifest = demand.manifest if demand.manifest.stored_as is None else Coder(demand.manifest).stored
    return attrs.evolve(demand, manifest=manifest, live=0, layout=layout)


def _sizes(held: Sequence[Demand], page: int, manifest: TierManifest) -> dict[str, int]:
    if manifest.memory is not None:
        return equal_tokens(held, page, parse_memory(manifest.memory), 0)
    if isinstance(manifest.capacity, Mapping):
        return from_mapping(held, page, manifest.capacity)
    assert manifest.capacity is not None
    return from_tokens(held, page, manifest.capacity, 0)
