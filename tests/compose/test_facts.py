"""Facts: what a model config says of its layers, read as transformers reads it, or refused by name.

transformers itself is hidden here. What it adds where it is installed is tested in ``test_config_classes``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixloom import CompositionError
from prefixloom.compose.model_config import load_config, read_facts

pytestmark = pytest.mark.usefixtures("without_transformers")

LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
WINDOWED = "sliding_attention"
WHOLE = "full_attention"


def kinds(config: Mapping[str, Any]) -> list[str]:
    return [layer.kind for layer in read_facts(config).layers]


# ---------------------------------------------------------------- reading configs


def test_usual_names_are_normalised() -> None:
    facts = read_facts(LLAMA)
    assert (facts.model_type, len(facts.layers), facts.hidden_size) == ("llama", 4, 64)
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.head_dim) == (4, 2, 16)
    assert facts.dtype == "bfloat16"
    assert facts.raw == LLAMA


def test_the_older_names_of_gpt_2_are_read() -> None:
    facts = read_facts({"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4})
    assert (len(facts.layers), facts.hidden_size, facts.num_attention_heads) == (2, 32, 4)
    assert (facts.num_key_value_heads, facts.head_dim) == (4, 8)


def test_a_head_dim_of_its_own_wins_over_the_quotient() -> None:
    assert read_facts({**LLAMA, "head_dim": 128}).head_dim == 128


def test_multi_query_attention_has_one_kv_head() -> None:
    falcon = {"model_type": "falcon", "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    assert read_facts({**falcon, "multi_query": True}).num_key_value_heads == 1
    grouped = {**falcon, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}
    assert read_facts(grouped).num_key_value_heads == 2


@pytest.mark.parametrize(
    ("said", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": "float16"}}, "float16"),
    ],
)
def test_the_dtype_is_read_under_both_of_its_names(said: Mapping[str, Any], dtype: str) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    facts = read_facts({**config, **said})
    assert (facts.dtype, "dtype" in "".join(facts.warnings)) == (dtype, False)


@pytest.mark.parametrize("said", [{}, {"dtype": None}, {"torch_dtype": "auto"}])
def test_a_dtype_that_a_config_does_not_say_is_taken_with_a_warning(said: Mapping[str, Any]) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"} | said
    for more, dtype in (({}, "float32"), ({"quantization_config": {"quant_method": "mxfp4"}}, "bfloat16")):
        for told in (config | more, {"text_config": config, **more}):
            facts = read_facts(told)
            assert facts.dtype == dtype
            assert f"'llama' does not say its dtype: {dtype} is taken" in facts.warnings[0]


def test_a_nested_text_config_is_the_one_that_counts() -> None:
    outer = {"model_type": "vlm", "dtype": "float16", "text_config": {**LLAMA, "torch_dtype": None}}
    facts = read_facts(outer)
    assert (facts.model_type, len(facts.layers)) == ("llama", 4)
    assert facts.dtype == "float16", "said outside, it holds inside"


def test_a_config_is_read_from_a_dict_an_object_a_file_and_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    expected = read_facts(LLAMA)
    assert read_facts(SimpleNamespace(to_dict=lambda: dict(LLAMA))) == expected
    assert read_facts(path) == read_facts(str(path)) == read_facts(tmp_path) == expected


def test_layers_that_a_config_class_only_computes_are_read_from_the_object() -> None:
    inner = SimpleNamespace(layer_types=["linear_attention"] * 3 + [WHOLE])
    plain = SimpleNamespace(layer_types=inner.layer_types, to_dict=lambda: {**LLAMA, "mamba_d_state": 16})
    nested = SimpleNamespace(text_config=inner, to_dict=lambda: {"text_config": {**LLAMA, "mamba_d_state": 16}})
    for source in (plain, nested):
        assert [layer.kind for layer in read_facts(source).layers] == inner.layer_types


@pytest.mark.parametrize(
    ("content", "told"),
    [("{", "cannot read the model config"), ("[]", "holds list, not a model config"), (None, "Nothing is downloaded")],
)
def test_a_bad_config_file_is_refused(tmp_path: Path, content: str | None, told: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CompositionError, match=told):
        load_config(tmp_path)


def test_what_is_no_config_at_all_is_refused() -> None:
    with pytest.raises(CompositionError, match="cannot read a model from int"):
        load_config(42)
    with pytest.raises(CompositionError, match=r"to_dict\(\) gave list"):
        load_config(SimpleNamespace(to_dict=list))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_hidden_layers": None}, "has no num_hidden_layers or n_layer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number from 1 to 1048576, got 0"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads must be a whole number"),
        ({"torch_dtype": "float7"}, "torch_dtype='float7' is none of float64"),
        ({"is_encoder_decoder": True}, "another input .*encoder-decoder model.*Use a decoder-only model"),
        ({"layer_types": [WHOLE]}, "lists 1 layer types and has 4 layers"),
        ({"layer_types": "full"}, "layer_types must be a list"),
        ({"per_layer_config": [1]}, "per_layer_config must map layer numbers"),
    ],
)
def test_a_bad_value_in_a_config_is_refused_by_name(change: Mapping[str, Any], told: str) -> None:
    with pytest.raises(CompositionError, match=told) as caught:
        read_facts({**LLAMA, **change})
    assert "'llama'" in str(caught.value)


# ---------------------------------------------------------------- layer kinds


def test_without_a_list_every_layer_is_plain_attention() -> None:
    assert kinds(LLAMA) == [WHOLE] * 4


def test_listed_layer_kinds_are_kept_as_open_strings() -> None:
    listed = ["conv", "somebody_elses", WHOLE, "linear_attention"]
    assert kinds({**LLAMA, "layer_types": listed}) == listed


def test_older_spellings_are_renamed_and_layers_without_memory_left_out() -> None:
    facts = read_facts({**LLAMA, "layers_block_type": ["attention", "mlp", "moe", "deepseek_sparse_attention"]})
    assert [(layer.index, layer.kind) for layer in facts.layers] == [(0, WHOLE), (3, WHOLE), (3, "indexer_keys")]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, [WINDOWED] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [WHOLE] * 4),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, [WHOLE] * 4),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}, [WHOLE] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            [WHOLE, WHOLE, WHOLE, WINDOWED],
        ),
        ({"model_type": "qwen3_moe", "sliding_window": 8, "use_sliding_window": True}, [WINDOWED] * 4),
        ({"model_type": "gemma2", "sliding_window": 8}, [WINDOWED, WHOLE, WINDOWED, WHOLE]),
        ({"model_type": "cohere2", "sliding_window": 8}, [WINDOWED, WINDOWED, WINDOWED, WHOLE]),
        ({"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2}, [WINDOWED, WHOLE] * 2),
        ({"model_type": "gemma4_text", "sliding_window": 8}, [WINDOWED, WINDOWED, WINDOWED, WHOLE]),
    ],
)
def test_a_window_is_read_as_transformers_reads_it(config: Mapping[str, Any], expected: list[str]) -> None:
    assert kinds({**LLAMA, **config}) == expected


def test_the_number_of_layers_may_come_from_their_list() -> None:
    config = {**LLAMA, "num_hidden_layers": None, "layers_block_type": ["linear_attention", "moe", WHOLE]}
    assert [layer.index for layer in read_facts(config).layers] == [0, 2]


def test_a_windowed_layer_carries_its_window() -> None:
    layers = read_facts({**LLAMA, "model_type": "gemma2", "sliding_window": 8}).layers
    assert [layer.options.get("sliding_window") for layer in layers] == [8, None, 8, None]


def test_a_window_that_does_not_say_whose_it_is_is_refused() -> None:
    with pytest.raises(CompositionError, match=r"does not say which layers use it.*HFModel"):
        read_facts({**LLAMA, "model_type": "newcomer", "sliding_window": 8})


@pytest.mark.parametrize("model_type", ["bert", "newcomer", "llada", "chatglm"])
def test_a_model_type_that_nobody_knows_is_refused_unless_it_lists_its_layers(model_type: str) -> None:
    config = {**LLAMA, "model_type": model_type}
    with pytest.raises(CompositionError, match=f"'{model_type}' is not known here, .*write layer_types into it"):
        read_facts(config)
    assert kinds({**config, "layer_types": [WHOLE] * 4}) == [WHOLE] * 4
    assert kinds({key: value for key, value in config.items() if key != "model_type"}) == [WHOLE] * 4, "somebody's own"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"is_causal": False}, "is_causal=False"),
        ({"architectures": ["ModernBertForMaskedLM"]}, "an encoder, without is_decoder=True"),
        ({"cross_attention_layers": [1]}, "another input than its tokens"),
        ({"add_cross_attention": True}, "another input than its tokens"),
    ],
)
def test_a_model_that_sees_more_than_earlier_tokens_is_refused_though_it_lists_its_layers(
    change: Mapping[str, Any], told: str
) -> None:
    listed = {**LLAMA, "layer_types": [WHOLE] * 4}
    for config in ({**listed, **change}, {"text_config": {**listed, **change}, **change}):
        with pytest.raises(CompositionError, match=told):
            read_facts(config)
    assert kinds({**listed, "use_bidirectional_attention": "vision", "is_causal": True, "is_decoder": False})


def test_a_width_that_only_transformers_would_know_is_said() -> None:
    assert "'llama' leaves out head_dim: 16 is taken" in read_facts(LLAMA).warnings[0]
    assert read_facts({**LLAMA, "head_dim": 16}).warnings == ()
    latent = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    assert not [each for each in read_facts(latent).warnings if "head_dim" in each], "a latent has a width of its own"


@pytest.mark.parametrize("key", ["mamba_d_state", "attention_chunk_size", "linear_num_key_heads", "attn_layer_period"])
def test_signs_of_other_memory_without_a_list_of_layers_are_refused(key: str) -> None:
    with pytest.raises(CompositionError, match=f"does not list its layers, and {key} says"):
        read_facts({**LLAMA, key: 8})
    assert kinds({**LLAMA, key: 8, "layer_types": [WHOLE] * 4}) == [WHOLE] * 4, "the list is the answer"
    assert kinds({**LLAMA, key: None}) == [WHOLE] * 4, "a key without a value is no sign"


@pytest.mark.parametrize(("interval", "whole"), [(3, [2]), (2, [1, 3]), (None, [3])])
def test_layers_without_rotary_positions_attend_to_everything(interval: int | None, whole: list[int]) -> None:
    found = kinds({**LLAMA, "attention_chunk_size": 8, "no_rope_layer_interval": interval})
    assert [layer for layer, kind in enumerate(found) if kind == WHOLE] == whole


def test_a_compressed_latent_makes_latent_layers_and_leaves_others_alone() -> None:
    latent = {**LLAMA, "kv_lora_rank": 32}
    assert kinds(latent) == ["latent_attention"] * 4
    mixed = ["linear_attention", "linear_attention", WHOLE, WHOLE]
    assert kinds({**latent, "layer_types": mixed}) == [*mixed[:2], "latent_attention", "latent_attention"]
    assert kinds({**latent, "index_topk": 64}) == ["latent_attention", "indexer_keys"] * 4
    assert kinds({**latent, "index_topk": 64, "layer_types": mixed}) == [
        *mixed[:2],
        *(["latent_attention", "indexer_keys"] * 2),
    ]
    assert kinds({**LLAMA, "index_topk": 64}) == [WHOLE] * 4, "without latents, that says nothing known"


def test_shared_layers_name_the_last_owner_of_their_kind() -> None:
    listed = [WINDOWED, WHOLE, WINDOWED, WHOLE, WINDOWED, WHOLE]
    config = {**LLAMA, "num_hidden_layers": 6, "layer_types": listed, "num_kv_shared_layers": 2, "sliding_window": 4}
    owners = {
        layer.index: layer.options["kv_owner"] for layer in read_facts(config).layers if "kv_owner" in layer.options
    }
    assert owners == {4: 2, 5: 3}


def test_a_shared_layer_without_an_owner_is_refused() -> None:
    config = {**LLAMA, "layer_types": [WHOLE, WHOLE, WHOLE, "conv"], "num_kv_shared_layers": 1}
    with pytest.raises(CompositionError, match=r"layer 3 \(conv\) shares.*none of the first 3 layers"):
        read_facts(config)


def test_what_single_layers_have_of_their_own_reaches_their_options() -> None:
    for key in (1, "1"):
        layers = read_facts({**LLAMA, "per_layer_config": {key: {"head_dim": 512}}}).layers
        assert [layer.options.get("head_dim") for layer in layers] == [None, 512, None, None]
    older = {**LLAMA, "layer_types": [WINDOWED, WHOLE] * 2, "global_head_dim": 512, "num_global_key_value_heads": 1}
    assert dict(read_facts(older).layers[1].options) == {"head_dim": 512, "num_key_value_heads": 1}
    separate = read_facts({**older, "attention_k_eq_v": False})
    assert dict(separate.layers[1].options) == {"head_dim": 512}
