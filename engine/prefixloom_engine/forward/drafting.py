"""Drafting: guesses of a draft model, made on the device by a small model with memory of its own.

The draft's entry of position p is made of the hidden vector that the model leaves at p and of the token at p + 1, as in
EAGLE and MTP; its component has a lookahead of 1. Every forward pass of the model writes the draft's entries of its
positions at once, because the pass samples the token after its last position. So published pages always have their
draft entries, even those of requests that want no guesses.

Guesses continue from the last valid entry. Each next entry is made of the draft's own output, in a step of role "draft"
that commits nothing; the entry is written again when the model has checked the guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from ..contract.model import Batch, Drafter, Span
from .jobs import PlannedRow


class DraftBuffers:
    """What the device keeps between passes for guessing, by the job's row and by how many guesses turned out right.

    Every method except the constructor runs on the forward stream.
    """

    def __init__(self, drafter: Drafter, rows: int, depth: int, device: str) -> None:
        self.drafter = drafter
        self._next = torch.zeros(rows, depth + 1, dtype=torch.int64, device=device)
        self._hidden: Tensor | None = None
        self.guessed = torch.zeros(rows, max(depth, 1), dtype=torch.int64, device=device)
        """(rows, depth): the newest guesses of each job."""

    def write(self, rows: Sequence[PlannedRow], batch: Batch, sampled: Tensor | None, hidden: Tensor) -> None:
        """Write after a forward pass the entries of its positions, and keep the first guess of rows that sample."""
        following = torch.cat((batch.tokens[:, 1:], batch.tokens[:, :1]), dim=1)
        for i, row in enumerate(rows):
            if row.samples and sampled is not None:
                count = row.guess_count + 1
                following[i, -count:] = sampled[i, -count:]
            else:
                following[i, -1] = row.next_token
        wanted = max(batch.wanted, 1)
        logits, out = self.drafter.draft(attrs.evolve(batch, tokens=following, wanted=wanted), hidden)
        likeliest = logits.argmax(-1)
        if self._hidden is None:
            self._hidden = out.new_zeros(*self._next.shape, self.drafter.width)
        for i, row in enumerate(rows):
            if row.samples:
                count = row.guess_count + 1
                self._next[row.job.device_row, :count] = likeliest[i, -count:]
                self._hidden[row.job.device_row, :count] = out[i, -count:]

    def guess(self, rows: Sequence[PlannedRow], tables: Mapping[str, Tensor]) -> None:
        """Guess ``guess_count`` tokens for each row, one after the other, into ``guessed``."""
        assert self._hidden is not None
        for i, row in enumerate(rows):
            mine = {name: table[i : i + 1] for name, table in tables.items()}
            token = self._next[row.job.device_row, row.guesses_kept].view(1, 1)
            hidden = self._hidden[row.job.device_row, row.guesses_kept].view(1, 1, -1)
            self.guessed[row.job.device_row, 0] = token[0, 0]
            for ahead in range(1, row.guess_count):
                at = row.span.start + ahead - 1
                logits, hidden = self.drafter.draft(Batch(token, [Span(at, at + 1)], mine), hidden)
                token = logits.argmax(-1)
                self.guessed[row.job.device_row, ahead] = token[0, 0]
