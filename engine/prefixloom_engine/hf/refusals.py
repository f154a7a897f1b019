"""Refusals: architectures that cannot be served, because transformers computes them wrongly or outside of its cache.

Each entry was measured with transformers 5.23 in float64: a prompt computed in two parts against the same prompt at
once. A test compares the list with the installed release, so that an entry is removed when its reason is gone.

Two more reasons are not bound to a model type: ``refuse_loaded`` finds them in the modules of a model.
"""

from __future__ import annotations

import math
from typing import Any

from prefixloom import CompositionError

FROM_ZERO = (
    "transformers starts its scan from zero whenever more than one token continues from a state, so what follows a "
    "restored prefix would be wrong"
)
OUTSIDE = "transformers keeps its state outside of the cache, so that it can be neither kept nor restored"
NO_CLAMP = (
    "transformers does not clamp the time step where a single token continues from a state, so that decoding computes "
    "something else than prefill does"
)
RECOMPOSE = "Compose the cache from the loaded model's own config: compose(HFModel(model).config, ...)"
REFUSED = {
    "mamba": FROM_ZERO,
    "falcon_mamba": FROM_ZERO,
    "jamba": FROM_ZERO,
    "zamba": FROM_ZERO,
    "recurrent_gemma": OUTSIDE,
    "rwkv": OUTSIDE,
    "zamba2": NO_CLAMP,
    "nemotron_h": NO_CLAMP,
}
"""By model type: why it is not served."""
REMEDY = "Use another architecture, or an engine with kernels of its own for it"


def refuse(config: Any) -> None:
    """Refuse a model whose config shows that its outputs would be wrong."""
    if getattr(config, "is_encoder_decoder", False):
        raise CompositionError(
            f"model type {config.model_type!r} is an encoder-decoder model: what its decoder remembers depends on the "
            f"encoder's input, so a prefix of tokens does not name it. Use a decoder-only model"
        )
    for model_type in (config.model_type, config.get_text_config(decoder=True).model_type):
        reason = REFUSED.get(model_type)
        if reason is not None:
            raise CompositionError(f"model type {model_type!r} cannot be served: {reason}. {REMEDY}")


def refuse_loaded(model: Any) -> None:
    """Refuse a model whose modules show that its outputs would be wrong."""
    model_type = model.config.model_type
    decoder = model.get_decoder() if callable(getattr(model, "get_decoder", None)) else model
    for module in decoder.modules():
        if getattr(module, "is_causal", None) is False:  # an encoder with a language-model head also takes a cache
            raise CompositionError(
                f"model type {model_type!r} attends to later tokens too, so what it remembers of a prefix depends on "
                f"what follows. Use a causal model"
            )
        low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
        if low > 0.0 or high < math.inf:
            raise CompositionError(
                f"model type {model_type!r} cannot be served with time steps from {low} to {high}: {NO_CLAMP}. {REMEDY}"
            )
