"""Statistics: frozen figures of a cache at one moment. They are counted elsewhere; nothing is computed from content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from ..tiers.host_tier import LowerTier
    from ..tree.lane import Lane
    from .cache import Cache


@attrs.frozen
class ComponentStats:
    """Pages (state slots for boundary components) of one component, and what they weigh."""

    capacity: int
    free: int
    cached: int
    leased: int
    running: int
    evicted: int
    page_tokens: int
    page_bytes: int
    rest_bytes: int = 0
    """What a cached one takes, where the tree keeps them in another form (``stored_as``)."""

    def __str__(self) -> str:
        unit = f"pages of {self.page_tokens} tokens" if self.page_tokens else "state slots"
        rest = f" ({self.rest_bytes} at rest)" if self.rest_bytes else ""
        return (
            f"{self.capacity} {unit}, {self.page_bytes} bytes each{rest}: {self.cached} cached ({self.leased} of them "
            f"leased), {self.running} running, {self.free} free; {self.evicted} evicted so far"
        )


@attrs.frozen
class TierStats:
    """A tier below the device: pages (states) by component, and what was copied so far.

    ``backed_up``, ``dropped`` and ``evicted`` count pages and states: copied down, left out for lack of room or order,
    gone from the tier. ``restored_tokens`` in so many ``restores``; ``fallbacks`` to a lower boundary; ``failed``
    copies. Of the store behind it: pages and states that it ``stored`` or ``refused``, and that were ``fetched``.
    """

    name: str
    capacity: Mapping[str, int]
    cached: Mapping[str, int]
    backed_up: int
    dropped: int
    evicted: int
    restores: int
    restored_tokens: int
    fallbacks: int
    failed: int
    stored: int = 0
    refused: int = 0
    fetched: int = 0

    def __str__(self) -> str:
        held = ", ".join(f"{self.cached[name]} of {count} {name}" for name, count in self.capacity.items())
        return (
            f"tier {self.name!r}: {held}; {self.backed_up} copied down, {self.dropped} left out, {self.evicted} "
            f"evicted; {self.restored_tokens} tokens restored in {self.restores} loads, {self.fallbacks} of them "
            f"shortened; {self.failed} copies failed; its store took {self.stored}, refused {self.refused} and brought "
            f"{self.fetched}"
        )


@attrs.frozen
class CacheStats:
    """Counters and gauges of a cache. ``hit_tokens / asked_tokens`` is the hit rate of opened sequences.

    ``sizing`` says in words how the pools' sizes were chosen, where that was left to ``compose``.
    """

    components: Mapping[str, ComponentStats]
    nodes: int
    namespaces: int
    sequences: int
    opened: int
    asked_tokens: int
    hit_tokens: int
    skipped_checkpoints: int
    plugin_errors: int
    recovered: int
    epoch: int
    in_flight: int = 0
    sizing: tuple[str, ...] = ()
    tier: TierStats | None = None

    def __str__(self) -> str:
        rate = f"{self.hit_tokens / self.asked_tokens:.0%}" if self.asked_tokens else "nothing asked yet"
        return "\n".join(
            (
                f"{self.sequences} running, {self.in_flight} steps in flight, {self.opened} opened so far; "
                f"{self.hit_tokens} of {self.asked_tokens} tokens hit ({rate}); {self.nodes} nodes in "
                f"{self.namespaces} namespaces",
                *(f"{name}: {figures}" for name, figures in self.components.items()),
                *([] if self.tier is None else [str(self.tier)]),
                *self.sizing,
            )
        )


def cache_stats(cache: Cache) -> CacheStats:
    return CacheStats(
        components={lane.name: _component(cache, lane) for lane in cache._lanes},
        nodes=cache._tree.nodes,
        namespaces=len(cache._tree.roots),
        sequences=len(cache._live),
        opened=cache._opened,
        asked_tokens=cache._asked,
        hit_tokens=cache._hit,
        skipped_checkpoints=cache._skipped_checkpoints,
        plugin_errors=cache._plugin_errors,
        recovered=cache._recovered,
        epoch=cache._epoch,
        in_flight=len(cache._flight.works),
        sizing=cache.composition.sizing,
        tier=None if cache._tier is None else tier_stats(cache._tier),
    )


def tier_stats(tier: LowerTier) -> TierStats:
    by_name = {lane.device.name: lane for lane in tier.lanes}
    return TierStats(
        tier.part.name,
        {name: lane.pool.capacity for name, lane in by_name.items()},
        {name: lane.in_tree for name, lane in by_name.items()},
        tier.backed_up, tier.dropped, tier.evicted,
        tier.restores, tier.restored_tokens, tier.fallbacks, tier.failed,
        0 if tier.shelf is None else tier.shelf.storing.stored,
        0 if tier.shelf is None else tier.shelf.storing.refused,
        tier.fetched,
    )  # fmt: skip


def _component(cache: Cache, lane: Lane) -> ComponentStats:
    return ComponentStats(
        capacity=sum(pool.capacity for pool in lane.pools),
        free=sum(pool.free for pool in lane.pools),
        cached=lane.in_tree,
        leased=lane.leased,
        running=lane.running,
        evicted=lane.evicted,
        page_tokens=lane.part.page_tokens,
        page_bytes=lane.live.slot_bytes,
        rest_bytes=lane.pool.slot_bytes if lane.live is not lane.pool else 0,
    )
