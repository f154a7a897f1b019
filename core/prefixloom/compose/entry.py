"""Composition: from the arguments of ``compose`` to a cache.

``negotiate`` turns the arguments into a frozen ``Composition``, or refuses them with the reason, before anything is
allocated; ``compose`` builds the cache from it. All decisions follow from manifests and reaches: no kind of component
is known here.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeVar

import attrs

from ..cache.cache import Cache
from ..contract.admission import ADMISSIONS, AdmissionPolicy
from ..contract.composition import Composition, Hooks, Part, TierPart
from ..contract.manifest import LAYOUTS, Layout, parse_memory
from ..contract.policy import BUILT_IN, EvictionPolicy, missing_methods
from ..contract.values import Profile
from ..device.codecs import Coder
from ..errors import CompositionError
from ..operations.state import Core
from .binding import bind, make_manager
from .build import build
from .capabilities import (
    Candidate,
    TierCandidate,
    check_supported,
    gather,
    page_sizes,
    rewind_depth,
    tree_page,
)
from .profiles import resolve_profile
from .registry import Registry, default_registry
from .sizing import (
    Demand,
    Traffic,
    by_default,
    check_states,
    from_mapping,
    from_tokens,
    from_traffic,
    sizing_lines,
)
from .tier import tier_part

log = logging.getLogger("prefixloom")

P = TypeVar("P")

Capacity = int | Mapping[str, int]
Slots = Literal["own", "lent"]


_CACHES: weakref.WeakKeyDictionary[Core, weakref.ref[Cache]] = weakref.WeakKeyDictionary()
"""All caches; a component's pool keeps the core of one that was dropped."""
_COMPOSING = threading.RLock()


def compose(
    model: object,
    *,
    page_size: int | None = None,
    capacity: Capacity | None = None,
    memory: int | str | None = None,
    traffic: Traffic | None = None,
    max_running: int | None = None,
    device: object = "cpu",
    layout: Layout = "layer_first",
    slots: Slots = "own",
    tensors: Mapping[str, Mapping[str, object]] | None = None,
    policy: str | EvictionPolicy = "lru",
    shares: Mapping[str, float] | None = None,
    admission: str | AdmissionPolicy = "all",
    max_rewind: int | None = None,
    debug: bool | None = None,
    tracing: bool = False,
    serve: Mapping[str, str] | None = None,
    plugins: Iterable[object] = (),
    registry: Registry | None = None,
) -> Cache:
    """Make the prefix cache for a model.

    ``model``       a model config (dict, object with ``to_dict``, path), a .toml profile, a Profile, or None
    ``plugins``     your own component instances, added to the model's, or alone if ``model`` is None
    ``page_size``   tokens of a page, 1 to 4096, of components without their own (default: the profile's, or 16)
    ``capacity``    tokens that every page component holds (rounded up to pages), with one state slot per 2048 of
                    them, at least 16; or a mapping from each component's name to its tokens or state slots
    ``memory``      bytes, or a text such as "20GiB", in place of ``capacity``: divided for ``traffic``
    ``traffic``     a ``Traffic``, the requests to divide memory for (default: ``Traffic()``, with fewer running
                    sequences if the memory is small); ``stats().sizing`` explains the result
    ``max_running`` sequences that run at once (default: the traffic's, or 1); a state pool that is too small for them
                    is refused
    ``device``      cpu, cuda, cuda:N or meta
    ``layout``      layout of pages on the device: "layer_first", a contiguous tensor for each buffer of a component; or
                    "page_first", all layers of a page together, which a tier of the same layout copies in one piece
    ``slots``       who hands out the slots of the pools: "own", the cache; or "lent", an engine, which hands in what it
                    has computed (``Cache.insert``) and takes back what nobody uses (``Cache.take_back``). With the
                    device "meta", the cache then keeps books only
    ``tensors``     memory that somebody else has, in place of the cache's own: by component and buffer a tensor
                    (layers, slots, ...), or one (slots, ...) for each layer
    ``policy``      the order of eviction: the name of a policy, built in or installed, or an EvictionPolicy
    ``shares``      by owner, its part of every pool of every tier where others want it too; who is not there has 1. The
                    owner of a namespace is what its name has before the first slash. Room is made of what the owner has
                    that keeps most for its share. None: all namespaces are one owner's
    ``admission``   which states the tree takes, for components that have no policy of their own: the name of a policy,
                    built in ("all", "branch-and-last") or installed, or an AdmissionPolicy
    ``max_rewind``  committed, unpublished tokens that a sequence may take back (default: the profile's, or 0)
    ``debug``       check everything after every operation (default: PREFIXLOOM_DEBUG=1 in the environment)
    ``tracing``     call hooks through the composition's plugin manager, so that monitoring sees them
    ``serve``       the component that serves layers of a kind, where several installed ones do:
                    {"sliding_attention": "mine"}

    It raises a CompositionError if the components do not fit together; nothing is allocated then.
    """
    registry = default_registry() if registry is None else registry
    composition = negotiate(
        model, page_size=page_size, capacity=capacity, memory=memory, traffic=traffic, max_running=max_running,
        device=device, layout=layout, slots=slots, policy=policy, shares=shares, admission=admission,
        max_rewind=max_rewind, debug=debug, tracing=tracing, serve=serve, plugins=plugins, registry=registry,
    )  # fmt: skip
    with _COMPOSING:
        _refuse_shared(composition)
        cache = build(composition, registry, tensors)
        _CACHES[cache.core] = weakref.ref(cache)
    return cache


