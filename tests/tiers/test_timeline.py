"""Timelines: when copies, calls of a store and waits began and ended, as a cache tells it."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from typing import Any

import pytest

from prefixloom import Activity, InputError, Path, Point, ThreadStream, Window
from prefixloom.testing.inside.backdoor import tier_lane
from tests.operations.test_work import executed
from tests.support.helpers import part, settle
from tests.support.stores import composed, idle, read_back, stocked
from tests.support.tiers import broken, copies_by, serve, simulated, tiered
from tests.tiers.test_gates import gated, served


def told(activities: Many[Activity]) -> list[tuple[str, str, dict[str, int]]]:
    return [(each.kind, each.stream, dict(each.pages)) for each in activities]


def in_order(activities: Many[Activity]) -> bool:
    times = all(each.asked <= each.begun <= each.ended for each in activities)
    return times and [each.ended for each in activities] == sorted(each.ended for each in activities)


def test_copies_in_the_calling_thread_are_told_with_their_pages_bytes_and_times() -> None:
    cache = tiered(part("path", Path()), part("point", Point()))
    timeline, begun = cache.timeline(), time.perf_counter()
    serve(cache, range(40))
    assert timeline.take() == []
    cache.evict({"path": 10, "point": 8})
    assert serve(cache, range(41)) == 40
    pages = tier_lane(cache, "path").pool.slot_bytes, tier_lane(cache, "point").pool.slot_bytes
    found = timeline.take()
    ways = [kind for kind, _, _ in told(found)]
    assert sorted(set(ways)) == ["down", "up"] and ways[-1] == "up"
    assert told(found)[-1] == ("up", "inline", {"path": 10, "point": 2})  # the tree's state, and the sequence's own
    assert found[-1].size == 10 * pages[0] + 2 * pages[1]
    assert in_order(found) and begun <= found[0].asked and found[-1].ended <= time.perf_counter()
    assert not any(each.failed for each in found)
    down = [sum(each.pages.values()) for each in found if each.kind == "down"]
    assert sum(down) == cache.stats().tier.backed_up  # type: ignore[union-attr]
    assert timeline.take() == []
    settle(cache)


def test_what_runs_on_a_stream_is_told_when_it_is_over_there() -> None:
    cache = tiered(part("path", Path()), write="through")
    simulation = simulated(cache)
    timeline = cache.timeline()
    serve(cache, range(40))
    cache.poll()
    assert timeline.take() == []
    before = time.perf_counter()
    simulation.drain()
    (copy,) = timeline.take()
    assert (copy.kind, copy.stream, copy.pages) == ("down", "down", {"path": 10})
    assert copy.asked < before <= copy.begun <= copy.ended
    cache.poll()
    settle(cache)


def test_a_step_that_has_to_wait_for_a_load_says_how_long() -> None:
    cache = tiered(part("path", Path()))
    serve(cache, range(40))
    cache.evict(40)
    simulation, forward = simulated(cache), ThreadStream("forward")
    timeline = cache.timeline()
    with cache.open(range(41), leave=1) as sequence:
        assert sequence.restore().ready == 40
        sequence.grow(1)
        with cache.step([sequence]) as step:
            step.run_ops(simulation["forward"])
        assert timeline.take() == []
        while simulation["up"].ready:
            simulation["up"].advance()
        assert [each.kind for each in timeline.take()] == ["up"]
        over = time.perf_counter()
        simulation.drain()
        (wait,) = timeline.take()
        assert (wait.kind, wait.stream, wait.pages, wait.size) == ("wait", "forward", {}, 0)
        assert wait.begun < over <= wait.ended or wait.begun >= over
        cache.poll()
    forward.close()
    settle(cache)


def test_a_worker_that_waits_for_a_load_is_told_with_the_time_of_it() -> None:
    cache = tiered(part("path", Path()), overlap=True)
    serve(cache, range(40))
    cache.evict(40)
    stream, timeline = ThreadStream("forward"), cache.timeline()
    slowly = copies_by(lambda honest, *given: time.sleep(0.05) or honest(*given))
    with slowly, cache.open(range(41), leave=1) as sequence:
        assert sequence.restore().ready == 40
        sequence.grow(1)
        with cache.step([sequence]) as step:
            step.run_ops(stream)
        stream.record().synchronize()
    found = {each.kind: each for each in timeline.take() if each.kind != "down"}
    assert set(found) == {"up", "wait"}
    assert found["up"].stream == "host tier, up" and found["wait"].stream == "forward"
    assert found["up"].ended - found["up"].begun >= 0.05
    assert found["wait"].ended - found["wait"].begun >= 0.04
    assert found["wait"].ended >= found["up"].ended
    cache.poll()
    stream.close()
    settle(cache)


def test_a_load_by_layers_is_waited_for_gate_by_gate() -> None:
    cache = gated(2)
    served(cache)
    simulation = simulated(cache)
    timeline = cache.timeline()
    with cache.open(range(33), leave=1) as sequence:
        assert sequence.restore().ready == 32
        sequence.grow(1)
        with cache.step([sequence]) as step:
            step.run_ops(simulation["forward"], gated=True)
            for layer in range(6):
                step.gate(layer)
        simulation.drain()
        kinds = [each.kind for each in timeline.take()]
        assert (kinds.count("up"), kinds.count("wait")) == (1, 6)  # each layer waits for its group
        cache.poll()
    settle(cache)


@pytest.mark.parametrize("on_stream", [False, True])
def test_a_copy_that_fails_is_told_as_failed(on_stream: bool) -> None:
    cache = tiered(part("path", Path()), write="through")
    simulation = simulated(cache) if on_stream else None
    timeline = cache.timeline()
    with copies_by(broken):
        serve(cache, range(40))
        if simulation is not None:
            simulation.drain()
    cache.poll()
    assert [(each.kind, each.failed) for each in timeline.take()] == [("down", True)]
    settle(cache)


def test_calls_of_a_store_are_timed_on_its_thread() -> None:
    components = [part("path", Path()), part("window", Window(10))]
    store = stocked(*components)
    cache, _ = composed(*components, store=store)
    timeline = cache.timeline()
    assert read_back(cache, [*range(40), 7]) == 40
    kinds = {each.kind: each for each in timeline.take()}
    assert {"search", "read", "fetch", "up"} <= set(kinds)
    assert kinds["search"].stream == kinds["read"].stream == "store"
    assert kinds["read"].pages == kinds["fetch"].pages == {"path": 10, "window": 3}
    sizes = {name: tier_lane(cache, name).pool.slot_bytes for name in ("path", "window")}
    assert kinds["read"].size == 10 * sizes["path"] + 3 * sizes["window"]
    assert cache.stats().tier.fetched == 13  # type: ignore[union-attr]
    assert serve(cache, range(100, 140)) == 0
    idle(cache)
    writes = [each for each in timeline.take() if each.kind == "write"]
    assert sum(sum(each.pages.values()) for each in writes) >= cache.stats().tier.stored > 0  # type: ignore[union-attr]
    assert in_order(writes)
    settle(cache)


def test_a_timeline_that_nobody_reads_holds_a_bounded_number_and_counts_the_others() -> None:
    cache = tiered(part("path", Path()), write="through")
    short, long = cache.timeline(2), cache.timeline()
    for user in range(5):
        serve(cache, [user] * 40)
    assert (len(short.take()), short.missing) == (2, 3)
    assert (len(long.take()), long.missing) == (5, 0)
    serve(cache, [9] * 40)
    assert (len(short.take()), short.missing) == (1, 3)
    settle(cache)


def test_a_closed_timeline_gets_nothing_and_costs_nothing() -> None:
    def cost(followers: int) -> int:
        """Of a request over a cache which had so many timelines, until they were closed."""
        cache = tiered(part("path", Path()), write="through")
        timelines = [cache.timeline() for _ in range(followers)]
        serve(cache, [1] * 40)
        for at, timeline in enumerate(timelines):
            timeline.close()
            timeline.close()
            serve(cache, [10 + at] * 40)
        for at in range(2 - followers):
            serve(cache, [10 + at] * 40)
        found = executed(lambda: serve(cache, [7] * 40))
        assert [len(timeline.take()) for timeline in timelines] == [1, 2][:followers]
        settle(cache)
        return found

    assert cost(2) == cost(0)


@pytest.mark.parametrize("most", [0, -1, True, 2.0, "many"])
def test_a_timeline_of_no_length_is_refused(most: Any) -> None:
    cache = tiered(part("path", Path()))
    with pytest.raises(InputError, match="at least 1 activity"):
        cache.timeline(most)


def test_times_are_those_of_a_sequence_without_steps_as_well() -> None:
    """``fill`` orders layers after a load in the same way as a step does."""
    cache = tiered(part("path", Path()))
    serve(cache, range(40))
    cache.evict(40)
    simulation = simulated(cache)
    timeline = cache.timeline()
    with cache.open(range(41), leave=1) as sequence:
        sequence.restore()
        sequence.grow(1)
        sequence.fill(simulation["forward"])
        sequence.commit()
        simulation.drain()
        assert sorted(each.kind for each in timeline.take()) == ["up", "wait"]
        cache.poll()
    settle(cache)
