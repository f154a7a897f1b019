"""The tier of a composition: which components it holds, and how much of each. Nothing is allocated here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ..contract.composition import Hooks, TierPart
from ..contract.manifest import Layout, Manifest, TierManifest
from ..device.codecs import Coder
from ..errors import CompositionError
from .sizing import Demand, evenly, from_mapping, from_tokens, parse_memory, told

if TYPE_CHECKING:
    from ..tiers.consensus import Consensus
    from .capabilities import TierCandidate

TIER_HOOKS = ("finalize_match_result", "build_hicache_transfers", "commit_hicache_transfer")
"""Hooks that a tier may override; all others are a component's."""


def tier_part(candidate: TierCandidate, demands: Mapping[str, Demand], page: int, hooks: Hooks) -> TierPart:
    strange = [name for name in hooks.overridden if name not in TIER_HOOKS]
    if strange:
        raise CompositionError(
            f"{candidate} overrides what no tier is asked: {', '.join(strange)}. Hooks of a tier: "
            f"{', '.join(TIER_HOOKS)}"
        )
    held = [_at_rest(demand, candidate.manifest.layout) for demand in demands.values() if _shares(demand.manifest)]
    if not held:
        raise CompositionError(f"{candidate}: no component of this composition shares anything that it could hold")
    try:
        sizes = _agreed(candidate, _sizes(held, page, candidate.manifest))
    except CompositionError as error:
        raise CompositionError(f"{candidate}: {error}") from error
    sizing = tuple(f"{candidate.name} {line}" for line in told(held, sizes, "the tier below the device"))
    return TierPart(candidate.name, candidate.component, candidate.manifest, sizes, hooks, candidate.origin, sizing)


def _agreed(candidate: TierCandidate, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """What all ranks can hold, where the tier serves several: they are to decide the same."""
    consensus: Consensus | None = getattr(candidate.component, "consensus", None)
    if consensus is None:
        return sizes
    manifest = candidate.manifest
    names = ("write", "hits", "load_at_least")
    consensus.agree_same({name: str(getattr(manifest, name)) for name in names})
    return consensus.agree_min(sizes)


def _shares(manifest: Manifest) -> bool:
    return manifest.shareable and not manifest.replay


def _at_rest(demand: Demand, layout: Layout) -> Demand:
    """What one cached slot of the component takes below the device: the form in which the tree keeps it."""
    manifest = demand.manifest if demand.manifest.stored_as is None else Coder(demand.manifest).stored
    return attrs.evolve(demand, manifest=manifest, live=0, layout=layout)


def _sizes(held: Sequence[Demand], page: int, manifest: TierManifest) -> dict[str, int]:
    if manifest.memory is not None:
        return evenly(held, page, parse_memory(manifest.memory), 0)
    if isinstance(manifest.capacity, Mapping):
        return from_mapping(held, page, manifest.capacity)
    assert manifest.capacity is not None
    return from_tokens(held, page, manifest.capacity, 0)
