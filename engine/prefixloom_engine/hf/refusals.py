"""Refusals: architectures that cannot be served, because transformers computes them wrongly or outside of its cache.

Each entry was measured with transformers 5.23 in float64: a prompt computed in two parts against the same prompt at
once. A test compares the list with the installed release, so that an entry is removed when its reason is gone.

The other reasons are not bound to a model type: ``refuse`` finds them in a config, ``refuse_loaded`` in the modules of
a model, and ``refuse_wrapped`` in what a caller passes as a model.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from prefixloom import CompositionError, InputError

OUTSIDE = "transformers keeps its state outside of the cache, so that it can be neither kept nor restored"
NO_CLAMP = (
    "transformers does not clamp the time step where a single token continues from a state, so that decoding computes "
    "something else than prefill does"
)
OWN_TOKENS = (
    "its code computes tokens of its own before those that it is given, and the past again in each pass, so that "
    "nothing of a prefix could be left out"
)
UNUSED_WINDOW = (
    "its config has a window that transformers' cache keeps to and transformers' attention does not, so that what it "
    "computes depends on how it is cut into passes"
)
RECOMPOSE = "Compose the cache from the loaded model's own config: compose(HFModel(model).config, ...)"
REFUSED = {
    "cpmant": OWN_TOKENS,
    "moshi": UNUSED_WINDOW,
    "recurrent_gemma": OUTSIDE,
    "rwkv": OUTSIDE,
    "zamba2": NO_CLAMP,
    "nemotron_h": NO_CLAMP,
}
"""By model type: why it is not served."""
UNPADDED = frozenset({"git", "moss_transcribe_diarize"})
"""Model types that transformers computes wrongly where rows have pasts of different lengths. The one puts places of an
image before the mask of a past, and the other takes no positions. Their rows go together if they are equally long."""
REMEDY = "Use another architecture, or an engine with kernels of its own for it"
NO_MODEL = "HFModel takes a causal language model of transformers (AutoModelForCausalLM)"
CACHE_NAMES = ("past_key_values", "cache_params")
"""The parameters by which models of transformers take a cache."""
CROSS_ATTENTION = frozenset({"encoder_attn", "crossattention", "cross_attn"})
"""The names by which transformers' layers have their attention to another input than tokens."""


def refuse(config: Any) -> None:
    """Refuse a model whose config shows that its outputs would be wrong."""
    if getattr(config, "is_encoder_decoder", False):
        raise CompositionError(
            f"model type {config.model_type!r} is an encoder-decoder model: what its decoder remembers depends on the "
            f"encoder's input, so a prefix of tokens does not name it. Use a decoder-only model"
        )
    text = config.get_text_config(decoder=True)
    _refuse_bidirectional(config.model_type, config, text)
    layers = getattr(text, "num_hidden_layers", None)
    if layers is None:
        raise CompositionError(
            f"model type {config.model_type!r} is made of parts with caches of their own, and no cache of all of them "
            f"can be made from its config. {REMEDY}"
        )
    if getattr(text, "num_kv_shared_layers", None) == layers:
        raise CompositionError(
            f"model type {config.model_type!r} keeps nothing of its own: all its layers read what the model that it "
            f"assists keeps. Serve that model"
        )
    states = getattr(text, "number_of_conv_states", 1)
    if states != 1:
        raise CompositionError(
            f"model type {config.model_type!r} keeps {states} convolution states in one layer, and there is a place "
            f"for one. {REMEDY}"
        )
    for model_type in (config.model_type, text.model_type):
        reason = REFUSED.get(model_type)
        if reason is not None:
            raise CompositionError(f"model type {model_type!r} cannot be served: {reason}. {REMEDY}")


def _refuse_bidirectional(model_type: str, *parts: Any) -> None:
    """Refuse a text model if one of these configs or modules says that its attention is not causal.

    transformers makes every mask bidirectional where a config has ``is_causal`` and it is not true.
    """
    for part in parts:
        if not getattr(part, "is_causal", True) or getattr(part, "use_bidirectional_attention", None) in (True, "all"):
            raise CompositionError(
                f"model type {model_type!r} attends to later tokens too (is_causal, use_bidirectional_attention), so "
                f"what it remembers of a prefix depends on what follows. Use a causal model"
            )


