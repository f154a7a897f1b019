"""Layers: what each layer of a model config remembers between tokens, as a kind in the config's own words.

A layer may remember in more than one way (keys of an indexer beside its latents, a state beside its attention): then it
has facts of several kinds under one number. Where a config leaves open what a layer remembers, it is refused: a window
taken for a path wastes memory, a path taken for a window gives wrong answers in silence. Which component serves a kind,
if any does, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .errors import CompositionError
from .values import LayerFacts

SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
GLOBAL = "full_attention"
LATENT = "latent_attention"
INDEXED = "indexed_attention"
INDEXER = "indexer_keys"
LINEAR = "linear_attention"
CONVOLUTION = "conv"
HYBRID = "hybrid"
HYBRID_SLIDING = "hybrid_sliding"
RENAMED = {"attention": GLOBAL, "deepseek_sparse_attention": INDEXED}
"""Older spellings of layer kinds, as transformers itself renames them."""
SEVERAL = {INDEXED: (GLOBAL, INDEXER), HYBRID: (GLOBAL, LINEAR), HYBRID_SLIDING: (SLIDING, LINEAR)}
"""Kinds of layers that remember in several ways."""
STATELESS = frozenset({"moe", "mlp", "dense", "sparse"})
"""Entries of a layer list that remember nothing between tokens."""
LETTERS = {"M": LINEAR, "E": "moe", "*": GLOBAL, "-": "mlp"}
"""Layer kinds as letters of a pattern."""
PERIODS = {
    "gemma2": 2, "vaultgemma": 2, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "gemma3n_text": 5, "gemma3_text": 6,
    "gemma4_text": 6,
}  # fmt: skip
"""Model types whose older configs do not list their layers: every n-th one has no window."""
ALL_WINDOWED = frozenset({"", "mistral", "ministral", "mixtral", "phi3", "phimoe", "starcoder2"})
"""Model types whose ``sliding_window``, if in use, holds for all layers."""
NOT_UNIFORM = (
    "attn_layer_indices", "attn_layer_period", "attn_type_list", "attention_types", "attention_chunk_size",
    "block_types", "conv_L_cache", "full_attention_interval", "full_attn_idxs", "hybrid_override_pattern",
    "layer_group_size", "linear_attn_config", "lru_width", "ssm_cfg", "state_size", "time_step_rank", "compress_ratios",
)  # fmt: skip
"""Keys that tell of layers of several kinds, or of recurrent ones, in configs that do not list them."""
RECURRENT_PREFIXES = ("mamba_", "ssm_", "linear_attn_", "linear_num_", "linear_key_", "linear_conv_")
LISTED = (
    "Load it with transformers' AutoConfig and pass the config object, which lists its layers, write layer_types into "
    "it, or pass a Profile"
)


def named(config: Mapping[str, Any]) -> str:
    return f"model type {config['model_type']!r}" if config.get("model_type") else "this model config"


def layer_facts(config: Mapping[str, Any], kinds: list[str]) -> tuple[LayerFacts, ...]:
    """The layers that remember something, in order, with what the config says of each."""
    overrides = _overrides(config, kinds)
    owners = _kv_owners(config, kinds)
    indexers = config.get("indexer_types")
    out: list[LayerFacts] = []
    for index, listed in enumerate(kinds):
        for kind in SEVERAL.get(listed, (listed,)):
            if kind in STATELESS or (kind == INDEXER and indexers is not None and indexers[index] == "shared"):
                continue
            options = dict(overrides.get(index, {}))
            if kind == GLOBAL and config.get("kv_lora_rank"):
                kind = LATENT
            elif kind == SLIDING:
                options.setdefault("sliding_window", config.get("sliding_window"))
            elif kind == CHUNKED:
                options.setdefault("attention_chunk_size", config.get("attention_chunk_size"))
            if index in owners:
                options["kv_owner"] = owners[index]
            out.append(LayerFacts(index, kind, options))
    return tuple(out)


def listed_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kinds that the config lists; empty if it lists none."""
    for key in ("layer_types", "layers_block_type"):
        listed = config.get(key)
        if listed is None:
            continue
        if not isinstance(listed, list | tuple) or not all(isinstance(kind, str) for kind in listed):
            raise CompositionError(f"{named(config)}: {key} must be a list of layer kinds, got {listed!r}")
        kinds = [RENAMED.get(str(kind), str(kind)) for kind in listed]
        return [INDEXED if kind == GLOBAL and _indexed(config) else kind for kind in kinds]
    return []


