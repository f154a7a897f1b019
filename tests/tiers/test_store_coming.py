"""A store comes while there is much for it already, and goes with a cache that nobody closed."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path as File
from typing import Any

import pytest

import prefixloom.tiers.store_writes
from prefixloom import Path, Sinks, Window
from prefixloom.testing.inside.backdoor import tier_lanes
from prefixloom_hicache import FileBackend, MemoryBackend
from tests.support.helpers import part, serve_tightly, settle
from tests.support.stores import behind, composed, idle, restored
from tests.support.tiers import serve

PROMPTS = [[100 * k + j for j in range(40)] for k in range(12)]


def parts() -> list[Any]:
    return [part("path", Path()), part("window", Window(10))]


# ---------------------------------------------------------------- coming


def test_what_is_there_already_is_offered_so_many_nodes_at_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tier = composed(part("path", Path()))
    for tokens in PROMPTS:
        serve(cache, tokens)
    monkeypatch.setattr(prefixloom.tiers.store_writes, "PER_POLL", 5)
    tier.attach(store := MemoryBackend(capacity=1 << 24))
    offered = []
    monkeypatch.setattr(behind(cache).writes, "offer", lambda lane, node: offered.append(node))
    for polled in (5, 10, 12, 12):
        cache.poll()
        assert len(offered) == polled
    assert len(set(offered)) == 12 and not store.status().records


def test_what_lies_below_other_nodes_is_offered_as_well() -> None:
    cache, tier = composed(part("path", Path()))
    for branch in PROMPTS[1:3]:
        serve(cache, [*PROMPTS[0], *branch])
    tier.attach(store := MemoryBackend(capacity=1 << 24))
    cache.poll()
    idle(cache)
    assert store.status().records == 30


@pytest.mark.parametrize("polls", [1, 2, 3, 4])
@pytest.mark.parametrize("names", ["path and window", "sinks"])
def test_what_is_split_while_it_is_offered_is_stored_whole(
    names: str, polls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after it was its turn, down to a node that has nothing left below the cut."""
    make = parts if names != "sinks" else lambda: [part("sinks", Sinks(4))]
    cache, tier = composed(*make(), store=MemoryBackend(capacity=1 << 24))
    for tokens in PROMPTS:
        serve_tightly(cache, tokens)
        idle(cache)
    tier.detach()
    cache.poll()
    monkeypatch.setattr(prefixloom.tiers.store_writes, "PER_POLL", 5)
    tier.attach(store := MemoryBackend(capacity=1 << 24))
    for _ in range(polls):
        cache.poll()
    for tokens in PROMPTS:
        serve_tightly(cache, [*tokens[:12], *[7] * 8])
    idle(cache)
    cache, _ = composed(*make(), store=store)
    for tokens in PROMPTS:
        with cache.open([*tokens, 1], leave=1) as sequence:
            assert restored(cache, sequence).ready == 40
    settle(cache)


def test_what_goes_while_it_is_offered_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for end in ("evict", "flush", "drop"):
        cache, tier = composed(*parts())
        for tokens in PROMPTS:
            serve(cache, tokens, namespace="one")
        tier.attach(MemoryBackend(capacity=1 << 24))
        with monkeypatch.context() as patch:
            patch.setattr(prefixloom.tiers.store_writes, "PER_POLL", 0)
            cache.poll()
        if end == "evict":
            cache.evict(256)
            for lane in tier_lanes(cache):
                freed: list[Any] = []
                lane.evict(50, freed)
                cache.core.index.tree.prune_all(freed)
        elif end == "flush":
            cache.flush()
            assert cache.stats().tier.to_store == 0  # type: ignore[union-attr]
        else:
            cache.drop_namespace("one")
        idle(cache)
        settle(cache)


def test_what_one_store_was_given_counts_for_that_store_alone() -> None:
    cache, tier = composed(part("path", Path()), store=MemoryBackend(capacity=1 << 24), keep="selective")
    for _ in range(3):
        serve(cache, PROMPTS[0])
    idle(cache)
    tier.detach()
    tier.attach(second := MemoryBackend(capacity=1 << 24))
    cache.poll()
    idle(cache)
    assert second.status().records == 0, "nothing was hit since"
    serve(cache, PROMPTS[0])
    idle(cache)
    assert second.status().records == 9


# ---------------------------------------------------------------- going


def test_a_cache_that_is_dropped_leaves_no_thread_and_no_lock(tmp_path: File) -> None:
    def use() -> tuple[weakref.ref[Any], ...]:
        store = FileBackend(tmp_path / "store", capacity=1 << 22)
        cache, tier = composed(part("path", Path()), store=store)
        serve(cache, PROMPTS[0])
        idle(cache)
        return weakref.ref(cache), weakref.ref(tier.store), weakref.ref(store)

    before = set(threading.enumerate())
    gone = use()
    end = time.monotonic() + 30
    while not set(threading.enumerate()) <= before and time.monotonic() < end:  # a busy machine gives them little time
        gc.collect()
        time.sleep(0.02)
    assert set(threading.enumerate()) <= before
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3
    FileBackend(tmp_path / "store", capacity=1 << 22).close()


def test_a_store_that_somebody_has_outlives_a_cache_that_is_dropped() -> None:
    cache, tier = composed(part("path", Path()), store=(store := MemoryBackend(capacity=1 << 22)))
    serve(cache, PROMPTS[0])
    idle(cache)
    del cache, tier
    gc.collect()
    assert store.status().records == 10
