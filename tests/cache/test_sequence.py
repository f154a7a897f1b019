"""Sequences: a life, what is refused, and endings of every sort. The random model compares all else with sets."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from prefixloom import CapacityError, InputError, Path, Point, ProtocolError, Sequence, Window
from tests.support.helpers import cache_of, finish, held, part, path_cache, run, serve, settle

TOKENS = list(range(40))


def mixed(**options: Any) -> Any:
    """Return a cache of a path, a window and a state."""
    return cache_of(part("path", Path()), part("window", Window(10)), part("state", Point()), **options)


def test_a_life_from_open_to_close() -> None:
    cache = path_cache()
    sequence = cache.open(TOKENS[:10], label="chat 7")
    assert (sequence.ready, sequence.named, sequence.reserved, sequence.committed) == (0, 10, 0, 0)
    sequence.grow(10)
    assert (sequence.reserved, sequence.committed) == (10, 0)
    assert sequence.owned("path") == 3
    sequence.commit()
    assert (sequence.committed, sequence.publishable) == (10, 8)
    assert sequence.publish() == 8
    sequence.grow(1)
    sequence.append([10])
    sequence.commit()
    assert sequence.tokens.tolist() == TOKENS[:11]
    assert "chat 7" in repr(sequence)
    assert cache.stats().sequences == 1
    sequence.close()
    assert not sequence.open
    assert held(cache, TOKENS[:11]) == 8
    stats = cache.stats()
    assert (stats.opened, stats.asked_tokens, stats.hit_tokens, stats.sequences) == (1, 10, 0, 0)
    settle(cache)


@pytest.mark.parametrize("leave", [0, 1, 3, 4, 5, 39, 40, 41, 1000])
def test_leave_leaves_so_many_tokens_to_compute(leave: int) -> None:
    cache = path_cache()
    serve(cache, TOKENS)
    with cache.open(TOKENS, leave=leave) as sequence:
        assert sequence.ready == max(0, (40 - leave) // 4 * 4)
    assert cache.peek(TOKENS, leave=leave) == sequence.ready


# ---------------------------------------------------------------- refusals

Call = Callable[[Any], object]
NO_NUMBERS: tuple[Any, ...] = ("8", 8.0, True, [8])
NO_COUNTS: tuple[Any, ...] = (-1, 1.5, "1", None, True)
REFUSED: list[tuple[Call, type[Exception], str]] = [
    *((lambda s, n=n: s.publish(n), ProtocolError, rf"cannot publish {n}: .*multiple of 4") for n in (8, 12, -4, 5, 0)),
    *((lambda s, n=n: s.commit(n), ProtocolError, f"cannot commit {n}: 6 are committed") for n in (5, 21, -1)),
    (lambda s: s.rewind(17), ProtocolError, "cannot rewind to 3: 4 are published"),
    *((lambda s, n=n: s.publish(n), InputError, "publish") for n in NO_NUMBERS),
    *((lambda s, n=n: s.commit(n), InputError, "commit") for n in NO_NUMBERS),
    *((lambda s, n=n: s.grow(n), InputError, "takes a number of tokens from 0 up") for n in NO_COUNTS),
    *((lambda s, n=n: s.rewind(n), InputError, "takes a number of tokens from 0 up") for n in NO_COUNTS),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "told"), REFUSED)
def test_call_that_breaks_the_contract_is_refused_and_changes_nothing(
    call: Call, error: type[Exception], told: str
) -> None:
    cache = path_cache()
    with cache.open(TOKENS[:10]) as sequence:
        sequence.grow(20)
        sequence.commit(6)
        sequence.publish(4)
        before = cache.stats()
        with pytest.raises(error, match=told):
            call(sequence)
        assert (cache.stats(), sequence.reserved, sequence.committed) == (before, 20, 6)
        sequence.commit()
        with pytest.raises(ProtocolError, match="cannot publish 12"):
            sequence.publish(12)  # committed, and not named yet
        sequence.append(range(10))
        assert sequence.publish(12) == 12
    settle(cache)


def test_growing_is_all_or_nothing_and_says_who_holds_what() -> None:
    cache = cache_of(part("path", Path()), part("window", Window(10)), capacity={"path": 64, "window": 32})
    big = cache.open(TOKENS, label="big one")
    big.grow(24)
    with cache.open([9] * 30, label="late") as late:
        before = cache.stats()
        with pytest.raises(CapacityError) as caught:
            late.grow(16)
        assert cache.stats() == before
        assert (late.reserved, late.owned("path"), late.owned("window")) == (0, 0, 0)
        (shortage,) = caught.value.shortages
        assert (shortage.component, shortage.wanted, shortage.free, shortage.evictable) == ("window", 4, 2, 0)
        assert shortage.holders == (("big one", 6),)
        assert caught.value.lacking == {"window": 2}
        message = str(caught.value)
        assert "reserve 16 tokens" in message
        assert "window: needs 4 pages (or state slots), 2 free + 0 evictable of 8" in message
        assert "big one 6" in message
        late.grow(8)
    big.abort()
    settle(cache)


def test_a_refusal_counts_what_leases_pin() -> None:
    cache = path_cache(tokens=40)
    first = cache.open(TOKENS[:32])
    finish(first)
    first.publish()
    with cache.open([7] * 20) as second, pytest.raises(CapacityError, match="8 pinned by leases"):
        second.grow(12)
    first.close()
    settle(cache)


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


def test_what_is_dropped_is_recovered_once_and_reported_with_where_it_was_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A sequence amid a step, and a sequence and a lease in a cycle."""
    cache = mixed()
    serve(cache, TOKENS)
    sequence: Sequence | None = cache.open([*TOKENS, *range(8)])
    run(sequence, 4)  # type: ignore[arg-type]
    sequence.grow(4)  # type: ignore[union-attr]
    del sequence
    box: list[Any] = [cache.open([*TOKENS, 1]), cache.lease(cache.match(TOKENS))]
    box.append(box)
    del box
    gc.collect()
    assert serve(cache, [1] * 8) == 0  # the next call takes it back
    assert cache.stats().recovered == 3
    assert caplog.text.count("test_sequence.py") == 3
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
