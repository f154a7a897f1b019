"""Slow, full and broken stores: nobody waits for them, and whatever they answer is a miss with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from prefixloom import Path, Window
from prefixloom.storage import Miss, Refused
from prefixloom.testing.inside.backdoor import tier_lanes
from prefixloom.tiers.pieces import READ
from prefixloom_hicache import GuardLimits, MemoryBackend
from tests.support.helpers import part, settle
from tests.support.stores import TOKENS, Gated, behind, composed, idle, read_back, restored, stocked, until
from tests.support.tiers import compute, serve

# ---------------------------------------------------------------- nobody waits


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


@pytest.mark.parametrize("held_in", ["exists", "get"])
@pytest.mark.parametrize("fetch", ["best_effort", "wait", "timeout"])
def test_a_prompt_waits_for_a_slow_store_as_long_as_its_policy_says(fetch: str, held_in: str) -> None:
    store = stocked(kind=Gated)
    cache, tier = composed(store=store, fetch=fetch)
    tier.fetch_base, tier.fetch_per_page = 0.05, 0.0
    store.holds = (held_in,)
    store.gate.clear()
    with cache.open([*TOKENS, 1]) as sequence:
        told = sequence.restore()
        assert told.over == (fetch == "best_effort")
        until(cache, store.held.is_set)
        if fetch == "timeout":
            until(cache, lambda: told.over)
            assert "too slow" in told.why
        assert (told.over, sequence.ready) == (fetch != "wait", 0)
        store.gate.set()
        until(cache, lambda: told.over and not behind(cache).reads.fetches)
        assert told.ready == sequence.ready == (40 if fetch == "wait" else 0)


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
    """Answers reads with ``answer(key, record)``, and with ``answers(keys)`` if a test gives that."""

    answer: Any = staticmethod(lambda key, record: record)
    answers: Any = None

    def get(self, keys: Any, into: Any = None) -> Any:
        if self.answers is not None:
            return self.answers(keys)
        return tuple(self.answer(key, record) for key, record in zip(keys, super().get(keys), strict=True))


def moved(key: Any, record: Any) -> Any:
    return attrs.evolve(record, start=record.start + 4, end=record.end + 4)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"answer": lambda key, record: Miss(key, "corrupt", "flipped")}, "corrupt: flipped"),
        ({"answer": moved}, "the store gave"),
        ({"answer": lambda key, record: 1 / 0}, "error: ZeroDivisionError"),
        ({"answer": lambda key, record: Refused(key, "io")}, "io"),
        ({"answers": lambda keys: tuple(None for _ in keys)}, "error"),
        ({"answers": lambda keys: tuple(True for _ in keys)}, "error"),
        ({"answers": lambda keys: ()}, "error"),
        ({"answers": lambda keys: None}, "error"),
        ({"answers": lambda keys: [Miss(key, "absent") for key in keys]}, "error"),
    ],
    ids=["corrupt", "another piece", "raises", "refused", "none", "booleans", "too few", "nothing", "a list"],
)
def test_whatever_a_store_answers_it_is_a_miss_with_a_reason(given: dict[str, Any], why: str) -> None:
    store = stocked(kind=Bad)
    for name, value in given.items():
        setattr(store, name, value)
    cache, _ = composed(store=store)
    with cache.open([*TOKENS, 1]) as sequence:
        told = restored(cache, sequence)
        assert told.ready == 0 and why in told.why, told
    assert serve(cache, TOKENS) == 0
    settle(cache)


def test_a_record_of_another_prompt_is_no_answer() -> None:
    """Of the same component and the same place."""
    store = stocked(kind=Bad)
    cache, _ = composed(store=store)
    serve(cache, other := list(range(100, 140)))
    idle(cache)
    kept: dict[Any, Any] = {}
    store.answer = lambda key, record: kept.setdefault((record.component, record.start, record.end), record)
    cache, _ = composed(store=store)
    assert read_back(cache, [*other, 1]) == 40
    with cache.open([*TOKENS, 1]) as sequence:
        told = restored(cache, sequence)
        assert told.ready == 0 and "another" in told.why


@pytest.mark.parametrize(
    "answers", [lambda records: (), lambda records: tuple(None for _ in records), lambda records: None]
)
def test_only_what_a_store_says_it_stored_counts_as_stored(answers: Callable[[Any], Any]) -> None:
    store = MemoryBackend(capacity=1 << 22)
    store.put = lambda records: answers(records)  # type: ignore[method-assign]
    cache, _ = composed(part("path", Path()), store=store)
    serve(cache, TOKENS)
    idle(cache)
    assert (behind(cache).writes.stored, behind(cache).writes.refused) == (0, 10)


@pytest.mark.parametrize("fetch", ["wait", "best_effort"])
def test_of_a_path_what_came_before_a_bad_piece_counts(fetch: str) -> None:
    tokens = list(range(4 * READ + 80))
    store = stocked(part("path", Path()), tokens=tokens, kind=Bad)
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
