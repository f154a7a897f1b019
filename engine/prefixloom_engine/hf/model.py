"""``HFModel``: a transformers model as the engine sees it."""

from __future__ import annotations

import copy
from typing import Any

from prefixloom import Cache, CompositionError

from .refusals import refuse, refuse_loaded
from .runner import HFRunner


class HFModel:
    """A ``model.Model`` of a loaded causal language model of transformers, whose code and weights stay as they are.

    Every architecture is served whose layers are of kinds that transformers' own cache and installed components know;
    those that are known to be wrong are refused (``refusals``).
    """

    def __init__(self, model: Any) -> None:
        config = getattr(model, "config", None)
        if config is None or not callable(getattr(config, "get_text_config", None)) or not hasattr(model, "generate"):
            raise CompositionError(
                f"HFModel takes a causal language model of transformers (AutoModelForCausalLM), got "
                f"{type(model).__name__}"
            )
        refuse(config)
        refuse_loaded(model)
        if model.training:
            raise CompositionError(
                f"{type(model).__name__} is in training mode, in which what it computes depends on chance: call "
                f"model.eval()"
            )
        self.model = model
        self.text = config.get_text_config(decoder=True)

    @property
    def config(self) -> object:
        """The config of the text model, with the dtype that the weights really have."""
        config = copy.deepcopy(self.text)
        config.dtype = self.model.dtype
        return config

    @property
    def vocabulary(self) -> int:
        return int(self.text.vocab_size)

    @property
    def stops(self) -> frozenset[int]:
        generation = getattr(self.model, "generation_config", None)
        ends = getattr(generation, "eos_token_id", None)
        if ends is None:
            ends = getattr(self.text, "eos_token_id", None)
        return frozenset([ends] if isinstance(ends, int) else ends or ())

    def bind(self, cache: Cache) -> HFRunner:
        device = str(self.model.device)
        if device.partition(":")[0] != cache.composition.device.partition(":")[0]:
            raise CompositionError(
                f"the model is on {device} and the cache on {cache.composition.device}: compose it with "
                f"device={device!r}"
            )
        return HFRunner(self.model, cache)
