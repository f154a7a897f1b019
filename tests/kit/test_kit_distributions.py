"""Laws of distributions: each mistake in options, names and what is read from a model's config is killed by its law."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from prefixloom import AdmissionPolicy, Buffer, Component, CompositionError, Manifest, Point
from prefixloom.compose.registry import default_registry
from prefixloom.testing import ComponentCase, Truth
from prefixloom.testing.conformance import untested, verdict
from prefixloom.testing.laws import options as laws
from prefixloom.testing.laws.facts import (
    law_each_component_is_an_instance_of_its_own,
    law_the_manifest_has_all_that_the_layers_write,
    law_the_manifest_says_what_content_depends_on,
)

NAME, OTHERS, CONFIG = (
    laws.law_it_has_the_name_that_it_is_given,
    laws.law_its_options_do_what_the_truth_says,
    laws.law_a_config_gives_each_layer_to_a_component,
)
RIGHT = """
from prefixloom import Buffer, Component, ComponentType, Manifest, Window, hookimpl
from prefixloom.testing import Truth

def made(name, window=1024, heads=2, layers=(0, 1), dtype="bfloat16"):
    return Component(name, Manifest([Buffer("k", (heads, 4), dtype, layers)]), Window(window))

def from_layers(facts, layers):
    found = {}
    for layer in layers:
        found.setdefault(layer.options.get("ring", 512), []).append(layer.index)
    return [(str(window), {"window": window, "layers": tuple(numbers)}) for window, numbers in found.items()]

@hookimpl
def prefixloom_component():
    return ComponentType("rings", made, layer_kinds={"ring"}, from_layers=from_layers)

@hookimpl
def prefixloom_truth(options):
    window = options["window"]
    return Truth(
        reads=lambda q: range(max(0, q - window + 1), q), ahead=0, grid=1, tokens_per_entry=1,
        buffers=[Buffer("k", (options["heads"], 4), options["dtype"], options["layers"])],
    )
