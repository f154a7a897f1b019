"""Binding: the hooks of component instances become plain callables, or are refused where pluggy would ignore them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import attrs
import pytest

from prefixloom import Buffer, Claim, Component, CompositionError, Manifest, Path, hookimpl
from prefixloom.compose.binding import bind
from prefixloom.contract.composition import Hooks
from prefixloom.contract.hookspecs import HOT_HOOKS, ComponentSpecs
from prefixloom.contract.values import AnchorView, NodeView, WalkView

WALK = WalkView("", 64, 65, 64)
ANCHOR = AnchorView("", 64)
NODES = (NodeView(0, 16, 1, 0),)


class Plain(Component):
    def __init__(self, name: str = "plain") -> None:
        super().__init__(name, Manifest([Buffer("k", (1,))]), Path())


def bound(instance: object) -> Hooks:
    return bind(instance, "component 'it' (distribution test 1)")


def test_the_table_has_exactly_the_hot_hooks_in_their_order() -> None:
    assert tuple(field.name for field in attrs.fields(Hooks)) == HOT_HOOKS


def test_the_table_is_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        bound(Plain()).commit_insert = None  # type: ignore[misc]


def test_a_hook_that_is_not_overridden_is_none() -> None:
    assert bound(Plain()) == Hooks()
    assert bound(Plain()).overridden == ()


class Overriding(Plain):
    @hookimpl
    def finalize_match_result(self, walk: WalkView) -> Claim:
        return Claim(branch=walk.boundary)

    @hookimpl
    def acquire_component_lock(self) -> str:
        return self.name

    @hookimpl
    def evict_component(self, tier: Any, node: Any) -> tuple[Any, Any]:
        return tier, node

    @hookimpl
    def commit_hicache_transfer(self, outcome: Any) -> Any:
        return outcome

    @hookimpl
    def build_hicache_transfers(self, phase: Any) -> Any:
        return phase

    @hookimpl(specname="run_forward_op")
    def flush(self, stream: Any, op: Any) -> None:
        raise LookupError(f"{op} on {stream}")


def test_bound_hooks_take_all_arguments_and_pass_on_those_that_are_taken() -> None:
    hooks = bound(Overriding("mine"))
    assert hooks.finalize_match_result is not None
    assert hooks.acquire_component_lock is not None
    assert hooks.evict_component is not None
    assert hooks.commit_hicache_transfer is not None
    assert hooks.build_hicache_transfers is not None
    assert hooks.run_forward_op is not None
    assert hooks.finalize_match_result(WALK) == Claim(branch=64)
    assert hooks.acquire_component_lock(ANCHOR, "host") == "mine"
    assert hooks.evict_component(NODES, "host") == ("host", NODES)
    assert hooks.commit_hicache_transfer("plan", "load", "done") == "done"
    assert hooks.build_hicache_transfers("plan", "store") == "store"
    with pytest.raises(LookupError, match="an op on a stream"):
        hooks.run_forward_op("an op", "a stream")  # type: ignore[arg-type]
    assert set(hooks.overridden) == {
        "finalize_match_result", "acquire_component_lock", "evict_component", "build_hicache_transfers",
        "commit_hicache_transfer", "run_forward_op",
    }  # fmt: skip


def test_a_hook_that_answers_none_gives_none() -> None:
    class Silent(Plain):
        @hookimpl
        def commit_insert(self, walk: WalkView) -> None:
            return None

    hook = bound(Silent()).commit_insert
    assert hook is not None
    assert hook(WALK) is None


def test_a_hook_with_the_full_signature_is_bound_without_an_adapter() -> None:
    instance = Overriding()
    assert bound(instance).finalize_match_result == instance.finalize_match_result


def test_each_instance_of_one_class_has_its_own_hooks() -> None:
    hooks = {name: bound(Overriding(name)).acquire_component_lock for name in ("a", "b")}
    for name, hook in hooks.items():
        assert hook is not None
        assert hook(ANCHOR, "device") == name
    assert bound(Plain("c")).acquire_component_lock is None


def test_static_hooks_and_wrapped_hooks_are_bound_by_their_names() -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return function(*args)

        return call

    class Odd(Plain):
        @staticmethod
        @hookimpl
        def evict_component(tier: Any) -> Any:
            return tier

        @hookimpl
        @logged
        def commit_insert(self, walk: WalkView) -> int:
            return walk.boundary

    hooks = bound(Odd())
    assert hooks.evict_component is not None
    assert hooks.commit_insert is not None
    assert hooks.evict_component(NODES, "host") == "host"
    assert hooks.commit_insert(WALK) == 64


def test_an_inherited_hook_can_be_switched_off_with_none() -> None:
    class Quiet(Overriding):
        finalize_match_result = None  # type: ignore[assignment]

    assert bound(Quiet()).finalize_match_result is None


# ---------------------------------------------------------------- what is refused


@attrs.define
class Valued:
    name: str = "v"


@attrs.frozen
class FrozenValued:
    name: str = "v"


@dataclass
class Data:
    name: str = "v"


def plain(**members: Any) -> Plain:
    """Return an instance of a class that has these members as well."""
    made: Plain = type("Made", (Plain,), members)()
    return made


def assigned() -> Plain:
    instance = Plain()
    instance.run_forward_op = lambda op, stream: None  # type: ignore[attr-defined]
    return instance


def wrapping(self: Any, walk: WalkView) -> Any:
    yield


def filled(self: Any, walk: WalkView | None = None) -> None: ...


def named(self: Any, *, walk: WalkView) -> None: ...


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "class": (lambda: Plain, r"is the class Plain, not an instance\. Pass Plain\(\.\.\.\)"),
    "attrs value": (Valued, r"Valued compares by value.*attrs\.define\(eq=False\)"),
    "frozen attrs value": (FrozenValued, r"FrozenValued compares by value.*attrs\.define\(eq=False\)"),
    "dataclass": (Data, "Data compares by value.*eq=False, or no __eq__"),
    "misspelt": (
        lambda: plain(finalise_match_result=hookimpl(lambda self, walk: None)),
        r"finalise_match_result, which is no hook.*mean finalize_match_result\?",
    ),
    "unknown": (
        lambda: plain(xyzzy=hookimpl(lambda self: None)),
        "xyzzy, which is no hook of a component. Hooks of a component: create_match_validator, ",
    ),
    "of a registry": (
        lambda: plain(prefixloom_component=hookimpl(lambda self: None)), "move it to the module of the entry point",
    ),
    "unmarked": (
        lambda: plain(commit_insert=lambda self, walk: None),
        "defines commit_insert without @hookimpl, so it would never be called. Decorate it",
    ),
    "unmarked and assigned": (assigned, "defines run_forward_op without @hookimpl"),
    "another argument": (
        lambda: plain(commit_insert=hookimpl(lambda self, walk, colour: None)),
        "does not fit its specification.*colour",
    ),
    "default": (
        lambda: plain(commit_insert=hookimpl(filled)),
        r"commit_insert takes walk, which would never be filled.*Write \(self, walk\)",
    ),
    "keyword": (
        lambda: plain(commit_insert=hookimpl(named)),
        r"commit_insert takes walk, which would never be filled.*Write \(self, walk\)",
    ),
    "all arguments": (
        lambda: plain(evict_component=hookimpl(lambda self, *args: None)),
        r"evict_component takes \*args, .*Write \(self, node, tier\)",
    ),
    "all keywords": (
        lambda: plain(evict_component=hookimpl(lambda self, **kwargs: None)), r"evict_component takes \*\*kwargs, ",
    ),
    "wrapper": (
        lambda: plain(commit_insert=hookimpl(wrapper=True)(wrapping)),
        "commit_insert is a hook wrapper.*Write a plain @hookimpl",
    ),
    "old wrapper": (
        lambda: plain(commit_insert=hookimpl(hookwrapper=True)(wrapping)),
        "commit_insert is a hook wrapper.*Write a plain @hookimpl",
    ),
    "first": (
        lambda: plain(commit_insert=hookimpl(tryfirst=True)(lambda self: None)),
        "commit_insert is marked tryfirst, which has no effect.*order of the composition",
    ),
    "last": (
        lambda: plain(commit_insert=hookimpl(trylast=True)(lambda self: None)),
        "commit_insert is marked trylast, which has no effect.*order of the composition",
    ),
    "twice": (
        type("Twice", (Overriding,), {"run_forward_op": hookimpl(lambda self, op: None)}),
        "implements run_forward_op twice, as flush and run_forward_op",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_instance_whose_hooks_would_not_be_called_is_refused(name: str) -> None:
    make, told = REFUSED[name]
    with pytest.raises(CompositionError, match=told) as caught:
        bound(make())
    assert "component 'it' (distribution test 1)" in str(caught.value)


def test_an_attrs_component_with_identity_is_accepted() -> None:
    @attrs.define(eq=False)
    class Identified:
        name: str = "i"

        @hookimpl
        def commit_insert(self) -> str:
            return self.name

    hook = bound(Identified()).commit_insert
    assert hook is not None
    assert hook(WALK) == "i"


def test_a_parameter_of_ones_own_with_a_default_is_accepted() -> None:
    class Own(Plain):
        @hookimpl
        def commit_insert(self, walk: WalkView, factor: int = 2) -> int:
            return walk.boundary * factor

    hook = bound(Own()).commit_insert
    assert hook is not None
    assert hook(WALK) == 128


def test_every_hot_hook_can_be_overridden_with_its_exact_signature() -> None:
    def implementation(name: str) -> Callable[..., Any]:
        args = ", ".join(inspect.signature(getattr(ComponentSpecs, name)).parameters)
        scope: dict[str, Any] = {}
        exec(f"def {name}({args}): return ({args.partition(',')[2]},)", scope)
        marked: Callable[..., Any] = hookimpl(scope[name])
        return marked

    everything = type("Everything", (Plain,), {name: implementation(name) for name in HOT_HOOKS})()
    hooks = bound(everything)
    assert hooks.overridden == HOT_HOOKS
    for name in HOT_HOOKS:
        count = len(inspect.signature(getattr(ComponentSpecs, name)).parameters) - 1
        arguments = tuple(object() for _ in range(count))
        assert getattr(hooks, name)(*arguments) == arguments
