"""Sequences over every kind of memory: early release, states, what is not shared, endings of every sort."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from prefixloom import CapacityError, Path, Point, ProtocolError, Window
from tests.support.helpers import cache_of, finish, held, part, path_cache, run, serve, settle

TOKENS = list(range(40))


def mixed(**options: Any) -> Any:
    """A path, a window and a state."""
    return cache_of(part("path", Path()), part("window", Window(10)), part("state", Point()), **options)


# ---------------------------------------------------------------- early release


# ---------------------------------------------------------------- states


def test_opening_with_no_slot_for_a_running_state_is_refused_and_leaves_nothing() -> None:
    cache = mixed(slots=2)
    serve(cache, TOKENS)
    runners = [cache.open([i] * 8) for i in (1, 2)]
    before = cache.stats().components
    with pytest.raises(CapacityError, match="cannot open a sequence: state: needs 1") as caught:
        cache.open(TOKENS)
    assert caught.value.lacking == {"state": 1}
    assert cache.stats().components == before
    for runner in runners:
        runner.close()
    settle(cache)


# ---------------------------------------------------------------- endings


@pytest.mark.parametrize("first", ["close", "abort"])
@pytest.mark.parametrize("second", ["close", "abort"])
def test_ending_twice_does_nothing(first: str, second: str) -> None:
    cache = mixed()
    sequence = cache.open(TOKENS)
    run(sequence, 20)
    getattr(sequence, first)()
    before = cache.stats()
    getattr(sequence, second)()
    assert cache.stats() == before
    assert held(cache, TOKENS[:20]) == (20 if first == "close" else 0)
    settle(cache)


@pytest.mark.parametrize("use", ["grow", "append", "commit", "publish", "rewind", "__enter__"])
def test_a_closed_sequence_can_not_be_used(use: str) -> None:
    cache = path_cache()
    sequence = cache.open(TOKENS, label="done")
    sequence.close()
    arguments: dict[str, Any] = {"grow": (1,), "append": ([1],), "rewind": (0,)}
    with pytest.raises(ProtocolError, match=r"<done closed.*> is closed"):
        getattr(sequence, use)(*arguments.get(use, ()))
    with pytest.raises(ProtocolError, match="is closed"):
        cache.step([sequence])


def test_an_exception_in_the_block_aborts_and_nothing_leaks() -> None:
    cache = mixed()
    with pytest.raises(ZeroDivisionError), cache.open(TOKENS) as sequence:
        run(sequence, 20)
        sequence.publish(8)
        raise ZeroDivisionError
    assert not sequence.open
    assert cache.peek(TOKENS) == 0
    assert cache.stats().components["path"].cached == 2, "what was published before stays"
    settle(cache)


def test_a_dropped_sequence_is_recovered_and_reported_with_where_it_was_made(caplog: pytest.LogCaptureFixture) -> None:
    cache = mixed()
    serve(cache, TOKENS)
    sequence = cache.open([*TOKENS, *range(8)])
    run(sequence, 4)
    sequence.grow(4)
    del sequence
    gc.collect()
    assert serve(cache, [1] * 8) == 0  # the next call takes it back
    assert cache.stats().recovered == 1
    assert "test_sequence_kinds.py" in caplog.text
    settle(cache)


def test_sequences_dropped_in_a_cycle_are_recovered_once() -> None:
    cache = mixed()
    serve(cache, TOKENS)
    box: list[Any] = [cache.open([*TOKENS, 1]), cache.lease(cache.match(TOKENS))]
    box.append(box)
    del box
    gc.collect()
    cache.poll()
    assert cache.stats().recovered == 2
    settle(cache)


@pytest.mark.parametrize("debug", [False, True])
def test_what_the_collector_drops_amid_a_flush_is_given_back_once(debug: bool) -> None:
    """The collector runs after so many allocations, so for each number it comes at another line of the flush."""
    before = gc.get_threshold()
    for allocations in range(40):
        cache = cache_of(part("path", Path()), part("window", Window(8)), part("point", Point()), debug=debug)
        gc.collect()
        gc.disable()
        try:
            box: list[Any] = [cache.open(TOKENS)]
            run(box[0], 8)
            box.append(box)
            del box
            gc.set_threshold(gc.get_count()[0] + allocations)
            gc.enable()
            cache.flush()
        finally:
            gc.set_threshold(*before)
            gc.enable()
        cache.poll()
        for figures in cache.stats().components.values():
            assert figures.free == figures.capacity
        settle(cache)


def test_a_sequence_from_before_a_flush_is_refused_and_ends_quietly() -> None:
    cache = mixed()
    serve(cache, TOKENS)
    running, other = cache.open([*TOKENS, 1, 2]), cache.open([7] * 8)
    run(other, 4)
    lease, plan = cache.lease(cache.match(TOKENS)), cache.match(TOKENS)
    cache.flush()
    assert not lease.active
    for use in (lambda: running.grow(1), lambda: running.append([1]), running.commit, running.publish):
        with pytest.raises(ProtocolError, match="before the cache was flushed"):
            use()
    running.close()
    running.abort()
    del other
    gc.collect()
    cache.poll()
    assert plan.stale
    for use in (cache.open, cache.lease):
        with pytest.raises(ProtocolError, match="before the cache was flushed"):
            use(plan)
    if lease.active:
        lease.release()
    for figures in cache.stats().components.values():
        assert figures.free == figures.capacity
    assert cache.stats().recovered == 0
    assert serve(cache, TOKENS) == 0
    assert held(cache, TOKENS) == 40
    settle(cache)


def test_a_stale_plan_still_knows_its_images() -> None:
    cache = cache_of(part("path", Path(), lookahead=1), page=1)
    serve(cache, [5] * 4)
    plan = cache.match([5, 0], extra=[(1, 2, "cat")])
    cache.evict(1)
    assert plan.stale
    with cache.open(plan) as sequence:
        finish(sequence)
        sequence.append([6, 7])
        run(sequence, 2)
    assert cache.match([5, 0, 6, 7], extra=[(1, 2, "cat")]).ready == 3


def test_a_namespace_that_holds_nothing_costs_nothing() -> None:
    cache = path_cache()
    for i in range(50):
        cache.open([1], namespace=f"tenant {i}").close()
        cache.peek([1] * 8, namespace=f"other {i}")
    assert cache.stats().namespaces <= 1
