"""Composition: from the arguments of ``compose`` to a cache.

Each step refuses what cannot be, with the reason, before anything is allocated. All decisions follow from manifests and
reaches: no kind of component is known here.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeVar

import attrs

from ..cache.cache import Cache
from ..contract.admission import ADMISSIONS, AdmissionPolicy
from ..contract.checks import of_type, whole
from ..contract.composition import Composition, Part, TierPart
from ..contract.manifest import LAYOUTS, Layout
from ..contract.policy import BUILT_IN, EvictionPolicy
from ..contract.values import Profile
from ..device.codecs import Coder
from ..errors import CompositionError
from ..operations.state import Core
from .binding import naming
from .build import build
from .capabilities import gather, paged, rewind_depth, sized_tier
from .profiles import resolve_profile
from .registry import Registry, default_registry
from .sizing import Capacity, Demand, Traffic, sizes_for

log = logging.getLogger("prefixloom")

P = TypeVar("P", EvictionPolicy, AdmissionPolicy)

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
    ``serve``       the component that serves layers of a kind, where several installed ones do:
                    {"sliding_attention": "mine"}

    It raises a CompositionError if the components do not fit together; nothing is allocated then.
    """
    registry = default_registry() if registry is None else of_type(registry, Registry, "registry")
    profile = resolve_profile(Profile(()) if model is None else model, registry, serve)
    parts, tier = gather(profile, plugins, registry)
    if layout not in LAYOUTS:
        raise CompositionError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    parts, page = paged(parts, profile.page_size if page_size is None else page_size)
    rewind = rewind_depth(parts, profile.max_rewind if max_rewind is None else max_rewind)
    traffic = _traffic(traffic, max_running)
    parts = tuple(
        _with_admission(_with_pool_at_rest(part, slots, traffic, rewind), admission, registry) for part in parts
    )
    # states always lie layer by layer
    demands = [Demand(part, rewind, layout if part.page_tokens else "layer_first") for part in parts]
    sizes, sizing = sizes_for(demands, page, capacity, memory, traffic)
    if tier is not None:
        tier = sized_tier(tier, demands, page)
        sizing += tier.sizing
    for warning in profile.warnings:
        log.warning("%s", warning)
    if debug is None:
        debug = os.environ.get("PREFIXLOOM_DEBUG") == "1"
    composition = Composition(
        name=profile.name,
        parts=tuple(attrs.evolve(part, capacity=sizes[part.name]) for part in parts),
        page=page,
        lookahead=max(part.manifest.lookahead for part in parts),
        max_rewind=rewind,
        device=_device(device),
        layout=layout,
        lent=slots == "lent",
        policy=_eviction(policy, shares, registry),
        debug=of_type(debug, bool, "debug"),
        sizing=sizing,
        warnings=profile.warnings,
        tier=tier,
    )
    with _COMPOSING:
        _refuse_shared(composition)
        cache = build(composition, registry, tensors)
        _CACHES[cache.core] = weakref.ref(cache)
    return cache


# ---------------------------------------------------------------- the arguments, one by one


def _traffic(traffic: object, max_running: object) -> Traffic | None:
    given = None if traffic is None else of_type(traffic, Traffic, "traffic")
    return given if max_running is None else attrs.evolve(given or Traffic(), running=whole(max_running, "max_running"))


def _with_pool_at_rest(part: Part, slots: object, traffic: Traffic | None, rewind: int) -> Part:
    """Return a part with the number of its running states, if its cached states are stored in another form."""
    if slots not in ("own", "lent"):
        raise CompositionError(f"slots must be 'own' or 'lent', got {slots!r}")
    if part.manifest.stored_as is None:
        return part
    if slots == "lent":
        raise CompositionError(
            f"{part}: its cached states have another form (stored_as) and slots of their own, which no engine lends. "
            f"Compose it with slots='own', or without stored_as"
        )
    if not Coder(part.manifest).changes:
        return part
    if traffic is None:
        raise CompositionError(
            f"{part}: its cached states have another form (stored_as) and a pool of their own. Say how many sequences "
            f"run at once (max_running, or traffic), so that both pools can be sized"
        )
    return attrs.evolve(part, running=traffic.running * (1 + (rewind + 1 if rewind else 0)))


def _with_admission(part: Part, common: object, registry: Registry) -> Part:
    """Return a part with the admission policy of its states: its own, or the composition's."""
    shared = _chosen(common, AdmissionPolicy, ADMISSIONS, registry.admission, "admission")
    own = part.manifest.admission
    if part.unit == "page":
        return part
    if own is not None:
        shared = _chosen(own, AdmissionPolicy, ADMISSIONS, registry.admission, str(part))
    return attrs.evolve(part, admission=shared)


def _chosen(given: object, kind: type[P], built_in: Mapping[str, P], installed: Callable[[str], P], what: str) -> P:
    """Return the policy that was given as ``what``: an object, or the name of one that is built in or installed."""
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


def _eviction(policy: object, shares: object, registry: Registry) -> EvictionPolicy:
    """Return the eviction policy with the shares of owners. It makes queues here, so that a broken one is refused."""
    chosen = _chosen(policy, EvictionPolicy, BUILT_IN, registry.policy, "policy")
    for states in (False, True):
        with naming(f"eviction policy {chosen.name!r}", "cannot make a queue"):
            chosen.queue(states=states)
    if shares is None:
        return chosen
    told = "shares are a mapping from owners to numbers above 0, got"
    if not isinstance(shares, Mapping):
        raise CompositionError(f"{told} {shares!r}")
    for owner, share in shares.items():
        if owner.__class__ is not str or share.__class__ not in (int, float) or not 0 < share < math.inf:
            raise CompositionError(f"{told} {owner!r}: {share!r}")
    return attrs.evolve(chosen, shares=dict(shares))


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


# ---------------------------------------------------------------- instances that serve one cache


def _refuse_shared(composition: Composition) -> None:
    """Refuse an instance that serves another cache: its pool and its notes are that one's (0076)."""

    def shared() -> list[Part | TierPart]:
        used = [core for core, cache in _CACHES.items() if cache() is not None or core.live]
        others = [part.component for core in used for part in _with_notes(core.shape.composition)]
        return [part for part in _with_notes(composition) if any(part.component is other for other in others)]

    if shared():
        gc.collect()  # a cache that was dropped may wait for it
    for part in shared():
        raise CompositionError(f"{part} serves another cache that is still in use. Make an instance for each cache")


def _with_notes(composition: Composition) -> list[Part | TierPart]:
    """Return the tier, and the components that may remember something of a cache: by a hook, or by their pool."""
    noting = [part for part in composition.parts if part.hooks.overridden or hasattr(part.component, "pool")]
    return [*noting] if composition.tier is None else [*noting, composition.tier]
