"""What plugins may say about copies between tiers, clause by clause of docs/hooks.md (T and D)."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import (
    AnchorView,
    Claim,
    Component,
    Outcome,
    Path,
    PluginError,
    Point,
    TierManifest,
    Transfer,
    TransferPlan,
    Window,
    compose,
)
from prefixloom import hookimpl as hook
from prefixloom.testing.inside.backdoor import copies
from prefixloom_hicache import HostTier
from tests.support.helpers import part, settle
from tests.support.tiers import broken, copies_by, serve, tiered


class Asked(Component):
    """Notes what it is asked and told."""

    more: Any = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[TransferPlan] = []
        self.told: list[tuple[TransferPlan, Outcome]] = []

    @hook
    def build_hicache_transfers(self, plan: TransferPlan, phase: str) -> Any:
        assert phase == plan.phase
        self.asked.append(plan)
        return self.more(plan) if callable(self.more) else self.more

    @hook
    def commit_hicache_transfer(self, plan: TransferPlan, phase: str, outcome: Outcome) -> Any:
        assert phase == plan.phase
        self.told.append((plan, outcome))


def asked(name: str, reach: Any, more: Any = ()) -> Asked:
    component = part(name, reach, Asked)
    assert isinstance(component, Asked)
    component.more = more
    return component


def test_t1_t2_each_plan_is_shown_once_before_and_once_after() -> None:
    near = asked("near", Window(8))
    cache = tiered(part("path", Path()), near, part("state", Point()), write="through")
    serve(cache, range(40), namespace="a")
    down = [
        Transfer("path", 0, 40, "device", "host"),
        Transfer("near", 0, 40, "device", "host"),
        Transfer("state", 40, 40, "device", "host"),
    ]
    assert near.asked == [TransferPlan("backup", "a", 40, tuple(down))]
    assert near.told == [(near.asked[0], Outcome(True))]
    cache.evict({"path": 100, "near": 100, "state": 9})
    assert len(near.asked) == 1  # nothing is copied that is below already
    with cache.open(range(44), namespace="a") as sequence:
        assert sequence.restore().ready == 40
    up = [Transfer(t.component, t.start, t.end, "host", "device") for t in down]
    assert near.asked[1] == TransferPlan("load", "a", 40, tuple(up))
    assert near.told[1] == (near.asked[1], Outcome(True))


def test_t3_what_is_added_is_copied_as_far_as_it_is_there() -> None:
    def start(plan: TransferPlan) -> Any:
        return (Transfer("near", 0, 8, "host", "device"),) * 2 if plan.phase == "load" else None

    cached = []
    for more in ((), start):
        cache = tiered(part("path", Path()), asked("near", Window(8), more))
        serve(cache, range(40))
        cache.evict({"path": 100, "near": 100})
        with cache.open(range(44)) as sequence:
            sequence.restore()
        cached.append(cache.stats().components["near"].cached)
        settle(cache)
    assert cached == [2, 4]


class Refusing(Component):
    """Its lock cannot be had while ``refuses`` is set."""

    refuses = False

    @hook
    def acquire_component_lock(self, anchor: AnchorView, tier: str) -> None:
        if self.refuses:
            raise RuntimeError("no lock")


def test_what_a_load_brought_and_no_lease_covers_may_go_again() -> None:
    """The copy went well, and then the plugin's lock could not be had."""
    path = part("path", Path(), Refusing)
    cache = tiered(path, part("near", Window(8)))
    serve(cache, range(40))
    cache.evict({"path": 100, "near": 100})
    with cache.open(range(44)) as sequence:
        path.refuses = True  # type: ignore[attr-defined]
        with pytest.raises(PluginError, match="no lock"):
            sequence.restore()
        path.refuses = False  # type: ignore[attr-defined]
        sequence.abort()
    cache.evict({"path": 100, "near": 100})
    assert {name: part.cached for name, part in cache.stats().components.items()} == {"path": 0, "near": 0}
    settle(cache)


