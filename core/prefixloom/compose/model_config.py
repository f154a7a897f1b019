"""Model config: read a Hugging Face style config into ``ModelFacts``.

Only this module knows how such configs name things. The kind of a layer says, in the config's own words, what the layer
remembers between tokens. A layer may remember in more than one way (keys of an indexer beside its latents, a state
beside its attention): then it has facts of several kinds under one number. A config that does not say what a layer
remembers is refused: to take a window for full attention wastes memory, and to take full attention for a window gives
wrong answers silently. This module does not know which component serves a kind.

A published config leaves out what equals the default of its class, and does not say which tokens its layers attend to.
The installed transformers says both. The core does not need it: where it is not installed, or lacks the type, the
tables below say what is known.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import attrs

from ..contract.checks import whole
from ..contract.manifest import DTYPE_BYTES
from ..contract.values import LayerFacts, ModelFacts
from ..errors import CompositionError
from .binding import shown

__all__ = ["GLOBAL", "load_config", "read_facts"]

Config = Mapping[str, Any]

# ---------------------------------------------------------------- what configs are known to say

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

MOST = 1 << 20
"""The largest of these numbers that is read. A list of more layers than that would take all memory."""

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

RECURRENT_PREFIXES = ("mamba_", "ssm_", "linear_attn_", "linear_num_", "linear_key_", "linear_conv_")

CROSSED = ("cross_attention_layers", "cross_attention_hidden_size", "add_cross_attention")
"""Keys that are signs of attention to another input, such as an image or what an encoder makes of one."""

NOT_PASSED = ("model_type", "dtype", "torch_dtype")
"""Keys that a class of transformers does not take, or takes in fewer spellings than a published config has."""

LISTED = (
    "Pass the config of the loaded model, HFModel(model).config, which lists its layers, write layer_types into it, or "
    "pass a Profile"
)


def named(config: Config) -> str:
    return f"model type {config['model_type']!r}" if config.get("model_type") else "this model config"


# ---------------------------------------------------------------- the config as a dict


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
    path = Path(source)
    try:
        path = path / "config.json" if path.is_dir() else path
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CompositionError(
            f"no model config at {str(path)!r}. Nothing is downloaded: pass the folder of a downloaded model, its "
            f"config.json, or a config object"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CompositionError(f"cannot read the model config {str(path)!r}: {error}") from error
    if not isinstance(config, dict):
        raise CompositionError(f"{str(path)!r} holds {type(config).__name__}, not a model config")
    return config


def _with_computed(source: object, config: dict[str, Any]) -> dict[str, Any]:
    """Return the dict of a config object with what its class only computes: a layer list, numbers by usual names."""
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


@attrs.frozen
class Known:
    """What transformers knows of a model config. ``text`` is the config of its language model with all defaults, or
    None.

    ``causal``, ``encoder``: transformers has a model of this type that generates, or one that fills in masked tokens.
    ``cross``: the class says that the model is an encoder with a decoder.
    ``failed``: why the class of the type did not take the config.
    """

    text: object = None
    causal: bool = False
    encoder: bool = False
    cross: bool = False
    failed: str = ""


def known_of(outer: Config, text: Config) -> Known:
    """Return what the installed transformers knows of a config, whose language model has the config ``text``."""
    told = {str(config["model_type"]): config for config in (text, outer) if config.get("model_type")}
    if not told:
        return Known()
    try:
        classes = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
        models = importlib.import_module("transformers.models.auto.modeling_auto")
        causal = {*models.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *models.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
        masked = models.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    except (ImportError, AttributeError):  # of a transformers that is older than what prefixloom's engine needs
        return Known()
    found = Known(causal=not causal.isdisjoint(told), encoder=not told.keys().isdisjoint(masked))
    name = next((name for name in reversed(told) if name in classes), None)
    if name is None:
        return found
    try:
        kind = classes[name]
        made = kind(**{key: told[name][key] for key in told[name] if key not in NOT_PASSED and _can_be_set(kind, key)})
        decoder = made.get_text_config(decoder=True)
        return attrs.evolve(found, text=decoder, cross=bool(getattr(made, "is_encoder_decoder", False)))
    except Exception as error:  # of a dozen types, from several libraries
        return attrs.evolve(found, failed=shown(error))


def _can_be_set(kind: type, name: str) -> bool:
    """Return whether an attribute of a config class is not one that the class only computes."""
    name = getattr(kind, "attribute_map", {}).get(name, name)
    return getattr(getattr(kind, name, None), "fset", kind) is not None


# ---------------------------------------------------------------- the facts


def read_facts(source: object) -> ModelFacts:
    """Return a model's facts, with normalised names and the kind of every layer.

    What the config leaves out is taken from its class in transformers, if that is installed.
    """
    outer = load_config(source)
    given = next((dict(inner) for key in NESTED if isinstance(inner := outer.get(key), Mapping) and inner), outer)
    known = known_of(outer, given)
    defaults = {} if known.text is None else load_config(known.text)
    config = defaults | {key: value for key, value in given.items() if value is not None or key not in defaults}
    _refuse_other_inputs(config, outer, known)
    listed = _listed_kinds(config)
    count = _integer(config, "num_hidden_layers", len(listed) or None)
    hidden = _integer(config, "hidden_size")
    # States alone need no attention heads; a component that does need them refuses 0.
    heads = _integer(config, "num_attention_heads", 0 if config.get("state_size") else None)
    width = hidden // heads if heads else 0
    if listed and len(listed) != count:
        raise CompositionError(f"{named(config)} lists {len(listed)} layer types and has {count} layers")
    dtype, assumed = _dtype(config, outer)
    implied = {
        "num_hidden_layers": len(_listed_kinds(given)),
        "num_key_value_heads": _kv_heads(given, heads),
        "head_dim": width,
    }
    return ModelFacts(
        model_type=str(config.get("model_type") or ""),
        layers=_layers(config, listed or _derived_kinds(config, count, known.causal)),
        dtype=dtype,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(config, heads),
        head_dim=_integer(config, "head_dim", width) if heads else 0,
        raw=config,
        warnings=(*assumed, *_taken(given, config, known, implied)),
    )


def _taken(given: Config, config: Config, known: Known, implied: Mapping[str, int]) -> list[str]:
    """Return warnings of numbers that the config leaves out, and that its others do not imply."""
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


def _refuse_other_inputs(config: Config, outer: Config, known: Known) -> None:
    """Refuse a model whose layers remember more of a prefix than its tokens say."""
    crossed = (
        "has another input than its tokens ({}), so a prefix of tokens does not name what it remembers. Use a "
        "decoder-only model"
    )
    later = (
        "attends to later tokens too ({}), so what it remembers of a prefix depends on what follows. Use a causal model"
    )
    encoder = known.encoder or "MaskedLM" in str(outer.get("architectures"))
    signs = (
        (crossed, "an encoder-decoder model", outer.get("is_encoder_decoder") or known.cross),
        (crossed, "cross-attention", any(config.get(key) for key in CROSSED)),
        (later, "use_bidirectional_attention", config.get("use_bidirectional_attention") in (True, "all")),
        (later, "is_causal=False", config.get("is_causal") is False),
        (later, "an encoder, without is_decoder=True", encoder and config.get("is_decoder") is not True),
    )
    for told, sign, found in signs:
        if found:
            raise CompositionError(f"{named(config)} {told.format(sign)}")


def _integer(config: Config, usual: str, default: int | None = None) -> int:
    """Return a number under its usual name, or another one. None counts as missing, as in transformers."""
    names = (usual, *USUAL[usual])
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        return whole(value, f"{named(config)}: {name}", high=MOST)
    if default is None:
        raise CompositionError(
            f"{named(config)} has no {' or '.join(names)}. Pass a complete config, or a Profile. Where transformers is "
            f"installed and has this type, its defaults are taken"
        )
    return default


def _kv_heads(config: Config, heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _integer(config, "num_key_value_heads", heads)


def _dtype(config: Config, outer: Config) -> tuple[str, list[str]]:
    """Return the dtype of the model's memory, with a warning where the config does not say it."""
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
    taken, why = ("bfloat16", ", in which quantized weights are computed") if quantized else ("float32", "")
    return taken, [
        f"{named(config)} does not say its dtype: {taken} is taken{why}. If the model is loaded in another one, write "
        f"dtype into the config"
    ]


