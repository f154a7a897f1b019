"""Capabilities: the checks whether a set of components fits together, and the numbers that follow from their manifests.

Each refusal names the component, the reason and the remedy, before anything is allocated. No kind of component is known
here: the checks look only at manifests and reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..contract.manifest import Manifest, TierManifest, Unit
from ..contract.reach import Reach
from ..contract.values import ComponentSpec, Profile
from ..device.codecs import Coder
from ..errors import CompositionError
from .binding import check_identity
from .registry import Registry

DEFAULT_PAGE = 16

MAX_PAGE = 4096

MAX_TREE_PAGE = 4096

PROBES = (0, 1, 2, 63, 64, 65, 4096)
"""The boundaries at which the answers of a reach are checked."""


@attrs.frozen
class Candidate:
    """A component instance that was not checked yet."""

    name: str
    component: Any
    manifest: Manifest
    reach: Reach
    origin: str

    @property
    def unit(self) -> Unit:
        return "boundary" if self.reach.unit == "boundary" else "page"

    def __str__(self) -> str:
        return f"component {self.name!r} ({self.origin})"


@attrs.frozen
class TierCandidate:
    """A tier below the device that was not checked yet."""

    name: str
    component: Any
    manifest: TierManifest
    origin: str

    def __str__(self) -> str:
        return f"tier {self.name!r} ({self.origin})"


def gather(
    profile: Profile, plugins: Iterable[object], registry: Registry
) -> tuple[tuple[Candidate, ...], TierCandidate | None]:
    """Return the components, the profile's before the caller's, each in the given order; and the tier, if any."""
    if isinstance(plugins, str) or not isinstance(plugins, Iterable):
        raise CompositionError(
            f"plugins must be a list of component instances, got {plugins!r}. An installed one is named by a Profile: "
            f'Profile([ComponentSpec("its name")])'
        )
    plugins = tuple(plugins)
    for name in (each for each in plugins if isinstance(each, str)):
        raise CompositionError(
            f"plugins takes component instances, and {name!r} is a name. An installed one is named by a Profile: "
            f"Profile([ComponentSpec({name!r})])"
        )
    everything = [_made(spec, registry) for spec in profile.components]
    everything += [_candidate(plugin, f"passed to compose, class {_class_name(plugin)}") for plugin in plugins]
    found = [candidate for candidate in everything if isinstance(candidate, Candidate)]
    tiers = [candidate for candidate in everything if isinstance(candidate, TierCandidate)]
    if len(tiers) > 1:
        raise CompositionError(f"two tiers below the device, and there can be one: {tiers[0]} and {tiers[1]}")
    if not found:
        raise CompositionError(
            "a cache needs at least one component: pass a model config or a profile that names one, or plugins=[...]"
        )
    seen: dict[str, Candidate | TierCandidate] = {}
    for candidate in everything:
        if candidate.name in seen:
            raise CompositionError(
                f"two components are named {candidate.name!r}: one from {seen[candidate.name].origin}, one from "
                f"{candidate.origin}. Give each a name of its own"
            )
        seen[candidate.name] = candidate
    return tuple(found), tiers[0] if tiers else None


def _made(spec: ComponentSpec, registry: Registry) -> Candidate | TierCandidate:
    component_type = registry.component(spec.kind)
    origin = registry.source("component", spec.kind)
    try:
        instance = component_type.make(name=spec.name, **spec.options)
    except CompositionError as error:
        raise CompositionError(f"component {spec.name!r} ({origin}): {error}") from error
    except Exception as error:
        raise CompositionError(
            f"component {spec.name!r} ({origin}) cannot be made with the options {dict(spec.options)!r}: "
            f"{type(error).__name__}: {error}. Correct the profile's options"
        ) from error
    candidate = _candidate(instance, origin)
    if candidate.name != spec.name:
        raise CompositionError(
            f"component {spec.name!r} ({origin}) was made under the name {candidate.name!r}: its make(name=...) must "
            f"keep the name that it is given"
        )
    return candidate


def _class_name(instance: object) -> str:
    cls = instance if isinstance(instance, type) else type(instance)
    return f"{cls.__module__}.{cls.__qualname__}"


def _candidate(instance: Any, origin: str) -> Candidate | TierCandidate:
    """Check that an instance has a name, a manifest and a reach, each of its type; a tier has no reach."""
    label = f"a component ({origin})"
    check_identity(instance, label)
    wanted: list[tuple[str, Any]] = [("name", str), ("manifest", Manifest), ("reach", Reach)]
    tier = isinstance(getattr(instance, "manifest", None), TierManifest)
    for attribute, kind in wanted[:1] if tier else wanted:
        try:
            value = getattr(instance, attribute)
        except AttributeError as error:
            raise CompositionError(
                f"{label} has no {attribute!r}: a component needs a name, a manifest and a reach. "
                f"prefixloom.Component takes the three"
            ) from error
        if not isinstance(value, kind):
            raise CompositionError(f"{label}: its {attribute} must be a {kind.__name__}, got {value!r}")
    if not instance.name:
        raise CompositionError(f"{label} has an empty name. Give it one")
    if tier:
        return TierCandidate(instance.name, instance, instance.manifest, origin)
    return Candidate(instance.name, instance, instance.manifest, instance.reach, origin)


def check_supported(candidate: Candidate) -> None:
    """Refuse a component with a manifest that its reach does not allow, or a reach with impossible answers."""
    manifest, reach = candidate.manifest, candidate.reach
    if reach.unit not in ("page", "boundary"):
        raise CompositionError(f"{candidate}: reach.unit must be 'page' or 'boundary', got {reach.unit!r}")
    if manifest.stored_as is not None:
        if candidate.unit == "page":
            raise CompositionError(
                f"{candidate}: stored_as is for states. Pages on the device are read in place, so they cannot be "
                f"stored in another form. Leave it out"
            )
        Coder(manifest)  # refuses a form that it does not know, or whose error is above the codec's tolerance
    if candidate.unit == "boundary" and (manifest.tokens_per_slot != 1 or manifest.page_size is not None):
        raise CompositionError(
            f"{candidate}: tokens_per_slot and page_size are for data of token positions; its reach belongs to the "
            f"boundary. Leave them out, and say where states can be taken with grid"
        )
    if candidate.unit == "page" and manifest.admission is not None:
        raise CompositionError(
            f"{candidate}: admission says which states the tree takes, and it has pages. Leave it out; the hook "
            f"commit_insert says which pages to keep"
        )
    needs_data = _needs_data(candidate)
    if manifest.replay and (needs_data or candidate.unit == "boundary"):
        raise CompositionError(
            f"{candidate}: replay={manifest.replay} rebuilds its data in place of keeping it, and its reach "
            f"{reach!r} needs data nevertheless. Give it a reach that needs nothing, or no replay"
        )


def _needs_data(candidate: Candidate) -> bool:
    """Whether a reach needs anything at a few boundaries. A reach with impossible answers is refused."""
    needs_data = False
    for n in PROBES:
        try:
            spans = tuple(candidate.reach.needs(n))
            last = float(candidate.reach.until(n))
            fits = all(isinstance(lo, int) and isinstance(hi, int) and 0 <= lo <= hi <= n for lo, hi in spans)
        except Exception as error:
            raise CompositionError(
                f"{candidate}: its reach {candidate.reach!r} fails at {n}: {type(error).__name__}: {error}. Correct "
                f"needs and until"
            ) from error
        if not fits or math.isnan(last):
            raise CompositionError(
                f"{candidate}: its reach {candidate.reach!r} answers needs({n}) = {spans!r}, until({n}) = {last!r}. "
                f"needs(n) must give token intervals within [0, n), until(p) a number"
            )
        needs_data = needs_data or any(lo < hi for lo, hi in spans)
    if needs_data and candidate.unit == "boundary":
        raise CompositionError(
            f"{candidate}: its reach {candidate.reach!r} belongs to boundaries and yet needs token positions. Split it "
            f"into two components, one of each unit"
        )
    return needs_data


# ---------------------------------------------------------------- numbers


def _page_size(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_PAGE:
        raise CompositionError(f"{what} must be a whole number of tokens from 1 to {MAX_PAGE}, got {value!r}")
    return value


def page_sizes(candidates: Sequence[Candidate], asked: int | None) -> dict[str, int]:
    """The tokens of a pool page by component; 0 for state slots."""
    common = DEFAULT_PAGE if asked is None else _page_size(asked, "page_size")
    pages: dict[str, int] = {}
    for candidate in candidates:
        if candidate.unit == "boundary":
            pages[candidate.name] = 0
            continue
        own = candidate.manifest.page_size
        page = common if own is None else _page_size(own, f"{candidate}: page_size")
        group = candidate.manifest.tokens_per_slot
        if page % group:
            raise CompositionError(
                f"{candidate}: one slot stands for {group} tokens and would straddle pages of {page}. Choose a "
                f"page_size that {group} divides"
            )
        pages[candidate.name] = page
    return pages


def tree_page(candidates: Sequence[Candidate], pages: Mapping[str, int], asked: int | None) -> int:
    """The tokens of a page of the tree: the least common multiple of all pages and grids."""
    own = [page for page in pages.values() if page] or [DEFAULT_PAGE if asked is None else asked]
    page = math.lcm(*own, *(candidate.manifest.grid for candidate in candidates))
    if page > MAX_TREE_PAGE:
        numbers = [
            f"{candidate.name}: "
            + " and ".join(
                [f"page {pages[candidate.name]}"] * bool(pages[candidate.name]) + [f"grid {candidate.manifest.grid}"]
            )
            for candidate in candidates
        ]
        raise CompositionError(
            f"impossible page sizes: the least common multiple of all pages and grids is {page} tokens, more than "
            f"{MAX_TREE_PAGE} ({'; '.join(numbers)}). Choose sizes that divide each other"
        )
    return page


def rewind_depth(candidates: Sequence[Candidate], asked: int) -> int:
    """Return ``asked``, the tokens that a sequence may take back, if every component allows as many."""
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 0:
        raise CompositionError(f"max_rewind must be a whole number of at least 0, got {asked!r}")
    for candidate in candidates:
        own = candidate.manifest.max_rewind
        if own is None:
            own = asked if candidate.unit == "page" else 0
        if asked > own:
            raise CompositionError(
                f"{candidate} can take back {own} tokens and max_rewind={asked} was asked for. Ask for at most {own}, "
                f"or give the component a larger max_rewind"
            )
    return asked