def _refuse_shared(composition: Composition) -> None:
    """Refuse an instance that serves another cache: its pool and its notes are that one's (0076)."""

    def shared() -> list[Part | TierPart]:
        used = [core for core, cache in _CACHES.items() if cache() is not None or core.live]
        others = [part.component for core in used for part in _with_notes(core.shape.composition)]
        return [part for part in _with_notes(composition) if any(part.component is other for other in others)]

    if shared():
        gc.collect()  # a cache that was dropped may wait for it
    for part in shared():
        raise CompositionError(
            f"{part.name!r} ({part.origin}) serves another cache that is still in use. Make an instance for each cache"
        )


def _with_notes(composition: Composition) -> list[Part | TierPart]:
    """The tier, and the components that may remember something of a cache: by a hook, or by their pool."""
    parts: list[Part | TierPart] = [
        part for part in composition.parts if part.hooks.overridden or hasattr(part.component, "pool")
    ]
    return parts if composition.tier is None else [*parts, composition.tier]


def negotiate(
    model: object,
    *,
    page_size: int | None = None,
    capacity: Capacity | None = None,
    memory: int | str | None = None,
    traffic: Traffic | None = None,
    max_running: int | None = None,
    device: object = "cpu",
    layout: Layout = "layer_first",
    slots: Slots = "own",
    policy: str | EvictionPolicy = "lru",
    shares: Mapping[str, float] | None = None,
    admission: str | AdmissionPolicy = "all",
    max_rewind: int | None = None,
    debug: bool | None = None,
    tracing: bool = False,
    serve: Mapping[str, str] | None = None,
    plugins: Iterable[object] = (),
    registry: Registry | None = None,
) -> Composition:
    """Return the composition from which ``compose`` would build a cache. Nothing is allocated."""
    registry = default_registry() if registry is None else registry
    profile = resolve_profile(Profile(()) if model is None else model, registry, serve)
    candidates, below = gather(profile, plugins, registry)
    for candidate in candidates:
        check_supported(candidate)
    asked_page = profile.page_size if page_size is None else page_size
    pages = page_sizes(candidates, asked_page)
    page = tree_page(candidates, pages, asked_page)
    rewind = rewind_depth(candidates, profile.max_rewind if max_rewind is None else max_rewind)
    eviction = _checked(_chosen(policy, EvictionPolicy, BUILT_IN, registry.policy, "policy"))
    if shares is not None:
        eviction = attrs.evolve(eviction, shares=_checked_shares(shares))
    admissions = _admissions(candidates, admission, registry)
    mix = _traffic(traffic, max_running)
    demands = {c.name: _demand(c, pages[c.name], mix, rewind, layout) for c in candidates}
    sizes, sizing = _sizes(tuple(demands.values()), page, capacity, memory, mix, rewind)
    for warning in profile.warnings:
        log.warning("%s", warning)
    everything: list[Candidate | TierCandidate] = [*candidates, *([] if below is None else [below])]
    manager = make_manager({c.name: c.component for c in everything}, {c.name: c.origin for c in everything})
    tier = None if below is None else tier_part(below, demands, page, bind(manager, below.name, tracing=tracing))
    return Composition(
        name=profile.name,
        parts=tuple(
            _part(c, demands[c.name], sizes[c.name], bind(manager, c.name, tracing=tracing), admissions.get(c.name))
            for c in candidates
        ),
        page=page,
        lookahead=max(candidate.manifest.lookahead for candidate in candidates),
        max_rewind=rewind,
        device=_device(device),
        layout=_layout(layout),
        lent=_checked_slots(slots, candidates) == "lent",
        policy=eviction,
        debug=os.environ.get("PREFIXLOOM_DEBUG") == "1" if debug is None else bool(debug),
        tracing=tracing,
        manager=manager,
        sizing=sizing + (() if tier is None else tier.sizing),
        warnings=profile.warnings,
        tier=tier,
    )