# ---------------------------------------------------------------- the kinds of layers


def _listed_kinds(config: Config) -> list[str]:
    """Return the layer kinds that the config lists; none if it lists none."""
    for key in ("layer_types", "layers_block_type", "attention_layers"):
        listed = config.get(key)
        if listed is None:
            continue
        if not isinstance(listed, list | tuple) or not all(isinstance(kind, str) for kind in listed):
            raise CompositionError(f"{named(config)}: {key} must be a list of layer kinds, got {listed!r}")
        kinds = [RENAMED.get(str(kind), str(kind)) for kind in listed]
        return [INDEXED if kind == GLOBAL and _indexed(config) else kind for kind in kinds]
    return []


def _indexed(config: Config) -> bool:
    """Return whether an indexer selects the latents to attend to. Older configs call such layers plain attention."""
    return bool(config.get("index_topk") and config.get("kv_lora_rank"))


def _derived_kinds(config: Config, count: int, known: bool) -> list[str]:
    """Return the layer kinds of a config that does not list its layers, derived as in transformers.

    Only of a model type that is ``known`` to generate, or that stands here, plain attention is taken for granted.
    """
    kinds = _kinds_by_family(config, count)
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


def _numbers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list | tuple) and all(isinstance(item, int) for item in value)


def _kinds_by_family(config: Config, count: int) -> list[str] | None:
    """Return the layer kinds that other keys than a list say, each as one family of models writes them; or None."""
    get, layers = config.get, range(count)
    if _numbers(attending := get("attn_layer_indices")):  # Bamba
        return [GLOBAL if index in attending else LINEAR for index in layers]
    if _numbers(attending := get("full_attn_idxs")):  # LFM2
        return [GLOBAL if index in attending else CONVOLUTION for index in layers]
    period, offset = get("attn_layer_period"), get("attn_layer_offset")
    if isinstance(period, int) and isinstance(offset, int) and period > 0:  # Jamba
        return [GLOBAL if index % period == offset else LINEAR for index in layers]
    period = get("full_attention_interval")
    if isinstance(period, int) and period > 0:  # Qwen3-Next
        return [LINEAR if (index + 1) % period else GLOBAL for index in layers]
    lists = get("linear_attn_config")
    if isinstance(lists, Mapping):  # Kimi Linear's published checkpoints, which count layers from 1
        whole, linear = lists.get("full_attn_layers"), lists.get("kda_layers")
        if _numbers(whole) and _numbers(linear):
            kinds = dict.fromkeys(whole, GLOBAL) | dict.fromkeys(linear, LINEAR)
            if missing := [number for number in range(1, count + 1) if number not in kinds]:
                raise CompositionError(
                    f"{named(config)}: linear_attn_config names no kind for layers {missing} (from 1)"
                )
            return [kinds[index + 1] for index in layers]
    if _numbers(flags := get("attn_type_list")) and len(flags) == count:  # MiniMax's published checkpoints
        return [GLOBAL if flag else LINEAR for flag in flags]
    if get("attention_chunk_size") and {"no_rope_layers", "no_rope_layer_interval"} & config.keys():  # Llama 4
        every = get("no_rope_layer_interval") or 4
        rotary = get("no_rope_layers") or [(index + 1) % every for index in layers]
        return [CHUNKED if flag else GLOBAL for flag in rotary[:count]]
    if isinstance(pattern := get("hybrid_override_pattern"), str):  # Nemotron-H's published checkpoints
        if len(pattern) != count or not set(pattern) <= set(LETTERS):
            raise CompositionError(
                f"{named(config)}: hybrid_override_pattern has {pattern!r} for {count} layers: it must have one of "
                f"{', '.join(LETTERS)} for each"
            )
        return [LETTERS[letter] for letter in pattern]
    if "mamba_d_ssm" in config:  # Falcon-H1
        return [HYBRID] * count
    if get("state_size") and get("num_attention_heads") is None:  # states alone
        return [LINEAR] * count
    return None


