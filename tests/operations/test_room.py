"""Room: what it is made of before anything is evicted."""

from __future__ import annotations

from prefixloom import Path
from prefixloom.testing.schedules.simulated import Simulation
from tests.support.helpers import cache_of, enqueue, part, settle


def test_whoever_is_short_of_slots_first_sees_which_steps_are_over() -> None:
    """What a step that is over has given back is free at once, and whoever takes it waits for nothing."""
    cache = cache_of(part("path", Path()), tokens=32)
    sim = Simulation("a")
    first, second = cache.open(range(32)), cache.open([9] * 8)
    first.grow(32)
    enqueue(sim["a"], first)
    first.abort()
    sim.drain()  # and nobody polls
    second.grow(8)
    assert second.running.fence == 0
    second.abort()
    settle(cache)
