"""The hot path calls bound hooks only, no hook that is not overridden, and each hook at most once per operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pluggy
import pytest

from prefixloom import Chunk, Claim, Component, Op, Path, Point, Reach, Receipt, Sinks, Window, hookimpl
from prefixloom.cache.cache import Cache
from prefixloom.contract.hookspecs import HOT_HOOKS
from prefixloom.contract.values import AnchorView, NodeView, Phase, SplitRule, Tier, Touch, Transfer, WalkView
from tests.support.helpers import cache_of, edges, finish, part, run, serve, settle

UNCALLED = {"build_hicache_transfers", "commit_hicache_transfer"}
"""Hooks of tiers. The caches here have no tier."""


class TrapTouched(BaseException):
    """Raised by a trap. It is no Exception, because the cache swallows exceptions of some hooks."""


class OverridesMostHooks(Component):
    """Overrides every hot hook except those of locks. Its answers change nothing, and it counts its calls."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: Counter[str] = Counter()

    @hookimpl
    def create_match_validator(self, tiers: tuple[Tier, ...]) -> Callable[[WalkView], int]:
        def validate(walk: WalkView) -> int:
            self.calls["the validator"] += 1
            return walk.boundary

        self.calls["create_match_validator"] += 1
        return validate

    @hookimpl
    def finalize_match_result(self, walk: WalkView) -> Claim:
        self.calls["finalize_match_result"] += 1
        return Claim(ops=(Op("mine", self.name),))

    @hookimpl
    def commit_insert(self, walk: WalkView) -> Claim:
        self.calls["commit_insert"] += 1
        return Claim()

    @hookimpl
    def redistribute_on_node_split(self, parent: NodeView, child: NodeView) -> SplitRule:
        self.calls["redistribute_on_node_split"] += 1
        return SplitRule()

    @hookimpl
    def evict_component(self, node: tuple[NodeView, ...], tier: Tier) -> Claim:
        self.calls["evict_component"] += 1
        return Claim()

    @hookimpl
    def build_hicache_transfers(self, plan: Any, phase: Phase) -> tuple[Transfer, ...]:
        self.calls["build_hicache_transfers"] += 1
        return ()

    @hookimpl
    def commit_hicache_transfer(self, plan: Any, phase: Phase, outcome: Any) -> Claim:
        self.calls["commit_hicache_transfer"] += 1
        return Claim()

    @hookimpl
    def deferred_forward_ops(self, batch: tuple[WalkView, ...]) -> tuple[Op, ...]:
        self.calls["deferred_forward_ops"] += 1
        return (Op("mine", self.name),)

    @hookimpl
    def run_forward_op(self, op: Op, stream: Any) -> None:
        self.calls["run_forward_op"] += 1


class OverridesEveryHook(OverridesMostHooks):
    """Overrides every hot hook, those of locks too."""

    @hookimpl
    def acquire_component_lock(self, anchor: AnchorView, tier: Tier) -> Receipt:
        self.calls["acquire_component_lock"] += 1
        return Receipt()

    @hookimpl
    def release_component_lock(self, receipt: Receipt) -> Touch:
        self.calls["release_component_lock"] += 1
        return Touch()


def tokens(seed: int, count: int = 64) -> list[int]:
    return list(range(1000 * seed, 1000 * seed + count))


def traffic(cache: Cache) -> None:
    """Every kind of operation: match, lease, chunks, a split, an abort, a rewind, steps of both roles, evictions."""
    serve(cache, tokens(1), chunk=16)
    state = any(part.unit == "boundary" for part in cache.composition.parts)
    assert serve(cache, [*tokens(1)[:40], *tokens(2)], chunk=16) == (32 if state else 40)
    assert (32, 40) in edges(cache)
    with cache.open([*tokens(1), 7, 8], leave=1, label="rewinding", priority=1) as sequence:
        finish(sequence)
        sequence.grow(1)
        sequence.rewind(1)
        sequence.append([9])
        with cache.step([sequence], role="draft"):
            pass
    with cache.lease(cache.match(tokens(1))):
        cache.peek(tokens(3))
    aborted = cache.open(tokens(3))
    run(aborted, 8)
    aborted.abort()
    for seed in range(4, 12):
        serve(cache, tokens(seed))
    cache.evict(8)
    settle(cache)
    stats = cache.stats()
    assert all(figures.evicted for figures in stats.components.values())
    assert stats.plugin_errors == 0


