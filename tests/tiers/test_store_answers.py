"""Slow, full and broken stores: nobody waits for them, and whatever they answer is a miss with a reason."""

from __future__ import annotations

import time
from typing import Any

import pytest

from prefixloom import Path, Window
from prefixloom.storage import Miss, Refused
from prefixloom.testing.inside.backdoor import tier_lanes
from prefixloom.tiers.pieces import READ
from prefixloom_hicache import GuardLimits, MemoryBackend
from tests.support.helpers import part, settle
from tests.support.stores import behind, composed, idle, read_back, restored, until
from tests.support.tiers import compute, serve

# ---------------------------------------------------------------- nobody waits


def slow(store: Any, seconds: float) -> Any:
    for name in ("get", "exists", "put"):
        whole = getattr(store, name)
        setattr(store, name, lambda *given, whole=whole: (time.sleep(seconds), whole(*given))[1])
    return store


class Slow(MemoryBackend):
    """Every call takes so long."""

    seconds = 0.0

    def get(self, *given: Any) -> Any:
        time.sleep(self.seconds)
        return super().get(*given)

    def put(self, *given: Any) -> Any:
        time.sleep(self.seconds)
        return super().put(*given)


def filled(tokens: list[int]) -> Slow:
    store = Slow(capacity=1 << 22)
    cache, _ = composed(store=store)
    serve(cache, tokens)
    idle(cache)
    return store


@pytest.mark.parametrize("fetch", ["best_effort", "wait", "timeout"])
def test_how_long_a_prompt_waits_is_the_policys_to_say(fetch: str) -> None:
    tokens = list(range(40))
    store = filled(tokens)
    store.seconds = 0.5
    cache, _ = composed(store=store, fetch=fetch)
    with cache.open([*tokens, 1]) as sequence:
        begun = time.monotonic()
        told = sequence.restore()
        assert told.over == (fetch == "best_effort")
        assert time.monotonic() - begun < 0.2
        until(cache, lambda: told.over)
        waited = time.monotonic() - begun
        assert told.ready == sequence.ready == (40 if fetch == "wait" else 0)
        assert waited < 0.4 if fetch != "wait" else waited > 0.4
        assert fetch != "timeout" or "too slow" in told.why


@pytest.mark.parametrize("used", [True, False])
def test_a_sequence_that_went_on_is_left_alone_and_the_next_one_has_it(used: bool) -> None:
    """Used or not: who was told to go on counts on where it stands."""
    tokens = list(range(40))
    store = filled(tokens)
    store.seconds = 0.05
    cache, _ = composed(store=store, fetch="best_effort")
    with cache.open([*tokens, 1]) as sequence:
        told = sequence.restore()
        if used:
            compute(cache, sequence, [*tokens, 1], 12)
        until(cache, lambda: not behind(cache).reads.fetches)
        assert sequence.ready == told.ready == 0
        assert "was used before" in told.why
    with cache.open([*tokens, 1]) as sequence:
        assert sequence.restore().ready == 40
    settle(cache)


@pytest.mark.parametrize(("keep", "host"), [("through", 4096), ("back", 40)])
def test_what_is_too_much_for_the_store_is_dropped_and_counted(keep: str, host: int) -> None:
    store = Slow(capacity=1 << 22)
    store.seconds = 0.1
    limits = GuardLimits(deadline=0.05, backlog_calls=2)
    cache, _ = composed(part("path", Path()), store=store, limits=limits, keep=keep, host=host)
    for k in range(12):
        serve(cache, [k] * 20)
        cache.poll()
    until(cache, lambda: not behind(cache).writes.calls)
    writes = behind(cache).writes
    assert writes.refused > 0 and writes.handed == writes.stored + writes.refused
    store.seconds = 0.0
    until(cache, lambda: not behind(cache).store.follows)
    assert tier_lanes(cache)[0].leased == 0
    settle(cache)


# ---------------------------------------------------------------- bad stores


class Bad(MemoryBackend):
    """Answers reads with ``answer(key, record)``."""

    answer: Any = None

    def get(self, keys: Any, into: Any = None) -> Any:
        return tuple(self.answer(key, record) for key, record in zip(keys, super().get(keys), strict=True))


def other(record: Any) -> Any:
    import attrs

    return attrs.evolve(record, start=record.start + 4, end=record.end + 4)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda key, record: Miss(key, "corrupt", "flipped"), "corrupt: flipped"),
        (lambda key, record: other(record), "the store gave"),
        (lambda key, record: 1 / 0, "error: ZeroDivisionError"),
        (lambda key, record: Refused(key, "io"), "io"),
    ],
    ids=["corrupt", "another piece", "raises", "nonsense"],
)
def test_whatever_a_store_answers_it_is_a_miss_with_a_reason(answer: Any, why: str) -> None:
    tokens = list(range(40))
    store = Bad(capacity=1 << 22)
    store.answer = lambda key, record: record
    cache, _ = composed(store=store)
    serve(cache, tokens)
    idle(cache)
    store.answer = answer
    cache, _ = composed(store=store)
    with cache.open([*tokens, 1]) as sequence:
        told = restored(cache, sequence)
        assert told.ready == 0 and why in told.why, told
    assert serve(cache, tokens) == 0
    settle(cache)


@pytest.mark.parametrize("fetch", ["wait", "best_effort"])
def test_of_a_path_what_came_before_a_bad_piece_counts(fetch: str) -> None:
    tokens = list(range(4 * READ + 80))
    store = Bad(capacity=1 << 24)
    store.answer = lambda key, record: record
    cache, _ = composed(part("path", Path()), store=store, tokens=1024)
    serve(cache, tokens)
    idle(cache)
    late = 4 * READ + 8
    store.answer = lambda key, record: Miss(key, "corrupt") if record.end == late else record
    cache, _ = composed(part("path", Path()), store=store, tokens=1024, fetch=fetch)
    with cache.open(tokens, leave=1) as sequence:
        sequence.restore()
        until(cache, lambda: not behind(cache).reads.fetches)
        assert sequence.ready == (4 * READ if fetch == "wait" else 0)
    assert read_back(cache, tokens) == 4 * READ
    settle(cache)


def test_a_host_that_is_too_small_takes_what_fits_and_serving_goes_on() -> None:
    tokens = list(range(40))
    store = filled(tokens)
    cache, _ = composed(store=store, host={"path": 20, "window": 20, "point": 2})
    with cache.open([*tokens, 1]) as sequence:
        told = restored(cache, sequence)
        assert told.ready < 40 and told.wanted == 40
    assert serve(cache, [*tokens, 1], restore=False) < 40
    settle(cache)


def test_windows_come_back_where_only_the_path_is_held() -> None:
    """What is held on the device and what is fetched complete each other."""
    tokens = list(range(64))
    store = MemoryBackend(capacity=1 << 22)
    cache, _ = composed(part("path", Path()), part("near", Window(8)), store=store)
    serve(cache, tokens, chunk=16)
    idle(cache)
    cache, _ = composed(part("path", Path()), part("near", Window(8)), store=store, host={"path": 4096, "near": 12})
    assert read_back(cache, tokens[:33]) == 32
    assert read_back(cache, [*tokens, 1]) == 64
    settle(cache)
