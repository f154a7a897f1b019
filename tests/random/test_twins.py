"""The fast paths of the lanes do what the general verbs do: two caches of one composition get the same operations."""

from __future__ import annotations

from functools import cache as remembered
from typing import Any

import pytest

import prefixloom
from prefixloom import (
    AdmissionPolicy,
    Buffer,
    Codec,
    Component,
    Manifest,
    Path,
    Point,
    Reach,
    Sinks,
    TierManifest,
    Window,
)
from prefixloom.testing.inside.backdoor import lanes, put_transfer_stream
from prefixloom.tree.lane import Lane
from prefixloom.tree.path_lane import PathLane
from prefixloom.tree.scatter_lane import ScatterLane
from prefixloom.tree.state_lane import StateLane
from prefixloom.tree.window_lane import WindowLane
from prefixloom_hicache import HostTier
from tests.random.twins import HOOKS, Fuse, answering, differ
from tests.support.setups import Setup, Strided, parts, setups


def finish_in_two(lane: PathLane, run: Any, cover: Any) -> None:
    """``finish`` as ``follow`` and ``release``."""
    lane.release(lane.follow(run, None, cover))  # type: ignore[arg-type]


GENERAL: dict[type[Lane], dict[str, Any]] = {
    PathLane: {"begin": Lane.begin, "hand_over": Lane.hand_over, "evict": Lane.evict, "finish": finish_in_two},
    WindowLane: {"begin": Lane.begin, "hand_over": Lane.hand_over},
    ScatterLane: {"begin": Lane.begin, "hand_over": Lane.hand_over},
    StateLane: {"hand_over": Lane.hand_over},
}
"""The verbs that lanes speed up, each with its general way."""


@remembered
def general(kind: type[Lane]) -> type[Lane]:
    """A subclass of ``kind`` whose verbs all go the general way."""
    return type(f"General{kind.__name__}", (kind,), {"__slots__": (), **GENERAL.get(kind, {})})


class Burning(Reach):
    """A window in plain Python, which may be told to fail."""

    def __init__(self, width: int, fuse: Fuse) -> None:
        self.width, self.fuse = width, fuse

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        self.fuse.burn()
        return ((max(0, n - self.width), n),) if n else ()

    def until(self, p: int) -> float:
        self.fuse.burn()
        return p + self.width


class Maker:
    """A composition, made again and again: ``hooks`` by component, and options of ``compose``."""

    def __init__(self, setup: Setup, hooks: dict[str, tuple[str, ...]] | None = None, **options: Any) -> None:
        self.setup, self.hooks, self.options = setup, hooks or {}, options

    def __call__(self, fast: bool) -> tuple[Any, list[Fuse]]:
        """A cache and the fuses of its plain Python. ``fast``: the lanes keep their fast paths."""
        setup, fuses = self.setup, []
        plugins: list[Any] = []
        for name, reach, facts in setup.parts:
            facts = dict(facts)
            dtype = "float32" if "stored_as" in facts else "int64"
            if isinstance(reach, Burning):
                reach = Burning(reach.width, Fuse())
                fuses.append(reach.fuse)
            kind = answering(*self.hooks[name]) if name in self.hooks else Component
            each: Any = kind(name, Manifest([Buffer("content", (2,), dtype)], **facts), reach)
            if name in self.hooks:
                fuses.append(each.fuse)
            plugins.append(each)
        options = dict(self.options)
        capacity = {
            name: setup.own.get(name, setup.slots if reach.unit == "boundary" else setup.tokens)
            for name, reach, _ in setup.parts
        }
        if "write" in options:
            host = {name: count * 3 for name, count in capacity.items()}
            plugins.append(HostTier(TierManifest(capacity=host, write=options.pop("write"), hits=1, overlap=False)))
        cache = prefixloom.compose(
            None, plugins=plugins, page_size=setup.page, capacity=capacity, policy=setup.policy,
            max_rewind=setup.max_rewind, debug=False, **options,
        )  # fmt: skip
        if cache.core.below is not None:  # copies are made at once, so that there is one order of events
            for way in ("down", "up"):
                put_transfer_stream(cache, way, None)
        if not fast:
            for lane in cache.core.shape.lanes:
                if type(lane) in GENERAL:
                    lane.__class__ = general(type(lane))
        return cache, fuses


