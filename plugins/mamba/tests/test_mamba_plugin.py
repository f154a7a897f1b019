"""The component of recurrent layers: what it stores and needs, what it refuses, and how a composed cache serves it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import pytest

import prefixloom
from prefixloom import (
    AdmissionPolicy,
    Buffer,
    Cache,
    Component,
    CompositionError,
    LayerFacts,
    Manifest,
    ModelFacts,
    Path,
    Point,
    StateView,
)
from prefixloom.compose.registry import Registry
from prefixloom_mamba import MambaComponent
from prefixloom_mamba.plugin import caveats, options_from_layers

SMALL: Mapping[str, Any] = {"conv": (6, 3), "recurrent": (2, 4)}


def cache_of(*components: Component, page: int = 4, states: int = 12, **options: Any) -> Cache:
    capacity = {c.name: states if c.reach.unit == "boundary" else 256 for c in components}
    return prefixloom.compose(None, plugins=components, page_size=page, capacity=capacity, debug=True, **options)


def whole() -> Component:
    return Component("whole", Manifest([Buffer("kv", (2,), "float32")]), Path())


def serve(cache: Cache, tokens: list[int], *chunks: int) -> int:
    """One request, published after each chunk; how much of it hit."""
    with cache.open(tokens, leave=1) as sequence:
        for chunk in (*chunks, len(tokens)):
            if sequence.reserved < min(chunk, len(tokens)):
                sequence.grow(min(chunk, len(tokens)) - sequence.reserved)
                with cache.step([sequence]) as step:
                    step.run_ops()
                sequence.publish()
        return sequence.ready


def cached(cache: Cache, name: str = "mamba") -> int:
    return cache.stats().components[name].cached


def facts_of(raw: Mapping[str, Any], *kinds: str, **changes: Any) -> ModelFacts:
    layers = tuple(LayerFacts(index, kind) for index, kind in enumerate(kinds))
    common = {"model_type": "toy", "dtype": "bfloat16", "hidden_size": 64, "num_attention_heads": 4}
    return ModelFacts(layers=layers, raw=raw, num_key_value_heads=4, head_dim=16, **{**common, **changes})


# ---------------------------------------------------------------- the component


def test_a_slot_holds_states_of_several_dtypes() -> None:
    mamba = MambaComponent(layers=(0, 2), conv=(6, 4), recurrent=(2, 8, 16))
    conv, recurrent = mamba.manifest.buffers
    assert (conv.name, conv.shape, conv.dtype, conv.layers) == ("conv", (6, 4), "bfloat16", (0, 2))
    assert (recurrent.name, recurrent.shape, recurrent.dtype) == ("recurrent", (2, 8, 16), "float32")
    assert mamba.manifest.slot_bytes == 2 * (6 * 4 * 2 + 2 * 8 * 16 * 4)
    assert (mamba.name, mamba.reach, mamba.manifest.grid, mamba.manifest.checkpoint_every) == ("mamba", Point(), 1, 0)


def test_the_dtype_of_the_recurrent_state_can_be_chosen() -> None:
    mamba = MambaComponent(conv=(6, 4), recurrent=(2, 8), dtype="float16", state_dtype="bfloat16")
    assert [buffer.dtype for buffer in mamba.manifest.buffers] == ["float16", "bfloat16"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"conv": None, "recurrent": None}, "needs a conv state .channels, kernel width., a recurrent one, or both"),
        ({"conv": (6,)}, r"a conv state is \(channels, kernel width\), got \(6,\)"),
        ({"recurrent": (0, 4)}, "every extent must be at least 1"),
        ({"grid": 0}, "grid must be a whole number of at least 1"),
        ({"grid": 64, "checkpoint_every": 100}, "checkpoint_every=100 is off the grid.*multiples of 64 only. Say 128"),
        ({"checkpoint_every": -4}, "checkpoint_every must be a whole number of at least 0"),
        ({"max_rewind": -1}, "max_rewind must be a whole number of at least 0"),
        ({"admit": 3}, "'state': admit must be the name of an admission policy, an AdmissionPolicy or a function"),
        ({"state_dtype": "float7"}, "dtype must be one of"),
        ({"layers": 0}, "layers must be distinct and at least one"),
    ],
)
def test_impossible_options_are_refused(options: Mapping[str, Any], told: str) -> None:
    with pytest.raises(CompositionError, match=told):
        MambaComponent("state", **{**SMALL, **options})


def test_no_hook_is_overridden_and_admission_is_a_fact_of_the_manifest() -> None:
    policy = AdmissionPolicy("mine", admit=lambda state: state.boundary > 8)
    admits: list[Any] = [None, "branch-and-last", policy, lambda state: state.last]
    cache = cache_of(*(MambaComponent(name, admit=admit, **SMALL) for name, admit in zip("abcd", admits, strict=True)))
    assert [part.hooks.overridden for part in cache.composition.parts] == [()] * 4
    assert [part.admission and part.admission.name for part in cache.composition.parts] == [
        "all", "branch-and-last", "mine", "d.admit",
    ]  # fmt: skip


def test_an_admission_policy_that_nobody_offers_is_refused_with_those_that_are_built_in() -> None:
    with pytest.raises(CompositionError, match=r"component 'mamba' .*named 'ends'.*Built in: all, branch-and-last"):
        cache_of(MambaComponent(admit="ends", **SMALL), registry=Registry([]))


# ---------------------------------------------------------------- model configs


def test_recurrences_and_convolutions_of_one_model_are_two_components() -> None:
    raw = {"mamba_dt_rank": 4, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "conv_L_cache": 3}
    facts = facts_of(raw, "linear_attention", "conv", "mamba")
    (first, state), (second, conv) = options_from_layers(facts, facts.layers)
    assert (first, state["layers"], state["recurrent"]) == ("", (0, 2), (128, 8))
    assert (second, conv["layers"], conv["conv"], conv["recurrent"]) == ("conv", (1,), (64, 3), None)
    assert "Mamba-1 scan starts from zero" in "".join(caveats(facts, facts.layers))
    assert list(caveats(facts, facts.layers[1:2])) == []


def test_the_state_is_as_wide_as_the_model_where_transformers_makes_it_so() -> None:
    scan = {"time_step_rank": 4, "state_size": 8, "conv_kernel": 4, "expand": 2}
    wide = facts_of(scan, "mamba", dtype="float64")
    assert options_from_layers(wide, wide.layers)[0][1]["state_dtype"] == "float64"
    delta = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    facts = facts_of(delta, "linear_attention", dtype="float64")
    ((_, options),) = options_from_layers(facts, facts.layers)
    assert (options["conv"], options["recurrent"]) == ((2 * 2 * 8 + 4 * 16, 4), (4, 8, 16))
    assert (options["dtype"], options["state_dtype"], options["grid"]) == ("float64", "float32", 64)


@pytest.mark.parametrize("model_type", ["zamba2", "nemotron_h"])
def test_what_is_wrong_with_single_tokens_is_told(model_type: str) -> None:
    facts = facts_of({}, "linear_attention", model_type=model_type)
    assert "does not clamp the time step" in "".join(caveats(facts, facts.layers))


def test_the_plugin_offers_the_recurrent_kinds_of_transformers() -> None:
    registry = Registry([EntryPoint("mamba", "prefixloom_mamba.plugin", "prefixloom")])
    assert registry.component("mamba").layer_kinds == {"linear_attention", "mamba", "mamba2", "conv"}


# ---------------------------------------------------------------- in a cache


def test_only_ends_are_admitted_where_it_is_asked_for() -> None:
    cache = cache_of(whole(), MambaComponent(admit="branch-and-last", **SMALL))
    with cache.open(range(32)) as sequence:
        for _ in range(4):
            sequence.grow(8)
            with cache.step([sequence]) as step:
                step.run_ops()
            if sequence.committed < 32:
                sequence.publish()
        assert cached(cache) == 0
    assert cached(cache) == 1
    assert cache.peek([*range(32), 99]) == 32


def test_admission_may_be_a_function_of_the_publication() -> None:
    seen: list[StateView] = []

    def admit(state: StateView) -> bool:
        seen.append(state)
        return state.boundary % 16 == 0

    cache = cache_of(whole(), MambaComponent(admit=admit, **SMALL))
    serve(cache, list(range(32)), 8, 16, 24)
    assert [state.boundary for state in seen] == [8, 16, 24, 32]
    assert cached(cache) == 2
