"""What an eviction takes of other components: what serves no boundary any more, and nothing else."""

from __future__ import annotations

import pytest

from prefixloom import Claim, Component, Path, PluginError, Point, Reach, TierManifest, Window, hookimpl
from prefixloom.contract.reach import Interval
from prefixloom_hicache import HostTier
from tests.support.helpers import PAGE, cache_of, part, serve, settle

TOKENS = list(range(100, 140))
ONES, TWOS = [1] * 8, [2] * 8


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