def composed(*reaches: Reach, page: int = 4, tokens: int = 64, slots: int = 9, hooks: Any = None, **more: Any) -> Maker:
    """Components a, b, c...; manifest facts under those names, the rest are options."""
    facts = {name: more.pop(name) for name in "abcdef" if name in more}
    setup = Setup(
        parts(*reaches, **facts), page=page, tokens=tokens, slots=slots, policy=more.pop("policy", "lru"),
        max_rewind=more.pop("max_rewind", 0), own=more.pop("own", {}),
    )  # fmt: skip
    return Maker(setup, hooks, **more)


CODED = {"stored_as": Codec("int8", 0.004)}
FUSE = Fuse()
MAKERS: dict[str, Maker] = {
    **{name: Maker(setup) for name, setup in list(setups().items())[::3]},
    "coded beside a window": composed(Path(), Window(9), Point(), c=CODED, slots=14, max_running=6),
    "admission": composed(Path(), Point(), admission="branch-and-last"),
    "admission, few per path": composed(
        Path(), Point(), b={"states_per_path": 2},
        admission=AdmissionPolicy("odd", lambda view: view.boundary % 8 > 0, lambda view: view.boundary % 3),
    ),
    "plain Python": composed(Path(), Burning(9, FUSE)),
    "plain Python, several": composed(Burning(5, FUSE), Path(), Burning(9, FUSE), Point()),
    "plain Python, checkpoints": composed(Path(), Burning(6, FUSE), Point(), c={"checkpoint_every": 8}, slots=16),
    "lookahead, window, state": composed(Path(), Window(9), Point(), a={"lookahead": 1}),
    "claims": composed(Path(), Window(9), Point(), hooks={"b": ("finalize_match_result",)}, slots=16),
    "locks": composed(
        Path(), Window(9), Point(), hooks={"b": ("acquire_component_lock", "release_component_lock")}, page=1, tokens=44
    ),
    "insertions": composed(Path(), Window(9), Point(), hooks={"b": ("commit_insert",), "c": ("commit_insert",)}),
    "splits": composed(Path(), Point(), hooks={"b": ("redistribute_on_node_split",)}, page=1, tokens=40),
    "evictions": composed(Path(), Window(9), Point(), hooks=dict.fromkeys("abc", ("evict_component",))),
    "all hooks": composed(Path(), Window(9), Point(), Sinks(4) | Window(5), hooks={"b": HOOKS, "c": HOOKS}),
    **{
        f"a tier, {write}": composed(Path(), Window(9), Point(), write=write, page=page, tokens=48, slots=7)
        for write, page in (("through", 4), ("back", 1), ("selective", 4))
    },
    "a tier and hooks": composed(Path(), Strided(), Point(), write="through", hooks={"c": HOOKS[3:]}),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_a_lane_does_the_same_fast_and_in_the_general_way(name: str) -> None:
    maker = MAKERS[name]
    differ(maker, f"{name} 1", 60, maker.setup.longest, failing=0.08)


def test_a_lane_of_each_kind_is_compared_and_has_a_fast_path() -> None:
    made = {type(lane) for maker in MAKERS.values() for lane in lanes(maker(fast=False)[0])}
    assert {general(kind) for kind in GENERAL} <= made
    for kind in GENERAL:
        assert all(getattr(kind, verb) is not way for verb, way in GENERAL[kind].items()), kind


WRONG: dict[str, tuple[type[Lane], str]] = {
    "a page of the tree is not counted": (PathLane, "in_tree"),
    "a page of a lease is not counted": (WindowLane, "leased"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_fast_path_that_differs_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, count = WRONG[what]
    honest: Any = kind.hand_over  # type: ignore[attr-defined]

    def wrong(self: Any, *given: Any) -> Any:
        moved = honest(self, *given)
        setattr(self, count, getattr(self, count) - 1)
        return moved

    monkeypatch.setattr(kind, "hand_over", wrong)
    maker = Maker(setups()["path and window"])
    with pytest.raises((AssertionError, prefixloom.PrefixloomError)):
        for seed in range(3):
            differ(maker, f"{what} {seed}", 100, maker.setup.longest, failing=0.08)
