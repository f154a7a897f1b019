"""Rows: where the rows of one forward pass have their entries in the pages of each component.

Rows of different lengths are aligned at their ends, since transformers pads on the left. The past of a shorter row
begins with padding entries that belong to no token, and the mask hides them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefixloom import ProtocolError

from ..contract.memory import LayerMemory
from ..contract.model import Batch


def called_outside_pass(layer: int) -> ProtocolError:
    """The error of a layer that is called while no pass runs."""
    return ProtocolError(
        f"layer {layer} was called outside of a pass of prefixloom's: this cache works for the model that it was made "
        f"for, called as a whole, while its session is open"
    )


class Rows:
    """The positions of one ``Batch`` and their entries, computed once for all layers of a component."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.count = batch.count
        self.past_count = max(span.start for span in batch.spans)
        self.ragged = any(span.start != self.past_count for span in batch.spans)
        self._past: dict[tuple[str, int], tuple[Tensor, Tensor | None]] = {}
        self._fresh: dict[str, Tensor] = {}
        self._starts: Tensor | None = None

    def __len__(self) -> int:
        return len(self.batch.spans)

    @property
    def starts(self) -> Tensor:
        """(rows, 1): the first position that is computed of each row."""
        if self._starts is None:
            device = self.batch.tokens.device
            self._starts = torch.tensor([[span.start] for span in self.batch.spans], device=device)
        return self._starts

    def positions(self) -> Tensor:
        """(rows, count): the positions of the tokens that are computed."""
        return self.starts + torch.arange(self.count, device=self.starts.device)

    def past_positions(self) -> Tensor:
        """(rows, past): the positions before those that are computed; 0 where a shorter row has padding."""
        past = torch.arange(-self.past_count, 0, device=self.starts.device)
        return (self.starts + past).clamp(min=0)

    def mask(self) -> Tensor | None:
        """(rows, past + count): 0 where a shorter row has padding, else 1. None where all rows are equally long."""
        if not self.ragged:
            return None
        at = torch.arange(self.past_count + self.count, device=self.starts.device)
        return (at >= self.past_count - self.starts).long()

    def fresh(self, memory: LayerMemory) -> Tensor:
        """(rows * count): the indices of the entries to be written, in all pages laid end to end."""
        found = self._fresh.get(memory.component)
        if found is None:
            found = self._fresh[memory.component] = self._entries(memory, self.positions())[0].flatten()
        return found

    def past(self, memory: LayerMemory, width: int, holes: bool) -> tuple[Tensor, Tensor | None]:
        """(rows * width): the indices of the entries of the last ``width`` positions before the new ones. And (rows,
        width), bool: which of these entries must not be read; None if all may be.

        ``holes``: whether pages of these positions may be absent.
        """
        key = (memory.component, width)
        found = self._past.get(key)
        if found is None:
            at = self.starts + torch.arange(-width, 0, device=self.starts.device)
            entries, absent = self._entries(memory, at)
            found = self._past[key] = (entries.flatten(), absent if holes or self.ragged else None)
        return found

    def _entries(self, memory: LayerMemory, positions: Tensor) -> tuple[Tensor, Tensor]:
        size = memory.page_tokens
        table = self.batch.tables[memory.component]
        pages = table.gather(1, (positions // size).clamp(min=0))
        absent = (pages < 0) | (positions < 0)
        return pages.clamp(min=0).long() * size + positions % size, absent
