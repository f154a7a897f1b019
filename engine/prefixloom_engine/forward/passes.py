"""Passes: what one step runs on the stream for a group of rows, and the sampling after it.

``run`` is called on the stream; ``read_results`` is called once the stream has passed the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from prefixloom import Cache

from ..contract.handover import Handover
from ..contract.model import Batch, Runner
from ..contract.requests import Request
from .drafting import DraftBuffers
from .handover import copy_content, copy_states, plan_handover, write_content
from .jobs import LogitsError, PlannedRow


@attrs.define(eq=False)
class HandoverCopy:
    """Takes the place of a forward pass for a row whose content another engine computed.

    ``newest``: by device row, the newest token of each job, kept on the device.
    """

    row: PlannedRow
    cache: Cache
    tables: Mapping[str, Tensor]
    newest: Tensor

    def run(self, runner: Runner) -> None:
        handover = self.row.incoming
        assert handover is not None
        write_content(self.cache, self.tables, handover, self.row.span.start, self.row.span.end)
        self.newest[self.row.job.device_row] = handover.token

    def read_results(self) -> None:
        handover = self.row.incoming
        assert handover is not None
        self.row.sampled = [handover.token]
        if self.row.job.request.logprobs:
            self.row.logprobs = [handover.logprob]


@attrs.define(eq=False)
class ForwardPass:
    """One forward pass of the model over a group of rows.

    ``newest``: by device row, the newest token of each job. It stays on the device, so that the next step can be
    launched before the planning thread has read the token.
    """

    rows: list[PlannedRow]
    tables: Mapping[str, Tensor]
    singles: Mapping[str, Tensor]
    newest: Tensor
    cache: Cache
    drafts: DraftBuffers | None
    gate: Callable[[int], None]
    sampled: Tensor | None = None
    guessed: Tensor | None = None
    logprobs: Tensor | None = None
    likeliest: tuple[Tensor, Tensor] | None = None
    usable: Tensor | None = None

    def run(self, runner: Runner) -> None:
        rows, drafts = self.rows, self.drafts
        for i, row in enumerate(rows):
            if row.hands_over:
                self._begin_handover(row, self._tables_of(i))
        wanted = max(row.guess_count + 1 for row in rows)  # also of rows that sample nothing: their logits are checked
        batch = Batch(self._tokens(), [row.span for row in rows], self.tables, self.singles, wanted, self.gate)
        if drafts is None:
            logits = runner.forward(batch)
        else:
            logits, hidden = drafts.drafter.forward(batch)
        sampled = self._sample(logits, wanted)
        if drafts is not None:
            drafts.write(rows, batch, sampled, hidden)
        for i, row in enumerate(rows):
            if row.outgoing is not None:
                content = copy_content(self.cache, self._tables_of(i), row.outgoing.pages)
                row.outgoing = attrs.evolve(row.outgoing, content=content)

    def _begin_handover(self, row: PlannedRow, tables: Mapping[str, Tensor]) -> None:
        """Copy, before the pass overwrites them, the states at the last boundary, where the pass begins."""
        have, span = row.job.request.hand_over or 0, row.span
        boundary, pages = plan_handover(self.cache, have, span.start, span.end)
        states = copy_states(self.cache, tables) if boundary else {}
        row.outgoing = Handover(have, boundary, span.end, -1, 0.0, pages, {}, states)

    def _tables_of(self, i: int) -> dict[str, Tensor]:
        return {name: table[i] for name, table in self.tables.items()}

    def _tokens(self) -> Tensor:
        """Return the known tokens (rows, count), with the newest tokens of the device in place; zeros before them."""
        newest, rows = self.newest, self.rows
        count = max(row.span.count for row in rows)
        unknown = [i for i, row in enumerate(rows) if not row.tokens]
        if len(unknown) == len(rows):
            return newest[self._device_rows(unknown), None]
        tokens = copy_to_device([[0] * (count - len(row.tokens)) + row.tokens for row in rows], newest)
        if unknown:
            tokens[copy_to_device(unknown, newest), -1] = newest[self._device_rows(unknown)]
        drafted = [i for i, row in enumerate(rows) if row.guesses_kept >= 0]
        if drafted and self.drafts is not None:
            guessed = self.drafts.guessed[self._device_rows(drafted)]
            tokens[copy_to_device(drafted, newest), 1:] = guessed[:, : count - 1]
            self.guessed = copy_to_host(tokens[:, 1:].clone())
        return tokens

    def _device_rows(self, which: Sequence[int]) -> Tensor:
        """Return the numbers of the rows in which the device keeps the jobs of these rows."""
        return copy_to_device([self.rows[i].job.device_row for i in which], self.newest)

    def _sample(self, logits: Tensor, wanted: int) -> Tensor | None:
        """Check the logits, and sample the rows that want a token; None: there are none."""
        newest, rows = self.newest, self.rows
        requests = [row.job.request for row in rows]
        highest, likeliest = logits.max(-1)
        self.usable = copy_to_host(usable(highest))
        sampling = [i for i, row in enumerate(rows) if row.samples]
        if not sampling:
            return None
        first = [row.span.end - wanted + 1 for row in rows]
        drawing = [request if row.samples else None for row, request in zip(rows, requests, strict=True)]
        sampled = sample(logits, likeliest, drawing, first)
        last = sampled[:, -1]
        if len(sampling) < len(rows):
            last = last[copy_to_device(sampling, newest)]
        newest[self._device_rows(sampling)] = last
        self.sampled = copy_to_host(sampled)
        if any(request.logprobs for request in requests):
            logprobs = logits.log_softmax(-1)
            self.logprobs = copy_to_host(logprobs.gather(-1, sampled[..., None])[..., 0])
            most = min(max(request.top_logprobs for request in requests), logits.shape[-1])
            if most:
                values, tokens = logprobs.topk(most)
                self.likeliest = copy_to_host(values), copy_to_host(tokens)
        return sampled

    def read_results(self) -> None:
        """Give each row that sampled its tokens and, where the draft model guessed for it, the guesses.

        A row whose logits were not finite gets an error.
        """
        assert self.usable is not None
        usable = self.usable.tolist()
        sampled = [] if self.sampled is None else self.sampled.tolist()
        for i, row in enumerate(self.rows):
            if row.samples:
                row.sampled = sampled[i][-row.guess_count - 1 :]
                if self.logprobs is not None and row.job.request.logprobs:
                    row.logprobs = self.logprobs[i, -row.guess_count - 1 :].tolist()
                if self.likeliest is not None and row.job.request.top_logprobs:
                    row.alternatives = self._alternatives(i, row)
            if row.guesses_kept >= 0 and self.guessed is not None:
                row.guesses = self.guessed[i].tolist()
            if row.outgoing is not None:
                row.outgoing = attrs.evolve(row.outgoing, token=row.sampled[-1])
            row.error = self._judged(row, usable[i][-row.guess_count - 1 :])

    def _alternatives(self, i: int, row: PlannedRow) -> list[list[tuple[int, float]]]:
        assert self.likeliest is not None
        values, tokens = (
            each[i, -row.guess_count - 1 :, : row.job.request.top_logprobs].tolist() for each in self.likeliest
        )
        return [list(zip(names, logprobs, strict=True)) for names, logprobs in zip(tokens, values, strict=True)]

    def _judged(self, row: PlannedRow, usable: list[bool]) -> LogitsError | None:
        """Return the error of a row, if the logits are not finite at a position that counts.

        Positions after a wrong guess do not count, because they are taken back.
        """
        for ahead, fine in enumerate(usable):
            if not fine:
                name, at = row.job.request.label or "a request", row.span.end - len(usable) + ahead
                return LogitsError(
                    f"{name}: the model's logits of this request are not finite at position {at}: one is NaN or "
                    f"infinite, or all of them are -inf"
                )
            if ahead < row.guess_count and row.sampled[ahead] != row.guesses[ahead]:
                break
        return None


# ---------------------------------------------------------------- sampling


def usable(highest: Tensor) -> Tensor:
    """Return whether one logit of each row and position is finite and none is NaN or plus infinity.

    To ``max``, NaN is greater than all numbers, so the highest logit tells.
    """
    return highest.isfinite()


def sample(logits: Tensor, likeliest: Tensor, requests: Sequence[Request | None], positions: Sequence[int]) -> Tensor:
    """Sample a token for each row and position on the device: (rows, wanted, vocabulary) -> (rows, wanted), int64.

    ``likeliest``: the argmax of the logits. ``requests``: of each row, whose ``temperature``, ``top_p`` and ``seed``
    say how to draw; None: nothing is drawn. ``positions``: of each row the position of the first token that is sampled.
    A draw depends only on the request's seed and the position. So it is the same in any batch, with guesses or without,
    with a cache or without.
    """
    sampled = likeliest.clone()
    for row, request in enumerate(requests):
        if request is not None and request.temperature:
            for i in range(logits.shape[1]):
                noise = _gumbel_noise(request.seed, positions[row] + i, logits.shape[-1]).to(logits.device)
                scaled = logits[row, i].to(torch.float64) / request.temperature
                if request.top_p < 1:
                    scaled = likeliest_alone(scaled, request.top_p)
                sampled[row, i] = (scaled + noise).argmax()
    return sampled


def likeliest_alone(logits: Tensor, top_p: float) -> Tensor:
    """Keep the logits of the fewest likeliest tokens whose probabilities add up to ``top_p``; make others -inf."""
    ranked, order = logits.sort(descending=True, stable=True)
    probabilities = ranked.softmax(-1)
    ranked = ranked.masked_fill(probabilities.cumsum(-1) - probabilities >= top_p, -torch.inf)
    return torch.empty_like(ranked).scatter_(-1, order, ranked)


def _gumbel_noise(seed: int, position: int, count: int) -> Tensor:
    """Return noise such that the argmax of logits / temperature + noise is a draw from their softmax."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + position) & 0x7FFFFFFFFFFFFFFF)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64).clamp(min=1e-300)
    return -(-uniform.log()).log()


# ---------------------------------------------------------------- between host and device


def copy_to_host(values: Tensor) -> Tensor:
    """Begin a copy to the host; it may be read when the stream's event is over. On a CPU these are the values."""
    if values.device.type == "cpu":
        return values
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return here.copy_(values, non_blocking=True)


def copy_to_device(values: Any, like: Tensor) -> Tensor:
    """Copy whole numbers to the device of ``like``, without waiting for it."""
    made = torch.tensor(values, dtype=torch.int64)
    if like.device.type == "cuda":
        return made.pin_memory().to(like.device, non_blocking=True)
    return made
