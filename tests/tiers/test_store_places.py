"""Mistakes that were made about what lies where in a store, and about what the scheduling thread does for it."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

import prefixloom.tiers.host_copies
from prefixloom import Path, Sinks, Window, WorkError
from prefixloom.testing.inside.backdoor import tier_lanes
from prefixloom_hicache import MemoryBackend
from tests.support.helpers import part, run, serve_tightly, settle
from tests.support.stores import TOKENS, behind, composed, idle, parts, read_back, restored, stocked, until
from tests.support.tiers import compute, serve, wrong

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


@pytest.mark.parametrize("keep", ["selective", "back"])
def test_another_store_does_not_have_what_the_last_one_had(keep: str) -> None:
    cache, tier = composed(part("path", Path()), store=MemoryBackend(capacity=1 << 22), keep=keep, host=40)

    def use() -> None:
        for _ in range(4):
            serve(cache, TOKENS)
        if keep == "back":
            for lane in tier_lanes(cache):
                for cell in [node.cells[lane.index] for node in cache.core.index.tree.roots[""].children]:
                    lane.going(lane, cell)
                    cell.left = 0  # as if it had gone, and come back from the store
        idle(cache)

    use()
    tier.detach()
    cache.poll()
    tier.attach(second := MemoryBackend(capacity=1 << 22))
    cache.poll()
    use()
    assert second.status().records == 9  # the last page was not hit again


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
    from prefixloom.tiers.store_writes import PER_POLL

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
    import gc
    import weakref

    store = MemoryBackend(capacity=1 << 22)
    cache, _ = composed(part("path", Path()), store=store)
    serve(cache, TOKENS)
    idle(cache)
    time.sleep(0.05)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
