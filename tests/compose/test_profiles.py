"""Profiles: layers, TOML files and Python values become component sets, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from prefixloom import (
    Buffer,
    Component,
    ComponentSpec,
    ComponentType,
    CompositionError,
    LayerFacts,
    Manifest,
    ModelFacts,
    Profile,
    Window,
    compose,
    hookimpl,
)
from prefixloom.compose.profiles import profile_from_facts, profile_from_toml, resolve_profile
from prefixloom.compose.registry import Registry

LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
WHOLE = "full_attention"


class Installed:
    """An entry point whose plugin is in memory: a component that serves the given layer kinds."""

    def __init__(self, kind: str, *layer_kinds: str, from_layers: Any = None, caveats: Any = None) -> None:
        self.name = kind
        self.value = f"{kind}_plugin"
        self.dist = SimpleNamespace(metadata={"Name": f"prefixloom-{kind}", "Version": "1"})
        self.type = ComponentType(
            kind,
            lambda name, **options: Component(name, Manifest([Buffer("k", (1,))]), Window(4)),
            layer_kinds=frozenset(layer_kinds),
            from_layers=from_layers or (lambda facts, layers: {"layers": tuple(layer.index for layer in layers)}),
            caveats=caveats,
        )

    @hookimpl
    def prefixloom_component(self) -> ComponentType:
        return self.type

    def load(self) -> Any:
        return self


def facts_of(*layer_kinds: str) -> ModelFacts:
    layers = tuple(LayerFacts(index, kind) for index, kind in enumerate(layer_kinds))
    return ModelFacts("toy", layers, "float32", 8, 2, 2, 4, {})


# ---------------------------------------------------------------- facts to components


def test_each_layer_kind_is_given_to_the_component_that_claims_it() -> None:
    registry = Registry([Installed("near", "n"), Installed("far", "f")])
    profile = profile_from_facts(facts_of("n", "f", "n"), registry)
    assert [(spec.kind, spec.name, dict(spec.options)) for spec in profile.components] == [
        ("near", "near", {"layers": (0, 2)}),
        ("far", "far", {"layers": (1,)}),
    ]
    assert profile.name == "toy"


def test_a_component_is_asked_once_for_all_layers_that_it_serves() -> None:
    asked: list[list[tuple[int, str]]] = []

    def from_layers(facts: ModelFacts, layers: tuple[LayerFacts, ...]) -> Mapping[str, Any]:
        asked.append([(layer.index, layer.kind) for layer in layers])
        return {"count": len(layers)}

    registry = Registry([Installed("both", "n", "f", from_layers=from_layers), Installed("x", "x")])
    profile = profile_from_facts(facts_of("n", "f", "x", "n"), registry)
    assert [(spec.kind, spec.name) for spec in profile.components] == [("both", "both"), ("x", "x")]
    assert profile.components[0].options == {"count": 3}
    assert asked == [[(0, "n"), (1, "f"), (3, "n")]]


def test_a_component_may_serve_its_layers_by_several_instances_with_names_of_their_own() -> None:
    registry = Registry([Installed("near", "n", from_layers=lambda f, layers: [("", {"w": 4}), ("8", {"w": 8})])])
    profile = profile_from_facts(facts_of("n", "n"), registry)
    assert profile.components == (ComponentSpec("near", "near", {"w": 4}), ComponentSpec("near", "near_8", {"w": 8}))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (["w"], "must return a mapping of option names, or a list"),
        ([("a", {"w": 1}), ("b", 3)], "must return a mapping of option names, or a list"),
        ([("a", {1: 1})], "must return a mapping of option names, or a list"),
        ("ab", "must return a mapping of option names, or a list"),
        (None, "must return a mapping of option names, or a list"),
        ([], r"must name each component differently, got suffixes \[\]"),
        ([("a", {}), ("a", {})], r"must name each component differently, got suffixes \['a', 'a'\]"),
    ],
)
def test_another_answer_is_refused_with_the_plugin_named(answer: Any, told: str) -> None:
    registry = Registry([Installed("near", "n", from_layers=lambda facts, layers: answer)])
    with pytest.raises(CompositionError, match=rf"'near' \(distribution prefixloom-near 1\): from_layers {told}"):
        profile_from_facts(facts_of("n"), registry)


def test_what_a_component_warns_of_is_in_the_profile_once() -> None:
    registry = Registry(
        [
            Installed("near", "n", caveats=lambda facts, layers: [f"{facts.model_type}: slow", "and hot"]),
            Installed("far", "f", caveats=lambda facts, layers: ["and hot"]),
            Installed("calm", "c"),
        ]
    )
    assert profile_from_facts(facts_of("n", "f", "c"), registry).warnings == ("toy: slow", "and hot")
    assert profile_from_facts(facts_of("c"), registry).warnings == ()
    broken = Registry([Installed("near", "n", caveats=lambda facts, layers: 1 / 0)])
    with pytest.raises(CompositionError, match="could not judge layer 0 of 'toy': ZeroDivisionError"):
        profile_from_facts(facts_of("n"), broken)


def test_layer_kinds_that_nobody_serves_are_refused_with_their_layers_and_what_is_served() -> None:
    registry = Registry([Installed("near", "n")])
    with pytest.raises(CompositionError, match=r"'f' \(layers 0, 2-4\); 'g' \(layer 5\).*Served: n by near") as caught:
        profile_from_facts(facts_of("f", "n", "f", "f", "f", "g"), registry)
    assert "broken" not in str(caught.value)


def test_a_broken_plugin_is_mentioned_where_a_layer_kind_is_not_served() -> None:
    broken = SimpleNamespace(name="far", value="far_plugin", load=lambda: 1 / 0)
    with pytest.raises(CompositionError, match=r"Installed but broken: component 'far'.*ZeroDivisionError"):
        profile_from_facts(facts_of("f"), Registry([broken]))


TWICE = Registry([Installed("near", "n"), Installed("nearer", "n", WHOLE), Installed("far", WHOLE)])


def test_a_layer_kind_served_twice_is_refused_with_the_choice_to_make() -> None:
    with pytest.raises(CompositionError, match=r"'n' are served by several.*near, nearer.*serve=\{'n': 'near'\}"):
        profile_from_facts(facts_of("n"), TWICE)


def test_serve_chooses_who_serves_a_layer_kind_from_python_and_from_toml(tmp_path: Path) -> None:
    def composed(model: Any, **options: Any) -> list[str]:
        return [part.name for part in compose(model, capacity=64, registry=TWICE, **options).composition.parts]

    facts = attrs.evolve(facts_of("n", WHOLE), raw=LLAMA)
    for chosen in ("near", "nearer"):
        assert composed(facts, serve={"n": chosen, WHOLE: "far"}) == [chosen, "far"]
    assert composed(facts, serve={"n": "nearer", WHOLE: "nearer"}) == ["nearer"], "one component serves both kinds"

    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "layer_types": ["n", WHOLE, "n", WHOLE]}))
    path = tmp_path / "mine.toml"
    path.write_text('model = "config.json"\n[serve]\nn = "near"\nfull_attention = "nearer"\n')
    assert composed(path) == ["near", "nearer"]
    assert composed(path, serve={"n": "nearer"}) == ["nearer"], "what the caller says comes first"
    path.write_text(path.read_text() + '[[components]]\nkind = "far"\n')
    assert composed(path) == ["near", "nearer", "far"], "components beside those of the model"


@pytest.mark.parametrize(
    ("model", "serve", "told"),
    [
        (facts_of("n"), {"n": "far"}, r"component 'far' does not serve layers of kind 'n'. Served: .*n by near"),
        (facts_of("n"), {"n": "near", "m": "near"}, "'near' does not serve layers of kind 'm'"),
        (facts_of("n"), {"n": "near", WHOLE: "far"}, "the model has no layers of kind 'full_attention'. It has 'n'"),
        (facts_of("n"), {"n": 1}, "serve must map layer kinds to the components"),
        (facts_of("n"), "n", "serve must map layer kinds to the components"),
        (Profile([ComponentSpec("near")]), {"n": "near"}, "the Profile names its components itself"),
        (None, {"n": "near"}, "the Profile names its components itself"),
    ],
)
def test_a_choice_that_has_no_effect_is_refused(model: Any, serve: Any, told: str) -> None:
    with pytest.raises(CompositionError, match=told):
        compose(model, capacity=64, registry=TWICE, serve=serve)


def test_a_component_that_cannot_read_its_layers_is_named_with_its_distribution() -> None:
    def raising(facts: ModelFacts, layers: Any) -> Any:
        raise KeyError("head_dim")

    def refusing(facts: ModelFacts, layers: Any) -> Any:
        raise CompositionError("two widths")

    for from_layers, told in (
        (raising, r"could not read layer 0 of 'toy': KeyError"),
        (refusing, "two widths"),
    ):
        registry = Registry([Installed("near", "n", from_layers=from_layers)])
        with pytest.raises(CompositionError, match=told) as caught:
            profile_from_facts(facts_of("n"), registry)
        assert "'near' (distribution prefixloom-near 1)" in str(caught.value)


def test_a_model_without_memory_is_refused() -> None:
    with pytest.raises(CompositionError, match="nothing to cache"):
        profile_from_facts(facts_of(), Registry([]))


# ---------------------------------------------------------------- profiles that somebody wrote


def test_a_profile_is_passed_as_it_is() -> None:
    profile = Profile([ComponentSpec("near")])
    assert resolve_profile(profile, Registry([])) is profile


def test_facts_and_configs_are_resolved_through_the_registry() -> None:
    registry = Registry([Installed("near", "n", WHOLE)])
    assert resolve_profile(facts_of("n"), registry).components[0].name == "near"
    assert resolve_profile(LLAMA, registry).components[0].options == {"layers": (0, 1, 2, 3)}


TOML = """
name = "mine"
page_size = 8
max_rewind = 3
[[components]]
kind = "near"
name = "n1"
options = {w = 4}
[[components]]
kind = "far"
"""


def test_a_toml_profile_says_the_same_as_python(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TOML)
    expected = Profile([ComponentSpec("near", "n1", {"w": 4}), ComponentSpec("far", "far")], 8, 3, "mine")
    assert profile_from_toml(path, Registry([])) == expected
    assert resolve_profile(str(path), Registry([])) == expected


def test_a_toml_profile_without_a_name_is_called_after_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('components = [{kind = "near"}]')
    assert profile_from_toml(path, Registry([])) == Profile([ComponentSpec("near")], name="mine")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "there is no profile"),
        ("name = ", "cannot be read"),
        ('name = "x"', "needs a model, or at least one"),
        ("components = 1", "needs a model, or at least one"),
        ('pagesize = 8\n[[components]]\nkind = "n"', "unknown keys: pagesize. Allowed: name, page_size"),
        (
            '[[components]]\nkind = "n"\noption = {}',
            "component 1 has unknown keys: option. Allowed: kind, name, options",
        ),
        ('[[components]]\nkind = "n"\n[[components]]\nname = "x"', "component 2 needs a kind"),
        ('page_size = "8"\n[[components]]\nkind = "n"', "page_size must be of type int, got '8'"),
        ('max_rewind = true\n[[components]]\nkind = "n"', "max_rewind must be of type int, got True"),
        ("[[components]]\nkind = 3", "kind must be of type str, got 3"),
        ('serve = {n = "x"}\n[[components]]\nkind = "n"', "names its components itself"),
        ('model = "bad.toml"', "cannot read the model config"),
        ("model = 3", "model must be of type str, got 3"),
    ],
)
def test_a_bad_toml_profile_is_refused_by_name(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "bad.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CompositionError, match=told) as caught:
        profile_from_toml(path, Registry([]))
    assert "bad.toml" in str(caught.value)