def test_t3_a_backup_may_take_along_what_lies_above() -> None:
    def above(plan: TransferPlan) -> Any:
        return (Transfer("near", 0, plan.boundary, "device", "host"),) if plan.phase == "backup" else None

    held = []
    for more in ((), above):
        cache = tiered(part("path", Path()), asked("near", Window(8), more), write="selective", hits=1)
        serve(cache, range(16), restore=False)
        copies(cache).backup([cache.core.index.tree.roots[""].children[0]])
        serve(cache, range(32), restore=False)
        held.append(cache.stats().tier.cached["near"])  # type: ignore[union-attr]
    assert held[0] <= held[1]


@pytest.mark.parametrize(
    "more",
    [
        (Transfer("nobody", 0, 4, "host", "device"),),
        lambda plan: (Transfer("path", 0, 4, plan.transfers[0].source, plan.transfers[0].target),),
        (Transfer("near", 0, 4, "device", "device"),),
        (Transfer("near", 8, 4, "host", "device"),),
        ("near",),
        "near",
        lambda plan: 1 / 0,
    ],
)
def test_t4_nonsense_is_counted_and_the_derived_copies_are_made(more: Any) -> None:
    cache = tiered(part("path", Path()), asked("near", Window(8), more))
    serve(cache, range(40))
    cache.evict({"path": 100, "near": 100})
    with cache.open(range(44)) as sequence:
        assert sequence.restore().ready == 40
    assert cache.stats().plugin_errors > 0
    settle(cache)


def test_d2_a_copy_that_fails_is_told() -> None:
    near = asked("near", Window(8))
    cache = tiered(near, write="through")
    with copies_by(broken):
        serve(cache, range(40))
    (plan, outcome) = near.told[0]
    assert plan.phase == "backup" and not outcome.ok and "no copy today" in outcome.error
    assert cache.stats().tier.cached == {"near": 0}  # type: ignore[union-attr]
    assert cache.stats().tier.failed == 1  # type: ignore[union-attr]
    settle(cache)


def test_d1_of_a_plan_that_led_to_no_copy_nothing_is_told() -> None:
    near = asked("near", Window(8))
    cache = tiered(near, write="through", host={"near": 8})
    serve(cache, range(40))
    assert len(near.asked) == 1 and near.told == []
    assert cache.stats().tier.dropped == 1  # type: ignore[union-attr]
    settle(cache)


def test_d4_a_hook_that_raises_when_told_is_counted() -> None:
    class Raises(Asked):
        @hook
        def commit_hicache_transfer(self, outcome: Outcome) -> Any:
            raise ValueError("told too much")

    cache = tiered(part("near", Window(8), Raises), write="through")
    serve(cache, range(40))
    assert cache.stats().plugin_errors == 1
    settle(cache)


class Strange(HostTier):
    @hook
    def commit_insert(self, walk: Any) -> Claim | None:
        return None


def test_a_tier_that_implements_a_hook_of_a_component_is_refused() -> None:
    from prefixloom import CompositionError

    with pytest.raises(CompositionError, match="overrides hooks that are never called on a tier: commit_insert"):
        compose(None, plugins=[part("path", Path()), Strange(TierManifest(capacity=400))], capacity=64, page_size=4)


class Narrow(Component):
    """Accepts less of what is on the device than of what could be restored."""

    @hook
    def create_match_validator(self, tiers: Any) -> Any:
        self.__dict__.setdefault("made", []).append(tiers)
        return lambda walk: min(walk.boundary, 8 * len(tiers))


def test_v1_a_validator_is_made_once_for_the_device_and_once_for_what_could_be_restored() -> None:
    alone, below = (part("path", Path(), Narrow) for _ in "ab")
    cache = compose(None, plugins=[alone], capacity=64, page_size=4)
    serve(cache, range(40), chunk=4)
    assert (vars(alone)["made"], cache.match(range(41)).ready) == ([("device",)], 8)
    cache = tiered(below, capacity={"path": 64})
    serve(cache, range(40), chunk=4)
    assert (vars(below)["made"], cache.match(range(41)).ready) == ([("device",), ("device", "host")], 8)
    cache.evict(64)
    assert cache.match(range(41)).restorable == 16
