"""Why prompts missed and what became of the rest, as counters among SGLang's metrics.

A prompt may agree with cached keys further than it hits, since a window or a state was evicted or never kept. SGLang's
own metrics do not tell this from a prompt that nobody sent before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixloom import Cache

from .prefix import Prefix

LOST = "sglang:prefixloom_lost_hit_tokens"
MISSED = "sglang:prefixloom_missed_tokens"
GONE = "sglang:prefixloom_lost_pages"


class Misses:
    """Counts why tokens of prompts miss, and what the cache loses, from when it is made."""

    def __init__(self, books: Cache, labels: Mapping[str, Any]) -> None:
        """``labels`` are those of SGLang's own metrics of its cache."""
        from prometheus_client import Counter  # it must be imported after SGLang has said where its processes meet

        self._books = books
        self._history = books.history()
        self._told: dict[tuple[str, str, str], int] = {}
        self._labels = dict(labels)

        def counter(name: str, text: str, *more: str) -> Any:
            return Counter(name=name, documentation=text, labelnames=[*self._labels, *more])

        self._lost = counter(
            LOST, "Tokens that agree with cached keys and are computed anew, by the component that lacks.", "component"
        )
        self._missed = counter(MISSED, "Tokens of prompts that did not hit.", "component", "tier", "reason")
        self._gone = counter(GONE, "Pages (states) removed or not kept.", "component", "tier", "cause")

    def count(self, prefix: Prefix) -> None:
        """Count once why the prompt of ``prefix``, which is about to be used, hits no more."""
        plan = prefix.plan
        if prefix.counted or plan is None:
            return
        prefix.counted = True
        if plan.limited_by is not None and plan.walked > plan.ready:
            self._lost.labels(**self._labels, component=plan.limited_by).inc(plan.walked - plan.ready)
        for each in self._books.account(plan).findings:
            tier = "" if each.loss is None else each.loss.tier
            self._missed.labels(**self._labels, component=each.component, tier=tier, reason=each.reason).inc(
                each.tokens
            )
        for (component, tier), losses in self._history.by_component.items():
            for cause, count in losses.causes.items():
                new = count - self._told.get((component, tier, cause), 0)
                if new:
                    self._told[component, tier, cause] = count
                    self._gone.labels(**self._labels, component=component, tier=tier, cause=cause).inc(new)
