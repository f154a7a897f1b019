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


def refused(instance: object, told: str) -> None:
    with pytest.raises(CompositionError, match=told) as caught:
        bound(instance)
    assert "component 'it' (distribution test 1)" in str(caught.value)


def test_a_class_in_place_of_an_instance_is_refused() -> None:
    refused(Plain, r"is the class Plain, not an instance\. Pass Plain\(\.\.\.\)")


def test_values_that_compare_equal_are_refused_with_the_remedy_of_their_kind() -> None:
    @attrs.define
    class Valued:
        name: str = "v"

    @attrs.frozen
    class FrozenValued:
        name: str = "v"

    @dataclass
    class Data:
        name: str = "v"

    refused(Valued(), r"Valued compares by value.*attrs\.define\(eq=False\)")
    refused(FrozenValued(), r"FrozenValued compares by value.*attrs\.define\(eq=False\)")
    refused(Data(), "Data compares by value.*eq=False, or no __eq__")


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


def test_a_misspelt_hook_is_refused_with_the_name_that_was_meant() -> None:
    class Typo(Plain):
        @hookimpl
        def finalise_match_result(self, walk: WalkView) -> None: ...

    refused(Typo(), r"finalise_match_result, which is no hook.*mean finalize_match_result\?")


def test_a_hook_of_no_known_name_lists_the_hooks_there_are() -> None:
    class Unknown(Plain):
        @hookimpl
        def xyzzy(self) -> None: ...

    refused(Unknown(), "xyzzy, which is no hook of a component. Hooks of a component: create_match_validator, ")


def test_a_registry_hook_on_an_instance_is_sent_to_its_module() -> None:
    class Cold(Plain):
        @hookimpl
        def prefixloom_component(self) -> None: ...

    refused(Cold(), "move it to the module of the entry point")


def test_an_unmarked_method_named_like_a_hook_is_refused() -> None:
    class Unmarked(Plain):
        def commit_insert(self, walk: WalkView) -> None: ...

    refused(Unmarked(), "defines commit_insert without @hookimpl, so it would never be called. Decorate it")
    assigned = Plain()
    assigned.run_forward_op = lambda op, stream: None  # type: ignore[attr-defined]
    refused(assigned, "defines run_forward_op without @hookimpl")


def test_an_argument_that_the_specification_has_not_is_refused() -> None:
    class Extra(Plain):
        @hookimpl
        def commit_insert(self, walk: WalkView, colour: str) -> None: ...

    refused(Extra(), "does not fit its specification.*colour")


def test_parameters_that_would_never_be_filled_are_refused() -> None:
    class Defaulted(Plain):
        @hookimpl
        def commit_insert(self, walk: WalkView | None = None) -> None: ...

    class Keyword(Plain):
        @hookimpl
        def commit_insert(self, *, walk: WalkView) -> None: ...

    class Starred(Plain):
        @hookimpl
        def evict_component(self, *args: Any) -> None: ...

    class Keywords(Plain):
        @hookimpl
        def evict_component(self, **kwargs: Any) -> None: ...

    for instance in (Defaulted(), Keyword()):
        refused(instance, r"commit_insert takes walk, which would never be filled.*Write \(self, walk\)")
    refused(Starred(), r"evict_component takes \*args, .*Write \(self, node, tier\)")
    refused(Keywords(), r"evict_component takes \*\*kwargs, ")


def test_a_parameter_of_ones_own_with_a_default_is_accepted() -> None:
    class Own(Plain):
        @hookimpl
        def commit_insert(self, walk: WalkView, factor: int = 2) -> int:
            return walk.boundary * factor

    hook = bound(Own()).commit_insert
    assert hook is not None
    assert hook(WALK) == 128


def test_hook_wrappers_are_refused() -> None:
    class New(Plain):
        @hookimpl(wrapper=True)
        def commit_insert(self, walk: WalkView) -> Any:
            return (yield)

    class Old(Plain):
        @hookimpl(hookwrapper=True)
        def commit_insert(self, walk: WalkView) -> Any:
            yield

    for instance in (New(), Old()):
        refused(instance, "commit_insert is a hook wrapper.*Write a plain @hookimpl")


def test_a_mark_of_order_is_refused() -> None:
    for mark in ("tryfirst", "trylast"):
        marked = type("Marked", (Plain,), {"commit_insert": hookimpl(**{mark: True})(lambda self: None)})
        refused(marked(), f"commit_insert is marked {mark}, which has no effect.*order of the composition")


def test_one_hook_implemented_twice_is_refused() -> None:
    class Twice(Overriding):
        @hookimpl
        def run_forward_op(self, op: Any) -> None: ...

    refused(Twice(), "implements run_forward_op twice, as flush and run_forward_op")


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
