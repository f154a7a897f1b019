"""Model config: read a Hugging Face style config into ``ModelFacts``.

Only this module knows how such configs name things. The kind of a layer says, in the config's own words, what the layer
remembers between tokens. A layer may remember in more than one way (keys of an indexer beside its latents, a state
beside its attention): then it has facts of several kinds under one number. A config that does not say what a layer
remembers is refused: to take a window for full attention wastes memory, and to take full attention for a window gives
wrong answers silently. This module does not know which component serves a kind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..contract.manifest import DTYPE_BYTES
from ..contract.values import LayerFacts, ModelFacts
from ..errors import CompositionError
from .config_classes import Known, known_of

__all__ = ["GLOBAL", "load_config", "read_facts"]

NESTED = ("text_config", "llm_config", "language_config")
"""Keys under which the config of a multimodal model has that of its language model."""

USUAL: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "hidden_size": ("n_embd", "d_model"),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "sliding_window": (),
}
"""Numbers by the names under which a config object answers, whatever its class calls them; and their other names."""

# ---------------------------------------------------------------- reading a config


def load_config(source: object) -> dict[str, Any]:
    """Load a config as a dict, from a dict, an object with ``to_dict``, a config.json, or a folder that has one."""
    if isinstance(source, Mapping):
        return dict(source)
    to_dict: Callable[[], object] | None = getattr(source, "to_dict", None)
    if callable(to_dict):
        config = to_dict()
        if not isinstance(config, Mapping):
            raise CompositionError(f"{type(source).__name__}.to_dict() gave {type(config).__name__}, not a dict")
        return _with_computed(source, dict(config))
    if not isinstance(source, str | os.PathLike):
        raise CompositionError(
            f"cannot read a model from {type(source).__name__}: pass a config dict, a config object with to_dict(), a "
            f"path to a config.json or its folder, a .toml profile or a Profile"
        )
    return _read_json(Path(source))


def _with_computed(source: object, config: dict[str, Any]) -> dict[str, Any]:
    """The dict of a config object, with what its class only computes: a layer list, numbers under their usual names."""
    for key in NESTED:
        if isinstance(config.get(key), Mapping):
            config[key] = _with_computed(getattr(source, key, None), dict(config[key]))
    listed = getattr(source, "layer_types", None)
    if isinstance(listed, list | tuple) and config.get("layer_types") is None:
        config["layer_types"] = list(listed)
    for name in USUAL:
        if config.get(name) is None and isinstance(value := getattr(source, name, None), int):
            config[name] = value
    return config


def _read_json(path: Path) -> dict[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CompositionError(
            f"no model config at {str(path)!r}. Nothing is downloaded: pass the folder of a downloaded model, its "
            f"config.json, or a config object"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CompositionError(f"cannot read the model config {str(path)!r}: {error}") from error
    if not isinstance(config, dict):
        raise CompositionError(f"{str(path)!r} holds {type(config).__name__}, not a model config")
    return config


def read_facts(source: object) -> ModelFacts:
    """Return a model's facts, with normalised names and the kind of every layer.

    What the config leaves out is taken from its class in transformers, if that is installed.
    """
    outer = load_config(source)
    given = _text_part(outer)
    known = known_of(outer, given)
    defaults = {} if known.text is None else load_config(known.text)
    config = defaults | {key: value for key, value in given.items() if value is not None or key not in defaults}
    _refuse_other_inputs(config, outer, known)
    listed = listed_kinds(config)
    count = _integer(config, "num_hidden_layers", default=len(listed) or None)
    hidden = _integer(config, "hidden_size")
    # States alone need no attention heads; a component that does need them refuses 0.
    heads = _integer(config, "num_attention_heads", default=0 if config.get("state_size") else None)
    width = _integer(config, "head_dim", default=hidden // heads) if heads else 0
    if listed and len(listed) != count:
        raise CompositionError(f"{named(config)} lists {len(listed)} layer types and has {count} layers")
    layers = layer_facts(config, listed or derived_kinds(config, count, known.causal))
    dtype, assumed = _dtype(config, outer)
    implied = {
        "num_hidden_layers": len(listed_kinds(given)),
        "num_key_value_heads": _kv_heads(given, heads),
        "head_dim": hidden // heads if heads else 0,
    }
    return ModelFacts(
        model_type=str(config.get("model_type") or ""),
        layers=layers,
        dtype=dtype,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(config, heads),
        head_dim=width,
        raw=config,
        warnings=(*assumed, *_taken(given, config, known, implied)),
    )


def _taken(given: Mapping[str, Any], config: Mapping[str, Any], known: Known, implied: Mapping[str, int]) -> list[str]:
    """Warnings about numbers that the config leaves out, and that are not those which are implied by its others."""
    if known.failed:
        return [f"{named(config)}: transformers does not take it, so its defaults are not known here: {known.failed}"]
    missing = [name for name, others in USUAL.items() if all(given.get(each) is None for each in (name, *others))]
    if config.get("kv_lora_rank") and "head_dim" in missing:
        missing.remove("head_dim")  # a latent has a width of its own
    if known.text is None:
        if "head_dim" not in missing or not given.get("model_type") or not implied["head_dim"]:
            return []
        return [
            f"{named(config)} leaves out head_dim: {implied['head_dim']} is taken, the hidden size over the heads. "
            f"Where transformers is installed and has this type, its default is taken"
        ]
    taken = [f"{name}={config[name]}" for name in missing if config.get(name) not in (None, implied.get(name))]
    return [f"{named(config)} leaves out {', '.join(taken)}: these are transformers' defaults"] if taken else []


def _refuse_other_inputs(config: Mapping[str, Any], outer: Mapping[str, Any], known: Known) -> None:
    """Refuse a model whose layers remember more of a prefix than its tokens say."""
    crossed = {
        "an encoder-decoder model": outer.get("is_encoder_decoder") or known.cross,
        "cross-attention": any(config.get(key) for key in CROSSED),
    }
    if any(crossed.values()):
        raise CompositionError(
            f"{named(config)} has another input than its tokens ({next(filter(crossed.get, crossed))}), so a prefix of "
            f"tokens does not name what it remembers. Use a decoder-only model"
        )
    masked = any("MaskedLM" in str(name) for name in outer.get("architectures") or ())
    signs = {
        "use_bidirectional_attention": config.get("use_bidirectional_attention") in (True, "all"),
        "is_causal=False": config.get("is_causal") is False,
        "an encoder, without is_decoder=True": (masked or known.encoder) and config.get("is_decoder") is not True,
    }
    if any(signs.values()):
        raise CompositionError(
            f"{named(config)} attends to later tokens too ({next(sign for sign in signs if signs[sign])}), so what it "
            f"remembers of a prefix depends on what follows. Use a causal model"
        )


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    for key in NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return dict(inner)
    return config


def _integer(config: Mapping[str, Any], usual: str, *, default: int | None = None) -> int:
    """The value of a number under its usual name, or another one. None counts as missing, as in transformers."""
    names = (usual, *USUAL[usual])
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CompositionError(f"{named(config)}: {name} must be a whole number of at least 1, got {value!r}")
        return value
    if default is None:
        raise CompositionError(
            f"{named(config)} has no {' or '.join(names)}. Pass a complete config, or a Profile. Where transformers is "
            f"installed and has this type, its defaults are taken"
        )
    return default


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _integer(config, "num_key_value_heads", default=heads)


def _dtype(config: Mapping[str, Any], outer: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The dtype of the model's memory, with a warning where the config does not say it."""
    quantized = config.get("quantization_config") or outer.get("quantization_config")
    said = [(key, holder.get(key)) for holder in (config, outer) for key in ("dtype", "torch_dtype")]
    if isinstance(quantized, Mapping):
        said.append(("bnb_4bit_compute_dtype", quantized.get("bnb_4bit_compute_dtype")))
    for key, value in said:
        if value is None or value == "auto":
            continue
        name = str(value).removeprefix("torch.")
        if name not in DTYPE_BYTES:
            raise CompositionError(f"{named(config)}: {key}={value!r} is none of {', '.join(DTYPE_BYTES)}")
        return name, []
    taken = "bfloat16" if quantized else "float32"
    why = ", in which quantized weights are computed" if quantized else ""
    return taken, [
        f"{named(config)} does not say its dtype: {taken} is taken{why}. If the model is loaded in another one, write "
        f"dtype into the config"
    ]


