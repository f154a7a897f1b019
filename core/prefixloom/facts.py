"""Facts: a Hugging Face style model config, read into ``ModelFacts``.

This module and ``layers`` are the only ones that know how such configs name things.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import CompositionError
from .layers import GLOBAL, derived_kinds, layer_facts, listed_kinds, named
from .manifest import DTYPE_BYTES
from .values import ModelFacts

__all__ = ["GLOBAL", "load_config", "read_facts"]

NESTED = ("text_config", "llm_config", "language_config")


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
            f"{named(config)} is an encoder-decoder model: what its decoder remembers depends on the encoder's input, "
            f"so a prefix of tokens does not name it. Use a decoder-only model"
        )
    if config.get("use_bidirectional_attention") in (True, "all"):
        raise CompositionError(
            f"{named(config)} attends to later tokens too (use_bidirectional_attention), so what it remembers of a "
            f"prefix depends on what follows. Use a causal model"
        )
    listed = listed_kinds(config)
    count = _integer(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers", default=len(listed) or None)
    hidden = _integer(config, "hidden_size", "n_embd", "d_model")
    # States alone need no attention heads; a component that does need them refuses 0.
    heads = _integer(
        config, "num_attention_heads", "n_head", "n_heads", default=0 if config.get("state_size") else None
    )
    if listed and len(listed) != count:
        raise CompositionError(f"{named(config)} lists {len(listed)} layer types and has {count} layers")
    return ModelFacts(
        model_type=str(config.get("model_type") or ""),
        layers=layer_facts(config, listed or derived_kinds(config, count)),
        dtype=_dtype(config, outer),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(config, heads),
        head_dim=_integer(config, "head_dim", "attention_head_dim", default=hidden // heads) if heads else 0,
        raw=config,
    )


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    for key in NESTED:
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner:
            return dict(inner)
    return config


def _integer(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of these names that the config has; None counts as missing, as transformers has it."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CompositionError(f"{named(config)}: {name} must be a whole number of at least 1, got {value!r}")
        return value
    if default is None:
        raise CompositionError(f"{named(config)} has no {' or '.join(names)}. Pass a complete config, or a Profile")
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
                raise CompositionError(f"{named(config)}: {key}={value!r} is none of {', '.join(DTYPE_BYTES)}")
            return name
    return "float32"
