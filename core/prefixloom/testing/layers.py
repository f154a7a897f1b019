"""Layers of the toy model, and which of them computes which layer kind of a model config.

A layer mixes tokens through a ``Store`` and does not know whether a cache stands behind it: the same layer runs plain.
A kind of memory is added as one more layer beside these; no layer knows another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..contract.values import LayerFacts, ModelFacts
from .recurrent import ShortConvolution, recurrence
from .stores import PageStore, PlainStore, StateStore, Store
from .weights import weights

__all__ = ["LAYERS", "Layer", "LayerMaker", "PageStore", "PlainStore", "StateStore", "Store", "attend", "rotary"]


class Layer(Protocol):
    """Mixes tokens."""

    @property
    def buffers(self) -> tuple[str, ...]:
        """What it keeps, as the component that serves it calls it in its manifest."""

    def forward(self, x: Tensor, start: int, store: Store) -> Tensor:
        """The outputs for ``x``, whose rows stand at the positions from ``start`` on. Nothing else is remembered."""


LayerMaker = Callable[[ModelFacts, LayerFacts, torch.Generator], Layer]
"""Makes a layer from the model's facts, its own, and a generator for its weights."""


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
        """The first position that the query at ``position`` sees. It never moves back."""
        return 0

    def forward(self, x: Tensor, start: int, store: Store) -> Tensor:
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
    """Attention over latents, one for all heads, and a rotary key beside each: K and V are made of them (MLA)."""

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

    def forward(self, x: Tensor, start: int, store: Store) -> Tensor:
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
    """An indexer's keys, one per token: here they are read by attending to them, in place of choosing by them."""

    buffers = ("index",)

    def __init__(self, facts: ModelFacts, layer: LayerFacts, generator: torch.Generator) -> None:
        self.dim = int(facts.raw["index_head_dim"])
        self.to_q = weights(generator, facts.hidden_size, self.dim)
        self.to_k = weights(generator, facts.hidden_size, self.dim)
        self.to_x = weights(generator, self.dim, facts.hidden_size)

    def forward(self, x: Tensor, start: int, store: Store) -> Tensor:
        store.write("index", start, rotary((x @ self.to_k)[:, None], start)[:, 0])
        keys = store.read("index", 0, start + len(x))[:, None]
        return attend(rotary((x @ self.to_q)[:, None], start), keys, keys, start, 0)[:, 0] @ self.to_x


def rotary(x: Tensor, start: int) -> Tensor:
    """``x`` (rows, heads, width) with its halves turned by the angles of the positions from ``start`` on."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(start, start + len(x), dtype=x.dtype, device=x.device)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, start: int, first: int, lows: list[int] | None = None) -> Tensor:
    """Causal attention of the queries from position ``start`` on over the entries from position ``first`` on.

    ``lows``: the first position that each query sees; default: all.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    rows = torch.arange(start, start + len(q), device=q.device)[:, None]
    columns = torch.arange(first, first + len(k), device=q.device)
    hidden = columns > rows
    if lows is not None:
        hidden = hidden | (columns < torch.tensor(lows, device=q.device)[:, None])
    return torch.einsum("hqk,khd->qhd", functional.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1), v)


LAYERS: dict[str, LayerMaker] = {
    "full_attention": PathAttention,
    "sliding_attention": WindowAttention,
    "chunked_attention": ChunkAttention,
    "latent_attention": LatentAttention,
    "indexer_keys": IndexerKeys,
    "linear_attention": recurrence,
    "conv": ShortConvolution,
}
"""Layer kind of a model config -> what computes it here."""
