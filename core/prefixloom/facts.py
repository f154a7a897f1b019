"""Facts: a Hugging Face style model config, read into ``ModelFacts``.

This is the only module that knows how such configs name things. Layer kinds are the config's own strings, open to any;
which component serves a kind, if any does, is not known here. Where a config leaves open what a layer remembers, it is
refused: a window taken for a path wastes memory, a path taken for a window gives wrong answers in silence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import CompositionError
from .manifest import DTYPE_BYTES
from .values import LayerFacts, ModelFacts

SLIDING = "sliding_attention"
GLOBAL = "full_attention"
LATENT = "latent_attention"
INDEXED = "indexed_attention"
RENAMED = {"attention": GLOBAL, "deepseek_sparse_attention": INDEXED}
"""Older spellings of layer kinds, as transformers itself renames them."""
STATELESS = frozenset({"moe", "mlp", "dense", "sparse"})
"""Entries of a layer list that remember nothing between tokens."""
PERIODS = {
    "gemma2": 2, "vaultgemma": 2, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "gemma3n_text": 5, "gemma3_text": 6,
    "gemma4_text": 6,
}  # fmt: skip
"""Model types whose older configs do not list their layers: every n-th one has no window."""
ALL_WINDOWED = frozenset({"", "mistral", "ministral", "mixtral", "phi3", "phimoe", "starcoder2"})
"""Model types whose ``sliding_window``, if in use, holds for all layers."""
NESTED = ("text_config", "llm_config", "language_config")
NOT_UNIFORM = (
    "attn_layer_indices", "attn_layer_period", "attn_type_list", "attention_types", "attention_chunk_size",
    "block_types", "conv_L_cache", "full_attention_interval", "full_attn_idxs", "hybrid_override_pattern",
    "layer_group_size", "lru_width", "ssm_cfg", "state_size", "time_step_rank", "compress_ratios",
)  # fmt: skip
"""Keys that tell of layers of several kinds, or of recurrent ones, in configs that do not list them."""
RECURRENT_PREFIXES = ("mamba_", "ssm_", "linear_attn_", "linear_num_", "linear_key_", "linear_conv_")
LISTED = (
    "Load it with transformers' AutoConfig and pass the config object, which lists its layers, write layer_types into "
    "it, or pass a Profile"
)


def load_config(source: object) -> dict[str, Any]:
    """The config as a dict, from a dict, an object with ``to_dict``, a config.json, or a folder that has one."""
    if isinstance(source, Mapping):
        return dict(source)
    to_dict: Callable[[], object] | None = getattr(source, "to_dict", None)
    if callable(to_dict):
        config = to_dict()
        if not isinstance(config, Mapping):
            raise CompositionError(f"{type(source).__name__}.to_dict() gave {type(config).__name__}, not a dict")
        return _with_layers(source, dict(config))
    if not isinstance(source, str | os.PathLike):
        raise CompositionError(
            f"cannot read a model from {type(source).__name__}: pass a config dict, a config object with to_dict(), a "
            f"path to a config.json or its folder, a .toml profile or a Profile"
        )
    return _read_json(Path(source))


def _with_layers(source: object, config: dict[str, Any]) -> dict[str, Any]:
    """The dict of a config object, with the layer list that some config classes only compute."""
    for key in NESTED:
        if isinstance(config.get(key), Mapping):
            config[key] = _with_layers(getattr(source, key, None), dict(config[key]))
    listed = getattr(source, "layer_types", None)
    if isinstance(listed, list | tuple) and config.get("layer_types") is None:
        config["layer_types"] = list(listed)
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
    """A model's facts, with the usual names normalised and every layer's kind told."""
    outer = load_config(source)
    config = _text_part(outer)
    if outer.get("is_encoder_decoder"):
        raise CompositionError(
            f"{_named(config)} is an encoder-decoder model: what its decoder remembers depends on the encoder's input, "
            f"so a prefix of tokens does not name it. Use a decoder-only model"
        )
    listed = _listed_kinds(config)
    count = _integer(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers", default=len(listed) or None)
    hidden = _integer(config, "hidden_size", "n_embd", "d_model")
    heads = _integer(config, "num_attention_heads", "n_head", "n_heads")
    if listed and len(listed) != count:
        raise CompositionError(f"{_named(config)} lists {len(listed)} layer types and has {count} layers")
    return ModelFacts(
        model_type=str(config.get("model_type") or ""),
        layers=_layers(config, listed or _derived_kinds(config, count)),
        dtype=_dtype(config, outer),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(config, heads),
        head_dim=_integer(config, "head_dim", default=hidden // heads),
        raw=config,
    )


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    for key in NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return dict(inner)
    return config


def _named(config: Mapping[str, Any]) -> str:
    return f"model type {config['model_type']!r}" if config.get("model_type") else "this model config"


def _integer(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these names that the config has; None counts as missing, as transformers has it."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CompositionError(f"{_named(config)}: {name} must be a whole number of at least 1, got {value!r}")
        return value
    if default is None:
        raise CompositionError(f"{_named(config)} has no {' or '.join(names)}. Pass a complete config, or a Profile")
    return default


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _integer(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)


def _dtype(config: Mapping[str, Any], outer: Mapping[str, Any]) -> str:
    """The dtype of the weights; float32 where nothing is said, as transformers loads such a config."""
    for holder in (config, outer):
        for key in ("dtype", "torch_dtype"):
            value = holder.get(key)
            if value is None or value == "auto":
                continue
            name = str(value).removeprefix("torch.")
            if name not in DTYPE_BYTES:
                raise CompositionError(f"{_named(config)}: {key}={value!r} is none of {', '.join(DTYPE_BYTES)}")
            return name
    return "float32"


# ---------------------------------------------------------------- layers


def _layers(config: Mapping[str, Any], kinds: list[str]) -> tuple[LayerFacts, ...]:
    if config.get("kv_lora_rank"):
        latent = INDEXED if config.get("index_topk") else LATENT
        kinds = [latent if kind == GLOBAL else kind for kind in kinds]
    overrides = _overrides(config, kinds)
    owners = _kv_owners(config, kinds)
    out: list[LayerFacts] = []
    for index, kind in enumerate(kinds):
        if kind in STATELESS:
            continue
        options = dict(overrides.get(index, {}))
        if kind == SLIDING:
            options.setdefault("sliding_window", config.get("sliding_window"))
        if index in owners:
            options["kv_owner"] = owners[index]
        out.append(LayerFacts(index, kind, options))
    return tuple(out)


def _listed_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kinds that the config lists; empty if it lists none."""
    for key in ("layer_types", "layers_block_type"):
        listed = config.get(key)
        if listed is None:
            continue
        if not isinstance(listed, list | tuple) or not all(isinstance(kind, str) for kind in listed):
            raise CompositionError(f"{_named(config)}: {key} must be a list of layer kinds, got {listed!r}")
        return [RENAMED.get(str(kind), str(kind)) for kind in listed]
    return []


