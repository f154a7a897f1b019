"""What an eviction takes of other components: what serves no boundary any more, and nothing else."""

from __future__ import annotations

import random

import pytest

from prefixloom import Cache, Claim, Component, Path, PluginError, Point, Reach, TierManifest, Window, hookimpl
from prefixloom.contract.reach import Interval
from prefixloom_hicache import HostTier
from tests.support.helpers import PAGE, cache_of, every_reach, part, serve, settle

TOKENS = list(range(100, 140))
ONES, TWOS = [1] * 8, [2] * 8


def test_what_serves_no_boundary_without_an_evicted_cell_goes_with_it() -> None:
    cache = cache_of(part("path", Path()), part("window", Window(6)), part("state", Point()))
    for tokens in (TOKENS[:8], ONES, TWOS):
        serve(cache, tokens)
    cache.lease(cache.match(TOKENS[:8])).release()  # the path's least recent leaf is now that of ONES
    free = {name: cache.pool(name).free for name in ("window", "state")}
    assert cache.evict({"path": 2}) == {"path": 2}
    assert cache.pool("state").free == free["state"] + 1
    assert cache.pool("window").free == free["window"] + 2
    assert [cache.stats().components[name].evicted for name in ("path", "window", "state")] == [2, 2, 1]
    assert [cache.peek(tokens) for tokens in (TOKENS[:8], ONES, TWOS)] == [8, 0, 8]


def test_a_window_takes_the_state_with_it_and_a_state_takes_nothing() -> None:
    cache = cache_of(part("path", Path()), part("window", Window(6)), part("state", Point()))
    serve(cache, ONES)
    serve(cache, TWOS)
    assert cache.evict({"window": 1}) == {"window": 2}
    assert [cache.stats().components[name].evicted for name in ("path", "window", "state")] == [0, 2, 1]
    assert cache.evict({"state": 1}) == {"state": 1}
    assert [cache.stats().components[name].evicted for name in ("path", "window", "state")] == [0, 2, 2]


class Late(Reach):
    """The first page, but only from the second on."""

    def needs(self, n: int) -> tuple[Interval, ...]:
        return ((0, PAGE),) if n > PAGE else ()


def test_a_state_stays_where_a_component_can_resume_without_its_cell() -> None:
    cache = cache_of(part("late", Late()), part("state", Point()))
    for tokens in (TOKENS, ONES):
        for length in (4, 8):
            serve(cache, tokens[:length])
    assert cache.evict({"late": 4}) == {"late": 4}
    assert [cache.peek(tokens[:length]) for tokens in (TOKENS, ONES) for length in (4, 8)] == [4, 4, 4, 4]
    assert cache.stats().components["state"].evicted == 2, "those of 8"


def test_what_is_covered_does_not_go_with_an_evicted_cell() -> None:
    cache = cache_of(part("window", Window(4)), part("state", Point()), debug=False)
    serve(cache, TOKENS[:8])
    state = cache.core.shape.lane("state")
    node = cache.match(TOKENS[:8]).match.node
    record = state.acquire(node)
    assert cache.evict({"window": 2}) == {"window": 2}
    assert node.cells[state.index] is not None
    state.release(record)
    assert cache.evict({"state": 1}) == {"state": 1}, "it goes when its turn comes"


class Asked(Component):
    """Wants to be asked before it loses a state."""

    @hookimpl
    def evict_component(self, node: object, tier: str) -> Claim | None:
        return None


def test_who_is_to_be_asked_loses_nothing_unasked() -> None:
    cache = cache_of(part("path", Path()), part("state", Point(), Asked))
    serve(cache, ONES)
    assert cache.evict({"path": 2}) == {"path": 2}
    assert cache.stats().components["state"].evicted == 0


@pytest.mark.parametrize("room", [100, 4])
def test_above_a_tier_falls_what_has_nothing_below_either(room: int) -> None:
    tier = HostTier(TierManifest(capacity={"path": room, "state": 10}, write="back"))
    cache = cache_of(part("path", Path()), part("state", Point()), tier)
    serve(cache, ONES)
    assert cache.evict({"path": 2}) == {"path": 2}
    assert cache.stats().components["state"].evicted == (0 if room == 100 else 1)
    with cache.open(ONES) as sequence:
        assert sequence.restore().ready == (8 if room == 100 else 0)