def _indexed(config: Mapping[str, Any]) -> bool:
    """Whether an indexer picks the latents that are attended to; older configs call such layers plain attention."""
    return bool(config.get("index_topk") and config.get("kv_lora_rank"))


def derived_kinds(config: Mapping[str, Any], count: int) -> list[str]:
    """The kinds of a config that does not list its layers, as transformers derives them."""
    for derive in DERIVED:
        kinds = derive(config, count)
        if kinds is not None:
            return kinds
    signs = [key for key in NOT_UNIFORM if config.get(key) is not None]
    signs += [key for key in config if key.startswith(RECURRENT_PREFIXES) and config[key] is not None]
    if signs:
        raise CompositionError(
            f"{named(config)} does not list its layers, and {', '.join(dict.fromkeys(signs[:4]))} says that they are "
            f"not all plain attention. {LISTED}"
        )
    return _windowed_kinds(config, count)


def _windowed_kinds(config: Mapping[str, Any], count: int) -> list[str]:
    """Plain attention everywhere, or the windows that a model type is known to have."""
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return [INDEXED if _indexed(config) else GLOBAL] * count
    if config.get("max_window_layers") is not None:
        first = config["max_window_layers"] if config.get("use_sliding_window") else count
        return [SLIDING if index >= first else GLOBAL for index in range(count)]
    model_type = str(config.get("model_type") or "")
    period = config.get("sliding_window_pattern") or PERIODS.get(model_type)
    if isinstance(period, int) and period > 0:
        kinds = [GLOBAL if (index + 1) % period == 0 else SLIDING for index in range(count)]
        if model_type == "gemma4_text":
            kinds[-1] = GLOBAL
        return kinds
    if period is None and (model_type in ALL_WINDOWED or config.get("use_sliding_window")):
        return [SLIDING] * count
    raise CompositionError(
        f"{named(config)} has sliding_window={window!r} and does not say which layers use it. {LISTED}"
    )


# ---------------------------------------------------------------- rules in place of a list


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, int) for item in value)


def _by_indices(config: Mapping[str, Any], count: int) -> list[str] | None:
    """Which layers have attention, by number; the others are recurrent (Bamba) or convolutions (LFM2)."""
    for key, other in (("attn_layer_indices", LINEAR), ("full_attn_idxs", CONVOLUTION)):
        attending = config.get(key, False)
        if _whole_numbers(attending) or (attending is None and other == LINEAR):
            return [GLOBAL if index in (attending or ()) else other for index in range(count)]
    return None


def _by_period(config: Mapping[str, Any], count: int) -> list[str] | None:
    """Attention in every n-th layer, counted from an offset (Jamba) or from the last of n (Qwen3-Next)."""
    period, offset = config.get("attn_layer_period"), config.get("attn_layer_offset")
    if isinstance(period, int) and isinstance(offset, int) and period > 0:
        return [GLOBAL if index % period == offset else LINEAR for index in range(count)]
    period = config.get("full_attention_interval")
    if isinstance(period, int) and period > 0:
        return [LINEAR if (index + 1) % period else GLOBAL for index in range(count)]
    return None


def _by_lists_from_one(config: Mapping[str, Any], count: int) -> list[str] | None:
    """Two lists of layer numbers that start at 1 (Kimi Linear's published checkpoints)."""
    lists = config.get("linear_attn_config")
    if not isinstance(lists, Mapping) or not all(
        _whole_numbers(lists.get(k)) for k in ("full_attn_layers", "kda_layers")
    ):
        return None
    kinds = dict.fromkeys(lists["full_attn_layers"], GLOBAL) | dict.fromkeys(lists["kda_layers"], LINEAR)
    missing = [n for n in range(1, count + 1) if n not in kinds]
    if missing:
        raise CompositionError(f"{named(config)}: linear_attn_config names no kind for layers {missing} (from 1)")
    return [kinds[n] for n in range(1, count + 1)]


