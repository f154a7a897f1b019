"""Tiny models of every causal model type that the installed transformers has, made from its own default configs.

A default config is shrunk by the names of its values: ``SMALL`` says how. What a model type needs beside that stands in
``SPECIAL``. The layers are picked so that every kind of layer that the default config has is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCABULARY = 97
LAYERS = 4
WINDOW = 24
"""More than a page of 16, so that a window has pages to lose."""

HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads"), 4
)
WIDTHS = dict.fromkeys(
    ("hidden_size", "n_embd", "d_model", "embedding_size", "embedding_dim", "emb_dim", "word_embed_proj_dim"), 32
)
INNER = dict.fromkeys(
    (
        "intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "d_inner", "dff", "dim_ff", "n_inner",
        "moe_intermediate_size", "shared_expert_intermediate_size", "shared_experts_intermediate_size",
        "intermediate_size_mlp", "expert_ffn_hidden_size", "shared_intermediate_size", "feed_forward_size",
        "dense_intermediate_size", "moe_shared_expert_intermediate_size", "prefix_dense_intermediate_size",
    ),
    48,
)  # fmt: skip
COUNTS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks"), LAYERS
)
EXPERTS = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "zero_expert_num"), 4
)
CHOSEN = dict.fromkeys(
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "num_expert_group", "n_group"), 2
)
POSITIONS = dict.fromkeys(
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "model_max_length"), 512
)
WINDOWS = dict.fromkeys(
    ("sliding_window", "window_size", "local_attention", "attention_window_size", "sliding_window_size"), WINDOW
)
SMALL: dict[str, Any] = {
    **HEADS, **WIDTHS, **INNER, **COUNTS, **EXPERTS, **CHOSEN, **POSITIONS, **WINDOWS,
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "unpadded_vocab_size": VOCABULARY,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_key_value_heads": 2, "num_kv_heads": 2, "kv_n_heads": 2, "head_dim": 16, "dim_head": 16, "d_head": 16,
    "attention_head_dim": 16, "kv_channels": 16, "rotary_dim": 4, "query_pre_attn_scalar": 8,
    "attention_chunk_size": 48,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 12, "o_lora_rank": 16, "topk_group": 1, "first_k_dense_replace": 1, "o_groups": 2,
    "index_topk": 16, "index_head_dim": 8, "index_n_heads": 16, "index_topk_blocks": 2, "index_block_size": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_heads": 4, "linear_head_dim": 8,
    "mamba_n_heads": 4, "mamba_num_heads": 4, "n_mamba_heads": 4, "mamba_d_head": 16, "mamba_head_dim": 16,
    "mamba_headdim": 16, "mamba_d_state": 8, "ssm_state_size": 8, "state_size": 8, "mamba_n_groups": 1,
    "mamba_ngroups": 1, "n_groups": 1, "mamba_chunk_size": 16, "chunk_size": 16, "mamba_dt_rank": 4,
    "time_step_rank": 4, "mamba_d_ssm": 64, "lru_width": 32, "attention_hidden_size": 32, "block_size": 16,
    "hidden_size_per_layer_input": 8, "laurel_rank": 4, "adapter_rank": 4, "router_hidden_size": 8,
    "num_nextn_predict_layers": 0, "cross_attention_hidden_size": 32,
}  # fmt: skip
"""By the name of a value in a config: its value in a tiny one. Values that a config lacks or leaves out are not set."""
PER_LAYER = ("layer_types", "layers_block_type", "attention_layers", "attn_layers")
"""The lists that name the kind of each layer."""

ABSENT = object()
"""A value that a tiny config is made without."""
FULL, SLIDING = "full_attention", "sliding_attention"
HEADED = {"head_dim": 16}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARING = {"layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2}
INDEXER = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
    "indexer_compress_ratio": 1,
}  # fmt: skip
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
NOTES = {
    "num_key_value_heads": 4,
    "head_dim": 12,
    "per_layer_config": {layer: {**MLA, "num_attention_heads": 4} for layer in (2, 3)},
}
ASSISTS = {
    **SHARING, "num_kv_shared_layers": LAYERS, "num_hidden_layers": LAYERS, "per_layer_config": {},
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "layer_types": ABSENT},
    "blt": {"encoder_hash_byte_group_vocab": 101},
    "cohere_compass_text": {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": {"model_type": "dots3_note_text", **NOTES},
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": NOTES,
    "gemma3n_text": {**SHARING, "intermediate_size": 48, "activation_sparsity_pattern": [0.0] * LAYERS},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **ASSISTS}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **ASSISTS}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "helium": {"head_dim": 8},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": HEADED,
    "hunyuan_v1_moe": {**HEADED, "num_experts": 4, "moe_topk": 2},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 16, "d_rel": 4},
    "inkling2_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 16, "d_rel": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": [FULL, SLIDING] * 2, "num_attention_heads_per_layer": [4, 8] * 2},
    "lfm2_moe": {"layer_types": ["conv", FULL] * 2, **ROUTED},
    "mamba2": {"head_dim": 16},
    "ministral": {**HEADED, "sliding_window": WINDOW},
    "ministral3": {"sliding_window": WINDOW},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": {"model_type": "qwen4_exp_text", **INDEXER}},
    "qwen4_exp_text": INDEXER,
    "reformer": {
        "is_decoder": True, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 16], "attention_head_size": 8,
        "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16,
    },
    "roc_bert": {"shape_vocab_size": 97, "pronunciation_vocab_size": 97},
    "xlnet": {"d_head": 8},
    "zamba": {
        "attention_hidden_size": 64,
        "num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
    },
    "zamba2": {"num_query_groups": 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
SINGLE_ONLY = ("xglm",)
"""Model types whose code cannot be run in float64."""
UNBUILT = {
    name: {"text_config": {"model_type": text, **ASSISTS}}
    for name, text in (("gemma4_assistant", "gemma4_text"), ("gemma4_unified_assistant", "gemma4_unified_text"))
}
"""What a model type's config class needs before its other values can be read."""
"""What a model type needs beside its shrunk defaults. A mapping in it goes into the mapping of that name."""