def _derived_kinds(config: Mapping[str, Any], count: int) -> list[str]:
    """The kinds of a config that does not list its layers, as transformers derives them."""
    signs = [key for key in NOT_UNIFORM if config.get(key) is not None]
    signs += [key for key in config if key.startswith(RECURRENT_PREFIXES) and config[key] is not None]
    if signs:
        raise CompositionError(
            f"{_named(config)} does not list its layers, and {', '.join(signs[:4])} says that they are not all plain "
            f"attention. {LISTED}"
        )
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return [GLOBAL] * count
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
        f"{_named(config)} has sliding_window={window!r} and does not say which layers use it. {LISTED}"
    )


def _overrides(config: Mapping[str, Any], kinds: list[str]) -> dict[int, Mapping[str, Any]]:
    """What single layers have in place of the model's common values."""
    listed = config.get("per_layer_config")
    if listed is not None:
        if not isinstance(listed, Mapping) or not all(isinstance(value, Mapping) for value in listed.values()):
            raise CompositionError(
                f"{_named(config)}: per_layer_config must map layer numbers to values, got {listed!r}"
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
                f"{_named(config)}: layer {index} ({kinds[index]}) shares the entries of an earlier layer, and none of "
                f"the first {max(first, 0)} layers is of its kind. Pass a Profile"
            )
        owners[index] = before[-1]
    return owners
