"""Stores of the toy model: where one layer of one sequence keeps what it remembers.

A layer reads and writes a ``LayerStore`` and does not know whether a cache stands behind it. A layer that remembers one
entry per position uses ``write`` and ``read``; a layer that remembers one state uses ``state`` and ``advance``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import InvariantError


class LayerStore(Protocol):
    """What one layer keeps of one sequence."""

    def write(self, buffer: str, start: int, values: Tensor) -> None:
        """Keep one entry for each position, beginning at ``start``."""

    def read(self, buffer: str, start: int, end: int) -> Tensor:
        """Return the entries of the positions [start, end), contiguous in memory."""

    def state(self, buffer: str, shape: tuple[int, ...]) -> Tensor:
        """Return the running state in float64; before the first token, zeros of this shape."""

    def advance(self, buffer: str, states: Tensor) -> None:
        """Keep the states of a step: ``states[i]`` is the one after i + 1 tokens, and the last is the running state."""


class PlainStore:
    """Entries and states in plain tensors, for a model that runs without a cache."""

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

    def state(self, buffer: str, shape: tuple[int, ...]) -> Tensor:
        return self.kept.get(buffer, torch.zeros(shape, dtype=torch.float64))

    def advance(self, buffer: str, states: Tensor) -> None:
        self.kept[buffer] = states[-1]


class _PoolStore:
    """One layer's rows of a component's pool. Every method is an error unless a subclass implements it."""

    def __init__(self, pool: Any, layer: int) -> None:
        self.component: str = pool.name
        self.rows: dict[str, Tensor] = {
            buffer.name: pool.buffers[buffer.name][buffer.layers.index(buffer.shared.get(layer, layer))]
            for buffer in pool.manifest.buffers
            if layer in buffer.layers or layer in buffer.shared
        }

    def _misused(self, buffer: str, *_: Any) -> Any:
        kind = "pages" if isinstance(self, PageStore) else "states"
        raise InvariantError(f"component {self.component!r} keeps {buffer!r} in {kind}; the layer uses it otherwise")

    write = read = state = advance = _misused


class PageStore(_PoolStore):
    """Entries in the pages of a component's pool, found through the sequence's page table."""

    def __init__(self, pool: Any, page_tokens: int, table: Tensor, layer: int) -> None:
        super().__init__(pool, layer)
        self.page_tokens = page_tokens
        self.table = table

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
        """Return the slots of the pages. Absent pages are refused, because a gather would read another's entries."""
        if len(pages) and int(pages[-1]) >= len(self.table):
            raise InvariantError(f"page {int(pages[-1])} of a sequence is used, and its table has {len(self.table)}")
        slots: Tensor = self.table[pages]
        if bool((slots < 0).any()):
            raise InvariantError(f"absent pages are used: the table holds {slots.tolist()} for pages {pages.tolist()}")
        return slots


class StateStore(_PoolStore):
    """The running state of a sequence, written in place. A small step also keeps the state after each token."""

    def __init__(self, pool: Any, slot: int, steps: Sequence[int], layer: int) -> None:
        super().__init__(pool, layer)
        self.slot = slot
        self.steps = steps

    def state(self, buffer: str, shape: tuple[int, ...]) -> Tensor:
        kept = self.rows[buffer][self.slot]
        if kept.shape != shape:
            raise InvariantError(f"{buffer!r} of {self.component!r} is {tuple(kept.shape)}; the layer keeps {shape}")
        return kept.to(torch.float64, copy=True)

    def advance(self, buffer: str, states: Tensor) -> None:
        rows = self.rows[buffer]
        rows[self.slot] = states[-1].to(rows.dtype)
        if len(states) <= len(self.steps):
            for slot, state in zip(self.steps, states, strict=False):
                rows[slot] = state.to(rows.dtype)
