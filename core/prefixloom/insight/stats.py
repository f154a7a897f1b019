"""Statistics: the counters and sizes of a cache at one moment, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from ..contract.shares import SharedQueue
from ..contract.tier_answers import TierStats
from ..operations.state import Core
from ..tree.lane import Lane


@attrs.frozen
class ComponentStats:
    """The numbers of pages (state slots for boundary components) of one component, and their size.

    ``capacity``     all pages of its pools
    ``free``         pages without an owner
    ``cached``       pages in the tree, ``leased`` of which lie where a lease covers something
    ``evictable``    pages in the tree that eviction may free now. Some of them are ``leased``: what nothing below needs
    ``running``      pages that running sequences own
    ``evicted``      pages that were evicted so far
    ``page_tokens``  tokens of a page, 0 for state slots
    ``page_bytes``   bytes of a page
    ``outside``      pages that are with the engine, if one lends them
    """

    capacity: int
    free: int
    cached: int
    leased: int
    running: int
    evicted: int
    page_tokens: int
    page_bytes: int
    rest_bytes: int = 0
    """Bytes of a cached state, if the tree keeps states in another form (``stored_as``); else 0."""
    outside: int = 0
    evictable: int = 0
    missed_tokens: int = 0
    """Tokens of opened sequences that the keys agree with and that did not hit on the device because of it."""

    def __str__(self) -> str:
        unit = f"pages of {self.page_tokens} tokens" if self.page_tokens else "state slots"
        rest = f" ({self.rest_bytes} at rest)" if self.rest_bytes else ""
        outside = f", {self.outside} with the engine" if self.outside else ""
        return (
            f"{self.capacity} {unit}, {self.page_bytes} bytes each{rest}: {self.cached} cached ({self.leased} of them "
            f"leased), {self.running} running, {self.free} free{outside}; {self.evicted} evicted so far"
        )


@attrs.frozen
class CacheStats:
    """The counters and sizes of a cache. ``hit_tokens / asked_tokens`` is the hit rate of opened sequences.

    ``sizing`` explains in words how ``compose`` chose the sizes of the pools.
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
    new_tokens: int = 0
    """Tokens of opened sequences that the keys did not agree with, up to the deepest boundary that was asked for."""
    owners: Mapping[str, Mapping[str, Mapping[str, int]]] = {}
    """By owner, tier and component, the pages (states) in the tree; of a cache without ``shares`` nothing."""

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


def cache_stats(core: Core) -> CacheStats:
    """Return the present statistics of the cache of ``core``."""
    tree, counts = core.index.tree, core.counts
    return CacheStats(
        components={lane.name: _component(lane, counts.missed.get(lane.name, 0)) for lane in core.shape.lanes},
        nodes=tree.nodes,
        namespaces=len(tree.roots),
        sequences=len(core.live),
        opened=counts.opened,
        asked_tokens=counts.asked_tokens,
        hit_tokens=counts.hit_tokens,
        skipped_checkpoints=counts.skipped_checkpoints,
        plugin_errors=core.plugins.errors,
        recovered=core.dropped.recovered,
        epoch=core.index.epoch,
        in_flight=len(core.flight.works),
        sizing=core.shape.composition.sizing,
        tier=None if core.below is None else core.below.stats(),
        new_tokens=counts.new_tokens,
        owners=_owners(core),
    )


def _owners(core: Core) -> dict[str, dict[str, dict[str, int]]]:
    found: dict[str, dict[str, dict[str, int]]] = {}
    for lane in core.shape.all_lanes:
        if isinstance(lane.queue, SharedQueue):
            for owner, pages in lane.queue.held.items():
                found.setdefault(owner, {}).setdefault(lane.tier, {})[lane.name] = pages
    return found


def _component(lane: Lane, missed: int) -> ComponentStats:
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
        outside=lane.pool.outside,
        evictable=lane.evictable,
        missed_tokens=missed,
    )