def _part(candidate: Candidate, demand: Demand, capacity: int, hooks: Hooks, admission: AdmissionPolicy | None) -> Part:
    return Part(
        name=candidate.name,
        component=candidate.component,
        manifest=candidate.manifest,
        reach=candidate.reach,
        unit=candidate.unit,
        page_tokens=demand.page_tokens,
        capacity=capacity,
        hooks=hooks,
        origin=candidate.origin,
        admission=admission,
        running=demand.live,
    )


def _demand(candidate: Candidate, page_tokens: int, traffic: Traffic | None, rewind: int, layout: Layout) -> Demand:
    """Collect what sizing must know of a component. ``layout`` is that of pages; states are always layer by layer."""
    layout = layout if page_tokens else "layer_first"
    demand = Demand(candidate.name, candidate.manifest, page_tokens, candidate.reach, layout=layout)
    if candidate.manifest.stored_as is None or not Coder(candidate.manifest).changes:
        return demand
    if traffic is None:
        raise CompositionError(
            f"{candidate}: its cached states have another form (stored_as) and a pool of their own. Say how many "
            f"sequences run at once (max_running, or traffic), so that both pools can be sized"
        )
    return attrs.evolve(demand, live=traffic.running * demand.live_of_one(rewind))


def _device(device: object) -> str:
    name = str(device)
    if name in ("cpu", "meta"):
        return name
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise CompositionError(f"device must be cpu, cuda, cuda:N or meta, got {device!r}")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(match[1] or 0) >= count:
        raise CompositionError(
            f"device {name!r} was asked for and torch {torch.__version__} sees {count} CUDA devices here. Use "
            f"device='cpu', or install a torch built for this machine's GPU"
        )
    return name


def _checked_slots(slots: object, candidates: Sequence[Candidate]) -> str:
    if slots not in ("own", "lent"):
        raise CompositionError(f"slots must be 'own' or 'lent', got {slots!r}")
    coded = [candidate for candidate in candidates if candidate.manifest.stored_as is not None]
    if slots == "lent" and coded:
        raise CompositionError(
            f"{coded[0]}: its cached states have another form (stored_as) and slots of their own, which no engine "
            f"lends. Compose it with slots='own', or without stored_as"
        )
    return str(slots)


def _layout(layout: Layout) -> Layout:
    if layout not in LAYOUTS:
        raise CompositionError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return layout


