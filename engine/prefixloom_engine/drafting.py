"""Drafting: a small model beside the large one guesses tokens, on the device, and has a memory of its own.

The draft's entry of position p is made of what the model leaves at p and of the token at p + 1, as in EAGLE and MTP: a
component with a lookahead of 1. Every forward pass of the model writes the entries of its positions at once, since the
token behind the last is sampled in that pass. So what is published is never without them; requests that want no guesses
write theirs, too. Guesses go on from the last entry that stands: each next entry is made of the draft's own output, in
a step of role "draft" that commits nothing, and is written again when the model has checked it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from .model import Batch, Span

if TYPE_CHECKING:
    from .forward import Row


@runtime_checkable
class Drafter(Protocol):
    """A runner that has a draft beside it, bound to the same cache. ``Runner.drafter`` is one, or there is none."""

    @property
    def width(self) -> int:
        """Of what the model leaves at a position."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """As ``Runner.forward``; and what the model leaves of each token, (rows, count, width)."""

    def draft(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Write the draft's entries of the batch's positions, made of ``hidden`` there and of the tokens *behind* them.

        ``batch.tokens`` are the latter. Returns guesses of the tokens behind those as logits, (rows, wanted,
        vocabulary), and what takes the place of ``hidden`` at the next positions, (rows, count, width).
        """


class Drafting:
    """What the device keeps for guessing: by a request's row and by how many guesses of its last pass were right.

    All but the constructor runs on the forward stream.
    """

    def __init__(self, drafter: Drafter, rows: int, depth: int, device: str) -> None:
        self.drafter = drafter
        self._next = torch.zeros(rows, depth + 1, dtype=torch.int64, device=device)
        self._hidden: Tensor | None = None
        self.guessed = torch.zeros(rows, max(depth, 1), dtype=torch.int64, device=device)

    def write(self, rows: Sequence[Row], batch: Batch, chosen: Tensor | None, hidden: Tensor) -> None:
        """After a forward pass: the entries of its positions, and for those that sample the first guess behind."""
        following = torch.cat((batch.tokens[:, 1:], batch.tokens[:, :1]), dim=1)
        for i, row in enumerate(rows):
            if row.samples and chosen is not None:
                behind = row.drafted + 1
                following[i, -behind:] = chosen[i, -behind:]
            else:
                following[i, -1] = row.behind
        wanted = max(batch.wanted, 1)
        logits, out = self.drafter.draft(attrs.evolve(batch, tokens=following, wanted=wanted), hidden)
        likeliest = logits.argmax(-1)
        if self._hidden is None:
            self._hidden = out.new_zeros(*self._next.shape, self.drafter.width)
        for i, row in enumerate(rows):
            if row.samples:
                behind = row.drafted + 1
                self._next[row.job.row, :behind] = likeliest[i, -behind:]
                self._hidden[row.job.row, :behind] = out[i, -behind:]

    def chain(self, rows: Sequence[Row], tables: Mapping[str, Tensor]) -> None:
        """Guess ``row.drafted`` tokens for each, one after the other; into ``guessed``."""
        assert self._hidden is not None
        for i, row in enumerate(rows):
            mine = {name: table[i : i + 1] for name, table in tables.items()}
            token = self._next[row.job.row, row.kept].view(1, 1)
            hidden = self._hidden[row.job.row, row.kept].view(1, 1, -1)
            self.guessed[row.job.row, 0] = token[0, 0]
            for ahead in range(1, row.drafted):
                at = row.span.start + ahead - 1
                logits, hidden = self.drafter.draft(Batch(token, [Span(at, at + 1)], mine), hidden)
                token = logits.argmax(-1)
                self.guessed[row.job.row, ahead] = token[0, 0]
