"""Rows: where the rows of one forward pass have their entries in the pages of each component.

Rows are aligned at their ends, since transformers pads on the left. Of a shorter row, the first columns belong to no
token, and the mask hides them. A row with fewer new tokens than others begins the pass with columns of its past: what
the model computes there is dropped, and its entries are read from the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefixloom import ProtocolError

from ..contract.memory import LayerMemory
from ..contract.model import Batch


def called_outside_pass(layer: int) -> ProtocolError:
    """Return the error of a layer that is called while no pass runs."""
    return ProtocolError(
        f"layer {layer} was called outside of a pass of prefixloom's: this cache works for the model that it was made "
        f"for, called as a whole, while its session is open"
    )


class Rows:
    """The positions of one ``Batch`` and their entries, computed once for all layers of a component.

    ``count``       how many columns the pass computes
    ``past_count``  how many columns are before these
    ``uneven``      whether rows have different numbers of new tokens
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.count = batch.count
        self.past_count = batch.longest - batch.count
        self.uneven = any(span.count != self.count for span in batch.spans)
        self._ragged = any(span.end != batch.longest for span in batch.spans)
        self._readable: dict[tuple[str, int], Tensor] = {}
        self._by_head: dict[tuple[int, int], Tensor] = {}
        self._fresh: dict[tuple[str, int], Tensor] = {}
        self._slots: dict[str, Tensor] = {}
        self._ends: Tensor | None = None
        self._new: Tensor | None = None

    def __len__(self) -> int:
        return len(self.batch.spans)

    @property
    def ends(self) -> Tensor:
        """(rows, 1): where each row ends."""
        if self._ends is None:
            device = self.batch.tokens.device
            self._ends = torch.tensor([[span.end] for span in self.batch.spans], device=device)
        return self._ends

    @property
    def new(self) -> Tensor:
        """Of uneven rows: the indices of the new tokens in (rows * count) columns."""
        if self._new is None:
            at = [
                row * self.count + column
                for row, span in enumerate(self.batch.spans)
                for column in range(self.count - span.count, self.count)
            ]
            self._new = torch.tensor(at, device=self.batch.tokens.device)
        return self._new

    def _positions(self, first: int, last: int) -> Tensor:
        """Return the positions of these columns, counted from the end of the pass: (rows, last - first).

        They are less than 0 where a column belongs to no token.
        """
        return self.ends + torch.arange(first, last, device=self.ends.device)

    def positions(self) -> Tensor:
        """Return the positions that are computed, (rows, count); 0 where a column belongs to no token."""
        return self._positions(-self.count, 0).clamp_(min=0)

    def past_positions(self) -> Tensor:
        """Return the positions before those that are computed, (rows, past); 0 where a column belongs to no token."""
        return self._positions(-self.count - self.past_count, -self.count).clamp_(min=0)

    def mask(self) -> Tensor | None:
        """Return (rows, past + count): 0 where a column belongs to no token, else 1. None if all rows end together."""
        if not self._ragged:
            return None
        return (self._positions(-self.past_count - self.count, 0) >= 0).long()

    def slots(self, memory: LayerMemory) -> Tensor:
        """Return the slots of the running states of a component, (rows)."""
        found = self._slots.get(memory.component)
        if found is None:
            found = self._slots[memory.component] = self.batch.tables[memory.component][:, 0].long()
        return found

    def fresh(self, memory: LayerMemory, width: int) -> Tensor:
        """Return the indices of the entries of the new tokens, row by row, in all pages laid end to end.

        They are at the end of what is ``readable`` of the last ``width`` columns.
        """
        key = (memory.component, width)
        found = self._fresh.get(key)
        if found is None:
            found = self.readable(memory, width)[:, width - self.count :].flatten()
            if self.uneven:
                found = found.index_select(0, self.new)
            self._fresh[key] = found
        return found

    def readable(self, memory: LayerMemory, width: int) -> Tensor:
        """Return the indices of the entries of the last ``width`` columns, (rows, width).

        Where a column belongs to no token, or its page is absent, this is the entry of the row's last token. The mask
        gives it weight 0. What lies elsewhere may be NaN, and 0 times NaN is not 0.
        """
        key = (memory.component, width)
        found = self._readable.get(key)
        if found is None:
            entries = self._entries(memory, self._positions(-width, 0))
            found = self._readable[key] = torch.where(entries < 0, entries[:, -1:], entries)
        return found

    def by_head(self, entries: Tensor, heads: int) -> Tensor:
        """Return the indices of the heads of entries that ``readable`` has returned, (rows * heads * width)."""
        key = (id(entries), heads)
        found = self._by_head.get(key)
        if found is None:
            every = torch.arange(heads, device=entries.device)[:, None]
            found = self._by_head[key] = (entries[:, None] * heads + every).flatten()
        return found

    def _entries(self, memory: LayerMemory, positions: Tensor) -> Tensor:
        """Return the indices of these positions' entries; less than 0 if a position is, or if its page is absent."""
        size, table = memory.page_tokens, self.batch.tables[memory.component]
        numbers = positions // size
        pages = table.gather(1, numbers.clamp(min=0)).long()
        return torch.where(numbers < 0, -1, pages * size + positions % size)
