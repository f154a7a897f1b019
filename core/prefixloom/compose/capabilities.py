"""Capabilities: the components of a cache, made and checked, and the numbers that follow from their manifests.

Each refusal names the component, the reason and the remedy, before anything is allocated. No kind of component is known
here: the checks look only at manifests and reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from ..contract.checks import of_type, whole
from ..contract.composition import Part, TierPart
from ..contract.manifest import Manifest, TierManifest, Unit, parse_memory
from ..contract.reach import Reach
from ..contract.values import ComponentSpec, Profile
from ..device.codecs import Coder
from ..errors import CompositionError
from ..tiers.consensus import Consensus
from .binding import bind, check_identity, naming
from .registry import Registry
from .sizing import Demand, equal_tokens, from_capacity, sizing_lines

DEFAULT_PAGE = 16

MAX_PAGE = 4096

MAX_TREE_PAGE = 4096

PROBES = (0, 1, 2, 63, 64, 65, 4096)
"""The boundaries at which the answers of a reach are checked."""

TIER_HOOKS = ("build_hicache_transfers", "commit_hicache_transfer")
"""The hooks that a tier may override; the other hooks are for components."""


def gather(profile: Profile, plugins: Iterable[object], registry: Registry) -> tuple[tuple[Part, ...], TierPart | None]:
    """Return the components, the profile's before the caller's, each in the given order; and the tier, if any.

    Pages and capacities of both are not decided yet.
    """
    given = [plugins] if isinstance(plugins, str) or not isinstance(plugins, Iterable) else [*plugins]
    everything = [_made(spec, registry) for spec in profile.components]
    for plugin in given:
        if plugin is plugins or isinstance(plugin, str):
            raise CompositionError(
                f"plugins must be a list of component instances, got {plugin!r}. An installed one is named by a "
                f'Profile: Profile([ComponentSpec("its name")])'
            )
        cls = plugin if isinstance(plugin, type) else type(plugin)
        everything.append(_part(plugin, f"passed to compose, class {cls.__module__}.{cls.__qualname__}"))
    parts = tuple(part for part in everything if isinstance(part, Part))
    tiers = [part for part in everything if isinstance(part, TierPart)]
    if len(tiers) > 1:
        raise CompositionError(f"two tiers below the device, and there can be one: {tiers[0]} and {tiers[1]}")
    if not parts:
        raise CompositionError(
            "a cache needs at least one component: pass a model config or a profile that names one, or plugins=[...]"
        )
    origins: dict[str, str] = {}
    for part in everything:
        if part.name in origins:
            raise CompositionError(
                f"two components are named {part.name!r}: one from {origins[part.name]}, one from {part.origin}. Give "
                f"each a name of its own"
            )
        origins[part.name] = part.origin
    for part in parts:
        for fault in _faults(part):
            raise CompositionError(f"{part}: {fault}")
    return parts, tiers[0] if tiers else None


def _made(spec: ComponentSpec, registry: Registry) -> Part | TierPart:
    component_type = registry.component(spec.kind)
    origin = registry.source("component", spec.kind)
    what = f"component {spec.name!r} ({origin})"
    with naming(what, f"cannot be made with the options {dict(spec.options)!r}", "Correct the profile's options"):
        instance = component_type.make(name=spec.name, **spec.options)
    part = _part(instance, origin)
    if part.name != spec.name:
        raise CompositionError(
            f"{what} was made under the name {part.name!r}: its make(name=...) must keep the name that it is given"
        )
    return part


def _part(instance: Any, origin: str) -> Part | TierPart:
    """Check that an instance has a name, a manifest and a reach, each of its type; a tier has no reach."""
    label = f"a component ({origin})"
    check_identity(instance, label)
    wanted: list[tuple[str, type]] = [("name", str), ("manifest", Manifest), ("reach", Reach)]
    tier = isinstance(getattr(instance, "manifest", None), TierManifest)
    for attribute, kind in wanted[:1] if tier else wanted:
        with naming(label, f"has no {attribute!r}", "prefixloom.Component takes a name, a manifest and a reach"):
            of_type(getattr(instance, attribute), kind, f"its {attribute}")
    if not instance.name:
        raise CompositionError(f"{label} has an empty name. Give it one")
    hooks = bind(instance, f"component {instance.name!r} ({origin})")
    if tier:
        return TierPart(instance.name, instance, instance.manifest, {}, hooks, origin)
    unit: Unit = "boundary" if instance.reach.unit == "boundary" else "page"
    return Part(instance.name, instance, instance.manifest, instance.reach, unit, 0, 0, hooks, origin)


def _faults(part: Part) -> Iterator[str]:
    """Yield what is wrong with a manifest that its reach does not allow, or with a reach of impossible answers."""
    manifest, reach, states = part.manifest, part.reach, part.unit == "boundary"
    if reach.unit not in ("page", "boundary"):
        yield f"reach.unit must be 'page' or 'boundary', got {reach.unit!r}"
    if manifest.stored_as is not None:
        if not states:
            yield (
                "stored_as is for states. Pages on the device are read in place, so they cannot be stored in another "
                "form. Leave it out"
            )
        Coder(manifest)  # refuses a form that it does not know, or whose error is above the codec's tolerance
    if states and (manifest.tokens_per_slot != 1 or manifest.page_size is not None):
        yield (
            "tokens_per_slot and page_size are for data of token positions; its reach belongs to the boundary. Leave "
            "them out, and say where states can be taken with grid"
        )
    if not states and manifest.admission is not None:
        yield (
            "admission says which states the tree takes, and it has pages. Leave it out; the hook commit_insert says "
            "which pages to keep"
        )
    needs_data = False
    for n in PROBES:
        with naming(part, f"has the reach {reach!r}, which fails at {n}", "Correct needs and until"):
            spans, last = tuple(reach.needs(n)), float(reach.until(n))
            fits = all(isinstance(lo, int) and isinstance(hi, int) and 0 <= lo <= hi <= n for lo, hi in spans)
        if not fits or math.isnan(last):
            yield (
                f"its reach {reach!r} answers needs({n}) = {spans!r}, until({n}) = {last!r}. needs(n) must give token "
                f"intervals within [0, n), until(p) a number"
            )
        needs_data = needs_data or any(lo < hi for lo, hi in spans)
    if needs_data and states:
        yield (
            f"its reach {reach!r} belongs to boundaries and yet needs token positions. Split it into two components, "
            f"one of each unit"
        )


# ---------------------------------------------------------------- numbers


def paged(parts: Sequence[Part], asked: int | None) -> tuple[tuple[Part, ...], int]:
    """Return the parts with their pages, and the page of the tree: the least common multiple of all pages and grids."""
    common = DEFAULT_PAGE if asked is None else whole(asked, "page_size", high=MAX_PAGE, unit=" tokens")
    paged: list[Part] = []
    for part in parts:
        if part.unit == "page":
            own, group = part.manifest.page_size, part.manifest.tokens_per_slot
            page = common if own is None else whole(own, f"{part}: page_size", high=MAX_PAGE, unit=" tokens")
            if page % group:
                raise CompositionError(
                    f"{part}: one slot stands for {group} tokens and would straddle pages of {page}. Choose a "
                    f"page_size that {group} divides"
                )
            part = attrs.evolve(part, page_tokens=page)
        paged.append(part)
    pages = [part.page_tokens for part in paged if part.page_tokens] or [common]
    tree_page = math.lcm(*pages, *(part.manifest.grid for part in paged))
    if tree_page > MAX_TREE_PAGE:
        numbers = [
            f"{part.name}: {f'page {part.page_tokens} and ' if part.page_tokens else ''}grid {part.manifest.grid}"
            for part in paged
        ]
        raise CompositionError(
            f"impossible page sizes: the least common multiple of all pages and grids is {tree_page} tokens, more than "
            f"{MAX_TREE_PAGE} ({'; '.join(numbers)}). Choose sizes that divide each other"
        )
    return tuple(paged), tree_page


def rewind_depth(parts: Sequence[Part], asked: int) -> int:
    """Return ``asked``, the tokens that a sequence may take back, if every component allows as many."""
    whole(asked, "max_rewind", 0)
    for part in parts:
        own = part.manifest.max_rewind
        if own is None:
            own = asked if part.unit == "page" else 0
        if asked > own:
            raise CompositionError(
                f"{part} can take back {own} tokens and max_rewind={asked} was asked for. Ask for at most {own}, or "
                f"give the component a larger max_rewind"
            )
    return asked


# ---------------------------------------------------------------- the tier


def sized_tier(tier: TierPart, demands: Iterable[Demand], page: int) -> TierPart:
    """Return the tier of a composition with the pages or states of each component that it holds."""
    unknown = [name for name in tier.hooks.overridden if name not in TIER_HOOKS]
    if unknown:
        raise CompositionError(
            f"{tier} overrides hooks that are never called on a tier: {', '.join(unknown)}. Hooks of a tier: "
            f"{', '.join(TIER_HOOKS)}"
        )
    manifest = tier.manifest
    held = [_at_rest(demand, manifest) for demand in demands]
    with naming(tier, "cannot be sized"):
        if manifest.memory is not None:
            sizes = equal_tokens(held, page, parse_memory(manifest.memory))
        else:
            assert manifest.capacity is not None
            sizes = from_capacity(held, page, manifest.capacity)
        consensus: Consensus | None = getattr(tier.component, "consensus", None)
        if consensus is not None:  # the tier serves several ranks, whose caches must make the same decisions
            names = ("write", "hits", "load_at_least")
            consensus.agree_same({name: str(getattr(manifest, name)) for name in names})
            sizes = dict(consensus.agree_min(sizes))
    lines = tuple(f"{tier.name} {line}" for line in sizing_lines(held, sizes, "the tier below the device"))
    return attrs.evolve(tier, capacity=sizes, sizing=lines)


def _at_rest(demand: Demand, tier: TierManifest) -> Demand:
    """Return the demand of a component below the device, where all its slots have the form in which they rest."""
    manifest = demand.part.manifest
    stored = manifest if manifest.stored_as is None else Coder(manifest).stored
    return Demand(attrs.evolve(demand.part, manifest=stored, running=0), 0, tier.layout)
