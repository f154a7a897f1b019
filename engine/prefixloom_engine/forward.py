"""Forward: a planned step goes to the stream, and what it samples comes back later.

The planning thread gives rows; all that touches content happens in ``Pass.run``, on the stream. The newest token of
each request stays in a tensor there, so that the next step can be launched before anybody here has seen it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from prefixloom import Cache, Stream, ThreadStream, stream_for

from . import sampling
from .model import Batch, Runner, Span
from .requests import Job


@attrs.define(eq=False)
class Row:
    """What one step computes of one job. ``known``: its tokens; empty: the newest, which only the device has.

    ``drafted``: how many of them are guesses. ``samples``: whether a token is sampled behind it. ``sequence`` and
    ``life`` are the job's when it was planned.
    """

    job: Job
    sequence: Any
    span: Span
    known: list[int]
    samples: bool
    drafted: int = 0
    life: int = 0
    prefill: bool = False
    chosen: list[int] = attrs.field(factory=list)


@attrs.define(eq=False)
class Pass:
    """One forward pass over a group of rows. All but ``run`` is the planning thread's."""

    rows: list[Row]
    tables: Mapping[str, Tensor]
    singles: Mapping[str, Tensor]
    newest: Tensor
    chosen: Tensor | None = None

    def run(self, runner: Runner) -> None:
        newest, rows = self.newest, self.rows
        count = rows[0].span.count
        tokens = moved([row.known or [0] * count for row in rows], newest)
        ahead = [i for i, row in enumerate(rows) if not row.known]
        if ahead:
            tokens[moved(ahead, newest), 0] = newest[moved([rows[i].job.row for i in ahead], newest)]
        wanted = max((row.drafted + 1 for row in rows if row.samples), default=0)
        logits = runner.forward(Batch(tokens, [row.span for row in rows], self.tables, self.singles, wanted))
        if wanted:
            self._sample(logits, wanted)

    def _sample(self, logits: Tensor, wanted: int) -> None:
        newest, rows = self.newest, self.rows
        asked = [row.job.request for row in rows]
        first = [row.span.end - wanted + 1 for row in rows]
        chosen = sampling.choose(logits, [r.temperature for r in asked], [r.seed for r in asked], first)
        sampling_rows = [i for i, row in enumerate(rows) if row.samples]
        at = moved([rows[i].job.row for i in sampling_rows], newest)
        newest[at] = chosen[moved(sampling_rows, newest), -1]
        self.chosen = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=chosen.device.type == "cuda")
        self.chosen.copy_(chosen, non_blocking=True)


class Flight:
    """A launched step. ``seconds``: what its forward passes took on a CPU."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.passes: list[Pass] = []
        self.event: Any = None
        self.error: BaseException | None = None
        self.seconds = 0.0

    def run(self, runner: Runner) -> None:
        """On the stream."""
        started = time.perf_counter()
        try:
            for each in self.passes:
                each.run(runner)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.seconds = time.perf_counter() - started

    def wait(self) -> None:
        """Until it is over; then each row that sampled has its ``chosen`` tokens."""
        if self.event is not None:
            self.event.synchronize()
        if self.error is not None:
            return
        for each in self.passes:
            if each.chosen is not None:
                for row, tokens in zip(each.rows, each.chosen.tolist(), strict=True):
                    row.chosen = tokens[len(tokens) - row.drafted - 1 :] if row.samples else []


class Forward:
    """The forward stream of one engine: a worker thread on a CPU, a stream of its own on CUDA, or nobody else."""

    def __init__(self, runner: Runner, cache: Cache, rows: int, overlap: bool) -> None:
        self.runner = runner
        self._cache = cache
        self._device = cache.composition.device
        self._parts = [part.name for part in cache.composition.parts]
        self._states = [part.name for part in cache.composition.parts if not part.page_tokens]
        self.newest = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self.stream = self._stream(overlap)

    def _stream(self, overlap: bool) -> Stream:
        if self._device.startswith("cuda"):
            raw = torch.cuda.Stream(torch.device(self._device))  # type: ignore[no-untyped-call]
            raw.wait_stream(torch.cuda.current_stream(torch.device(self._device)))
            return stream_for(raw, self._device, {})
        return ThreadStream("prefixloom engine") if overlap else stream_for(None, self._device, {})

    # ------------------------------------------------------------ launching
    def launch(self, rows: Sequence[Row]) -> Flight:
        """Enqueue a step over these rows. What goes wrong while that is done is the flight's error, too."""
        groups = self.runner.groups([row.span for row in rows])
        ordered = [rows[i] for group in groups for i in group]
        flight = Flight(ordered)
        try:
            with self._cache.step([row.sequence for row in ordered]) as step:
                step.run_ops(self.stream)
                tables = {name: step.table(name) for name in self._parts}
                singles = {}
                if self._cache.composition.max_rewind:
                    singles = {name: step.rewind_table(name) for name in self._states}
                at = 0
                for group in groups:
                    mine = slice(at, at + len(group))
                    narrow = [{name: table[mine] for name, table in each.items()} for each in (tables, singles)]
                    flight.passes.append(Pass(ordered[mine], narrow[0], narrow[1], self.newest))
                    at = mine.stop
                self.stream.run(lambda: flight.run(self.runner))
        except Exception as error:  # of a forward that runs right here; the step has committed nothing
            flight.error = flight.error or error
        flight.event = self.stream.record()
        return flight

    def close(self) -> None:
        """Wait for what is in flight, and let the worker go."""
        self.stream.record().synchronize()
        self.stream.close()


def moved(values: Any, like: Tensor) -> Tensor:
    """Whole numbers, to where ``like`` is, without waiting for the device."""
    made = torch.tensor(values, dtype=torch.int64)
    if like.device.type == "cuda":
        return made.pin_memory().to(like.device, non_blocking=True)
    return made
