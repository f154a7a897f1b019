"""Mistakes that were made about the store behind the host tier, each in the smallest case that shows it."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from typing import Any

import pytest

import prefixloom.keys.elements
import prefixloom.tiers.host_copies
from prefixloom import Buffer, Component, Manifest, Path, Point, Sinks, TierManifest, Window, WorkError, hookimpl
from prefixloom.testing.inside.backdoor import put_transfer_stream, tier_lane, tier_lanes
from prefixloom.tiers.store_writes import PER_CALL, PER_POLL
from prefixloom_hicache import GuardLimits, HostTier, MemoryBackend
from tests.support.helpers import cache_of, part, run, serve_tightly, settle
from tests.support.stores import TOKENS, Gated, behind, composed, idle, parts, read_back, restored, stocked, until
from tests.support.tiers import compute, copies_by, serve, wrong

# ---------------------------------------------------------------- what a failed step wrote


def test_what_a_failed_step_wrote_is_not_stored(threads: Any) -> None:
    store = MemoryBackend(capacity=1 << 22)
    cache, _ = composed(part("path", Path()), store=store)
    down = put_transfer_stream(cache, "down", threads("down"))
    forward, go = threads("forward"), threading.Event()

    def broken() -> None:
        assert go.wait(20)
        raise RuntimeError("the step failed")

    with cache.open(TOKENS) as sequence:
        sequence.grow(40)
        with cache.step([sequence]) as step:
            step.run_ops(forward)
            forward.run(broken)
        sequence.publish()
        for _ in range(3):
            cache.poll()  # the copy to the host is in flight, and handed over
        go.set()
        assert down.record().synchronize(10)
        time.sleep(0.1)  # nobody has polled: only the store's thread knows
        assert store.status().records == 0
        for _ in range(3):
            cache.poll()
    idle(cache)
    assert store.status().records == 0
    assert tier_lanes(cache)[0].leased == 0
    settle(cache)


def breaking(name: str, go: threading.Event) -> Any:
    """Return what copies between tiers once ``go`` is set, and fails for the component ``name``."""

    def copy(honest: Any, source: Any, *rest: Any) -> None:
        assert go.wait(20)
        if source.name == name:
            raise RuntimeError("the copy failed")
        honest(source, *rest)

    return copy


@pytest.mark.parametrize("name", ["path", "state"])
def test_a_copy_that_fails_while_its_target_is_pinned_for_the_store(name: str, threads: Any) -> None:
    store = MemoryBackend(capacity=1 << 22)
    cache, _ = composed(part("path", Path()), part("state", Point()), store=store)
    put_transfer_stream(cache, "down", threads("down"))
    with copies_by(breaking(name, go := threading.Event())):
        serve(cache, TOKENS)
        cache.poll()
        cache.poll()
    go.set()
    idle(cache)
    until(cache, lambda: not cache.core.flight.works)
    for lane in tier_lanes(cache):
        assert (lane.leased, lane.in_tree) == (0, 0), lane.device.name
    cache.drop_namespace("")
    assert cache.stats().nodes == 0 and not cache.core.index.dropped_roots
    assert serve(cache, TOKENS) == 0
    settle(cache)


def test_a_state_that_never_arrived_is_not_found_while_it_is_pinned_for_the_store(threads: Any) -> None:
    store = Gated(capacity=1 << 22)
    cache, _ = composed(part("path", Path()), part("state", Point()), store=store)
    store.gate.clear()
    serve(cache, [7] * 8)
    until(cache, store.held.is_set)  # what is handed over from now on waits
    put_transfer_stream(cache, "down", threads("down"))
    with copies_by(breaking("state", go := threading.Event())):
        serve(cache, TOKENS)
        cache.poll()
        cache.poll()
    assert tier_lane(cache, "state").leased == 2
    go.set()
    until(cache, lambda: not cache.core.flight.works)
    assert cache.stats().tier.cached["state"] == 1  # type: ignore[union-attr]
    store.gate.set()
    idle(cache)
    assert tier_lane(cache, "state").leased == 0
    settle(cache)


# ---------------------------------------------------------------- what has left the host since


def test_what_left_the_host_before_a_restore_is_fetched() -> None:
    cache, _ = composed(part("path", Path()), store=MemoryBackend(capacity=1 << 22), tokens=64, host={"path": 48})
    serve(cache, TOKENS)
    idle(cache)
    cache.evict(64)
    with cache.open([*TOKENS, 1]) as sequence:
        assert cache.match([*TOKENS, 1]).restorable == 40
        serve(cache, [9] * 40)
        idle(cache)
        assert cache.match([*TOKENS, 1]).restorable < 40
        assert restored(cache, sequence).ready == 40
    settle(cache)


# ---------------------------------------------------------------- extra keys


def test_what_a_store_brings_is_found_though_the_extra_keys_of_its_prompt_were_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sequence ended while its prompt was read, and other extra keys came."""
    prompt: Any = {"tokens": [*TOKENS, 1], "extra": [(0, 4, "an image")]}
    store = Gated(capacity=1 << 22)
    cache, _ = composed(part("path", Path()), store=store)
    serve(cache, **prompt)
    idle(cache)
    cache, _ = composed(part("path", Path()), store=store)
    cache.journal()
    store.holds = ("get",)
    store.gate.clear()
    with cache.open(**prompt) as sequence:
        told = sequence.restore()
        until(cache, store.held.is_set)
    monkeypatch.setattr(prefixloom.keys.elements, "FEW", 0)
    for number in range(3):
        cache.open([5] * 8, extra=[(0, 4, f"image {number}")]).abort()
    store.gate.set()
    until(cache, lambda: told.over)
    assert cache.match(**prompt).restorable == 40
    settle(cache)


