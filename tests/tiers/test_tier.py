"""The host tier: what it keeps, what comes back, and that both are what an oracle of sets says."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from prefixloom import (
    CompositionError,
    EvictionPolicy,
    Path,
    Point,
    ProtocolError,
    TierManifest,
    compose,
)
from prefixloom.contract.manifest import LAYOUTS
from prefixloom.contract.queues import ListQueue
from prefixloom.testing.inside.backdoor import tier_lane
from prefixloom_hicache import HostTier
from tests.support.helpers import every_reach, part, settle
from tests.support.sampling import sampled, slow
from tests.support.tiers import WRITES, Requests, content_is_there, path_of, restorable, serve, tiered

SETS = {
    "F": ("path",),
    "S": ("window",),
    "M": ("point",),
    "FS": ("path", "window"),
    "FM": ("path", "point"),
    "SM": ("window", "point"),
    "FSM": ("path", "window", "point"),
    "FC": ("path", "chunk"),
    "FT": ("path", "tail"),
    "FU": ("path", "union"),
    "FB": ("path", "blocks"),
    "FH": ("path", "holes"),
    "sinks": ("sinks", "point"),
}


def parts(names: tuple[str, ...]) -> list[Any]:
    return [part(name, every_reach()[name], checkpoint_every=8 if name == "point" else 0) for name in names]


def test_a_tier_has_the_options_that_a_profile_gives_it() -> None:
    options: dict[str, Any] = {
        "capacity": 64, "write": "selective", "hits": 3, "load_at_least": 8, "layout": "page_first", "gates": 2,
        "overlap": True,
    }  # fmt: skip
    tier = HostTier.make("below", **options, keep="back")
    assert (tier.name, tier.keep, tier.manifest) == ("below", "back", TierManifest(**options))
    assert HostTier.make(memory="1MiB").manifest == TierManifest(memory="1MiB")
    assert {each.name for each in attrs.fields(TierManifest)} == {*options, "memory"}, "and there are no others"


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("page", [slow(1), 4])
@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_what_is_restorable_is_what_sets_say_and_comes_back_as_it_was(
    names: tuple[str, ...], page: int, write: str
) -> None:
    requests = Requests((names, page, write))
    cache = tiered(
        *parts(names), page=page, tokens=96, slots=7, write=write, hits=1,
        host={n: 9 if n == "point" else 200 for n in names},
        layout=requests.rng.choice(LAYOUTS), device_layout=requests.rng.choice(LAYOUTS),
    )  # fmt: skip
    told = restored = 0
    for _ in range(36):
        tokens = requests.next()
        plan = cache.match(tokens)
        assert plan.ready == max(restorable(cache, tokens, tiers=False))
        assert plan.restorable == max(restorable(cache, tokens))
        told += plan.restorable > plan.ready
        with cache.open(plan) as sequence:
            outcome = sequence.restore()
            assert outcome.wanted == plan.restorable
            assert outcome.ready == sequence.ready == plan.restorable or "did not fit" in outcome.why
            restored += sequence.ready > plan.ready
        serve(cache, tokens, chunk=requests.rng.choice((8, 100)))
        if requests.rng.random() < 0.2:
            cache.evict(requests.rng.randrange(1, 60))
        if requests.rng.random() < 0.1:
            cache.evict({requests.rng.choice(names): 3})
    settle(cache)
    assert content_is_there(cache)
    assert write == "selective" or (told and restored)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("names", sampled(SETS.values(), 4), ids=SETS)
def test_it_is_the_same_without_the_second_set_of_books(names: tuple[str, ...], write: str) -> None:
    told = []
    for debug in (True, False):
        requests = Requests((names, write))
        cache = tiered(
            *parts(names), tokens=96, slots=7, write=write, hits=1, debug=debug,
            host={n: 9 if n == "point" else 200 for n in names},
        )  # fmt: skip
        hits = [serve(cache, requests.next(), chunk=8) for _ in range(20)]
        told.append((hits, cache.stats().tier))
    assert told[0] == told[1]
    assert told[0][1].backed_up > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_what_has_room_below_is_never_lost(names: tuple[str, ...]) -> None:
    """Write-back: whatever could once be resumed at still can, on one tier or the other."""
    cache = tiered(*parts(names), tokens=96, slots=7, write="back", host=dict.fromkeys(names, 2000))
    requests = Requests(("kept", names))
    ever: list[tuple[list[int], set[int]]] = []
    for _ in range(30):
        tokens = requests.next()
        serve(cache, tokens)
        ever.append((tokens, restorable(cache, tokens)))
        if requests.rng.random() < 0.3:
            cache.evict({name: requests.rng.randrange(9) for name in names})
        for known, bounds in ever:
            assert bounds <= restorable(cache, known), known
    assert cache.stats().tier.evicted == cache.stats().tier.dropped == 0  # type: ignore[union-attr]


def test_of_a_path_the_leaves_go_first_below_as_well() -> None:
    cache = tiered(part("path", Path()), tokens=400, host=40, write="through")
    for tail in range(3):
        serve(cache, [*range(16), *[100 + tail] * 8])
    cache.evict(400)
    assert max(restorable(cache, range(16))) == 16  # the stem, which is the oldest
    assert cache.stats().tier.evicted == 0  # type: ignore[union-attr]
    serve(cache, [200] * 24, restore=False)
    cache.evict(400)
    assert max(restorable(cache, range(16))) == 16
    assert max(restorable(cache, [200] * 24)) == 24
    tier = cache.stats().tier
    assert tier.evicted > 0 and tier.dropped == 0, "one leaf after the other goes for it"  # type: ignore[union-attr]


def test_what_comes_first_below_has_nothing_below_it_but_what_goes() -> None:
    """A policy is told by ``add_first`` that a cell should be evicted next."""
    made: list[ListQueue] = []
    first: list[int] = []  # by call: how many cells lie below the one that comes first

    class Told(ListQueue):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def add_first(self, cell: Any) -> None:
            super().add_first(cell)
            if self is made[-1]:
                first.append(sum(kid.cells[index] is not None for kid in cell.node.children))

    cache = tiered(part("path", Path()), tokens=96, host=160, policy=EvictionPolicy("told", make=Told))
    index = tier_lane(cache, "path").index
    requests = Requests("first below")
    for _ in range(120):
        serve(cache, requests.next())
    assert len(first) > 20
    assert set(first) <= {0, 1}


def test_for_what_does_not_fit_below_nothing_goes() -> None:
    cache = tiered(part("path", Path()), tokens=400, host=16, write="through")
    serve(cache, range(16))
    serve(cache, [7] * 20)
    cache.evict(400)
    assert max(restorable(cache, range(16))) == 16
    tier = cache.stats().tier
    assert tier.evicted == 0 < tier.dropped  # type: ignore[union-attr]


def test_selective_copies_what_was_hit_so_often() -> None:
    cache = tiered(part("path", Path()), tokens=400, write="selective", hits=2)
    for _ in range(2):
        serve(cache, range(20))
        assert cache.stats().tier.backed_up == 0  # type: ignore[union-attr]
    serve(cache, range(20))  # opened at 16 for the second time
    assert cache.stats().tier.backed_up == 4  # type: ignore[union-attr]
    cache.evict(400)
    assert cache.match(range(20)).restorable == 16


def test_hits_are_those_of_both_halves_of_a_split() -> None:
    cache = tiered(part("path", Path()), tokens=400, write="selective", hits=2)
    serve(cache, range(24))
    serve(cache, range(24))  # a hit at 20 splits
    serve(cache, [*range(12), 99, 99, 99, 99])
    assert [node.hits for node in path_of(cache, range(24))] == [2, 1, 0]  # type: ignore[attr-defined]


def test_a_load_that_is_not_worth_it_is_not_offered() -> None:
    cache = tiered(part("path", Path()), load_at_least=16)
    serve(cache, range(40), chunk=4)
    cache.evict({"path": 3})  # [28, 40)
    assert (cache.match(range(41)).ready, cache.match(range(41)).restorable) == (28, 28)
    cache.evict({"path": 1})
    assert (cache.match(range(41)).ready, cache.match(range(41)).restorable) == (24, 40)


def test_a_restore_that_does_not_fit_comes_to_the_next_lower_boundary_that_does() -> None:
    cache = tiered(part("path", Path()), part("state", Point(), checkpoint_every=8), tokens=48, slots=6)
    serve(cache, range(40), chunk=8)
    cache.evict({"path": 12, "state": 6})
    with cache.open([9] * 24) as other:
        other.grow(24)  # 24 of 48 tokens are in use
        with cache.open(range(41)) as sequence:
            told = sequence.restore()
            assert (told.wanted, told.ready) == (40, 24)
            assert "40 tokens did not fit" in told.why
    assert cache.stats().tier.fallbacks > 0  # type: ignore[union-attr]
    settle(cache)


def test_a_restore_that_does_not_fit_counts_as_a_use_of_no_more_than_where_it_tried_to_resume() -> None:
    cache = tiered(part("path", Path()), part("state", Point()), write="through", policy="lfu", slots=3)
    first, second = list(range(24)), [9] * 16
    serve(cache, first, chunk=8)
    cache.evict({"state": 3})
    others = [cache.open([number]) for number in (7, 8)]
    with cache.open([*first, 1]) as sequence:
        restored = sequence.restore()
        assert (restored.wanted, restored.ready) == (24, 0)
        sequence.abort()
    for other in others:
        other.abort()
    for _ in range(2):
        serve(cache, second)
    cache.evict({"path": 6})
    assert cache.peek(second) == 16
    assert cache.stats().components["path"].cached == 4


def test_restore_comes_first_and_without_a_tier_it_does_nothing() -> None:
    cache = tiered(part("path", Path()))
    serve(cache, range(40))
    with cache.open(range(41)) as sequence:
        sequence.grow(1)
        with pytest.raises(ProtocolError, match="restore comes first"):
            sequence.restore()
    bare = compose(None, plugins=[part("path", Path())], capacity=64, page_size=4)
    with bare.open(range(8)) as sequence:
        assert sequence.restore().ready == 0


def test_a_plan_says_what_is_restorable_and_is_stale_when_that_is_gone() -> None:
    cache = tiered(part("path", Path()), tokens=64, host=40)
    serve(cache, range(40))
    cache.evict(64)
    plan = cache.match(range(41))
    assert (plan.ready, plan.restorable) == (0, 40)
    serve(cache, [7] * 40)
    cache.evict(64)  # takes the place of [0, 40) below
    assert plan.stale
    assert cache.match(range(41)).restorable < 40


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        (lambda: [HostTier(TierManifest(capacity=64), "a"), HostTier(TierManifest(capacity=64), "b")], "two tiers"),
        (lambda: [HostTier(TierManifest(capacity={"path": 64}))], "capacity must name every component"),
        (lambda: [HostTier(TierManifest(capacity=2))], "less than one page"),
        (lambda: [HostTier(TierManifest(memory=10))], "too little"),
        (lambda: [HostTier(TierManifest())], "say how large the tier is"),
        (lambda: [HostTier(TierManifest(capacity=64, memory=64))], "one of them"),
        (lambda: [HostTier(TierManifest(capacity=64, write="sometimes"))], "write must be"),  # type: ignore[arg-type]
        (lambda: [HostTier(TierManifest(capacity=64, layout="any"))], "layout must be"),  # type: ignore[arg-type]
        (lambda: [HostTier(TierManifest(capacity=64), "path")], "two components are named 'path'"),
    ],
)
def test_an_impossible_tier_is_refused(tier: Any, message: str) -> None:
    with pytest.raises(CompositionError, match=message):
        compose(
            None, plugins=[part("path", Path()), part("state", Point()), *tier()], page_size=4,
            capacity={"path": 64, "state": 4},
        )  # fmt: skip


def test_a_branch_that_lies_deeper_than_what_was_restored_stays() -> None:
    """The path leads to 16, and the state that is below stands at 8: a checkpoint at 16 is still worth making."""
    cache = tiered(part("path", Path()), part("state", Point()))
    for end in (8, 18):
        serve(cache, range(end))
    cache.evict({"state": 8})
    with cache.open(range(24)) as sequence:
        assert (sequence.ready, sequence.branch) == (0, 16)
        assert sequence.restore().ready == 8
        assert sequence.branch == 16
    settle(cache)
