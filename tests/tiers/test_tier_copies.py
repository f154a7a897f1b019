"""Copies between tiers: what they are told, what they bring, and what is left of them when they are over."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

import prefixloom.tiers.host_copies
import prefixloom.tiers.restore
from prefixloom import Path, Point, RaceError, Window
from prefixloom.device.flight import Flight
from prefixloom.testing.inside.backdoor import copies
from tests.support.helpers import part, run, settle
from tests.support.tiers import path_of, serve, simulated, tiered
from tests.tiers.test_tier_regressions import broken, state_below, whole


def test_a_tiers_threads_end_with_its_cache() -> None:
    before = set(threading.enumerate())
    cache = tiered(part("path", Path()), write="through", overlap=True)
    serve(cache, range(40))
    assert set(threading.enumerate()) - before
    del cache
    until = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < until:
        gc.collect()  # not at once: the copies that were enqueued hold their pools
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_pools_see_to_the_order_of_their_pages_once_they_are_copied() -> None:
    """Until then it would cost, and be of no use."""
    cache = tiered(part("path", Path()), write="back")
    pools = [lane.pool for lane in cache.core.shape.all_lanes]
    serve(cache, range(40))
    assert [pool.orderly for pool in pools] == [False, False]
    cache.evict(40)
    assert [pool.orderly for pool in pools] == [True, True]
    settle(cache)


def test_a_restore_that_cannot_fit_does_not_try_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tiered(part("path", Path()), tokens=1024, host={"path": 1200})
    serve(cache, range(1000))
    cache.evict(1024)
    asked = []
    honest = prefixloom.tiers.restore._load
    monkeypatch.setattr(prefixloom.tiers.restore, "_load", lambda *args: asked.append(1) or honest(*args))
    with cache.open([7] * 900) as other:
        other.grow(900)
        with cache.open(range(1001)) as sequence:
            assert sequence.restore().ready == 124  # what is left of 1,024
    assert len(asked) <= 3
    settle(cache)


def test_a_copy_to_the_host_that_fails_on_its_stream_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tiered(part("path", Path()), write="through")
    simulation = simulated(cache)
    monkeypatch.setattr(prefixloom.tiers.host_copies, "copy_between", broken)
    serve(cache, range(40))
    simulation.drain()
    cache.poll()
    assert cache.stats().tier.failed == 1  # type: ignore[union-attr]
    settle(cache)


def test_a_load_that_is_over_is_not_remembered_until_the_next_poll() -> None:
    cache = tiered(part("path", Path()))
    for _ in range(3):
        serve(cache, range(40))
        cache.evict(1000)
    assert copies(cache).flying == []
    run_one = cache.open(range(44))
    run(run_one, 1)
    run_one.close()


@pytest.mark.parametrize("way", ["down", "up"])
def test_wrong_books_are_no_copy_that_failed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the second set of books finds in a copy is told, not taken for bad luck."""
    cache = tiered(part("path", Path()))
    serve(cache, range(40))
    if way == "up":
        cache.evict(1000)

    def wrong_books(*_: Any) -> None:
        raise RaceError("seen")

    monkeypatch.setattr(prefixloom.tiers.host_copies, "copy_between", wrong_books)
    with pytest.raises(RaceError):
        if way == "down":
            cache.evict(1000)
        with cache.open(range(44)) as sequence:
            sequence.restore()


def test_nothing_that_a_copy_was_told_is_changed_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of a copy that waits are the copy's alone."""
    told: list[tuple[Any, list[int], Any, list[int]]] = []
    honest = prefixloom.tiers.host_copies.HostCopies.run

    def seen(self: Any, moves: Any, nodes: Any, hold: Any, way: str) -> Any:
        work = honest(self, moves, nodes, hold, way)
        told.extend((mine.src, list(mine.src), mine.dst, list(mine.dst)) for mine in moves)
        return work

    monkeypatch.setattr(prefixloom.tiers.host_copies.HostCopies, "run", seen)
    cache = tiered(part("path", Path()), part("state", Point()), write="through", host={"path": 96, "state": 4})
    simulation = simulated(cache)
    for turn in range(8):
        serve(cache, [turn % 5, *range(40)])
        cache.evict({"path": 8, "state": 2})
        if turn % 3 == 2:
            simulation.drain()
            cache.poll()
    simulation.drain()
    assert len(told) > 6
    for src, src_then, dst, dst_then in told:
        assert (src, dst) == (src_then, dst_then)
    settle(cache)