def tiny_config(model_type: str, **options: Any) -> Any:
    """The config of a tiny model of this type, with these options."""
    special = {**SPECIAL.get(model_type, {}), **options}
    default = CONFIG_MAPPING[model_type](**UNBUILT.get(model_type, {})).to_dict()
    return AutoConfig.for_model(model_type, **merged(shrunk(default), special))


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    out = {**values}
    for name, value in over.items():
        inside = out.get(name)
        out[name] = merged(inside, value) if isinstance(inside, Mapping) and isinstance(value, Mapping) else value
    return {name: value for name, value in out.items() if value is not ABSENT}


def tiny_model(model_type: str, **options: Any) -> Any:
    """A tiny model of this type in float64, with strong random weights."""
    torch.manual_seed(0)
    dtype = torch.float32 if model_type in SINGLE_ONLY else torch.float64
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **options), dtype=dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped one has no kernel for float64
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    return model.eval()


def shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a default config, each as small as ``SMALL`` says; lists by layer shortened together."""
    picked = picked_layers(config)
    out = {}
    for name, value in config.items():
        if name in ("id2label", "label2id", "transformers_version", "model_type", "_name_or_path"):
            continue
        if name == "per_layer_config":
            out[name] = {picked.index(int(at)): shrunk(value[at]) for at in value if int(at) in picked}
        elif isinstance(value, Mapping):
            out[name] = dict(value) if "rope" in name else shrunk(value)
        elif isinstance(value, list | tuple) and picked and len(value) == count_of(config):
            out[name] = [value[at] for at in picked]
            if name in SMALL:
                out[name] = [SMALL[name]] * len(picked)
        elif isinstance(value, bool) or value is None or name not in SMALL:
            out[name] = value
        else:
            out[name] = SMALL[name]
    if "kv_lora_rank" in out and "num_key_value_heads" in out:
        out["num_key_value_heads"] = out["num_attention_heads"]  # latents are spread to all heads
        if "qk_rope_head_dim" in out and config.get("head_dim") == config["qk_rope_head_dim"]:
            out["head_dim"] = out["qk_rope_head_dim"]
    return out


def count_of(config: Mapping[str, Any]) -> int:
    return next((int(config[name]) for name in COUNTS if isinstance(config.get(name), int)), 0)


def picked_layers(config: Mapping[str, Any]) -> list[int]:
    """The numbers of ``LAYERS`` layers of a default config, among them one of each kind."""
    count = count_of(config)
    if count < LAYERS:
        return []
    kinds: Sequence[Any] = next((config[name] for name in PER_LAYER if config.get(name)), [""] * count)
    if len(kinds) != count:
        return []
    mlps = config.get("mlp_layer_types") or [""] * count
    first: dict[Any, int] = {}
    for at, kind in enumerate(kinds):
        first.setdefault(kind, at)
    for at, kind in enumerate(zip(kinds, mlps, strict=False)):
        if len(first) < LAYERS and kind[0] in first and mlps[first[kind[0]]] != kind[1]:
            first.setdefault(kind, at)
    picked = sorted(first.values())[:LAYERS]
    for at in range(count):
        if len(picked) < LAYERS and at not in picked:
            picked.append(at)
    return sorted(picked)
