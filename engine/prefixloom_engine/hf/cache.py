"""``PooledCache``: what a transformers model takes as ``past_key_values``, over the pools of a composed cache.

It holds no memory of its own. Between ``begin`` and ``end`` the model's layers read and write the entries of one
``Batch``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache
from transformers.cache_utils import DynamicCache

from prefixloom import Cache, CompositionError, ProtocolError

from ..contract.model import Batch
from .layers import pooled_layer
from .pages import Pages
from .refusals import refuse_autocast
from .rows import Rows
from .states import States


class PooledCache(TransformersCache):
    """Each runner and each session has its own. ``config``: the config of the model's text part."""

    is_compileable = False  # the tensors that layers return have new addresses in each pass
    is_croppable = False

    def __init__(self, cache: Cache, config: Any) -> None:
        templates = DynamicCache(config=config).layers
        layers = [pooled_layer(template, cache, at) for at, template in enumerate(templates)]
        TransformersCache.__init__(self, layers=layers)  # not ``super()``: a model's own cache class may be mixed in
        self._pages = [pages for layer in self.layers for pages in _attributes_of(layer, Pages)]
        self._states: dict[int, States] = {
            at: states for at, layer in enumerate(self.layers) for states in _attributes_of(layer, States)
        }
        self._entered: States | None = None
        """The states of the layer that was the last to read or write its own in this pass."""
        self._length = 0
        self.outgrown = False
        """Whether the sequence may grow so long that what is cached of it does not fit any more (``rope``)."""
        _check_entries(self._pages)

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a state, which a pass with padding would change."""
        return bool(self._states)

    @property
    def has_pages(self) -> bool:
        """Whether a layer attends to tokens of the past."""
        return bool(self._pages)

    # ------------------------------------------------------------ passes
    def begin(self, batch: Batch) -> Rows:
        """Begin a pass: the model is called next, with the tokens of ``batch``."""
        refuse_autocast(batch.tokens.device.type)
        rows = Rows(batch)
        for pages in self._pages:
            pages.begin(rows)
        for states in self._states.values():
            states.begin(rows)
        self._length = rows.past_count
        return rows

    def end(self) -> None:
        """End a pass: the model has returned or raised."""
        for pages in self._pages:
            pages.end()
        for states in self._states.values():
            states.end()
        self._entered = None

    def check(self, rows: Rows) -> None:
        """Raise if a layer ran without the cache. Called before ``end`` when the model has returned.

        A model that ignores the cache it is given, as encoders do, would otherwise answer nonsense without any error.
        """
        length = rows.past_count + rows.count
        left_out = [pages.layer for pages in self._pages if pages.seen != length]
        left_out += [at for at, states in self._states.items() if not states.entered]
        if left_out:
            layers = ", ".join(map(str, sorted(set(left_out))))
            raise CompositionError(
                f"layers {layers} ran without the cache that the model was given, so what they remember is kept "
                f"nowhere. Is it a causal language model?"
            )
        self._length = length

    def continue_from(self, length: int) -> None:
        """Set how many tokens the next pass continues from. Called between passes."""
        self._length = length
        for pages in self._pages:
            pages.seen = length

    # ------------------------------------------------------------ what models call
    def __bool__(self) -> bool:
        """Return whether Phi's code is to give up this cache, as it does past its original length if this is true.

        Others ask whether a cache is None.
        """
        return self.outgrown

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length as transformers does, and also where no layer counts because all are recurrent."""
        if not self._pages:
            return self._length
        return int(super().get_seq_length(layer_idx))

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._enter(layer_idx)
        state: Tensor | None = super().get_conv_state(layer_idx, state_idx)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._enter(layer_idx)
        state: Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
        return state

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self._enter(layer_idx)
        state: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        return state

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._enter(layer_idx)
        state: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        return state

    def _enter(self, layer: int) -> None:
        states = self._states.get(layer)
        if states is not None:
            if self._entered is not states and self._entered is not None:
                self._entered.leave()
            self._entered = states
            states.enter()

    # ------------------------------------------------------------ what pools cannot do
    def reset(self) -> None:
        self._refuse("reset", "open another session")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._refuse("reorder_cache", "beams would write into each other's pages: use num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("batch_repeat_interleave", "a session is one conversation: open one for each answer")

    def batch_select_indices(self, indices: Tensor) -> None:
        self._refuse("batch_select_indices", "a session is one conversation: open one for each answer")

    def activate_past_recording(self) -> None:
        self._refuse("activate_past_recording", "generate without an assistant; prefixloom's engine speculates")

    def crop(self, tokens_to_remove: int) -> None:
        self._refuse("crop", "generate without an assistant; prefixloom's engine speculates")

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise ProtocolError(f"a cache over pools has no {what}: {instead}")


def cache_over(cache: Cache, config: Any) -> PooledCache:
    """Make the cache that a model of this config takes, of the class that its code asks for."""
    kind = minimax_cache() if config.model_type == "minimax" else PooledCache
    return kind(cache, config)


@functools.cache
def minimax_cache() -> type[PooledCache]:
    """Make the class for MiniMax, whose code takes only a cache of its own class and calls methods of that class.

    The class is made on first use, because it needs transformers' module of MiniMax.
    """
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    class MiniMaxPooledCache(PooledCache, MiniMaxCache):
        """Adds MiniMax's method names. What ``MiniMaxCache`` itself keeps beside the layers stays empty."""

        def __len__(self) -> int:
            return len(self.layers)

        def get_linear_cache(self, layer_idx: int) -> Tensor | None:
            return self.get_recurrent_state(layer_idx)

        def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
            self.update_recurrent_state(linear_cache, layer_idx)

    return MiniMaxPooledCache


def _attributes_of(layer: object, kind: type) -> Iterable[Any]:
    return [value for value in vars(layer).values() if isinstance(value, kind)]


def _check_entries(pages: Iterable[Pages]) -> None:
    for one in pages:
        rows = one.memory.rows[one.names[0]]
        if rows.shape[1] != one.memory.page_tokens:
            raise CompositionError(
                f"layer {one.layer}: component {one.memory.component!r} keeps one entry for several tokens, and "
                f"transformers' attention takes one for each"
            )