# ---------------------------------------------------------------- a ticket that is never done


def test_a_fetch_that_finds_all_on_the_host_already_is_over() -> None:
    """The host has it, and it was not worth a load: there is nothing to be read."""
    tier = HostTier(
        TierManifest(capacity=4096, load_at_least=1000), identity={"model": "m", "weights": "1"}, fetch="wait",
        limits=GuardLimits(deadline=5.0),
    )  # fmt: skip
    cache = cache_of(part("path", Path()), tier)
    tier.attach(MemoryBackend(capacity=1 << 22))
    cache.poll()
    serve(cache, TOKENS)
    idle(cache)
    cache.evict(40)
    with cache.open([*TOKENS, 1]) as sequence:
        told = restored(cache, sequence)
        assert told.ready == 0
    assert not behind(cache).reads.fetches


@pytest.mark.parametrize("held_in", ["looking", "reading"])
@pytest.mark.parametrize("fetch", ["wait", "timeout"])
def test_detach_ends_what_was_asked_of_a_store_that_hangs(held_in: str, fetch: str) -> None:
    store = stocked(kind=Gated)
    cache, tier = composed(store=store, fetch=fetch, limits=GuardLimits(deadline=60.0))
    tier.fetch_base = 60.0
    store.holds = ("exists",) if held_in == "looking" else ("get",)
    store.gate.clear()
    with cache.open([*TOKENS, 1]) as sequence:
        told = sequence.restore()
        until(cache, store.held.is_set)
        tier.detach()
        until(cache, lambda: told.over, 3.0)
        assert sequence.ready == told.ready
    store.gate.set()
    until(cache, lambda: not behind(cache).reads.fetches)
    settle(cache)


def test_writes_that_a_detached_store_never_answers_are_counted_and_hold_nothing() -> None:
    store = Gated(capacity=1 << 22)
    cache, tier = composed(part("path", Path()), store=store, limits=GuardLimits(deadline=60.0))
    store.gate.clear()
    serve(cache, TOKENS)
    cache.poll()
    assert store.held.wait(5)
    tier.detach()
    until(cache, lambda: not behind(cache).writes.calls and not behind(cache).store.follows, 3.0)
    assert cache.stats().tier.refused == 10  # type: ignore[union-attr]
    assert tier_lanes(cache)[0].leased == 0
    store.gate.set()


def test_a_write_that_never_comes_back_pins_nothing() -> None:
    """What it writes was copied out of the host's slots."""
    store = Gated(capacity=1 << 22)
    cache, _ = composed(part("path", Path()), store=store, limits=GuardLimits(deadline=60.0))
    store.gate.clear()
    serve(cache, TOKENS)
    cache.poll()
    assert store.held.wait(5)
    until(cache, lambda: tier_lanes(cache)[0].leased == 0, 3.0)
    store.gate.set()
    idle(cache)
    assert store.status().records == 10


