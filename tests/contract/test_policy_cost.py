"""Under each policy, the cost of an eviction and of a request does not depend on the size of the tree."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from prefixloom import Path, Point, Window
from tests.support.helpers import cache_of, part, serve


def lines_run(action: Callable[[], object]) -> int:
    """The lines of prefixloom that ``action`` executes.

    The collector is off, because a collection would count the finalizers of earlier tests' objects.
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


@pytest.mark.parametrize("name", ["lru", "slru", "lfu", "priority"])
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
