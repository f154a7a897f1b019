"""Config classes: what the installed transformers knows of a model type.

A published config leaves out what equals the default of its class, and does not say which tokens its layers attend to.
The core does not need transformers. Where it is not installed, and of types that it does not have, nothing is known
here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import attrs

NOT_PASSED = ("model_type", "dtype", "torch_dtype")
"""Keys that a class does not take, or takes in fewer spellings than a published config has."""


@attrs.frozen
class Known:
    """What is known of a model config. ``text`` is the config of its language model with all defaults, or None.

    ``causal``, ``encoder``: transformers has a model of this type that generates, or one that fills in masked tokens.
    ``cross``: the class says that the model is an encoder with a decoder.
    ``failed``: why the class of the type did not take the config.
    """

    text: Any = None
    causal: bool = False
    encoder: bool = False
    cross: bool = False
    failed: str = ""


def known_of(outer: Mapping[str, Any], text: Mapping[str, Any]) -> Known:
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
        return attrs.evolve(found, failed=" ".join(f"{type(error).__name__}: {error}".split()))


def _can_be_set(kind: type, name: str) -> bool:
    """Whether an attribute of a config class is not one that the class only computes."""
    name = getattr(kind, "attribute_map", {}).get(name, name)
    return getattr(getattr(kind, name, None), "fset", kind) is not None