def refuse_wrapped(model: Any) -> None:
    """Refuse what is not a model of transformers itself, and say what to pass in place of a wrapper."""
    kind = type(model).__name__
    if isinstance(model, PreTrainedModel):
        if not hasattr(model, "generate"):
            raise CompositionError(f"{NO_MODEL}, got {kind}")
        return
    if isinstance(getattr(model, "_orig_mod", None), PreTrainedModel):
        raise CompositionError(
            f"got {kind}, a wrapper that torch.compile made around a model: pass the model that was compiled"
        )
    if callable(getattr(model, "get_base_model", None)):
        raise CompositionError(
            f"got {kind}, a wrapper that PEFT made around a model: pass model.merge_and_unload(), the model with the "
            f"adapter in its weights"
        )
    if isinstance(getattr(model, "module", None), PreTrainedModel):
        raise CompositionError(f"got {kind}, a wrapper around a model: pass the model inside, its attribute module")
    raise CompositionError(f"{NO_MODEL}, got {kind}")


def refuse_loaded(model: Any) -> None:
    """Refuse a model whose modules show that its outputs would be wrong."""
    model_type = model.config.model_type
    cache_parameter(model)
    decoder = model.get_decoder() if callable(getattr(model, "get_decoder", None)) else model
    own = {model_type, model.config.get_text_config(decoder=True).model_type}
    for name, module in decoder.named_modules():
        if name.rpartition(".")[2] in CROSS_ATTENTION:
            raise CompositionError(
                f"model type {model_type!r} has attention to another input than its tokens, such as an encoder's "
                f"output or an image, so a prefix of tokens does not name what it remembers. Use a decoder-only model"
            )
        if getattr(getattr(module, "config", None), "model_type", model_type) not in own:
            continue  # of an image or a sound, which a session refuses
        # Encoders with a language-model head take a cache, too.
        if getattr(module, "is_decoder", None) is False:
            raise CompositionError(
                f"model type {model_type!r} is an encoder with is_decoder=False: it attends to later tokens too, so "
                f"what it remembers of a prefix depends on what follows. Use a causal model, or load one that was "
                f"trained as a decoder with is_decoder=True"
            )
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise CompositionError(
                f"model type {model_type!r} counts its positions from behind the pad token where it is not given them, "
                f"and generate gives it others, so that what it remembers depends on how it is called. {REMEDY}"
            )
        _refuse_bidirectional(model_type, module, getattr(module, "config", None))
        low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
        if low > 0.0 or high < math.inf:
            raise CompositionError(
                f"model type {model_type!r} cannot be served with time steps from {low} to {high}: {NO_CLAMP}. {REMEDY}"
            )


def cache_parameter(model: Any) -> str:
    """Return the name of the parameter by which a model takes a cache."""
    takes = inspect.signature(model.forward).parameters
    name = next((name for name in CACHE_NAMES if name in takes), None)
    if name is None:
        raise CompositionError(
            f"{type(model).__name__} takes none of {', '.join(CACHE_NAMES)}, so it cannot be given what is cached"
        )
    classes = re.findall(r"\b\w*Cache\b", str(takes[name].annotation))
    if classes and "Cache" not in classes:
        raise CompositionError(
            f"{type(model).__name__} takes a cache of a class of its own, {classes[0]}, and no other, so it cannot be "
            f"given what is cached"
        )
    return name


def refuse_autocast(device: str) -> None:
    """Refuse a pass under autocast, which computes entries of other dtypes than the same model does outside of it."""
    if torch.is_autocast_enabled(device):
        raise CompositionError(
            "the model is called under torch.autocast, so what it would remember depends on more than tokens. Call it "
            "outside of autocast, and load it in the dtype that is wanted"
        )


def refuse_generation(model: Any) -> None:
    """Refuse a model whose generation config makes ``generate`` build a cache of its own."""
    chosen = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if chosen is not None:
        raise CompositionError(
            f"the model's generation_config has cache_implementation={chosen!r}, and generate then refuses the cache "
            f"of a session: set model.generation_config.cache_implementation = None"
        )


def refuse_pass_without_cache(given: Mapping[str, Any]) -> None:
    """Refuse a pass of a ``generate`` that gives the model the whole text again."""
    if given.get("use_cache") is False:
        raise InputError(
            "generate was called without use_cache, and gives the model the whole text in each pass. Call it with "
            "use_cache=True; the model's generation_config may say otherwise"
        )