def _by_flags(config: Mapping[str, Any], count: int) -> list[str] | None:
    """One number per layer: 1 for attention, 0 for a recurrence (MiniMax's published checkpoints)."""
    flags: Any = config.get("attn_type_list")
    if not _whole_numbers(flags) or len(flags) != count:
        return None
    return [GLOBAL if flag else LINEAR for flag in flags]


def _by_rope(config: Mapping[str, Any], count: int) -> list[str] | None:
    """Layers with rotary positions attend within chunks, the others to everything (Llama 4)."""
    if not config.get("attention_chunk_size") or not {"no_rope_layers", "no_rope_layer_interval"} & set(config):
        return None
    rotary = config.get("no_rope_layers")
    if not rotary:
        every = config.get("no_rope_layer_interval") or 4
        rotary = [(index + 1) % every != 0 for index in range(count)]
    return [CHUNKED if flag else GLOBAL for flag in rotary[:count]]


def _by_pattern(config: Mapping[str, Any], count: int) -> list[str] | None:
    """One letter for each layer (Nemotron-H's published checkpoints)."""
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        return None
    if len(pattern) != count or not set(pattern) <= set(LETTERS):
        raise CompositionError(
            f"{named(config)}: hybrid_override_pattern has {pattern!r} for {count} layers: it must have one of "
            f"{', '.join(LETTERS)} for each"
        )
    return [LETTERS[letter] for letter in pattern]


def _all_alike(config: Mapping[str, Any], count: int) -> list[str] | None:
    """Attention and a state in every layer (Falcon-H1), or states alone: a state size, and no attention heads."""
    if "mamba_d_ssm" in config:
        return [HYBRID] * count
    if config.get("state_size") and config.get("num_attention_heads") is None:
        return [LINEAR] * count
    return None


DERIVED: tuple[Callable[[Mapping[str, Any], int], list[str] | None], ...] = (
    _by_indices, _by_period, _by_lists_from_one, _by_flags, _by_rope, _by_pattern, _all_alike,
)  # fmt: skip
"""The rules by which configs say their layers without a list; None: the rule does not apply."""


# ---------------------------------------------------------------- what single layers have of their own


def _overrides(config: Mapping[str, Any], kinds: list[str]) -> dict[int, Mapping[str, Any]]:
    """What single layers have in place of the model's common values."""
    listed = config.get("per_layer_config")
    if listed is not None:
        if not isinstance(listed, Mapping) or not all(isinstance(value, Mapping) for value in listed.values()):
            raise CompositionError(
                f"{named(config)}: per_layer_config must map layer numbers to values, got {listed!r}"
            )
        return {int(index): value for index, value in listed.items()}
    if config.get("global_head_dim") is None:
        return {}
    value = {"head_dim": config["global_head_dim"]}
    if config.get("attention_k_eq_v", True) and config.get("num_global_key_value_heads") is not None:
        value["num_key_value_heads"] = config["num_global_key_value_heads"]
    return {index: value for index, kind in enumerate(kinds) if kind == GLOBAL}


def _kv_owners(config: Mapping[str, Any], kinds: list[str]) -> dict[int, int]:
    """Sharer -> owner: the last ``num_kv_shared_layers`` read the entries of the last layer of their kind before."""
    shared = config.get("num_kv_shared_layers") or 0
    first = len(kinds) - shared
    owners: dict[int, int] = {}
    for index in range(max(first, 0), len(kinds)):
        before = [i for i in range(first) if kinds[i] == kinds[index]]
        if not before:
            raise CompositionError(
                f"{named(config)}: layer {index} ({kinds[index]}) shares the entries of an earlier layer, and none of "
                f"the first {max(first, 0)} layers is of its kind. Pass a Profile"
            )
        owners[index] = before[-1]
    return owners
