"""Shares: whatever one owner asks, another keeps its share of every pool of every tier, and nothing is left unused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from prefixloom import Cache, CapacityError, CompositionError, Path, Point, Tail, TierManifest, Window
from prefixloom.contract.queues import KEPT_TURNS
from prefixloom_hicache import HostTier
from tests.support.helpers import cache_of, held, part, path_cache, run, serve, settle

PINNED = 2**31 - 1
SHARES = {"a": 2.0, "c": 0.5}
PARTS = {"path": Path(), "window": Window(10), "state": Point()}


def kept(cache: Cache, component: str) -> Mapping[str, int]:
    return {owner: tiers["device"].get(component, 0) for owner, tiers in cache.stats().owners.items()}


@pytest.mark.parametrize("policy", ["lru", "priority", "slru"])
@pytest.mark.parametrize("seed", range(2))
def test_eviction_takes_from_the_owner_that_keeps_most_for_its_share(seed: int, policy: str) -> None:
    """And only of what no lease covers. By less than one cell, an owner may have to give more than that."""
    draw = random.Random(seed)
    cache = cache_of(*(part(name, reach) for name, reach in PARTS.items()), policy=policy, shares=SHARES, slots=24)
    most, evicted = 60 // 4, 0
    for _ in range(60):
        owner = draw.choice("aaabbc")
        namespace = draw.choice((owner, f"{owner}/salt", f"{owner}/x/y"))
        tokens = [draw.randrange(3) for _ in range(4)] + [draw.randrange(9)] * draw.randrange(4, 56)
        serve(cache, tokens, chunk=draw.choice((8, 100)), namespace=namespace, priority=draw.choice((0, 5, PINNED)))
        name = draw.choice(list(PARTS))
        before = kept(cache, name)
        freed = cache.evict({name: draw.randrange(1, 12)})[name]
        after = kept(cache, name)
        assert sum(before.values()) - sum(after.values()) == freed
        for loser in before:
            if after.get(loser, 0) < before[loser]:
                evicted += 1
                level = (after.get(loser, 0) + most) / SHARES.get(loser, 1)
                assert all(pages / SHARES.get(other, 1) <= level for other, pages in after.items()), (before, after)
    assert evicted > 20
    settle(cache)


@pytest.mark.parametrize("host", [0, 1024], ids=["device", "device and host"])
@pytest.mark.parametrize("reaches", [("path",), ("window",), ("path", "window", "state")], ids=str)
def test_a_greedy_owner_does_not_take_what_another_keeps_within_its_share(reaches: tuple[str, ...], host: int) -> None:
    tier = [HostTier(TierManifest(capacity=host))] if host else []
    parts = [part(name, PARTS[name]) for name in reaches]
    cache = cache_of(*parts, *tier, tokens=512, slots=16, policy="priority", shares={})
    honest = [1] * 160
    serve(cache, honest, chunk=32, namespace="honest")
    for number in range(25):
        serve(cache, [number, *range(100)], chunk=32, namespace=f"greedy/{number % 3}", priority=PINNED)
        cache.poll()
    assert cache.peek(honest, namespace="honest") == 160
    of_greedy = cache.stats().owners["greedy"]
    if host and reaches == ("path",):
        assert of_greedy["host"]["path"] > 1024 // 4 // 2, "what nobody else wants is used"
    if "path" in reaches:
        assert of_greedy["device"]["path"] > 512 // 4 // 2
    serve(cache, honest, namespace="other")
    settle(cache)


def test_an_owner_whose_pages_have_gone_is_forgotten() -> None:
    parts = (part("path", Path()), part("tail", Tail(12, 5)), part("state", Point()))
    cache = cache_of(*parts, tokens=64, shares={}, policy="priority")
    for number in range(40):
        for tokens in ([number] * 32, [number] * 40):
            serve(cache, tokens, chunk=8, namespace=f"{number}")
    assert len(cache.stats().owners) <= 5
    for lane in cache.core.shape.lanes:
        queue: Any = lane.queue
        early: Any = getattr(lane, "_early", None) or getattr(lane, "slack", None)
        assert max(len(queue.queues), len(early.queues if early is not None else ())) <= 5
    cache.drop_namespace("39")
    cache.flush()
    assert cache.stats().owners == {}
    serve(cache, [1] * 16, namespace="late")
    assert kept(cache, "path") == {"late": 4}
    settle(cache)


def test_slack_of_covered_cells_can_be_had_whoever_keeps_most() -> None:
    """The books promise it, so a sequence that needs it gets it."""
    cache = cache_of(part("window", Window(8)), tokens=160, shares={}, policy="priority")
    serve(cache, [1] * 40, namespace="small")
    lease = cache.lease(cache.match([1] * 40, namespace="small"))
    for number in range(14):
        serve(cache, [2 + number] * 8, namespace="large")
    sequence = cache.open([99] * 200, namespace="new")
    with pytest.raises(CapacityError):
        sequence.grow(156)
    run(sequence, 152)
    assert kept(cache, "window") == {"small": 2}, "what the lease needs"
    sequence.abort()
    lease.release()
    settle(cache)


@pytest.mark.parametrize("shares", [3, {"a": 0}, {"a": -1}, {"a": float("inf")}, {"a": True}, {1: 1}, {"a": "1"}])
def test_shares_that_are_no_numbers_above_0_are_refused(shares: Any) -> None:
    with pytest.raises(CompositionError, match="shares are a mapping from owners to numbers above 0"):
        path_cache(shares=shares)


@pytest.mark.parametrize("shares", [None, {}], ids=["no shares", "shares"])
@pytest.mark.parametrize("priority", [1, PINNED])
def test_a_priority_ends_when_nobody_uses_what_it_keeps(priority: int, shares: Any) -> None:
    cache = path_cache(tokens=64, policy="priority", shares=shares)
    pinned, used = [1] * 16, [2] * 16
    for tokens in (pinned, used):
        serve(cache, tokens, priority=priority)
    lost = None
    for number in range(60):
        serve(cache, [100 + number] * 16)
        assert serve(cache, [*used, 3]) == 16, "what is used keeps its priority"
        if lost is None and not held(cache, pinned):
            lost = number
    assert lost is not None and lost > KEPT_TURNS, "it has kept it for a while"
    settle(cache)


def test_victims_that_are_copied_down_together_are_of_several_owners() -> None:
    """All are taken off the queue before the first goes."""
    cache = cache_of(part("path", Path()), HostTier(TierManifest(capacity=16)), tokens=256, shares={"b": 3})
    for number in range(8):
        serve(cache, [number] * 16, namespace="a" if number % 2 else "b")
    with cache.open([9] * 300, namespace="c") as sequence:
        sequence.grow(180)
        with cache.step([sequence]) as step:
            step.run_ops()
        assert kept(cache, "path") == {"a": 4, "b": 12}
    settle(cache)


@pytest.mark.parametrize("write", ["through", "back"])
def test_a_state_whose_lease_ends_after_it_was_passed_is_evicted(write: str) -> None:
    """It never stood in the queue of an owner: it was covered from the beginning, and is passed when that ends."""
    tier = HostTier(TierManifest(capacity={"path": 480, "state": 40}, write=write))
    cache = cache_of(part("path", Path()), part("state", Point()), tier, tokens=96, shares={"b": 3})
    with cache.open(range(32), namespace="a") as sequence:
        for length in (16, 24):
            sequence.grow(length - sequence.committed)
            with cache.step([sequence]) as step:
                step.run_ops()
            sequence.publish()
            if length == 16:
                lease = cache.lease(cache.match(range(20), namespace="a"))
        lease.release()
        assert cache.evict({"state": 8}) == {"state": 1}
    settle(cache)
