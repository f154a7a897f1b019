"""The window component: what it stores and needs, what it refuses, and how a composed cache serves it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import pytest

import prefixloom
from prefixloom import Cache, Component, CompositionError, Window
from prefixloom.compose.registry import Registry
from prefixloom_swa import SwaComponent

SMALL: Mapping[str, Any] = {"kv_heads": 1, "k_dim": 2, "dtype": "float32"}


def cache_of(*components: Component, page: int = 4, tokens: int = 128) -> Cache:
    capacity = {component.name: tokens for component in components}
    return prefixloom.compose(None, plugins=components, page_size=page, capacity=capacity, debug=True)


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


def cached(cache: Cache, name: str = "swa") -> int:
    return cache.stats().components[name].cached


# ---------------------------------------------------------------- the component


def test_a_window_counts_the_query_itself() -> None:
    swa = SwaComponent(window=4, **SMALL)
    assert (swa.name, swa.reach) == ("swa", Window(4))
    assert swa.reach.needs(10) == ((7, 10),)
    assert SwaComponent(window=1, **SMALL).reach.needs(10) == ()


def test_keys_and_values_are_one_buffer_each_over_all_layers() -> None:
    swa = SwaComponent("near", layers=(0, 2, 4), kv_heads=2, k_dim=16, v_dim=8, window=8, page_size=2, shared={5: 4})
    keys, values = swa.manifest.buffers
    assert (keys.name, keys.shape, keys.dtype, keys.layers) == ("k", (2, 16), "bfloat16", (0, 2, 4))
    assert (values.name, values.shape, dict(values.shared)) == ("v", (2, 8), {5: 4})
    assert (swa.manifest.page_size, swa.manifest.placement) == (2, "sharded")
    assert swa.manifest.slot_bytes == (2 * 16 + 2 * 8) * 2 * 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "needs a window or a chunk, one of the two"),
        ({"window": 4, "chunk": 8}, "needs a window or a chunk, one of the two"),
        ({"window": 0}, "a window must be a whole number of at least 1, got 0: it counts the query itself"),
        ({"window": -3}, "a window must be a whole number of at least 1, got -3"),
        ({"window": 4.0}, "a window must be a whole number"),
        ({"window": True}, "a window must be a whole number"),
        ({"chunk": 0}, "a chunk must be a whole number of at least 1, got 0$"),
        ({"window": 4, "keep_windows": "some"}, "keep_windows must be 'all' or 'last', got 'some'"),
        ({"window": 4, "layers": ()}, "layers must be distinct and at least one"),
        ({"window": 4, "dtype": "float7"}, "dtype must be one of"),
        ({"window": 4, "max_rewind": -1}, "max_rewind must be a whole number of at least 0"),
    ],
)
def test_impossible_options_are_refused(options: Mapping[str, Any], told: str) -> None:
    with pytest.raises(CompositionError, match=told):
        SwaComponent("near", **{**SMALL, **options})


def test_a_hook_is_overridden_only_where_it_is_asked_for() -> None:
    parts = cache_of(SwaComponent("a", window=4, **SMALL), SwaComponent("b", window=4, keep_windows="last", **SMALL))
    assert [part.hooks.overridden for part in parts.composition.parts] == [(), ("commit_insert",)]


def test_the_plugin_offers_what_transformers_calls_sliding_and_chunked() -> None:
    registry = Registry([EntryPoint("swa", "prefixloom_swa.plugin", "prefixloom")])
    assert registry.component("swa").layer_kinds == {"sliding_attention", "chunked_attention"}
    assert isinstance(registry.component("swa").make(name="x", window=4, **SMALL), SwaComponent)


# ---------------------------------------------------------------- in a cache


def test_a_sequence_of_any_length_runs_in_a_pool_of_a_few_windows() -> None:
    cache = cache_of(SwaComponent(window=5, **SMALL), tokens=16)
    for start in (0, 1000):
        with cache.open(range(start, start + 64)) as sequence:
            for _ in range(16):
                sequence.grow(4)
                sequence.commit()
            assert sequence.owned("swa") <= 4
        assert cache.peek([*range(start, start + 64), 99]) == 64


def test_all_windows_are_kept_where_nothing_else_is_said_and_the_older_part_goes_first() -> None:
    cache = cache_of(SwaComponent("swa", window=5, **SMALL))
    serve(cache, list(range(32)))
    assert cached(cache) == 8
    assert serve(cache, [*range(12), 99]) == 12, "an earlier boundary is resumed at"
    cache = cache_of(SwaComponent("swa", window=5, **SMALL))
    serve(cache, list(range(32)))
    with cache.open([*range(32), 99]) as sequence:
        assert sequence.ready == 32
        assert cache.evict({"swa": 7}) == {"swa": 7}, "a lease pins one window, not a long leaf"
        assert cache.evict({"swa": 1}) == {"swa": 0}
    assert cache.peek([*range(12), 99]) == 0


def test_only_the_last_window_of_each_publication_is_kept_where_it_is_asked_for() -> None:
    cache = cache_of(SwaComponent("swa", window=5, keep_windows="last", **SMALL))
    serve(cache, list(range(48)), 16, 32)
    assert cached(cache) == 3
    prompt = list(range(48))
    assert [cache.peek([*prompt[:at], 99]) for at in (8, 16, 20, 32, 44, 48)] == [0, 16, 16, 32, 32, 48]


def test_a_window_longer_than_a_publication_keeps_all_of_it() -> None:
    cache = cache_of(SwaComponent("swa", window=30, keep_windows="last", **SMALL))
    serve(cache, list(range(48)), 16, 32)
    assert cached(cache) == 12
    assert cache.peek([*range(48), 99]) == 48
