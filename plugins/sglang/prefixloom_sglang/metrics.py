"""Why prompts missed, as a counter among SGLang's metrics.

A prompt may agree with cached keys further than it hits, since a window or a state was evicted or never kept. SGLang's
own metrics do not tell this from a prompt that nobody sent before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .prefix import Prefix

NAME = "sglang:prefixloom_lost_hit_tokens"


class LostHits:
    """Counts, by component, tokens whose keys are cached and which are computed again for lack of this component."""

    def __init__(self, labels: Mapping[str, Any]) -> None:
        """``labels`` are those of SGLang's own metrics of its cache."""
        from prometheus_client import Counter  # it must be imported after SGLang has said where its processes meet

        self._labels = dict(labels)
        self._counter = Counter(
            name=NAME,
            documentation="Tokens that agree with cached keys and are computed anew, by the component that lacks.",
            labelnames=[*self._labels, "component"],
        )

    def count(self, prefix: Prefix) -> None:
        """Count once what the prompt of ``prefix`` lost."""
        plan = prefix.plan
        if prefix.counted or plan is None:
            return
        prefix.counted = True
        if plan.limited_by is not None and plan.walked > plan.ready:
            self._counter.labels(**self._labels, component=plan.limited_by).inc(plan.walked - plan.ready)