def _windowed_kinds(config: Config, count: int) -> list[str]:
    """Return plain attention in all layers, or the windows that a model type is known to have."""
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


# ---------------------------------------------------------------- the options of layers


def _layers(config: Config, kinds: list[str]) -> tuple[LayerFacts, ...]:
    """Return the layers that remember something, in order, with their options from the config."""
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


def _overrides(config: Config, kinds: list[str]) -> dict[int, Config]:
    """Return the options of single layers that differ from the model's common values."""
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


def _sliding_widths(config: Config, options: Config) -> dict[str, Any]:
    """Return the heads and widths of a layer with a window, if its model type gives such layers others."""
    latent = options.get("kv_lora_rank") or config.get("kv_lora_rank")
    if latent:  # transformers caches the latent and the rotary key as keys and values of one head
        return {"num_key_value_heads": 1, "head_dim": latent, "v_head_dim": config.get("qk_rope_head_dim")}
    heads, width = config.get("swa_num_key_value_heads"), config.get("swa_head_dim")
    if heads is None and config.get("model_type") == "mimo_v2_flash":
        heads = 2 * config["num_key_value_heads"]
    found = {"num_key_value_heads": heads, "head_dim": width}
    return {name: value for name, value in found.items() if value is not None and name not in options}


def _kv_owners(config: Config, kinds: list[str]) -> dict[int, int]:
    """Return sharer -> owner. Each of the last ``num_kv_shared_layers`` layers reads the entries of the last layer of
    its kind before all of them.
    """
    first = len(kinds) - (config.get("num_kv_shared_layers") or 0)
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
