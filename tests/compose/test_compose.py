"""Composition: what fits together becomes a frozen composition, what does not is refused before anything is made."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from prefixloom import (
    Buffer,
    Chunk,
    Codec,
    Component,
    ComponentSpec,
    ComponentType,
    CompositionError,
    EvictionPolicy,
    Identity,
    Manifest,
    Path,
    Profile,
    Reach,
    Window,
    compose,
    hookimpl,
)
from prefixloom.compose.model_config import read_facts
from prefixloom.compose.registry import Registry
from prefixloom.contract.composition import Composition, Part
from tests.support.composing import ONE_BYTE, composed, paths, refused, state, windowed


class Installed:
    """An entry point in memory that offers one component."""

    def __init__(self, kind: str, make: Any, distribution: str = "prefixloom-test") -> None:
        self.name, self.value = kind, f"{kind}_plugin"
        self.dist = SimpleNamespace(metadata={"Name": distribution, "Version": "1"})
        self._type = ComponentType(kind, make)

    def load(self) -> Any:
        return self

    @hookimpl
    def prefixloom_component(self) -> ComponentType:
        return self._type


# ---------------------------------------------------------------- what is of another type

SMALL = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
WRONG: dict[str, tuple[Callable[[Any], object], Any, str]] = {
    "registry": (lambda given: compose(None, plugins=[paths()], capacity=64, registry=given), 5, "of type Registry"),
    "buffers": (Manifest, 5, "the buffers of a manifest must be a sequence"),
    "buffer": (Manifest, [5], "must be Buffer values, got 5"),
    "name of a buffer": (lambda given: Buffer(given, (2,)), 5, "a buffer's name must be of type str"),
    "sharers": (lambda given: Buffer("k", (2,), shared=given), 5, "shared must be of type Mapping"),
    "tolerance": (lambda given: Codec("int8", given), "x", "tolerance must be of type Real"),
    "components": (Profile, 5, "the components of a profile must be a sequence"),
    "kind": (ComponentSpec, 5, "kind must be of type str"),
    "options": (lambda given: ComponentSpec("full", options=given), 5, "options must be of type Mapping"),
    "codec": (lambda given: Manifest([Buffer("k", ())], stored_as=given), "int8", "stored_as must be of type Codec"),
    "shards": (lambda given: Identity(shards=given), 5, "shards must be of type Mapping"),
    "shard": (lambda given: Identity(shards={"tp": given}), 5, "the shard of axis 'tp' must be a sequence of int"),
    "rank": (lambda given: Identity(shards={"tp": given}), ("a", 2), "the shard of axis 'tp' must be int values"),
    "number of ranks": (lambda given: Identity(shards={"tp": given}), (0,), "is \\(rank, number of ranks\\)"),
    "axis": (lambda given: Identity(shards=given), {5: (0, 2)}, "an axis must be of type str"),
    "layers": (
        compose,
        {**SMALL, "num_hidden_layers": 10**12},
        "num_hidden_layers must be .* from 1 to 1048576",
    ),
    "key": (lambda given: EvictionPolicy("odd", key=given), 5, "EvictionPolicy: key must be a function, got 5"),
    "make": (lambda given: ComponentType("odd", given), 5, "ComponentType: make must be a function, got 5"),
    "layer kinds": (lambda given: ComponentType("odd", paths, layer_kinds=given), 5, "layer_kinds must be a sequence"),
    "one layer kind": (
        lambda given: ComponentType("odd", paths, layer_kinds=given),
        "full",
        r"layer_kinds must be .* write \['full'\]",
    ),
    "warnings": (lambda given: Profile((), warnings=given), None, "the warnings of a profile must be a sequence"),
    "path": (compose, "a\0b", "cannot read the model config"),
    "profile": (compose, "a\0b.toml", "cannot be read: embedded null byte"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_another_type_is_refused_by_name(name: str) -> None:
    make, given, told = WRONG[name]
    with pytest.raises(CompositionError, match=told):
        make(given)


def test_architectures_that_are_no_list_name_no_encoder() -> None:
    assert read_facts({**SMALL, "architectures": 5}).layers == read_facts(SMALL).layers


# ---------------------------------------------------------------- what a composition says


def test_a_single_path_component_becomes_a_composition_with_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFIXLOOM_DEBUG", raising=False)
    whole = paths()
    composition = composed(whole, capacity=1000)
    assert (composition.page, composition.lookahead, composition.max_rewind) == (16, 0, 0)
    assert (composition.device, composition.policy.name, composition.debug) == ("meta", "lru", False)
    (part,) = composition.parts
    assert attrs.asdict(part, recurse=False, filter=lambda field, _: field.name not in ("hooks", "origin")) == {
        "name": "whole", "component": whole, "manifest": whole.manifest, "reach": Path(), "unit": "page",
        "page_tokens": 16, "capacity": 63, "admission": None,
            "running": 0,
    }  # fmt: skip
    assert part.origin == "passed to compose, class prefixloom.contract.values.Component"


def test_a_state_has_no_pages_and_is_copied() -> None:
    part = composed(paths(), state()).parts[1]
    assert (part.unit, part.page_tokens) == ("boundary", 0)


def test_a_composition_and_its_parts_are_frozen() -> None:
    composition = composed(paths())
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        composition.page = 1  # type: ignore[misc]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        composition.parts[0].capacity = 1  # type: ignore[misc]


def test_parts_are_in_the_order_of_the_composition_and_not_of_registration() -> None:
    registry = Registry([Installed(kind, paths) for kind in ("a", "b", "c")])
    profile = Profile([ComponentSpec("b"), ComponentSpec("c"), ComponentSpec("a")])
    composition = composed(state("z"), windowed("y"), model=profile, registry=registry)
    assert [part.name for part in composition.parts] == ["b", "c", "a", "z", "y"]


def test_a_profile_gives_names_options_page_size_and_rewind() -> None:
    registry = Registry([Installed("near", windowed)])
    profile = Profile([ComponentSpec("near", "n1", {"w": 4, "max_rewind": 9})], page_size=8, max_rewind=3, name="mine")
    composition = composed(model=profile, registry=registry)
    assert (composition.name, composition.page, composition.max_rewind) == ("mine", 8, 3)
    assert (composition.parts[0].name, composition.parts[0].reach) == ("n1", Window(4))
    assert composition.parts[0].origin == "distribution prefixloom-test 1"
    overruled = composed(model=profile, registry=registry, page_size=4, max_rewind=0)
    assert (overruled.page, overruled.max_rewind) == (4, 0)


def test_lookahead_is_that_of_the_component_that_looks_furthest() -> None:
    assert composed(paths("a"), paths("b", lookahead=1), state()).lookahead == 1


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), ("", False)])
def test_debug_comes_from_the_environment_unless_it_is_said(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: bool
) -> None:
    monkeypatch.setenv("PREFIXLOOM_DEBUG", value)
    assert composed(paths()).debug is expected
    assert composed(paths(), debug=not expected).debug is not expected


def test_hooks_are_bound_per_part() -> None:
    class Hooked(Component):
        @hookimpl
        def commit_insert(self) -> str:
            return self.name

    one, two = (Hooked(name, Manifest(ONE_BYTE), Path()) for name in ("one", "two"))
    composition = composed(one, paths(), two)
    hook = composition.parts[2].hooks.commit_insert
    assert hook is not None
    assert hook("walk") == "two"  # type: ignore[arg-type, comparison-overlap]
    assert composition.parts[1].hooks.overridden == ()


def test_a_cache_has_the_composition_that_it_was_made_of() -> None:
    made = compose(None, plugins=[paths()], capacity=64, page_size=4, debug=True, max_rewind=2, policy="lfu")
    composition = made.composition
    assert isinstance(composition, Composition)
    assert isinstance(composition.parts[0], Part)
    assert (composition.page, composition.parts[0].capacity, composition.debug) == (4, 16, True)
    assert (composition.max_rewind, composition.policy.name) == (2, "lfu")


# ---------------------------------------------------------------- the set


class Odd(Path):
    unit = "token"


NAMES_ALL = r"capacity must name every component \(state, whole\) and no other: "
REFUSED: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("needs at least one component", [], {}),
    (r"got 'sink'. An installed one .*Profile\(\[ComponentSpec\(", ["sink"], {}),
    (r"is the class Component, not an instance\. Pass Component\(\.\.\.\)", [Component], {}),
    ("empty name", [paths("")], {}),
    ("no installed distribution offers a component named 'far'", [], {"model": Profile([ComponentSpec("far")])}),
    (
        "was made under the name 'mine'", [],
        {
            "model": Profile([ComponentSpec("near")]),
            "registry": Registry([Installed("near", lambda name: paths("mine"))]),
        },
    ),
    ("reach.unit must be 'page' or 'boundary', got 'token'", [Component("odd", Manifest(ONE_BYTE), Odd())], {}),
    ("stored_as is for states. Pages on the device are read in place", [paths(stored_as=Codec("int8"))], {}),
    *(
        ("'state' .*tokens_per_slot and page_size are for data of token positions", [state(**facts)], {})
        for facts in ({"tokens_per_slot": 4}, {"page_size": 4})
    ),
    *(
        ("device must be cpu, cuda, cuda:N or meta", [paths()], {"device": device})
        for device in ("gpu", "cuda:", "cuda:x", "mps", "cpu:0", "", None, 0)
    ),
    *(("debug must be of type bool, got", [paths()], {"debug": given}) for given in ("0", 1, [True])),
    # sizes
    (NAMES_ALL + "unknown states; missing state$", [paths(), state()], {"capacity": {"whole": 64, "states": 3}}),
    (NAMES_ALL + "missing state$", [paths(), state()], {"capacity": {"whole": 64}}),
    ("and no other: unknown extra$", [paths()], {"capacity": {"whole": 64, "extra": 3}}),
    *(
        (r"capacity.* must be a whole number of at least 1 tokens, got", [paths()], {"capacity": capacity})
        for capacity in (0, -5, 1.5, True, "64", {"whole": 0}, {"whole": -1}, {"whole": "64"})
    ),
    ("neither was given", [paths()], {"capacity": None}),
    ("not by both", [paths()], {"capacity": 64, "memory": "1GiB"}),
    *(
        ("max_running must be a whole number of at least 1", [paths()], {"max_running": value})
        for value in (0, -1, True, 1.5, "8")
    ),
    ("traffic must be of type Traffic, got 32", [paths()], {"traffic": 32}),
]  # fmt: skip


@pytest.mark.parametrize(("told", "plugins", "options"), REFUSED)
def test_what_fits_no_composition_is_refused(told: str, plugins: list[Any], options: dict[str, Any]) -> None:
    refused(told, *plugins, **options)


def test_plugins_must_be_a_list() -> None:
    with pytest.raises(CompositionError, match="plugins must be a list"):
        compose(None, plugins=paths(), capacity=64, registry=Registry([]))  # type: ignore[arg-type]


def test_two_components_of_one_name_are_refused_with_both_origins() -> None:
    registry = Registry([Installed("whole", paths)])
    told = refused(
        "two components are named 'whole'", paths(), model=Profile([ComponentSpec("whole")]), registry=registry
    )
    assert "distribution prefixloom-test 1" in told
    assert "passed to compose" in told


@pytest.mark.parametrize("missing", ["name", "manifest", "reach"])
def test_a_component_without_its_three_attributes_is_refused(missing: str) -> None:
    class Bare:
        pass

    bare: Any = Bare()
    for attribute, value in (("name", "bare"), ("manifest", Manifest(ONE_BYTE)), ("reach", Path())):
        if attribute != missing:
            setattr(bare, attribute, value)
    refused(rf"Bare\) has no '{missing}'", bare)
    setattr(bare, missing, 42)
    refused(rf"Bare\): its {missing} must be of type \w+, got 42", bare)


def test_any_object_with_the_three_will_do() -> None:
    class Duck:
        name = "duck"
        manifest = Manifest(ONE_BYTE)
        reach = Chunk(8)

    assert composed(Duck()).parts[0].reach == Chunk(8)


def test_options_that_a_component_does_not_take_name_its_distribution() -> None:
    registry = Registry([Installed("near", windowed)])
    for options, told in (({"wide": 4}, "wide"), ({"w": 0}, "a window must be")):
        profile = Profile([ComponentSpec("near", "n1", options)])
        refused(rf"component 'n1' \(distribution prefixloom-test 1\).*{told}", model=profile, registry=registry)


# ---------------------------------------------------------------- facts


class Broken(Reach):
    """A reach that answers whatever it is given."""

    def __init__(self, needs: Any, until: Any = float("inf"), unit: str = "page") -> None:
        self._needs, self._until, self.unit = needs, until, unit

    def needs(self, n: int) -> Any:
        return self._needs(n)

    def until(self, p: int) -> Any:
        return self._until


@pytest.mark.parametrize(
    ("reach", "told"),
    [
        (Reach(), "NotImplementedError: Reach must define needs"),
        (Broken(lambda n: 1 / 0), "fails at 0: ZeroDivisionError"),
        (Broken(lambda n: None), "fails at 0: TypeError"),
        (Broken(lambda n: ((0, n + 1),)), r"answers needs\(0\) = \(\(0, 1\),\)"),
        (Broken(lambda n: ((-1, n),)), r"answers needs\(0\)"),
        (Broken(lambda n: ((2, 1),)), r"within \[0, n\)"),
        (Broken(lambda n: (), until="soon"), "fails at 0: ValueError"),
        (Broken(lambda n: (), until=float("nan")), "until\\(0\\) = nan"),
        (Broken(lambda n: ((0, n),), unit="boundary"), "belongs to boundaries and yet needs token positions"),
    ],
)
def test_a_broken_reach_is_refused_by_name(reach: Reach, told: str) -> None:
    assert "component 'odd'" in refused(told, Component("odd", Manifest(ONE_BYTE), reach))


# ---------------------------------------------------------------- pages


def test_the_page_of_the_tree_is_the_least_common_multiple_of_all_pages_and_grids() -> None:
    composition = composed(paths(page_size=4), windowed(page_size=6), state(grid=16))
    assert composition.page == 48
    assert [part.page_tokens for part in composition.parts] == [4, 6, 0]


def test_the_asked_page_size_counts_only_where_a_component_uses_it() -> None:
    assert composed(paths(page_size=4), page_size=3).page == 4
    assert composed(paths(page_size=4), windowed(), page_size=3).page == 12
    assert composed(state(grid=4), page_size=6).page == 12, "states alone: the tree has pages of its own"
    assert composed(state()).page == 16


def test_pages_of_1_and_of_4096_tokens_are_possible_and_no_others_beyond() -> None:
    assert composed(paths(), page_size=1).page == 1
    assert composed(paths(), page_size=4096).page == 4096
    for bad in (0, 4097, 2.0, True):
        refused("page_size must be a whole number from 1 to 4096 tokens", paths(), page_size=bad)
    refused("component 'whole' .*page_size must be .* from 1 to 4096 tokens, got 8192", paths(page_size=8192))
    refused("page_size must be .* got 0", state(), model=Profile((), page_size=0))


def test_a_slot_may_not_straddle_pages() -> None:
    assert composed(paths(tokens_per_slot=4)).parts[0].page_tokens == 16
    refused("'whole' .*one slot stands for 3 tokens and would straddle pages of 16", paths(tokens_per_slot=3))


def test_impossible_page_sizes_are_refused_with_their_numbers() -> None:
    assert composed(paths(page_size=256), state(grid=4096)).page == 4096
    told = refused("impossible page sizes", paths(page_size=256), windowed(page_size=255), state(grid=7))
    assert (
        "456960 tokens, more than 4096 (whole: page 256 and grid 1; near: page 255 and grid 1; state: grid 7)" in told
    )


# ---------------------------------------------------------------- rewind, device, policy


def test_a_rewind_deeper_than_a_component_can_take_back_is_refused_by_name() -> None:
    assert composed(paths(), windowed(max_rewind=8), state(max_rewind=4), max_rewind=4).max_rewind == 4
    refused("'near' .*can take back 3 tokens and max_rewind=4", paths(), windowed(max_rewind=3), max_rewind=4)
    refused("'state' .*can take back 0 tokens", paths(), state(), max_rewind=1)
    for bad in (-1, 1.0, True):
        refused("max_rewind must be a whole number", paths(), max_rewind=bad)


def test_devices_that_are_there_are_accepted() -> None:
    assert composed(paths(), device="meta").device == "meta"
    torch = pytest.importorskip("torch")
    assert composed(paths(), device=torch.device("cpu")).device == "cpu"
    missing = torch.cuda.device_count()
    refused(
        f"'cuda:{missing}' was asked for and torch .* sees {missing} CUDA devices", paths(), device=f"cuda:{missing}"
    )
    if missing:
        assert composed(paths(), device="cuda").device == "cuda"


def test_a_policy_is_built_in_installed_or_an_object() -> None:
    mine = EvictionPolicy("mine", key=lambda use: use.last)

    class Offering(Installed):
        @hookimpl
        def prefixloom_policy(self) -> EvictionPolicy:
            return mine

    assert composed(paths(), policy="slru").policy.name == "slru"
    assert composed(paths(), policy=mine).policy is mine
    assert composed(paths(), policy="mine", registry=Registry([Offering("policy:mine", paths)])).policy is mine
    refused("offers a policy named 'random'.*Built in: lru, ", paths(), policy="random")
    refused("policy must be a name or an EvictionPolicy, got 3", paths(), policy=3)


def test_a_component_type_whose_make_takes_no_name_is_refused() -> None:
    with pytest.raises(CompositionError, match=r"'ring': it is made by make\(name=.* and <lambda> takes no name"):
        ComponentType("ring", lambda size=4: windowed("ring", size))


def test_a_component_type_whose_make_shows_no_signature_is_taken_at_its_word() -> None:
    assert ComponentType("plain", dict).make(name="plain") == {"name": "plain"}


def test_every_layer_that_shares_anothers_entries_is_checked() -> None:
    for shared, wrong in (({3: 0, 4: 9}, 4), ({3: 9, 4: 0}, 3), ({3: 0, 1: 0}, 1)):
        with pytest.raises(CompositionError, match=f"layer {wrong} cannot share layer"):
            Buffer("k", (1,), "uint8", (0, 1), shared=shared)
    assert Buffer("k", (1,), "uint8", (0, 1), shared={3: 0, 4: 1}).shared == {3: 0, 4: 1}
