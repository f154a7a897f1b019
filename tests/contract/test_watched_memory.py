"""Of what a policy of somebody else's was given for cells nothing is kept: not of what has gone, and not of itself."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest

from prefixloom import Cache, Path, Point, Window
from prefixloom.contract.policy import EvictionPolicy, Guest
from prefixloom.contract.queues import ListQueue
from tests.support.helpers import Keeping, cache_of, part, serve, settle


class Failing(ListQueue):
    def pop(self) -> Any:
        raise LookupError("no idea")


POLICIES: dict[str, Any] = {
    "key": EvictionPolicy("key", key=lambda use: use.uses),
    "queue": EvictionPolicy("queue", make=type("Plain", (ListQueue,), {})),
    "keeping": EvictionPolicy("keeping", make=Keeping),
    "lru": "lru",
    "failing": EvictionPolicy("failing", make=Failing),
}


def count(kind: str) -> int:
    """Objects of classes of that name."""
    return sum(type(each).__name__ == kind for each in gc.get_objects())


def emptied(cache: Cache) -> None:
    cache.evict(dict.fromkeys(cache.stats().components, 10_000))


@pytest.mark.parametrize("end", [emptied, Cache.flush], ids=["evicted", "flushed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_without_the_collector_nothing_is_left_of_a_tree(policy: str, end: Callable[[Cache], object]) -> None:
    parts = part("path", Path()), part("window", Window(10)), part("state", Point())
    gc.collect()
    before = {kind: count(kind) for kind in ("Node", "Cell", "PartialCell", "Slack", "Guest")}
    cache = cache_of(*parts, policy=POLICIES[policy], tokens=1024, slots=32, debug=False)
    gc.collect()
    gc.disable()
    logging.disable(logging.CRITICAL)  # a record has the frames that an error went through
    try:
        for number in range(20):
            serve(cache, [number] * 17)
        assert count("Node") > before["Node"] + 10
        end(cache)
        left = {kind: count(kind) - known for kind, known in before.items()}
        guests = [each for each in gc.get_objects() if type(each) is Guest]
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
    kept = left.pop("Guest")
    assert max(left.values()) <= 2, left  # of a root
    assert kept == 0 or policy == "keeping"
    assert not any(guest.cell or guest.node for guest in guests), "and who keeps one keeps nothing else"
    settle(cache)
    assert all(not getattr(lane.queue, "_guests", None) for lane in cache.core.shape.lanes)