def test_only_what_the_device_lacks_is_copied_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a window's three pages two are there."""
    cache = tiered(part("near", Window(10)))
    for end in (8, 16, 24):
        serve(cache, range(end))
    cache.evict({"near": 1000})
    serve(cache, range(25))
    lane = cache.core.shape.lanes[0]
    (cell,) = [node.cells[0] for node in path_of(cache, range(24)) if node.end == 16]
    lane.drop_cell(cell)
    copied: list[int] = []

    def counted(source: Any, src: Any, target: Any, dst: Any) -> None:
        if target is lane.pool:
            copied.append(len(src))
        whole(source, src, target, dst)

    monkeypatch.setattr(prefixloom.tiers.host_copies, "copy_between", counted)
    with cache.open(range(25)) as sequence:
        assert sequence.restore().ready == 24
    assert copied == [1]
    settle(cache)


def test_a_hit_counts_for_all_that_lies_above_it() -> None:
    cache = tiered(part("path", Path()), write="selective", hits=2)
    for end in (8, 16):
        serve(cache, range(end), restore=False)
    before = [node.hits for node in path_of(cache, range(16))]  # type: ignore[attr-defined]
    cache.open(range(17)).close()
    assert [node.hits for node in path_of(cache, range(16))] == [count + 1 for count in before]  # type: ignore[attr-defined]


def test_a_state_that_a_load_brought_is_covered_no_longer() -> None:
    cache = state_below()
    with cache.open(range(17)) as sequence:
        assert sequence.restore().ready == 16
        assert cache.stats().components["state"].leased == 0
    settle(cache)


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_copy_that_comes_after_nothing_races_with_the_layers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a copy reads in one pool and what it writes in the other are both known to the second set of books."""
    cache = tiered(part("path", Path()), write="through" if way == "down" else "back")
    if way == "up":
        serve(cache, range(40))
        cache.evict(1000)
    simulation = simulated(cache)
    monkeypatch.setattr(Flight, "order", lambda *_: None)
    with cache.open(range(44)) as sequence:
        if way == "up":
            assert sequence.restore().ready == 40
        sequence.grow(4)
        said = (
            "copy down of path' reads" if way == "down" else "layers of .* reads slot .*'copy up of path', which wrote"
        )
        with pytest.raises(RaceError, match=said):
            with cache.step([sequence]) as step:
                step.run_ops(simulation["forward"])
            sequence.publish()
        simulation.drain()


def test_a_load_that_fails_after_its_sources_went_takes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tiered(part("path", Path()), part("state", Point()))
    serve(cache, range(40), namespace="a")
    cache.evict({"path": 1000, "state": 8})
    simulation = simulated(cache)
    monkeypatch.setattr(prefixloom.tiers.host_copies, "copy_between", broken)
    sequence = cache.open(range(44), namespace="a")
    assert sequence.restore().ready == 40
    cache.drop_namespace("a")
    simulation.drain()
    cache.poll()
    assert sequence.failed is not None and cache.stats().tier.failed == 1  # type: ignore[union-attr]
    serve(cache, range(40), namespace="a")
    settle(cache)


def test_only_what_goes_is_copied_before_it_goes() -> None:
    """Of two prompts whose first pages are slack, one is cut."""
    cache = tiered(part("near", Window(8)))
    for first in (1, 2):
        serve(cache, [first] * 40)
    assert cache.evict({"near": 1})["near"] == 8
    assert cache.stats().tier.backed_up == 10  # type: ignore[union-attr]
    settle(cache)