def _chosen(given: object, kind: type[P], built_in: Mapping[str, P], installed: Callable[[str], P], what: str) -> P:
    """The policy that was given as ``what``: an object, or the name of one that is built in or installed."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, str):
        raise CompositionError(f"{what} must be a name or an {kind.__name__}, got {given!r}")
    if given in built_in:
        return built_in[given]
    try:
        return installed(given)
    except CompositionError as error:
        by = "" if what in ("policy", "admission") else f"{what}: "
        raise CompositionError(f"{by}{error}. Built in: {', '.join(built_in)}") from error


def _admissions(candidates: Sequence[Candidate], common: object, registry: Registry) -> dict[str, AdmissionPolicy]:
    """The admission policy of each boundary component: its own, or the composition's."""

    def chosen(given: object, what: str) -> AdmissionPolicy:
        return _chosen(given, AdmissionPolicy, ADMISSIONS, registry.admission, what)

    shared = chosen(common, "admission")
    return {
        c.name: shared if c.manifest.admission is None else chosen(c.manifest.admission, str(c))
        for c in candidates
        if c.unit == "boundary"
    }


def _checked_shares(shares: object) -> Mapping[str, float]:
    if not isinstance(shares, Mapping):
        raise CompositionError(f"shares are a mapping from owners to numbers above 0, got {shares!r}")
    for owner, share in shares.items():
        if owner.__class__ is not str or share.__class__ not in (int, float) or not 0 < share < math.inf:
            raise CompositionError(f"shares are a mapping from owners to numbers above 0, got {owner!r}: {share!r}")
    return dict(shares)


def _checked(policy: EvictionPolicy) -> EvictionPolicy:
    """Check an eviction policy by making queues, so that a broken one is refused now and not in service."""
    for states in (False, True):
        try:
            queue = policy.queue(states=states)
            missing = missing_methods(queue)
        except CompositionError:
            raise
        except Exception as error:
            raise CompositionError(f"eviction policy {policy.name!r} cannot make a queue: {error!r}") from error
        if missing:
            raise CompositionError(
                f"eviction policy {policy.name!r} makes {queue!r}, which has no {', '.join(missing)}"
            )
    return policy


def _traffic(traffic: object, max_running: object) -> Traffic | None:
    if traffic is not None and not isinstance(traffic, Traffic):
        raise CompositionError(f"traffic must be a prefixloom.Traffic, got {traffic!r}")
    if max_running is None:
        return traffic
    if not isinstance(max_running, int) or isinstance(max_running, bool) or max_running < 1:
        raise CompositionError(f"max_running must be a whole number of at least 1, got {max_running!r}")
    return attrs.evolve(traffic or Traffic(), running=max_running)


def _sizes(
    demands: Sequence[Demand],
    page: int,
    capacity: Capacity | None,
    memory: int | str | None,
    traffic: Traffic | None,
    rewind: int,
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Pool pages or state slots by component, and the reasons in words."""
    if capacity is not None and memory is not None:
        raise CompositionError(
            "say how large the cache is by capacity or by memory, not by both: capacity follows from memory"
        )
    if memory is not None:
        budget = parse_memory(memory)
        if traffic is None:
            return by_default(demands, page, budget, rewind)
        return from_traffic(demands, page, budget, traffic, rewind)
    if capacity is None:
        raise CompositionError('say how large the cache is: capacity=<tokens> or memory="20GiB"; neither was given')
    if isinstance(capacity, Mapping):
        sizes = from_mapping(demands, page, capacity)
        check_states(demands, sizes, 1 if traffic is None else traffic.running, rewind)
    else:
        sizes = from_tokens(demands, page, capacity, rewind)
        for demand in demands:
            if traffic is not None and not demand.page_tokens:
                sizes[demand.name] = max(sizes[demand.name], demand.states_needed(traffic.running, rewind))
    return sizes, sizing_lines(demands, sizes, "as capacity says")
