"""Retention: what was opened with a low priority goes first; of equals, what is wanted for a shorter time.

Source: the retention of TensorRT-LLM (``KvCacheRetentionConfig``), which gives ranges of tokens a priority and a
duration. Here whoever opens a sequence says ``priority`` and ``until``. Both hold for what the sequence publishes, so a
range gets its own when ``sequence.priority`` or ``sequence.until`` is set before the range is published. Once
``cache.expire(now)`` was told that a time is over, what nobody wants any more goes before all else, until it is used
again. Of what is wanted equally long the least recently used goes first.
"""

from __future__ import annotations

import math
from typing import Any

from prefixloom import EvictionPolicy, hookimpl

from .cells import CellRecord, RankedQueue


class RetentionQueue(RankedQueue):
    def rank(self, cell: Any, record: CellRecord) -> tuple[int, float, int]:
        node = cell.node
        return node.priority, getattr(node, "until", math.inf), record.last


@hookimpl
def prefixloom_policy() -> EvictionPolicy:
    return EvictionPolicy("retention", make=RetentionQueue)