# ---------------------------------------------------------------- kinds of layers

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

RENAMED = {"attention": GLOBAL, "deepseek_sparse_attention": INDEXED, "global": GLOBAL, "local": GLOBAL}
"""Older names of layer kinds, as transformers renames them. Of GPT-Neo's "local" attention it keeps all tokens."""

SEVERAL = {INDEXED: (GLOBAL, INDEXER), HYBRID: (GLOBAL, LINEAR), HYBRID_SLIDING: (SLIDING, LINEAR)}
"""Layer kinds that remember in several ways, and these ways."""

STATELESS = frozenset({"moe", "mlp", "dense", "sparse"})
"""Entries of a layer list that remember nothing between tokens."""

LETTERS = {"M": LINEAR, "E": "moe", "*": GLOBAL, "-": "mlp"}
"""The letters that stand for layer kinds in a pattern."""

PERIODS = {
    "gemma2": 2, "vaultgemma": 2, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "gemma3n_text": 5, "gemma3_text": 6,
    "gemma4_text": 6,
}  # fmt: skip
"""Model types whose older configs do not list their layers, with n: every n-th layer has no window."""

ALL_WINDOWED = frozenset({"", "mistral", "ministral", "mixtral", "phi3", "phimoe", "starcoder2"})
"""Model types in which all layers use ``sliding_window``, if it is in use."""

PLAIN = frozenset({
    "", "bloom", "codegen", "cohere", "deepseek_v2", "deepseek_v3", "deepseek_v32", "falcon", "gemma", "glm", "glm4",
    "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "granitemoe", "llama", "mpt", "nemotron", "olmo", "olmo2",
    "olmoe", "opt", "persimmon", "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "xglm",
})  # fmt: skip
"""Model types that are known without transformers to be plain causal attention, but for windows. A config without a
type is somebody's own, who means what it says."""

