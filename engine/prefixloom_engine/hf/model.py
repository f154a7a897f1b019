"""``HFModel``: a transformers model as a ``Model`` of the engine."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from prefixloom import Cache, CompositionError, Identity

from .identity import check_evaluating, identity_of
from .images import PromptImages, prompt_images
from .layers import list_layers
from .refusals import refuse, refuse_loaded, refuse_wrapped
from .rope import rope_sets
from .runner import HFRunner


class HFModel:
    """Makes a loaded causal language model of transformers a ``Model`` of the engine. Its code and weights stay as is.

    It serves every architecture whose kinds of layers both transformers' own cache and the installed components know,
    except those that transformers computes wrongly (``refusals``).
    """

    def __init__(self, model: Any) -> None:
        refuse_wrapped(model)
        config = model.config
        refuse(config)
        refuse_loaded(model)
        check_evaluating(model)
        self.model = model
        self._identity = identity_of(model)
        self._told: Identity | None = None
        self.text = config.get_text_config(decoder=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> HFModel:
        return HFModel(copy.deepcopy(self.model, memo))  # with an identity of its own

    @property
    def config(self) -> object:
        """A copy of the text model's config, with the dtype that the weights have, and with a list of its layers."""
        config = copy.deepcopy(self.text)
        config.dtype = self.model.dtype
        list_layers(config)
        return config

    @property
    def identity(self) -> Identity:
        self._told = self._identity.now()
        return self._told

    def changed(self) -> bool:
        return self._identity.known is not self._told or self._identity.changed()

    def recoded(self) -> bool:
        """Return whether ``changed`` is true because of a forward hook or other code in the model's way."""
        return self._identity.known is not self._told or self._identity.recoded()

    def written(self) -> bool:
        """Return whether weights are seen to be changed through ``Tensor.data``. On a GPU this waits for its work."""
        return self._identity.weights.written()

    def weights_changed(self) -> None:
        """Say that weights were changed in a way that no sample of them shows: they are all hashed again.

        Call it after writing some numbers of a tensor through ``Tensor.data`` or numpy, by a kernel of your own, or
        from another process that shares the memory.
        """
        self._identity.weights.forget()

    def media(self, tokens: Sequence[int], inputs: Mapping[str, Any]) -> PromptImages:
        return prompt_images(self.model, tokens, inputs)

    @property
    def vocabulary(self) -> int:
        return int(self.text.vocab_size)

    @property
    def context(self) -> int | None:
        """The positions that the config says, or those to which a scaled rotary embedding extends them."""
        positions = getattr(self.text, "max_position_embeddings", None)
        if positions is None:
            return None
        original = "original_max_position_embeddings"
        scaled = [
            each[original] * each["factor"] for each in rope_sets(self.text) if {"factor", original} <= each.keys()
        ]
        return int(max(positions, *scaled, 0))

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
