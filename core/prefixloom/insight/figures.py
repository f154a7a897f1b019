"""Figures: what a cache counts and measures, by name and label, for whatever shows it: Prometheus, a page, a log.

The names begin with ``prefixloom:``. Labels are components, tiers, causes, reasons and, with ``shares``, owners: there
are few of each, and none of them comes from a prompt or from a client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import attrs

from .history import AGES, Histogram, History
from .stats import CacheStats, ComponentStats

Labels = tuple[tuple[str, str], ...]


@attrs.frozen
class Figure:
    """One figure with all of its labels.

    ``kind``     a counter only grows; a gauge is the present value; a histogram has ``Histogram``s, whose bounds are
                 ``bounds``
    ``samples``  (labels, value)
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[tuple[Labels, float | Histogram], ...]
    bounds: tuple[float, ...] = AGES


def figures_of(stats: CacheStats, history: History | None) -> list[Figure]:
    """Return the figures of a cache; of its losses and misses those that a history knows."""
    found = [
        _plain("asked_tokens", "counter", "tokens that sequences were opened with", stats.asked_tokens),
        _plain("hit_tokens", "counter", "of these, tokens that hit on the device", stats.hit_tokens),
        _plain("new_tokens", "counter", "of these, tokens that the keys did not agree with", stats.new_tokens),
        _plain("sequences", "gauge", "open sequences", stats.sequences),
        _plain("nodes", "gauge", "nodes of the tree", stats.nodes),
        _plain("skipped_checkpoints", "counter", "states not kept, since no slot could be had",
               stats.skipped_checkpoints),
        _plain("plugin_errors", "counter", "errors of hooks that the default was taken for", stats.plugin_errors),
        _by_component(stats, "stopped_tokens", "counter", "tokens that the keys agreed with and this component kept "
                      "from hitting on the device", lambda each: each.missed_tokens),
        Figure("prefixloom:pages", "gauge", "pages (states) of the device by what they are", tuple(
            ((("component", name), ("tier", "device"), ("state", state)), float(getattr(each, state)))
            for name, each in stats.components.items()
            for state in ("free", "cached", "running", "leased", "evictable", "outside")
        )),
        Figure("prefixloom:capacity_pages", "gauge", "pages (states) that a pool has", (
            *(((("component", name), ("tier", "device")), float(each.capacity))
              for name, each in stats.components.items()),
            *(((("component", name), ("tier", "host")), float(count))
              for name, count in (stats.tier.capacity.items() if stats.tier else ())),
        )),
        _by_component(stats, "page_bytes", "gauge", "bytes of a page (state)", lambda each: each.page_bytes),
        _by_component(stats, "page_tokens", "gauge", "tokens of a page; 0 for states", lambda each: each.page_tokens),
        _by_component(stats, "evicted_pages", "counter", "pages (states) evicted from the device",
                      lambda each: each.evicted),
    ]  # fmt: skip
    if stats.owners:
        found.append(Figure("prefixloom:owner_pages", "gauge", "pages (states) in the tree, by owner", tuple(
            ((("owner", owner), ("tier", tier), ("component", name)), float(pages))
            for owner, tiers in stats.owners.items() for tier, held in tiers.items() for name, pages in held.items()
        )))  # fmt: skip
    if stats.tier is not None:
        found += _of_tier(stats)
    return found if history is None else [*found, *_of_history(history)]


def _plain(name: str, kind: Literal["counter", "gauge"], text: str, value: float) -> Figure:
    return Figure(f"prefixloom:{name}", kind, text, (((), float(value)),))


def _by_component(
    stats: CacheStats, name: str, kind: Literal["counter", "gauge"], text: str, value: Callable[[ComponentStats], float]
) -> Figure:
    samples = tuple(((("component", each),), float(value(of))) for each, of in stats.components.items())
    return Figure(f"prefixloom:{name}", kind, text, samples)


def _of_tier(stats: CacheStats) -> list[Figure]:
    tier = stats.tier
    assert tier is not None
    cached = tuple(((("component", name),), float(count)) for name, count in tier.cached.items())
    return [
        Figure("prefixloom:host_pages", "gauge", "pages (states) that the host's memory has", cached),
        _plain("restores", "counter", "loads from below the device", tier.restores),
        _plain("restored_tokens", "counter", "tokens that these loads brought", tier.restored_tokens),
        _plain("backed_up_pages", "counter", "pages (states) copied to the host", tier.backed_up),
        _plain("dropped_pages", "counter", "pages (states) that were not copied down", tier.dropped),
        _plain("host_evicted_pages", "counter", "pages (states) evicted from the host", tier.evicted),
        _plain("failed_copies", "counter", "copies either way that raised", tier.failed),
        _plain("store_stored_pages", "counter", "pages (states) that the store took", tier.stored),
        _plain("store_refused_pages", "counter", "pages (states) that the store did not take", tier.refused),
        _plain("store_fetched_pages", "counter", "pages (states) that the store brought", tier.fetched),
        _plain("store_waiting", "gauge", "what is still on its way to the store", tier.to_store),
    ]


def _of_history(history: History) -> list[Figure]:
    lost = list(history.by_component.items())

    def labels(component: str, tier: str, *more: tuple[str, str]) -> Labels:
        return (("component", component), ("tier", tier), *more)

    return [
        Figure("prefixloom:missed_tokens", "counter", "tokens that did not hit, by the component and the reason", tuple(
            (labels(component, tier, ("reason", reason)), float(count))
            for (component, tier, reason), count in history.missed_tokens.items()
        )),
        Figure("prefixloom:lost_pages", "counter", "pages (states) removed or not kept, by the cause", tuple(
            (labels(component, tier, ("cause", cause)), float(count))
            for (component, tier), losses in lost for cause, count in losses.causes.items()
        )),
        Figure("prefixloom:evicted_age_seconds", "histogram", "how long pages (states) had been cached when they went",
               tuple((labels(*key), losses.ages) for key, losses in lost)),
        Figure("prefixloom:reuse_gap_seconds", "histogram", "how long after pages (states) went a prompt missed them",
               tuple((labels(*key), losses.gaps) for key, losses in lost)),
    ]  # fmt: skip
