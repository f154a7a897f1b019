"""A cache with functions of its own does what the sources say, in everything."""

from __future__ import annotations

from typing import Any

import pytest

import prefixloom.fused
import twins
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
from prefixloom.fusing import Fuser
from prefixloom_hicache import HostTier
from setups import Setup, Strided, parts, setups
from twins import Fuse, answering, differ


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

    def __call__(self, fused: bool) -> tuple[Any, list[Fuse]]:
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
            max_rewind=setup.max_rewind, debug=False, fuse=fused, **options,
        )  # fmt: skip
        if cache._tier is not None:  # copies are made at once, so that there is one order of events
            cache._tier.streams = {way: cache._stream(None) for way in ("down", "up")}
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
    "coded": composed(Path(), Point(), b=CODED, slots=14, max_running=6),
    "coded, checkpoints, rewind": composed(
        Path(), Window(9), Point(), c={**CODED, "checkpoint_every": 8, "max_rewind": 2}, max_rewind=2, slots=40,
        max_running=6,
    ),
    "coded and plain": composed(Path(), Point(), Point(), b=CODED, slots=14, max_running=6),
    "admission": composed(Path(), Point(), admission="branch-and-last"),
    "admission, few per path": composed(
        Path(), Point(), b={"states_per_path": 2},
        admission=AdmissionPolicy("odd", lambda view: view.boundary % 8 > 0, lambda view: view.boundary % 3),
    ),
    "plain Python": composed(Path(), Burning(9, FUSE)),
    "plain Python, several": composed(Burning(5, FUSE), Path(), Burning(9, FUSE), Point()),
    "plain Python, states to rewind to": composed(
        Path(), Burning(6, FUSE), Point(), c={"max_rewind": 3}, max_rewind=3, slots=25
    ),
    "plain Python, checkpoints": composed(Path(), Burning(6, FUSE), Point(), c={"checkpoint_every": 8}, slots=16),
    "lookahead, window, state": composed(Path(), Window(9), Point(), a={"lookahead": 1}),
    "validator": composed(Path(), Window(9), Point(), hooks={"b": ("create_match_validator",)}),
    "claims": composed(Path(), Window(9), Point(), hooks={"b": ("finalize_match_result",)}, slots=16),
    "locks": composed(
        Path(), Window(9), Point(), hooks={"b": ("acquire_component_lock", "release_component_lock")}, page=1, tokens=44
    ),
    "insertions": composed(Path(), Window(9), Point(), hooks={"b": ("commit_insert",), "c": ("commit_insert",)}),
    "splits": composed(Path(), Point(), hooks={"b": ("redistribute_on_node_split",)}, page=1, tokens=40),
    "evictions": composed(Path(), Window(9), Point(), hooks=dict.fromkeys("abc", ("evict_component",))),
    "evictions of windows alone": composed(Path(), Window(9), Window(5), hooks={"b": ("evict_component",)}),
    "ops": composed(Path(), Point(), hooks={"a": ("deferred_forward_ops",)}),
    "all hooks": composed(Path(), Window(9), Point(), Sinks(4) | Window(5), hooks={"b": twins.HOOKS, "c": twins.HOOKS}),
    **{
        f"a tier, {write}": composed(Path(), Window(9), Point(), write=write, page=page, tokens=48, slots=7)
        for write, page in (("through", 4), ("back", 1), ("selective", 4))
    },
    "a tier, scattered, coded": composed(
        Path(), Sinks(4) | Window(7), Point(), c=CODED, write="back", slots=14, max_running=6
    ),
    "a tier and hooks": composed(Path(), Strided(), Point(), write="through", hooks={"c": twins.HOOKS[3:]}),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_fused_or_not_a_cache_does_the_same(name: str) -> None:
    maker = MAKERS[name]
    differ(maker, f"{name} 1", 60, maker.setup.longest, failing=0.08)


MUTANTS = {
    "a count of the tree": (".in_tree += ", ".in_tree += 1 + "),
    "a count of leases": (".leased += ", ".leased += 1 + "),
    "an order of eviction": ("end = queue._end\n", "end = queue._end.next\n"),
    "a statistic": ("self._hit += ready", "self._hit += ready + 1"),
    "a cover": (".leases += 1", ".leases += 2"),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_a_function_that_is_made_wrong_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = MUTANTS[what]
    entry = Fuser.entry
    changed: list[str] = []

    def wrong(self: Fuser, function: Any, *known: Any) -> str:
        text = entry(self, function, *known)
        changed.extend([function.__qualname__] * (old in text))
        return text.replace(old, new)

    monkeypatch.setattr(prefixloom.fused, "made", {})
    monkeypatch.setattr(Fuser, "entry", wrong)
    name = "path and window"
    maker = Maker(setups()[name])
    with pytest.raises((AssertionError, AttributeError)):
        for seed in range(3):
            differ(maker, f"{name} {seed}", 100, maker.setup.longest, failing=0.08)
    assert changed
