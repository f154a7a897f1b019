"""Building: from a composition to a wired cache.

Pools and lanes are made, ``Shape`` says what follows from them once, and the parts of the ``Core`` are wired together,
the tier below and debug mode among them. It does no cache operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..cache.cache import Cache
from ..contract.composition import Composition, Part
from ..contract.policy import serving
from ..contract.queues import Queue
from ..contract.values import Tier, WalkView
from ..device.codecs import Coder
from ..device.flight import Flight
from ..device.pool import DebugPool, Pool
from ..device.tables import Tables
from ..errors import CompositionError
from ..insight.debug import Debug
from ..operations.plugin_calls import PluginCalls
from ..operations.state import Core, Shape
from ..operations.teardown import fail_work
from ..operations.unwritten import Unwritten
from ..tiers.host_lane import HostLane, make_host_lanes
from ..tiers.host_tier import LowerTier
from ..tree.lane import Lane
from ..tree.partial_lane import PartialLane
from ..tree.path_lane import PathLane
from ..tree.state_lane import CodedLane, StateLane
from .binding import naming
from .registry import Registry

Validators = list[tuple[str, Callable[[WalkView], int]]]


def build(composition: Composition, registry: Registry, tensors: Mapping[str, Any] | None = None) -> Cache:
    """Make the cache of ``composition``. Adapters of models are looked up in ``registry``.

    ``tensors``: memory that somebody else has, by component.
    """
    tensors = _checked_tensors(composition, tensors)
    validators = make_validators(composition, ("device",))  # first: a plugin may refuse, and nothing is allocated yet
    tier_validators = [] if composition.tier is None else make_validators(composition, ("device", "host"))
    lanes = tuple(make_lane(composition, i, tensors.get(part.name)) for i, part in enumerate(composition.parts))
    for lane in lanes:
        lane.feeds = tuple(other for other in lanes if _falls_with(other, lane))
    host_lanes = () if composition.tier is None else make_host_lanes(composition, composition.tier, lanes)
    shape = Shape(composition, lanes, host_lanes, validators, tier_validators)
    return Cache(make_core(shape, host_lanes), registry.session_plugins)


def make_core(shape: Shape, host_lanes: tuple[HostLane, ...]) -> Core:
    """Return a core whose parts know each other."""
    composition = shape.composition
    core = Core(shape)
    pools = [pool for lane in shape.all_lanes for pool in lane.pools]
    core.flight = flight = Flight(pools)
    core.unwritten = unwritten = Unwritten()
    flight.on_failure = partial(fail_work, core)
    flight.on_over = unwritten.work_over
    flight.on_reuse = unwritten.reused
    for pool in pools:
        pool.dropped = core.dropped
    core.plugins = PluginCalls()
    core.tables = Tables(flight, composition.device)
    if composition.tier is not None:
        core.below = LowerTier(core, composition.tier, host_lanes)
    if composition.debug:
        core.watcher = Debug(core)
    return core


# ---------------------------------------------------------------- lanes


def _checked_tensors(composition: Composition, tensors: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Refuse memory that no component can take."""
    if tensors is None:
        return {}
    if not isinstance(tensors, Mapping):
        raise CompositionError(f"tensors are given as a mapping by component, got {tensors!r}")
    parts = {part.name: part for part in composition.parts}
    for name in tensors:
        if name not in parts:
            raise CompositionError(f"tensors were given for {name!r}; there are {', '.join(parts)}")
        if parts[name].running or composition.layout != "layer_first":
            raise CompositionError(
                f"component {name!r} cannot lie in tensors that were given: its states have another form (stored_as), "
                f"or the cache has the layout {composition.layout!r}"
            )
    return tensors


def make_lane(composition: Composition, index: int, tensors: Mapping[str, Any] | None = None) -> Lane:
    """Return the lane of one component, with its pool."""
    part = composition.parts[index]
    entries = part.page_tokens // part.manifest.tokens_per_slot if part.page_tokens else 1
    kind = DebugPool if composition.debug else Pool
    make = partial(kind, unit=part.unit, entries=entries, device=composition.device, lent=composition.lent)
    layout = composition.layout if part.unit == "page" else "layer_first"
    try:
        live = make(part.name, part.manifest, capacity=part.running or part.capacity, layout=layout, tensors=tensors)
    except CompositionError as error:
        if tensors is None:
            raise
        raise CompositionError(f"component {part.name!r} cannot lie in the tensors that were given: {error}") from error
    queue = serving(composition.policy, states=part.unit == "boundary")
    if hasattr(part.component, "pool"):
        part.component.pool = live
    if not part.running:
        return lane_for(index, part, live, queue, composition)
    coder = Coder(part.manifest)
    rest = make(f"{part.name} at rest", coder.stored, capacity=part.capacity - part.running)
    return CodedLane(index, part, rest, queue, composition.page, composition.max_rewind, live, coder)


def lane_for(index: int, part: Part, pool: Pool, queue: Queue, composition: Composition) -> Lane:
    """Return the lane of a part's kind of reach: a boundary, a whole path, or any other positions."""
    reach = part.reach
    if reach.unit == "boundary":
        return StateLane(index, part, pool, queue, composition.page, composition.max_rewind)
    if reach.closed_upward:
        return PathLane(index, part, pool, queue, composition.page)
    return PartialLane(index, part, pool, queue, composition.page)


def _falls_with(lane: Lane, lost: Lane) -> bool:
    """Return whether cells of ``lane`` may be useless once ``lost`` has evicted its own at their node.

    They are kept where a plugin is to be asked before it loses a cell.
    """
    if lane is lost or lane.hooks.evict_component is not None:
        return False
    return lost.closed_upward or lane.unit == "boundary"


def make_validators(composition: Composition, tiers: tuple[Tier, ...]) -> Validators:
    """Return the validators of matches over ``tiers`` that plugins have, by component."""
    validators: Validators = []
    for part in composition.parts:
        maker = part.hooks.create_match_validator
        if maker is None:
            continue
        with naming(part, "raised in create_match_validator"):
            validator = maker(tiers)
        if validator is None:
            continue
        if not callable(validator):
            raise CompositionError(
                f"component {part.name!r}: create_match_validator must return a function or None, got {validator!r}"
            )
        validators.append((part.name, validator))
    return validators