def set_trap(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, a call of a hook of ours through pluggy raises. pytest may still use pluggy for its own hooks."""

    def trapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (self.name if isinstance(self, pluggy.HookCaller) else args[0]) in HOT_HOOKS:
                raise TrapTouched
            return function(self, *args, **kwargs)

        return call

    for cls, names in (
        (pluggy.HookCaller, ("__call__", "call_extra", "call_historic")),
        (pluggy.PluginManager, ("_hookexec",)),
    ):
        for name in names:
            monkeypatch.setattr(cls, name, trapped(getattr(cls, name)))


def three(kind: type[Component], **options: Any) -> Cache:
    return cache_of(
        part("path", Path(), kind=kind),
        part("near", Window(10), kind=kind),
        part("few", Sinks(4), kind=kind),
        **options,
    )


def hybrid(kind: type[Component], **options: Any) -> Cache:
    return cache_of(
        part("path", Path(), kind=kind),
        part("near", Window(10), kind=kind),
        part("state", Point(), kind=kind),
        **options,
    )


# ---------------------------------------------------------------- pluggy


@pytest.mark.parametrize(
    ("make", "kind"), [(three, OverridesEveryHook), (hybrid, OverridesMostHooks), (hybrid, Component)]
)
def test_a_whole_request_never_touches_pluggy(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Cache], kind: type[Component]
) -> None:
    cache = make(kind)
    set_trap(monkeypatch)
    traffic(cache)
    for component in cache.composition.parts:
        if kind is not Component:
            called = {name for name in HOT_HOOKS if component.component.calls[name]}
            assert set(component.hooks.overridden) - UNCALLED - {"redistribute_on_node_split"} <= called


# ---------------------------------------------------------------- how often

EXPECTED: dict[str, dict[str, int]] = {
    "match": {"the validator": 1, "finalize_match_result": 1},
    "open": {"the validator": 1, "finalize_match_result": 1, "acquire_component_lock": 1},
    "grow": {},
    "step": {"deferred_forward_ops": 1},
    "run_ops": {"run_forward_op": 2},  # one op claimed by the match, one deferred
    "leave": {},
    "publish": {"commit_insert": 1, "acquire_component_lock": 1},
    "rewind": {},
    "append": {},
    "close": {"commit_insert": 1, "acquire_component_lock": 1, "release_component_lock": 1},
    "diverge": {
        "the validator": 1, "finalize_match_result": 1, "acquire_component_lock": 1, "redistribute_on_node_split": 1,
    },
    "abort": {"release_component_lock": 1},
}  # fmt: skip
"""How often an operation calls each hook of one component, at any depth of the tree."""


def counted(reach: Reach, chunk: int) -> dict[str, dict[str, int]]:
    """The hook calls of each operation on a path of nodes of ``chunk`` tokens, in the order of ``EXPECTED``."""
    cache = cache_of(part("it", reach, kind=OverridesEveryHook), tokens=512)
    component = cache.composition.parts[0].component
    calls: Counter[str] = component.calls
    prompt = tokens(1, 128)
    serve(cache, prompt, chunk=chunk)
    assert len(edges(cache)) == 128 // chunk
    found: dict[str, dict[str, int]] = {}

    def tell(operation: str, result: Any) -> Any:
        found[operation] = dict(calls)
        calls.clear()
        return result

    calls.clear()
    plan = tell("match", cache.match([*prompt, *tokens(2)]))
    assert plan.ready == 128
    sequence = tell("open", cache.open([*prompt, *tokens(2)]))
    tell("grow", sequence.grow(64))
    step = tell("step", cache.step([sequence]))
    with step:
        tell("run_ops", step.run_ops())
    tell("leave", None)
    tell("publish", sequence.publish())
    sequence.grow(4)
    tell("rewind", sequence.rewind(4))
    tell("append", sequence.append(tokens(3, 8)))
    sequence.grow(8)
    sequence.commit()
    tell("close", sequence.close())
    calls.clear()
    sequence = tell("diverge", cache.open(prompt[:124]))
    tell("abort", sequence.abort())
    settle(cache)
    return found


@pytest.mark.parametrize("reach", [Path(), Window(130), Chunk(256), Sinks(6) | Window(130)], ids=repr)
@pytest.mark.parametrize("chunk", [128, 8])
def test_hooks_run_at_most_once_per_operation_and_never_per_node(reach: Reach, chunk: int) -> None:
    assert counted(reach, chunk) == EXPECTED


@pytest.mark.parametrize("reach", [Path(), Window(10), Sinks(6) | Window(10)], ids=repr)
def test_one_eviction_of_many_leaves_asks_once(reach: Reach) -> None:
    cache = cache_of(part("it", reach, kind=OverridesEveryHook), tokens=512)
    for seed in range(8):
        serve(cache, tokens(seed, 16))
    calls: Counter[str] = cache.composition.parts[0].component.calls
    calls.clear()
    assert cache.evict(96)["it"] >= 24
    assert calls["evict_component"] == 1


@pytest.mark.parametrize("reach", [Path(), Window(200)], ids=repr)
def test_one_eviction_of_a_deep_path_asks_once(reach: Reach) -> None:
    cache = cache_of(part("it", reach, kind=OverridesEveryHook), tokens=512)
    serve(cache, tokens(1, 128), chunk=8)
    calls: Counter[str] = cache.composition.parts[0].component.calls
    calls.clear()
    assert cache.evict(64)["it"] == 16
    assert calls["evict_component"] == 1
