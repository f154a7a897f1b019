"""Layers of the toy model, and the stores through which they keep what they remember.

A layer reads and writes a ``Store`` and does not know whether a cache stands behind it: the same layer runs plain. A
kind of memory is added as one more layer beside these, with more methods of the stores if it needs them; no layer knows
another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InvariantError
from ..values import LayerFacts, ModelFacts


class Store(Protocol):
    """What one layer keeps of one sequence."""

    def write(self, buffer: str, start: int, values: Tensor) -> None:
        """Keep one entry for each of the positions from ``start`` on."""

    def read(self, buffer: str, start: int, end: int) -> Tensor:
        """The entries of the positions [start, end), contiguous."""


class Layer(Protocol):
    """Mixes tokens."""

    @property
    def buffers(self) -> tuple[str, ...]:
        """What it keeps, as the component that serves it calls it in its manifest."""

    def forward(self, x: Tensor, start: int, store: Store) -> Tensor:
        """The outputs for ``x``, whose rows stand at the positions from ``start`` on. Nothing else is remembered."""


LayerMaker = Callable[[ModelFacts, LayerFacts, torch.Generator], Layer]
"""Makes a layer from the model's facts, its own, and a generator for its weights."""


def weights(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    """Strong weights, so that a wrong entry moves the logits; about normal(0, 0.2) at a width of 32."""
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).mul(1.2 / rows**0.5)


class PathAttention:
    """Causal attention over the whole path: grouped heads, rotary positions, K and V of any two widths."""

    buffers = ("k", "v")

    def __init__(self, facts: ModelFacts, layer: LayerFacts, generator: torch.Generator) -> None:
        self.heads = facts.num_attention_heads
        self.kv_heads = int(layer.options.get("num_key_value_heads") or facts.num_key_value_heads)
        self.k_dim = int(layer.options.get("head_dim") or facts.head_dim)
        self.v_dim = int(layer.options.get("v_head_dim") or facts.raw.get("v_head_dim") or self.k_dim)
        self.to_q = weights(generator, facts.hidden_size, self.heads * self.k_dim)
        self.to_k = weights(generator, facts.hidden_size, self.kv_heads * self.k_dim)
        self.to_v = weights(generator, facts.hidden_size, self.kv_heads * self.v_dim)
        self.to_x = weights(generator, self.heads * self.v_dim, facts.hidden_size)

    def forward(self, x: Tensor, start: int, store: Store) -> Tensor:
        count, end = len(x), start + len(x)
        q = rotary((x @ self.to_q).view(count, self.heads, self.k_dim), start)
        store.write("k", start, rotary((x @ self.to_k).view(count, self.kv_heads, self.k_dim), start))
        store.write("v", start, (x @ self.to_v).view(count, self.kv_heads, self.v_dim))
        mixed = attend(q, store.read("k", 0, end), store.read("v", 0, end), start, 0)
        return mixed.reshape(count, -1) @ self.to_x


def rotary(x: Tensor, start: int) -> Tensor:
    """``x`` (rows, heads, width) with its halves turned by the angles of the positions from ``start`` on."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(start, start + len(x), dtype=x.dtype, device=x.device)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, start: int, first: int) -> Tensor:
    """Causal attention of the queries from position ``start`` on over the entries from position ``first`` on."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    rows = torch.arange(start, start + len(q), device=q.device)[:, None]
    columns = torch.arange(first, first + len(k), device=q.device)
    return torch.einsum("hqk,khd->qhd", functional.softmax(scores.masked_fill(columns > rows, -torch.inf), dim=-1), v)


LAYERS: dict[str, LayerMaker] = {"full_attention": PathAttention}
"""Layer kind of a model config -> what computes it here."""


# ---------------------------------------------------------------- stores


class PlainStore:
    """Entries in plain tensors: what a model does that has no cache."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def write(self, buffer: str, start: int, values: Tensor) -> None:
        before = self.kept.get(buffer)
        kept = 0 if before is None else len(before)
        if start != kept:
            raise InvariantError(f"a plain store holds {kept} entries of {buffer!r} and was given more from {start} on")
        self.kept[buffer] = values if before is None else torch.cat((before, values))

    def read(self, buffer: str, start: int, end: int) -> Tensor:
        return self.kept[buffer][start:end]


class PageStore:
    """Entries in the pages of a component's pool, found through the sequence's page table."""

    def __init__(self, pool: Any, page_tokens: int, table: Tensor, layer: int) -> None:
        self.page_tokens = page_tokens
        self.table = table
        self.rows = {
            buffer.name: pool.buffers[buffer.name][buffer.layers.index(buffer.shared.get(layer, layer))]
            for buffer in pool.manifest.buffers
            if layer in buffer.layers or layer in buffer.shared
        }

    def write(self, buffer: str, start: int, values: Tensor) -> None:
        positions = torch.arange(start, start + len(values), device=self.table.device)
        rows = self.rows[buffer]
        pages = self._present(positions // self.page_tokens)
        rows[pages, positions % self.page_tokens] = values.to(rows.dtype)

    def read(self, buffer: str, start: int, end: int) -> Tensor:
        first = start // self.page_tokens
        pages = self._present(torch.arange(first, -(-end // self.page_tokens), device=self.table.device))
        entries: Tensor = self.rows[buffer][pages].flatten(0, 1)
        return entries[start - first * self.page_tokens : end - first * self.page_tokens].contiguous()

    def _present(self, pages: Tensor) -> Tensor:
        """Where the pages are, refusing any that is absent: a gather would read a stranger's entries in silence."""
        if len(pages) and int(pages[-1]) >= len(self.table):
            raise InvariantError(f"page {int(pages[-1])} of a sequence is used, and its table has {len(self.table)}")
        slots: Tensor = self.table[pages]
        if bool((slots < 0).any()):
            raise InvariantError(f"absent pages are used: the table holds {slots.tolist()} for pages {pages.tolist()}")
        return slots