@pytest.mark.parametrize("write", ["through", "selective"])
def test_what_a_tier_has_copied_before_is_not_asked_of_the_device_again(write: str) -> None:
    tier = HostTier(TierManifest(capacity={"path": 100, "state": 10}, write=write, hits=2))  # type: ignore[arg-type]
    cache = cache_of(part("path", Path()), part("state", Point()), tier)
    for tokens in (ONES, TWOS, [*TWOS, 5]):
        serve(cache, tokens)
    with cache.open([*TWOS, 6]):
        pass
    assert cache.evict({"path": 4}) == {"path": 4}
    kept = {tuple(ONES): write == "through", tuple(TWOS): True}
    assert cache.stats().components["state"].evicted == sum(not below for below in kept.values())
    for tokens, below in kept.items():
        with cache.open(list(tokens)) as sequence:
            assert sequence.restore().ready == (8 if below else 0)


def test_what_others_of_its_kind_hang_from_stays() -> None:
    """Of two paths, one keeps a child whose other half lies on the host, while its parent found no room there."""
    tier = HostTier(TierManifest(capacity={"a": 64, "b": 4}, write="back"))
    cache = cache_of(part("a", Path()), part("b", Path()), tier)
    for tokens in (TOKENS[:8], TOKENS[:12]):
        serve(cache, tokens)
    with cache.open([*TOKENS[:8], 99], leave=1):
        pass
    cache.evict({"b": 3})
    assert cache.stats().components["a"].cached == 3
    assert cache.evict({"a": 64}) == {"a": 3}


def test_a_state_stays_where_what_it_needs_of_another_node_lies_below() -> None:
    tier = HostTier(TierManifest(capacity={"near": 64, "state": 10}, write="selective", hits=2))
    cache = cache_of(part("near", Window(4).shift(4)), part("state", Point()), tier)
    serve(cache, TOKENS[:8])
    for _ in range(3):
        cache.open([*TOKENS[:8], 98]).close()
    serve(cache, TOKENS[:12])
    assert cache.match([*TOKENS[:12], 1]).restorable == 12
    cache.evict({"near": 64})
    assert cache.match([*TOKENS[:12], 1]).restorable == 12


class Moody(Reach):
    """A window in plain Python that raises when it is told to."""

    raising = False

    def needs(self, n: int) -> tuple[Interval, ...]:
        if Moody.raising:
            raise RuntimeError("moody")
        return ((max(0, n - 8), n),) if n else ()


def test_a_reach_that_raises_while_it_is_asked_leaves_the_books_right(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(part("near", Moody()), part("state", Point()))
    for at in range(4):
        serve(cache, range(at * 100, at * 100 + 16))
    monkeypatch.setattr(Moody, "raising", True)
    with pytest.raises(PluginError, match="moody"):
        cache.evict({"near": 6})
    monkeypatch.setattr(Moody, "raising", False)
    assert cache.stats().components["near"].evicted >= 6
    settle(cache)


def filled(names: tuple[str, ...], seed: int, falling: bool) -> tuple[Cache, list[list[int]]]:
    """A cache of these components after some traffic, the same for the same seed."""
    reaches = {**every_reach(), "path beside": Path()}
    cache = cache_of(*(part(name, reaches[name]) for name in names), tokens=512, slots=40)
    if not falling:
        for lane in cache.core.shape.lanes:
            lane.feeds = ()
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(12):
        before = rng.choice(prompts)[: PAGE * rng.randrange(1, 6)] if prompts and rng.random() < 0.7 else []
        prompts.append([*before, *(rng.randrange(9) for _ in range(PAGE * rng.randrange(1, 8)))])
        serve(cache, prompts[-1])
    return cache, prompts


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "names",
    [
        ("path", "window", "point"), ("window", "point"), ("path", "chunk", "point"), ("sinks", "point"),
        ("path", "union", "tail", "point"), ("chunk", "union", "window"),
        ("path", "path beside", "point"),
    ],
    ids="-".join,
)  # fmt: skip
def test_no_boundary_is_lost_by_what_falls(names: tuple[str, ...], seed: int) -> None:
    """The same eviction in two caches, in one of which nothing falls: every prefix hits at the same length."""
    rng = random.Random(seed + 100)
    amounts = {name: rng.randrange(1, 40 if name != "point" else 4) for name in names}
    fallen = 0
    for name in names:
        cache, prompts = filled(names, seed, True)
        other, _ = filled(names, seed, False)
        assert cache.evict({name: amounts[name]}) == other.evict({name: amounts[name]})
        for prompt in prompts:
            for length in range(PAGE, len(prompt) + 1, PAGE):
                assert cache.peek(prompt[:length]) == other.peek(prompt[:length])
        fallen += sum(each.evicted for each in cache.stats().components.values()) - amounts[name]
    assert fallen or "path" not in names
