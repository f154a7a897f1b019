"""Layers of the toy model, and which of them computes which layer kind of a model config.

A layer mixes tokens through a ``LayerStore``. It does not know whether a cache stands behind the store, so the same
layer also runs without a cache. No layer knows another: a new kind of memory is a new class beside these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ...contract.values import LayerFacts, ModelFacts
from .arithmetic import attend, rotary, weights
from .recurrent import ShortConvolution, recurrence
from .stores import LayerStore, PageStore, PlainStore, StateStore

__all__ = ["LAYERS", "Layer", "LayerMaker", "LayerStore", "PageStore", "PlainStore", "StateStore", "attend", "rotary"]


class Layer(Protocol):
    """A layer that mixes tokens."""

    @property
    def buffers(self) -> tuple[str, ...]:
        """The names of the buffers it keeps, as in the manifest of the component that serves it."""

    def forward(self, x: Tensor, start: int, store: LayerStore) -> Tensor:
        """Return the outputs for ``x``, whose positions begin at ``start``. All memory of a layer is in the store."""


LayerMaker = Callable[[ModelFacts, LayerFacts, torch.Generator], Layer]
"""Makes a layer from the model's facts, the layer's facts, and a generator for its weights."""


class PathAttention:
    """Causal attention over the whole path: grouped heads, rotary positions, K and V of any two widths."""

    buffers: tuple[str, ...] = ("k", "v")

    def __init__(self, facts: ModelFacts, layer: LayerFacts, generator: torch.Generator) -> None:
        self.heads = facts.num_attention_heads
        self.kv_heads = int(layer.options.get("num_key_value_heads") or facts.num_key_value_heads)
        self.k_dim = int(layer.options.get("head_dim") or facts.head_dim)
        self.v_dim = int(layer.options.get("v_head_dim") or facts.raw.get("v_head_dim") or self.k_dim)
        self.to_q = weights(generator, facts.hidden_size, self.heads * self.k_dim)
        self.to_k = weights(generator, facts.hidden_size, self.kv_heads * self.k_dim)
        self.to_v = weights(generator, facts.hidden_size, self.kv_heads * self.v_dim)
        self.to_x = weights(generator, self.heads * self.v_dim, facts.hidden_size)

    def first_seen(self, position: int) -> int:
        """Return the first position that the query at ``position`` sees; it never decreases."""
        return 0

    def forward(self, x: Tensor, start: int, store: LayerStore) -> Tensor:
        count, end, first = len(x), start + len(x), self.first_seen(start)
        q = rotary((x @ self.to_q).view(count, self.heads, self.k_dim), start)
        store.write("k", start, rotary((x @ self.to_k).view(count, self.kv_heads, self.k_dim), start))
        store.write("v", start, (x @ self.to_v).view(count, self.kv_heads, self.v_dim))
        lows = [self.first_seen(position) for position in range(start, end)]
        mixed = attend(q, store.read("k", first, end), store.read("v", first, end), start, first, lows)
        return mixed.reshape(count, -1) @ self.to_x


class WindowAttention(PathAttention):
    """Attention over the last ``sliding_window`` positions, the query's own included, as transformers counts them."""

    def __init__(self, facts: ModelFacts, layer: LayerFacts, generator: torch.Generator) -> None:
        super().__init__(facts, layer, generator)
        self.window = int(layer.options["sliding_window"])

    def first_seen(self, position: int) -> int:
        return max(0, position - self.window + 1)


class ChunkAttention(PathAttention):
    """Attention within chunks of the positions, as in Llama 4: from the last multiple of the chunk on."""

    def __init__(self, facts: ModelFacts, layer: LayerFacts, generator: torch.Generator) -> None:
        super().__init__(facts, layer, generator)
        self.chunk = int(layer.options["attention_chunk_size"])

    def first_seen(self, position: int) -> int:
        return position // self.chunk * self.chunk


class LatentAttention:
    """Multi-head latent attention (MLA): K and V are computed from one latent per token and a shared rotary key."""

    buffers = ("latent", "rope")

    def __init__(self, facts: ModelFacts, layer: LayerFacts, generator: torch.Generator) -> None:
        self.heads, self.dim = facts.num_attention_heads, facts.head_dim
        self.latent, self.rope = int(facts.raw["kv_lora_rank"]), int(facts.raw["qk_rope_head_dim"])
        self.to_q = weights(generator, facts.hidden_size, self.heads * (self.dim + self.rope))
        self.to_latent = weights(generator, facts.hidden_size, self.latent)
        self.to_rope = weights(generator, facts.hidden_size, self.rope)
        self.to_k = weights(generator, self.latent, self.heads * self.dim)
        self.to_v = weights(generator, self.latent, self.heads * self.dim)
        self.to_x = weights(generator, self.heads * self.dim, facts.hidden_size)

    def forward(self, x: Tensor, start: int, store: LayerStore) -> Tensor:
        count, end = len(x), start + len(x)
        q = (x @ self.to_q).view(count, self.heads, -1)
        plain, turned = q[..., : self.dim], q[..., self.dim :]
        store.write("latent", start, x @ self.to_latent)
        store.write("rope", start, rotary((x @ self.to_rope)[:, None], start)[:, 0])
        latent, rope = store.read("latent", 0, end), store.read("rope", 0, end)
        k = torch.cat(((latent @ self.to_k).view(end, self.heads, -1), rope[:, None].expand(-1, self.heads, -1)), -1)
        v = (latent @ self.to_v).view(end, self.heads, -1)
        return attend(torch.cat((plain, rotary(turned, start)), -1), k, v, start, 0).reshape(count, -1) @ self.to_x


class IndexerKeys:
    """An indexer's keys, one per token. The toy layer attends to the keys; a real indexer chooses tokens by them."""

    buffers = ("index",)

    def __init__(self, facts: ModelFacts, layer: LayerFacts, generator: torch.Generator) -> None:
        self.dim = int(facts.raw["index_head_dim"])
        self.to_q = weights(generator, facts.hidden_size, self.dim)
        self.to_k = weights(generator, facts.hidden_size, self.dim)
        self.to_x = weights(generator, self.dim, facts.hidden_size)

    def forward(self, x: Tensor, start: int, store: LayerStore) -> Tensor:
        store.write("index", start, rotary((x @ self.to_k)[:, None], start)[:, 0])
        keys = store.read("index", 0, start + len(x))[:, None]
        return attend(rotary((x @ self.to_q)[:, None], start), keys, keys, start, 0)[:, 0] @ self.to_x


LAYERS: dict[str, LayerMaker] = {
    "full_attention": PathAttention,
    "sliding_attention": WindowAttention,
    "chunked_attention": ChunkAttention,
    "latent_attention": LatentAttention,
    "indexer_keys": IndexerKeys,
    "linear_attention": recurrence,
    "conv": ShortConvolution,
}
"""What computes each layer kind of a model config."""
