"""MiniMax, whose code takes only a cache of its own class, and asks that for states by names of its own."""

from __future__ import annotations

from torch import Tensor
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from .cache import PooledCache


class MiniMaxPooledCache(PooledCache, MiniMaxCache):
    """The same cache over pools, under those names. What ``MiniMaxCache`` keeps beside its layers stays empty."""

    def __len__(self) -> int:
        return len(self.layers)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)
