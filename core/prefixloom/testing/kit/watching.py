"""Layers under watch: what they read and write is found out by running them, so that nobody need say it.

The layers run over memory that is laid out as a pool's. What a token reads is found by changing entries: where the
token's outputs stay the same, bit by bit, it does not read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from ...contract.manifest import Buffer, Manifest
from .case import ComponentCase, LawBroken
from .truth import Truth

TOKENS = 8
"""The tokens of a watched sequence are whole numbers below this one."""
LENGTH = 48
"""How many tokens are computed where all of a sequence is."""
TRIALS = 2
"""How often entries are changed before a token counts as one that does not read them."""
LOUD = 300.0
"""The size of changed entries, so that one of many is heard through a softmax."""

NARROWER = {"torch.float64": ("float32",), "torch.float32": ("float16", "bfloat16")}
"""Dtypes of fewer bits."""

Memory = Mapping[str, Tensor]


def gaps_of(spans: tuple[tuple[int, int], ...], n: int) -> list[tuple[int, int]]:
    """Return the intervals of [0, n) that ``spans`` leaves out."""
    edges = [0, *(edge for low, high in spans for edge in (low, high)), n]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


class Layers:
    """The layers of a component, run alone over one sequence."""

    def __init__(self, case: ComponentCase) -> None:
        assert case.truth.layers is not None
        self._run = case.truth.layers
        self.manifest: Manifest = case.manifest
        self.has_states = case.has_states
        self.group = case.manifest.tokens_per_slot
        self._page = 1 if self.has_states else case.manifest.page_size or case.page_size * self.group
        self._sequences: dict[int, tuple[Tensor, Memory]] = {}
        self._chance = torch.Generator().manual_seed(case.seed)

    def tokens(self, count: int) -> Tensor:
        return torch.randint(TOKENS, (count,), generator=torch.Generator().manual_seed(1))

    def memory(self, count: int, *, filled: bool = True) -> dict[str, Tensor]:
        """Return memory for so many tokens: random entries, or zeros."""
        slots = 2 if self.has_states else -(-count // self._page) + 1
        middle = () if self.has_states else (self._page // self.group,)
        made = {}
        for buffer in self.manifest.buffers:
            tensor = torch.zeros(
                (len(buffer.layers), slots, *middle, *buffer.shape), dtype=getattr(torch, buffer.dtype)
            )
            made[buffer.name] = self._noise(tensor, 1.0) if filled else tensor
        return made

    def _noise(self, tensor: Tensor, size: float) -> Tensor:
        if tensor.dtype.is_floating_point:
            return (torch.randn(tensor.shape, generator=self._chance) * size).to(tensor.dtype)
        return torch.randint(0, 2, tensor.shape, generator=self._chance).to(tensor.dtype)

    def compute(self, tokens: Tensor, start: int, end: int, memory: Memory, *, absent: Iterable[int] = ()) -> Tensor:
        """Run the layers over [start, end), without the pages ``absent``. The first page of the memory is nobody's."""
        pages = torch.arange(1, 2 if self.has_states else 1 + -(-max(end, 1) // self._page))
        pages[list(absent)] = -1
        try:
            with torch.no_grad():
                out = self._run(tokens, start, end, memory, pages)
        except KeyError as error:
            raise LawBroken(
                f"the layers ask for the buffer {error}, and the manifest has {', '.join(memory)}: it is lost"
            ) from error
        except Exception as error:
            raise LawBroken(f"the layers raise {type(error).__name__} over [{start}, {end}): {error}") from error
        if not isinstance(out, Tensor):
            raise LawBroken(f"layers(tokens, start, end, buffers, pages) must return a tensor of outputs, got {out!r}")
        return out

    def changed(self, memory: Memory, spans: Iterable[tuple[int, int]]) -> dict[str, Tensor]:
        """Return memory in which the entries of these positions are others."""
        out = {name: tensor.clone() for name, tensor in memory.items()}
        for tensor in out.values():
            entries = tensor[:, 1:].flatten(1, 2)  # a view: by layer, then by number
            for low, high in spans:
                part = entries[:, low // self.group : -(-high // self.group)]
                part.copy_(self._noise(part, LOUD))
        return out

    def heard(self, q: int, spans: list[tuple[int, int]]) -> bool:
        """Return whether the token at q reads any of these positions, in entries that hold earlier tokens only."""
        spans = [
            (low, min(high, q // self.group * self.group)) for low, high in spans if low < q // self.group * self.group
        ]
        if not spans:
            return False
        tokens, base = self._sequence(q)
        heard = self.compute(tokens, q, q + 1, base).nan_to_num()
        for _ in range(TRIALS):
            other = self.compute(tokens, q, q + 1, self.changed(base, spans)).nan_to_num()
            if not torch.equal(heard, other):
                return True
        return False

    def _sequence(self, q: int) -> tuple[Tensor, Memory]:
        """Return tokens, and memory with random entries, for a sequence longer than ``q``; make each size once."""
        size = 1 << (q + 9).bit_length()
        if size not in self._sequences:
            self._sequences[size] = self.tokens(size), self.memory(size)
        return self._sequences[size]

    def first_heard(self, q: int, spans: list[tuple[int, int]]) -> int | None:
        """Return the first position of these that the token at q reads."""
        if not self.heard(q, spans):
            return None
        while True:
            count = sum(high - low for low, high in spans)
            if count == 1:
                return spans[0][0]
            front, back, left = list[tuple[int, int]](), list[tuple[int, int]](), count // 2
            for low, high in spans:
                middle = min(high, low + left)
                front += [(low, middle)] if low < middle else []
                back += [(middle, high)] if middle < high else []
                left -= middle - low
            spans = front if self.heard(q, front) else back

    # ------------------------------------------------------------ going on
    def gone_on(self, cut: int, needs: Iterable[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Return the outputs behind ``cut`` of one pass, and of one that has only what resuming there needs."""
        length = LENGTH if cut < LENGTH else cut + LENGTH // 2
        tokens = self.tokens(length + 9)
        whole = self.compute(tokens, 0, length, self.memory(length + 9, filled=not self.has_states))
        before = self.memory(length + 9, filled=not self.has_states)
        self.compute(tokens, 0, cut, before)
        self.compute(tokens[1:], 0, cut + 1, self.memory(length + 9))  # another sequence comes between
        if self.has_states:
            return whole[cut:], self.compute(tokens, cut, length, before)
        kept = {p // self._page for low, high in needs for p in range(low, high)}
        gone = [page for page in range(cut // self._page) if page not in kept]
        left_out = self.changed(before, gaps_of(tuple(needs), cut))
        return whole[cut:], self.compute(tokens, cut, length, left_out, absent=gone)

    # ------------------------------------------------------------ what they write
    def truth(self, said: Truth) -> Truth:
        """Return the truth with what is found out; what somebody said stays."""
        found: dict[str, Any] = {}
        if not any(buffer.shared for buffer in self.manifest.buffers):  # whose entries a layer reads is not seen here
            found["buffers"] = self._written()
        if not self.has_states:
            found |= {"ahead": self._ahead(), "tokens_per_entry": self._tokens_per_entry()}
        return attrs.evolve(said, **{name: value for name, value in found.items() if getattr(said, name) is None})

    def _after(self, tokens: Tensor, memory: dict[str, Tensor]) -> dict[str, Tensor]:
        self.compute(tokens, 0, LENGTH, memory)
        return memory

    def _written(self) -> tuple[Buffer, ...]:
        """Return the buffers that the layers write, each with the layers that change it."""
        before = self.memory(LENGTH + 9)
        after = self._after(self.tokens(LENGTH + 9), {name: tensor.clone() for name, tensor in before.items()})
        found = []
        for buffer in self.manifest.buffers:
            changed = [not torch.equal(*pair) for pair in zip(before[buffer.name], after[buffer.name], strict=True)]
            owners = tuple(layer for layer, is_written in zip(buffer.layers, changed, strict=True) if is_written)
            if owners:
                shared = {reader: owner for reader, owner in buffer.shared.items() if owner in owners}
                found.append(attrs.evolve(buffer, layers=owners, shared=shared))
        return tuple(found)

    def narrower(self) -> dict[str, str]:
        """Return the buffers of which every value that is written fits a dtype of fewer bits, each with this dtype."""
        memory = self._after(self.tokens(LENGTH + 9), self.memory(LENGTH + 9, filled=False))
        return {
            name: few
            for name, tensor in memory.items()
            for few in NARROWER.get(str(tensor.dtype), ())
            if tensor.any() and torch.equal(tensor, tensor.to(getattr(torch, few)).to(tensor.dtype))
        }

    def _entries(self, memory: Memory) -> list[Tensor]:
        """Return (entries, values) of each buffer, in the order of positions."""
        return [tensor[:, 1:].flatten(1, 2).transpose(0, 1).flatten(1) for tensor in memory.values()]

    def _ahead(self) -> int:
        """Return how many tokens after an entry change it."""
        tokens, start = self.tokens(LENGTH + 9), self.memory(LENGTH + 9)
        base = self._entries(self._after(tokens, {name: tensor.clone() for name, tensor in start.items()}))
        most = 0
        for at in range(LENGTH // 2, LENGTH // 2 + 2 * self.group):
            other = tokens.clone()
            other[at] = (other[at] + 1) % TOKENS
            found = self._entries(self._after(other, {name: tensor.clone() for name, tensor in start.items()}))
            for one, two in zip(base, found, strict=True):
                first = (one != two).any(1).nonzero().flatten().tolist()[:1]
                most = max([most, *(at - ((entry + 1) * self.group - 1) for entry in first)])
        return most

    def _tokens_per_entry(self) -> int:
        """Return how many tokens an entry stands for, by how many entries a sequence has."""
        start = self.memory(LENGTH + 9)
        after = self._after(self.tokens(LENGTH + 9), {name: tensor.clone() for name, tensor in start.items()})
        counts = [
            int((one != two).any(1).sum()) for one, two in zip(self._entries(start), self._entries(after), strict=True)
        ]
        return LENGTH // max([1, *counts])


def watch(case: ComponentCase) -> Layers | None:
    """Return a case's layers under watch, and complete its truth by what they write; None where nobody gave layers."""
    if case.truth.layers is None:
        return None
    if "layers" not in case.memo:
        found = Layers(case)
        case.truth = found.truth(case.truth)
        case.memo["layers"] = found
    layers: Layers = case.memo["layers"]
    return layers