NOT_UNIFORM = (
    "attn_layers", "attn_layer_indices", "attn_layer_period", "attn_type", "attn_type_list", "attention_types",
    "attention_chunk_size", "block_types", "conv_L_cache", "full_attention_interval", "full_attn_idxs",
    "hybrid_override_pattern", "layer_group_size", "linear_attn_config", "lru_width", "ssm_cfg", "state_size",
    "time_step_rank", "compress_ratios",
)  # fmt: skip
"""Keys that are signs of several layer kinds, or of recurrent layers, in configs that do not list their layers."""

CROSSED = ("cross_attention_layers", "cross_attention_hidden_size", "add_cross_attention")
"""Keys that are signs of attention to another input, such as an image or what an encoder makes of one."""

RECURRENT_PREFIXES = ("mamba_", "ssm_", "linear_attn_", "linear_num_", "linear_key_", "linear_conv_")

LISTED = (
    "Pass the config of the loaded model, HFModel(model).config, which lists its layers, write layer_types into it, or "
    "pass a Profile"
)


def named(config: Mapping[str, Any]) -> str:
    return f"model type {config['model_type']!r}" if config.get("model_type") else "this model config"


def layer_facts(config: Mapping[str, Any], kinds: list[str]) -> tuple[LayerFacts, ...]:
    """The layers that remember something, in order, with their options from the config."""
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
                options |= _sliding_widths(config, options)
                options.setdefault("sliding_window", config.get("sliding_window"))
            elif kind == CHUNKED:
                options.setdefault("attention_chunk_size", config.get("attention_chunk_size"))
            if index in owners:
                options["kv_owner"] = owners[index]
            out.append(LayerFacts(index, kind, options))
    return tuple(out)


def listed_kinds(config: Mapping[str, Any]) -> list[str]:
    """The layer kinds that the config lists; empty if it lists none."""
    for key in ("layer_types", "layers_block_type", "attention_layers"):
        listed = config.get(key)
        if listed is None:
            continue
        if not isinstance(listed, list | tuple) or not all(isinstance(kind, str) for kind in listed):
            raise CompositionError(f"{named(config)}: {key} must be a list of layer kinds, got {listed!r}")
        kinds = [RENAMED.get(str(kind), str(kind)) for kind in listed]
        return [INDEXED if kind == GLOBAL and _indexed(config) else kind for kind in kinds]
    return []


def _indexed(config: Mapping[str, Any]) -> bool:
    """Whether an indexer selects the latents to attend to. Older configs call such layers plain attention."""
    return bool(config.get("index_topk") and config.get("kv_lora_rank"))


def derived_kinds(config: Mapping[str, Any], count: int, known: bool) -> list[str]:
    """The layer kinds of a config that does not list its layers, derived as in transformers.

    Only of a model type that is ``known`` to generate, or that stands here, plain attention is taken for granted.
    """
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
    kinds = _windowed_kinds(config, count)
    if not known and config.get("model_type", "") not in ALL_WINDOWED | PERIODS.keys() | PLAIN:
        raise CompositionError(
            f"{named(config)} is not known here, and it does not say what its layers remember: it may attend to later "
            f"tokens, or remember in other ways. If it is plain causal attention, write layer_types into it, a list of "
            f"{GLOBAL!r} for each layer; install a transformers that knows it; or pass a Profile"
        )
    return kinds


def _windowed_kinds(config: Mapping[str, Any], count: int) -> list[str]:
    """Plain attention in all layers, or the windows that a model type is known to have."""
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


# ---------------------------------------------------------------- rules for configs without a list of layers


def _whole_numbers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, int) for item in value)


def _by_indices(config: Mapping[str, Any], count: int) -> list[str] | None:
    """A list of the layers with attention; the others are recurrent (Bamba) or convolutions (LFM2)."""
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
"""The rules for configs that do not list their layers. A rule that does not apply returns None."""

# ---------------------------------------------------------------- options of single layers


def _overrides(config: Mapping[str, Any], kinds: list[str]) -> dict[int, Mapping[str, Any]]:
    """The options of single layers that differ from the model's common values."""
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


def _sliding_widths(config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The heads and widths of a layer with a window, if its model type gives such layers others than the rest."""
    latent = options.get("kv_lora_rank") or config.get("kv_lora_rank")
    if latent:  # transformers caches the latent and the rotary key as keys and values of one head
        return {"num_key_value_heads": 1, "head_dim": latent, "v_head_dim": config.get("qk_rope_head_dim")}
    heads, width = config.get("swa_num_key_value_heads"), config.get("swa_head_dim")
    if heads is None and config.get("model_type") == "mimo_v2_flash":
        heads = 2 * config["num_key_value_heads"]
    found = {"num_key_value_heads": heads, "head_dim": width}
    return {name: value for name, value in found.items() if value is not None and name not in options}


def _kv_owners(config: Mapping[str, Any], kinds: list[str]) -> dict[int, int]:
    """Sharer -> owner. Each of the last ``num_kv_shared_layers`` layers reads the entries of the last layer of its kind
    before all of them.
    """
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