def test_all_that_makes_room_is_stored_when_the_store_answers_before_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryBackend(capacity=1 << 22)
    cache, tier = composed(part("path", Path()), store=store, keep="back", host=400, tokens=400)
    guarded = tier.store
    assert guarded is not None
    ask = guarded.ask

    def quick(*given: Any, **named: Any) -> Any:
        call = ask(*given, **named)
        for _ in range(5000):
            if call.over:
                break
            time.sleep(0.001)
        return call

    serve(cache, list(range(320)))
    monkeypatch.setattr(guarded, "ask", quick)
    serve(cache, list(range(1000, 1320)))
    idle(cache)
    assert store.status().records == 80 > PER_CALL
    assert cache.stats().tier.refused == 0  # type: ignore[union-attr]


def test_a_fetch_says_that_it_was_too_slow_when_the_time_ends_before_its_last_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prefixloom.tiers.store_reads.SLICE", 1)  # one call at a time
    store, tokens = MemoryBackend(capacity=1 << 22), list(range(401))
    near = part("near", Window(400))
    cache, _ = composed(near, store=store, tokens=800)
    serve(cache, tokens)
    idle(cache)
    cache, tier = composed(part("near", Window(400)), store=store, tokens=800, fetch="timeout")
    tier.fetch_base = 1e9
    sequence = cache.open(tokens)
    told = sequence.restore()
    until(cache, lambda: any(fetch.reading for fetch in behind(cache).reads.fetches))
    (fetch,) = behind(cache).reads.fetches
    for _ in range(5000):
        if all(call.over for call in fetch.calls):
            break
        time.sleep(0.001)
    fetch._until = 0.0
    until(cache, lambda: told.over)
    assert (told.ready, told.why) == (0, "the store was too slow")
    sequence.abort()


def test_a_fetch_must_promise_as_much_as_is_asked_for() -> None:
    store = stocked(tokens=TOKENS[:8])
    reads: list[int] = []
    whole = store.get
    store.get = lambda keys, into=None: (reads.append(len(keys)), whole(keys))[1]
    cache, tier = composed(store=store)
    tier.fetch_at_least = 16
    with cache.open(TOKENS) as sequence:
        assert restored(cache, sequence).ready == 0
    assert reads == []
    tier.fetch_at_least = 8
    with cache.open(TOKENS) as sequence:
        assert restored(cache, sequence).ready == 8


# ---------------------------------------------------------------- what may be answered, and what plugins do


class Moody(Component):
    """Its hook raises where a test says so."""

    bad = False

    @hookimpl
    def finalize_match_result(self, walk: Any) -> None:
        if self.bad:
            raise RuntimeError("a plugin's mistake")


def test_a_plugin_that_raises_in_the_end_of_a_fetch_costs_that_fetch_only() -> None:
    data = Manifest([Buffer("data", (2,), "int64")])
    store = stocked(Moody("path", data, Path()))
    moody = Moody("path", data, Path())
    cache, _ = composed(moody, store=store)
    first, second = cache.open([*TOKENS, 1]), cache.open([*TOKENS[:20], 1])
    one, other = first.restore(), second.restore()
    serve(cache, list(range(100, 140)))  # pins something for the store as well
    moody.bad = True
    end = time.monotonic() + 5
    while not (one.over and other.over) and time.monotonic() < end:
        cache.poll()  # raises nothing
        time.sleep(0.001)
    assert one.over and other.over
    assert "a plugin's mistake" in one.why
    moody.bad = False
    idle(cache)
    assert not behind(cache).reads.fetches
    first.close()
    second.close()
    settle(cache)


# ---------------------------------------------------------------- what is written where


def test_strange_names_are_no_reason_to_stop() -> None:
    store = MemoryBackend(capacity=1 << 22)
    cache, _ = composed(part("path", Path()), store=store)
    serve(cache, TOKENS, namespace="\udc80")
    with cache.open(TOKENS, extra=[(8, 12, 10**5000)]) as sequence:
        compute(cache, sequence, TOKENS, 40)
    idle(cache)
    assert store.status().records == 20
    cache, _ = composed(part("path", Path()), store=store)
    assert read_back(cache, [*TOKENS, 1], namespace="\udc80") == 40


def test_what_a_split_leaves_above_a_bare_half_is_stored_as_well() -> None:
    store = MemoryBackend(capacity=1 << 22)
    cache, _ = composed(part("sinks", Sinks(4)), store=store)
    serve_tightly(cache, TOKENS)
    serve_tightly(cache, [*TOKENS[:20], *[7] * 20])  # splits it before a poll: all that it holds is above
    idle(cache)
    assert store.status().records == 1
    cache, _ = composed(part("sinks", Sinks(4)), store=store)
    with cache.open([*TOKENS, 1]) as sequence:
        assert restored(cache, sequence).ready == 40


