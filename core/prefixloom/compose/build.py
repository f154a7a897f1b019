"""Assembly: from a composition to the parts of a cache, and the numbers that follow from them once.

It makes pools and lanes and looks at which hooks are there. It does no cache operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..contract.policy import serving
from ..contract.queues import Queue
from ..contract.values import Tier
from ..device.codecs import Coder
from ..device.pool import DebugPool, Pool
from ..errors import CompositionError
from ..operations.plugin_calls import Asking
from ..tree.keys import KeyMaker
from ..tree.lane import Lane, PageLane
from ..tree.partial_lane import SlackLane
from ..tree.state_lane import CodedLane, PointLane

if TYPE_CHECKING:
    from ..contract.composition import Composition, Part


class Assembly(Asking):
    """What a cache is made of."""

    def __init__(self, composition: Composition) -> None:
        self.composition = composition
        self._validators = self._make_validators(("device",))  # a plugin may refuse: nothing has been allocated
        self._tier_validators = [] if composition.tier is None else self._make_validators(("device", "host"))
        self._page = composition.page
        self._lookahead = composition.lookahead
        self._max_rewind = composition.max_rewind
        self._keys = KeyMaker(composition.lookahead)
        self._lanes = tuple(self._make_lane(i) for i in range(len(composition.parts)))
        for lane in self._lanes:
            lane.feeds = tuple(other for other in self._lanes if self._falls_with(other, lane))
        self._page_lanes = tuple(lane for lane in self._lanes if isinstance(lane, PageLane))
        self._point_lanes = tuple(lane for lane in self._lanes if isinstance(lane, PointLane))
        self._coded_lanes = tuple(lane for lane in self._lanes if isinstance(lane, CodedLane))
        self._in_order: tuple[Lane, ...] = (*self._page_lanes, *self._point_lanes)
        self._closed_lanes = tuple(lane for lane in self._page_lanes if lane.part.reach.closed_upward)
        self._near_lanes = tuple(lane for lane in self._page_lanes if not lane.part.reach.closed_upward)
        self._all_closed = len(self._closed_lanes) == len(self._lanes) and not self._validators
        self._several_near = len(self._near_lanes) > 1
        self._several_states = len(self._point_lanes) > 1
        self._tracking = any(lane.track_every for lane in self._point_lanes)
        self._thins = any(lane.part.manifest.states_per_path is not None for lane in self._point_lanes)
        self._follows = bool(self._coded_lanes) or self._thins or composition.debug or composition.tier is not None
        """Whether a publication always has consequences."""
        self._unshared = any(not lane.shared for lane in self._lanes)
        self._sparing = tuple(lane for lane in self._page_lanes if isinstance(lane, SlackLane))
        self._retaining = bool(self._point_lanes or self._sparing)
        self._longest = min(
            (lane.pool.capacity * lane.part.page_tokens for lane in self._page_lanes if not lane.retains),
            default=1 << 62,
        )
        self._replay = max(part.manifest.replay for part in composition.parts)
        self._rewind_limit = self._find_rewind_limit()
        self._nothing: list[Any] = [None] * len(self._lanes)
        self._bind_hooks()

    # ------------------------------------------------------------ making
    def _falls_with(self, lane: Lane, lost: Lane) -> bool:
        """Whether cells of ``lane`` may be of no use any more once ``lost`` has evicted its own at their node.

        Not where a plugin is to be asked before it loses a cell.
        """
        if lane is lost or lane.hooks.evict_component is not None:
            return False
        return lost.part.reach.closed_upward or lane.unit == "boundary"

    def _make_lane(self, index: int) -> Lane:
        composition = self.composition
        part = composition.parts[index]
        entries = part.page_tokens // part.manifest.tokens_per_slot if part.page_tokens else 1
        kind = DebugPool if composition.debug else Pool
        make = partial(kind, unit=part.unit, entries=entries, device=composition.device)
        layout = composition.layout if part.unit == "page" else "layer_first"
        live = make(part.name, part.manifest, capacity=part.running or part.capacity, layout=layout)
        queue = serving(composition.policy)
        if part.running:
            coder = Coder(part.manifest)
            rest = make(f"{part.name} at rest", coder.stored, capacity=part.capacity - part.running)
            lane: Lane = CodedLane(index, part, rest, queue, composition.page, live, coder)
        else:
            lane = lane_for(index, part, live, queue, composition.page)
        if hasattr(part.component, "pool"):
            part.component.pool = live
        return lane

    def _find_rewind_limit(self) -> tuple[str, int] | None:
        """Who limits how many committed tokens can be taken back, and to how many; None: nobody."""
        limits: list[tuple[str, int]] = []
        for lane in self._lanes:
            own = lane.part.manifest.max_rewind
            if isinstance(lane, PointLane):
                lane.allow_rewind(self._max_rewind)
                limits.append((lane.name, self._max_rewind))
            elif lane.retains:
                limits.append((lane.name, self._max_rewind))
            elif own is not None:
                limits.append((lane.name, own))
        return min(limits, key=lambda limit: limit[1], default=None)

    def _bind_hooks(self) -> None:
        hooks = [lane.hooks for lane in self._lanes]
        self._lock_hooks = any(h.acquire_component_lock or h.release_component_lock for h in hooks)
        self._match_hooks = any(h.finalize_match_result for h in hooks)
        self._plugin_ops = self._match_hooks or any(h.deferred_forward_ops for h in hooks)
        tier = [] if self.composition.tier is None else [self.composition.tier.hooks]
        self._transfer_hooks = any(h.build_hicache_transfers or h.commit_hicache_transfer for h in (*hooks, *tier))
        self._insert_hooks = any(h.commit_insert for h in hooks)
        self._asks_more = self._match_hooks or self.composition.debug or self.composition.tier is not None
        """Whether a match is more than what the keys and the components say."""
        self._opens_apart = self._lock_hooks or self._match_hooks or self._replay > 0
        """Whether opening may cover more than the reaches say, or take more slots than those of running states."""
        self._admitting = any(isinstance(lane, PointLane) and lane.admit is not None for lane in self._lanes)
        self._attended = bool(
            self._tracking or self._coded_lanes or self._thins or self._unshared or self._lock_hooks
            or self._insert_hooks or self._admitting
        )  # fmt: skip
        """Whether a publication is more than each component's handing over all it has."""

    def _make_validators(self, tiers: tuple[Tier, ...]) -> list[tuple[str, Callable[..., Any]]]:
        validators: list[tuple[str, Callable[..., Any]]] = []
        for part in self.composition.parts:
            maker = part.hooks.create_match_validator
            if maker is None:
                continue
            try:
                validator = maker(tiers)
            except Exception as error:
                raise CompositionError(f"component {part.name!r}: create_match_validator raised {error!r}") from error
            if validator is not None:
                if not callable(validator):
                    raise CompositionError(
                        f"component {part.name!r}: create_match_validator must return a function or None, "
                        f"got {validator!r}"
                    )
                validators.append((part.name, validator))
        return validators


def lane_for(index: int, part: Part, pool: Pool, queue: Queue, tree_page: int) -> Lane:
    """The lane that serves a part's reach: the narrowest, hence fastest, that is right for it."""
    from ..tree.path_lane import PathLane
    from ..tree.scatter_lane import ScatterLane
    from ..tree.state_lane import PointLane
    from ..tree.window_lane import SpanLane

    reach = part.reach
    if reach.unit == "boundary":
        return PointLane(index, part, pool, queue, tree_page)
    if reach.closed_upward:
        return PathLane(index, part, pool, queue, tree_page)
    shape = reach.shape
    if shape is not None and not shape.head and part.hooks.acquire_component_lock is None:
        return SpanLane(index, part, pool, queue, tree_page)
    return ScatterLane(index, part, pool, queue, tree_page)
