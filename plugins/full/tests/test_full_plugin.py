"""The Full component: what it stores for the attention of real model configs, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import pytest

import prefixloom
from prefixloom import Component, CompositionError, Path, compose
from prefixloom.compose.registry import Registry
from prefixloom.contract.composition import Composition
from prefixloom_full import FullComponent

LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK: Mapping[str, Any] = {
    "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "dtype": "float16",
}  # fmt: skip


@pytest.fixture
def registry() -> Registry:
    return Registry([EntryPoint("full", "prefixloom_full.plugin", "prefixloom")])


def composed(config: object, registry: Registry, **options: Any) -> Composition:
    return compose(config, capacity=64, device="meta", registry=registry, **options).composition


def buffers(component: Component) -> dict[str, tuple[int, ...]]:
    return {buffer.name: buffer.shape for buffer in component.manifest.buffers}


# ---------------------------------------------------------------- the component


def test_keys_and_values_are_one_buffer_each_over_all_layers() -> None:
    full = FullComponent(layers=3, kv_heads=2, k_dim=16, dtype="float16")
    assert (full.name, full.reach) == ("full", Path())
    assert buffers(full) == {"k": (2, 16), "v": (2, 16)}
    assert {(buffer.layers, buffer.dtype) for buffer in full.manifest.buffers} == {((0, 1, 2), "float16")}
    assert full.manifest.slot_bytes == 2 * 2 * 16 * 2 * 3
    assert full.manifest.placement == "sharded"


def test_values_may_be_of_another_width_and_pages_of_its_own() -> None:
    full = FullComponent("wide", layers=(1, 5), kv_heads=4, k_dim=192, v_dim=128, page_size=64)
    assert buffers(full) == {"k": (4, 192), "v": (4, 128)}
    assert (full.name, full.manifest.page_size) == ("wide", 64)
    assert full.manifest.buffers[0].layers == (1, 5)


def test_latents_are_held_once_for_all_heads_and_on_every_rank() -> None:
    full = FullComponent(layers=2, latent_dim=512, rope_dim=64)
    assert buffers(full) == {"latent": (512,), "rope": (64,)}
    assert full.manifest.placement == "replicated"
    assert buffers(FullComponent(layers=2, latent_dim=512)) == {"latent": (512,)}


def test_a_torch_dtype_is_accepted() -> None:
    torch = pytest.importorskip("torch")
    assert FullComponent(kv_heads=1, k_dim=8, dtype=torch.float64).manifest.buffers[0].dtype == "float64"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "needs kv_heads and k_dim, or latent_dim"),
        ({"kv_heads": 2}, "needs kv_heads and k_dim"),
        ({"latent_dim": 8, "kv_heads": 2, "v_dim": 8}, "have no kv_heads, v_dim"),
        ({"kv_heads": 2, "k_dim": 8, "rope_dim": 4}, "rope_dim goes with latent_dim"),
        ({"index_dim": 8, "kv_heads": 2, "rope_dim": 4}, "an indexer's keys, which have no kv_heads, rope_dim"),
        ({"kv_heads": 2, "k_dim": 8, "lookahead": -1}, "lookahead must be a whole number of at least 0"),
        ({"kv_heads": 0, "k_dim": 8}, "every extent must be at least 1"),
        ({"kv_heads": 1, "k_dim": 8, "layers": 0}, "layers must be distinct and at least one"),
        ({"kv_heads": 1, "k_dim": 8, "layers": (1, 1)}, "layers must be distinct"),
        ({"kv_heads": 1, "k_dim": 8, "shared": {3: 7}}, "layer 3 cannot share layer 7's entries"),
        ({"kv_heads": 1, "k_dim": 8, "dtype": "float7"}, "dtype must be one of"),
    ],
)
def test_impossible_options_are_refused(options: Mapping[str, Any], told: str) -> None:
    with pytest.raises(CompositionError, match=told):
        FullComponent("whole", **options)


def test_it_overrides_no_hook(registry: Registry) -> None:
    assert composed(LLAMA, registry).parts[0].hooks.overridden == ()


# ---------------------------------------------------------------- model configs


def test_a_value_width_of_its_own_is_read(registry: Registry) -> None:
    (part,) = composed({**LLAMA, "head_dim": 24, "v_head_dim": 8}, registry).parts
    assert buffers(part.component) == {"k": (2, 24), "v": (2, 8)}


def test_layers_of_other_kinds_are_left_to_other_components(registry: Registry) -> None:
    config = {**LLAMA, "layer_types": ["linear_attention", "full_attention"] * 2}
    with pytest.raises(CompositionError, match=r"'linear_attention' \(layers 0, 2\).*full_attention by full"):
        composed(config, registry)


def test_layers_of_different_widths_are_components_of_their_own(registry: Registry) -> None:
    wide = {index: {"head_dim": 512, "num_key_value_heads": 1} for index in range(4)}
    (part,) = composed({**LLAMA, "per_layer_config": wide}, registry).parts
    assert (part.name, buffers(part.component)) == ("full", {"k": (1, 512), "v": (1, 512)})
    narrow, other = composed({**LLAMA, "per_layer_config": {3: wide[3]}}, registry).parts
    assert (narrow.name, narrow.manifest.buffers[0].layers, buffers(narrow.component)["k"]) == (
        "full",
        (0, 1, 2),
        (2, 16),
    )
    assert (other.name, other.manifest.buffers[0].layers, buffers(other.component)["k"]) == (
        "full_1x512",
        (3,),
        (1, 512),
    )


def test_the_width_of_values_may_be_that_of_a_single_layer(registry: Registry) -> None:
    config = {**LLAMA, "v_head_dim": 4, "per_layer_config": {3: {"v_head_dim": 8}}}
    parts = {part.name: buffers(part.component) for part in composed(config, registry).parts}
    assert parts == {"full": {"k": (2, 16), "v": (2, 4)}, "full_2x16_8": {"k": (2, 16), "v": (2, 8)}}


def test_an_indexer_is_named_so_wherever_its_layer_stands(registry: Registry) -> None:
    listed = ["indexer_keys", "full_attention", "full_attention", "indexer_keys"]
    parts = composed({**LLAMA, "layer_types": listed, "index_head_dim": 32}, registry).parts
    assert {part.name: part.manifest.buffers[0].layers for part in parts} == {"full_indexer": (0, 3), "full": (1, 2)}


def test_latents_with_two_sidecars_are_served_together(registry: Registry) -> None:
    """Indexer keys from the config, draft KV of the caller's own: one prefix, as deep as all three hold it."""
    draft = FullComponent("draft", layers=1, kv_heads=2, k_dim=8, v_dim=4, lookahead=1)
    config = {**DEEPSEEK, "index_topk": 64, "index_head_dim": 32}
    cache = prefixloom.compose(config, registry=registry, plugins=[draft], page_size=4, capacity=64, debug=True)
    assert [part.name for part in cache.composition.parts] == ["full", "full_indexer", "draft"]
    assert cache.composition.lookahead == 1
    tokens = list(range(17))
    with cache.open(tokens) as sequence:
        for count in (9, 8):
            sequence.grow(count)
            sequence.commit()
            sequence.publish()
    assert cache.peek(tokens) == 16, "the draft's last entry is known only with the token after it"
    assert cache.peek(tokens[:16]) == 12
    assert cache.evict({"draft": 2})["draft"] == 2
    assert cache.peek(tokens) == 8
    cached = {name: figures.cached for name, figures in cache.stats().components.items()}
    assert cached == {"full": 2, "full_indexer": 2, "draft": 2}, "without the draft's the others' serve no boundary"