"""
WRONG: list[tuple[str, str, str, Callable[[ComponentCase], None], str]] = [
    ("a name that is not taken", "Component(name,", "Component('rings',", NAME, "whose name is 'rings'"),
    ("a reach that knows the default alone", "Window(window)", "Window(1024)", OTHERS, "window=2048 in place of 1024"),
    ("a truth that knows the default alone", 'options["window"]', "1024", OTHERS, "made with window=512"),
    ("a shape that knows the default alone", "(heads, 4)", "(2, 4)", OTHERS, "layers write shape (4, 4)"),
    ("a dtype that is not taken", "4), dtype", '4), "bfloat16"', OTHERS, "layers write dtype float32"),
    ("layers that are not taken", "dtype, layers)", "dtype, (0, 1))", OTHERS, "has entries for the layers [1]"),
    ("layers that are counted anew", "append(layer.index)", "append(len(found))", CONFIG, "stores the layers [1"),
    ("the first window alone", "in found.items()]", "in found.items()][:1]", CONFIG, "stores the layers [1]"),
    ("an option that nobody takes", '{"window":', '{"rope": 1, "window":', CONFIG, "make raises TypeError"),
    ("two components of a name", "(str(window),", '("",', CONFIG, "must name each component differently"),
]
PASSED = '    return Component(name, Manifest([Buffer("k", (2, 4))]), Window(given.get("window", 1024)))'


@pytest.fixture
def rings(distribution: Any) -> Iterator[Callable[[str], ComponentCase]]:
    def installed(source: str) -> ComponentCase:
        distribution("prefixloom-rings", {"rings": "kit_rings"}, {"kit_rings": source})
        default_registry.cache_clear()
        return ComponentCase.installed("rings")

    yield installed
    default_registry.cache_clear()


def test_a_right_distribution_keeps_its_laws(rings: Callable[[str], ComponentCase]) -> None:
    case = rings(RIGHT)
    assert [verdict(law, case).status for law in (NAME, OTHERS, CONFIG)] == ["holds"] * 3
    assert not [told for told in untested(case) if "config" in told]


@pytest.mark.parametrize(("mistake", "right", "wrong", "law", "told"), WRONG, ids=[row[0] for row in WRONG])
def test_a_mistake_of_a_distribution_is_killed_by_its_law(
    mistake: str, right: str, wrong: str, law: Any, told: str, rings: Callable[[str], ComponentCase]
) -> None:
    assert right in RIGHT
    source = RIGHT.replace(right, wrong, 1)
    found = verdict(law, rings(source))
    assert (found.status, told in found.told) == ("broken", True), found.told


def test_a_truth_that_answers_none_is_an_error(rings: Callable[[str], ComponentCase]) -> None:
    with pytest.raises(CompositionError, match=r"prefixloom_truth answered None to the options .*'window': 1024"):
        rings(RIGHT.replace('    window = options["window"]\n', "    return None\n"))


def test_a_config_that_a_plugin_cannot_read_is_told(rings: Callable[[str], ComponentCase]) -> None:
    case = rings(RIGHT.replace('options.get("ring", 512)', 'options["ring"]'))
    assert verdict(CONFIG, case).status == "holds"
    assert [told for told in untested(case) if "from_layers raises KeyError: 'ring'" in told]


def test_options_that_are_passed_on_are_options_like_others(rings: Callable[[str], ComponentCase]) -> None:
    passed_on = RIGHT.replace(
        'made(name, window=1024, heads=2, layers=(0, 1), dtype="bfloat16")', "made(name, **given)"
    )
    source = passed_on.replace(
        '    return Component(name, Manifest([Buffer("k", (heads, 4), dtype, layers)]), Window(window))', PASSED
    )
    assert "**given" in source and PASSED in source
    case = rings(
        source.replace('options["window"]', 'options.get("window", 1024)').partition("        buffers=")[0] + "    )\n"
    )
    assert case.options == {}
    assert ComponentCase.installed("rings", window=32).options == {"window": 32}


def test_a_component_without_defaults_says_why_no_config_makes_it(rings: Callable[[str], ComponentCase]) -> None:
    source = RIGHT.replace("window=1024, heads", "*, window, heads").replace(
        'options.get("ring", 512)', 'options["ring"]'
    )
    with pytest.raises(CompositionError, match=r"missing 1 required .*of a small config, .* KeyError\('ring'\)"):
        rings(source)


def test_a_policy_that_is_made_for_each_component_is_no_other_manifest() -> None:
    def make() -> Component:
        own = AdmissionPolicy("own", admit=lambda state: state.last)
        return Component("state", Manifest([Buffer("s", (4,), "float32")], admission=own), Point())

    assert verdict(law_each_component_is_an_instance_of_its_own, ComponentCase(make, Truth(grid=1))).status == "holds"


# ---------------------------------------------------------------- prefixloom's own

HEADS: dict[str, Any] = {"kv_heads": 2, "k_dim": 3}
MORE: dict[str, Any] = {**HEADS, "v_dim": 5, "layers": (1, 4), "shared": {6: 4}, "dtype": "float32", "lookahead": 1}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "full": (HEADS, MORE, {"latent_dim": 4}, {"latent_dim": 4, "rope_dim": 2, "layers": 2}, {"index_dim": 3}),
    "swa": ({**HEADS, "window": 5}, {**MORE, "window": 5}, {**MORE, "chunk": 8}),
    "mamba": (
        {"conv": (3, 2)},
        {"recurrent": (2, 2), "state_dtype": "bfloat16", "layers": (1, 3), "grid": 4},
        {"conv": (3, 2), "recurrent": (2, 2), "dtype": "float16", "layers": 2, "stored_as": "int8"},
    ),
}


@pytest.mark.parametrize(("name", "options"), [(name, each) for name, some in OPTIONS.items() for each in some])
def test_the_truth_of_a_distribution_is_that_of_its_component(name: str, options: dict[str, Any]) -> None:
    case = ComponentCase.installed(name, **options)
    law_the_manifest_has_all_that_the_layers_write(case)
    law_the_manifest_says_what_content_depends_on(case)