def test_what_comes_to_a_node_that_was_stored_already_is_stored_as_well() -> None:
    """The first has kept the end of its window only; of the second the host gets the pages before it."""
    store = MemoryBackend(capacity=1 << 22)
    names = ("path", "window")
    cache, _ = composed(*parts(names), store=store)
    second = cache.open(TOKENS)
    serve_tightly(cache, TOKENS)
    idle(cache)
    kept = store.status().records
    run(second, 40)
    second.close()
    idle(cache)
    assert (kept, store.status().records) == (13, 20)
    cache, _ = composed(*parts(names), store=store)
    with cache.open(TOKENS[:5], leave=1) as sequence:
        assert restored(cache, sequence).ready == 4


def test_what_a_fetch_is_about_to_fill_stays_while_room_is_made_for_it() -> None:
    """A window's cell that has a part of its edge may not go for the sake of the rest."""
    near = lambda: part("near", Window(9))  # noqa: E731
    store = stocked(near())
    other = [*TOKENS[:36], 8, 8, 8, 8, *range(60, 68)]
    cache, _ = composed(near(), store=store)
    serve(cache, other, chunk=12)
    idle(cache)
    for size in range(8, 25, 4):
        cache, _ = composed(near(), store=store, host=size)
        for tokens in (TOKENS, other, TOKENS[:24], other[:44], TOKENS):
            cache.evict(256)
            with cache.open([*tokens, 1]) as sequence:
                restored(cache, sequence)
                with cache.step([sequence]) as step:
                    step.run_ops()
                assert wrong(cache, sequence, tokens) == []
            cache.poll()
        until(cache, lambda: tier_lanes(cache)[0].leased == 0)  # noqa: B023
        settle(cache)


def test_a_fetch_that_cannot_begin_its_copies_leaves_no_work_open(monkeypatch: pytest.MonkeyPatch) -> None:
    store = stocked()
    cache, _ = composed(store=store)
    told = (sequence := cache.open([*TOKENS, 1])).restore()

    def failing(*_: Any) -> Any:
        raise WorkError("no stream")

    with monkeypatch.context() as patched:
        patched.setattr(prefixloom.tiers.host_copies.HostCopies, "stream", failing)
        until(cache, lambda: told.over)
    assert not [work for work in cache.core.flight.works if work.event is None]
    sequence.close()
    until(cache, lambda: told.over)
    assert [(lane.in_tree, lane.leased) for lane in tier_lanes(cache)] == [(0, 0)] * 3
    assert cache.stats().nodes == 0
    assert read_back(cache, [*TOKENS, 1]) == 40
    settle(cache)


def test_new_weights_are_named_before_a_flush() -> None:
    store = MemoryBackend(capacity=1 << 22)
    cache, tier = composed(part("path", Path()), store=store)
    serve(cache, TOKENS)
    idle(cache)
    tier.identity = {"model": "m", "weights": "second"}
    cache.flush()
    assert read_back(cache, [*TOKENS, 1]) == 0


# ---------------------------------------------------------------- the scheduling thread


def test_a_long_edge_is_handed_over_in_parts() -> None:
    store = MemoryBackend(capacity=1 << 24)
    cache, _ = composed(part("path", Path()), store=store, page=1, tokens=4096)
    tokens = [k % 1000 for k in range(4 * PER_POLL)]
    serve(cache, tokens)
    seen = [behind(cache).writes.handed]
    for polls in range(20):
        cache.poll()
        seen.append(behind(cache).writes.handed)
        if polls == 1:
            serve(cache, [*tokens[: PER_POLL * 3], 5, 5, 5])  # a split on the way
    assert max(b - a for a, b in itertools.pairwise(seen)) <= PER_POLL
    idle(cache)
    assert store.status().records == 4 * PER_POLL + 3
    assert tier_lanes(cache)[0].leased == 0
    cache, _ = composed(part("path", Path()), store=store, page=1, tokens=4096)
    assert read_back(cache, [*tokens, 1]) == 4 * PER_POLL
    assert read_back(cache, [*tokens[: PER_POLL * 3], 5, 5, 5, 1]) == PER_POLL * 3 + 3


def test_a_store_that_is_idle_holds_nothing_of_its_last_call() -> None:
    store = MemoryBackend(capacity=1 << 22)
    cache, _ = composed(part("path", Path()), store=store)
    serve(cache, TOKENS)
    idle(cache)
    time.sleep(0.05)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
