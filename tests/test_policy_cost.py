"""What eviction and a request cost under each policy, counted in lines of the core."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from helpers import cache_of, part, serve
from prefixloom import Path, Point, Window

# ---------------------------------------------------------------- cost


def lines_run(action: Callable[[], object]) -> int:
    """Lines of the core that ``action`` executes: a cost without a clock.

    A collection in the midst of it would count the finalizers of what earlier tests dropped.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if "prefixloom" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    gc.disable()
    old = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(old)
        gc.enable()
    return count


@pytest.mark.parametrize("name", ["lru", "mru", "slru", "lfu", "priority"])
def test_eviction_and_a_request_cost_the_same_in_a_tree_of_any_size(name: str) -> None:
    costs = []
    for prompts in (20, 1000):
        cache = cache_of(
            part("path", Path()), part("window", Window(10)), part("state", Point()),
            tokens=8 * prompts, slots=prompts + 1, policy=name, debug=False,
        )  # fmt: skip
        for i in range(prompts):
            serve(cache, [i] * 8)
        fresh = iter(range(10_000, 20_000))
        costs.append(
            (
                lines_run(lambda cache=cache: cache.evict(8)),
                lines_run(lambda cache=cache: cache.evict({"state": 1})),
                lines_run(lambda cache=cache, fresh=fresh: serve(cache, [next(fresh)] * 8)),
                lines_run(lambda cache=cache, prompts=prompts: serve(cache, [prompts - 1] * 8)),
            )
        )
    assert costs[0] == costs[1]
