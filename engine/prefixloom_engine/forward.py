"""Forward: a planned step goes to the stream, and what it samples comes back later.

The planning thread gives rows; all that touches content happens in ``Pass.run``, on the stream. The newest token of
each request stays in a tensor there, so that the next step can be launched before anybody here has seen it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from prefixloom import Cache, Stream, ThreadStream, stream_for

from . import sampling
from .drafting import Drafting
from .handover import Handed, collect, collect_states, fill, outgoing
from .model import Batch, Runner, Span, no_gate
from .openmp import release_team
from .requests import Job


@attrs.define(eq=False)
class Row:
    """What one step computes of one job. ``known``: its tokens; empty: the newest, which only the device has.

    ``guesses``: how the last ``drafted`` of them are guessed; ``kept``: of the guesses of its last pass so many were
    right, and the device's draft goes on from there (-1: it has no part in it). ``samples``: whether a token is sampled
    behind it; ``behind``: the token there, if it is not. ``sequence`` and ``life`` are the job's when it was planned.
    """

    job: Job
    sequence: Any
    span: Span
    known: list[int]
    life: int
    samples: bool
    prefill: bool = False
    guesses: list[int] = attrs.field(factory=list)
    drafted: int = 0
    kept: int = -1
    behind: int = 0
    chosen: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    arriving: Handed | None = None
    handed: Handed | None = None

    @property
    def hands_over(self) -> bool:
        """Whether another engine gets what this row's sequence has when its pass is over."""
        return self.samples and self.job.request.hand_over is not None


@attrs.define(eq=False)
class Arrival:
    """In place of a forward pass: a row whose content was computed elsewhere."""

    row: Row
    cache: Cache
    tables: Mapping[str, Tensor]
    newest: Tensor

    def run(self, runner: Runner) -> None:
        handed = self.row.arriving
        assert handed is not None
        fill(self.cache, self.tables, handed, self.row.span.start, self.row.span.end)
        self.newest[self.row.job.row] = handed.token

    def tell(self) -> None:
        handed = self.row.arriving
        assert handed is not None
        self.row.chosen, self.row.logprobs = [handed.token], [handed.logprob]


@attrs.define(eq=False)
class Pass:
    """One forward pass over a group of rows. All but ``run`` is the planning thread's."""

    rows: list[Row]
    tables: Mapping[str, Tensor]
    singles: Mapping[str, Tensor]
    newest: Tensor
    cache: Cache
    drafting: Drafting | None
    gate: Callable[[int], None]
    chosen: Tensor | None = None
    guessed: Tensor | None = None
    logprobs: Tensor | None = None

    def run(self, runner: Runner) -> None:
        rows, drafting = self.rows, self.drafting
        for i, row in enumerate(rows):
            if row.hands_over:
                self._begin_hand_over(row, self._tables_of(i))
        wanted = max((row.drafted + 1 for row in rows if row.samples), default=0)
        batch = Batch(self._tokens(), [row.span for row in rows], self.tables, self.singles, wanted, self.gate)
        if drafting is None:
            logits = runner.forward(batch)
        else:
            logits, hidden = drafting.drafter.forward(batch)
        chosen = self._sample(logits, wanted) if wanted else None
        if drafting is not None:
            drafting.write(rows, batch, chosen, hidden)
        for i, row in enumerate(rows):
            if row.handed is not None:
                row.handed = attrs.evolve(row.handed, content=collect(self.cache, self._tables_of(i), row.handed.pages))

    def _begin_hand_over(self, row: Row, tables: Mapping[str, Tensor]) -> None:
        """The pass to the end begins at the last boundary, and writes over the states that stand there."""
        have, span = row.job.request.hand_over or 0, row.span
        boundary, pages = outgoing(self.cache, have, span.start, span.end)
        states = collect_states(self.cache, tables) if boundary else {}
        row.handed = Handed(have, boundary, span.end, -1, 0.0, pages, {}, states)

    def _tables_of(self, i: int) -> dict[str, Tensor]:
        return {name: table[i] for name, table in self.tables.items()}

    def _tokens(self) -> Tensor:
        newest, rows = self.newest, self.rows
        count = rows[0].span.count
        tokens = moved([row.known or [0] * count for row in rows], newest)
        ahead = [i for i, row in enumerate(rows) if not row.known]
        if ahead:
            tokens[moved(ahead, newest), 0] = newest[moved([rows[i].job.row for i in ahead], newest)]
        drafted = [i for i, row in enumerate(rows) if row.kept >= 0]
        if drafted and self.drafting is not None:
            guessed = self.drafting.guessed[moved([rows[i].job.row for i in drafted], newest)]
            tokens[moved(drafted, newest), 1:] = guessed[:, : count - 1]
            self.guessed = fetched(tokens[:, 1:])
        return tokens

    def _sample(self, logits: Tensor, wanted: int) -> Tensor:
        newest, rows = self.newest, self.rows
        asked = [row.job.request for row in rows]
        first = [row.span.end - wanted + 1 for row in rows]
        chosen = sampling.choose(logits, [r.temperature for r in asked], [r.seed for r in asked], first)
        sampling_rows = [i for i, row in enumerate(rows) if row.samples]
        at = moved([rows[i].job.row for i in sampling_rows], newest)
        newest[at] = chosen[moved(sampling_rows, newest), -1]
        self.chosen = fetched(chosen)
        if any(request.logprobs for request in asked):
            self.logprobs = fetched(logits.log_softmax(-1).gather(-1, chosen[..., None])[..., 0])
        return chosen

    def tell(self) -> None:
        """It is over: each row that sampled gets its tokens, and what was guessed for it."""
        if self.chosen is None:
            return
        chosen = self.chosen.tolist()
        for i, row in enumerate(self.rows):
            if row.samples:
                row.chosen = chosen[i][-row.drafted - 1 :]
                if self.logprobs is not None and row.job.request.logprobs:
                    row.logprobs = self.logprobs[i, -row.drafted - 1 :].tolist()
            if row.kept >= 0 and self.guessed is not None:
                row.guesses = self.guessed[i].tolist()
            if row.handed is not None:
                row.handed = attrs.evolve(row.handed, token=row.chosen[-1])


class Flight:
    """A launched step. ``seconds``: what its forward passes took on a CPU."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self.passes: list[Pass | Arrival] = []
        self.event: Any = None
        self.error: BaseException | None = None
        self.seconds = 0.0

    def run(self, work: Callable[[], object]) -> None:
        """On the stream."""
        started = time.perf_counter()
        try:
            work()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.seconds += time.perf_counter() - started

    def wait(self) -> None:
        """Until it is over; then each row that sampled has its ``chosen`` tokens."""
        if self.event is not None:
            self.event.synchronize()
        if self.error is None:
            for each in self.passes:
                each.tell()


class Forward:
    """The forward stream of one engine: a worker thread on a CPU, a stream of its own on CUDA, or nobody else."""

    def __init__(self, runner: Runner, cache: Cache, rows: int, overlap: bool) -> None:
        self.runner = runner
        self._cache = cache
        self._device = cache.composition.device
        self._parts = [part.name for part in cache.composition.parts]
        self._states = [part.name for part in cache.composition.parts if not part.page_tokens]
        drafter = getattr(runner, "drafter", None)
        depth = cache.composition.max_rewind
        self.drafting = None if drafter is None else Drafting(drafter, rows, depth, self._device)
        self.newest = torch.zeros(rows, dtype=torch.int64, device=self._device)
        self.stream = self._stream(overlap)
        self._gated = not isinstance(self.stream, ThreadStream)
        """Whether layers are enqueued while the step's block is open, so that each can come after its own load. A
        worker thread gets a forward pass in one piece, and waits for all of a load before it."""

    def _stream(self, overlap: bool) -> Stream:
        if self._device.startswith("cuda"):
            raw = torch.cuda.Stream(torch.device(self._device))  # type: ignore[no-untyped-call]
            raw.wait_stream(torch.cuda.current_stream(torch.device(self._device)))
            return stream_for(raw, self._device, {})
        return ThreadStream("prefixloom engine") if overlap else stream_for(None, self._device, {})

    # ------------------------------------------------------------ launching
    def launch(self, rows: Sequence[Row]) -> Flight:
        """Enqueue a step over these rows. A forward pass that fails right here is the flight's error, too."""
        if not self._gated:
            release_team()
        computed = [row for row in rows if row.arriving is None]
        groups = self.runner.groups([row.span for row in computed])
        ordered = [computed[i] for group in groups for i in group]
        flight = Flight([*ordered, *(row for row in rows if row.arriving is not None)])
        try:
            self._guess(flight)
            self._compute(flight, groups)
        except Exception:  # the step has committed nothing
            if flight.error is None:
                raise
        flight.event = self.stream.record()
        return flight

    def _guess(self, flight: Flight) -> None:
        drafting, rows = self.drafting, [row for row in flight.rows if row.kept >= 0]
        if drafting is None or not rows:
            return
        with self._cache.step([row.sequence for row in rows], role="draft") as step:
            step.run_ops(self.stream)
            tables = {name: step.table(name) for name in self._parts if name not in self._states}
            self.stream.run(lambda: flight.run(lambda: drafting.chain(rows, tables)))

    def _compute(self, flight: Flight, groups: list[list[int]]) -> None:
        with self._cache.step([row.sequence for row in flight.rows]) as step:
            gated = self._gated and not any(row.arriving or row.hands_over for row in flight.rows)
            step.run_ops(self.stream, gated=gated)
            gate = step.gate if gated else no_gate
            tables = {name: step.table(name) for name in self._parts}
            singles = {}
            if self._cache.composition.max_rewind:
                singles = {name: step.rewind_table(name) for name in self._states}
            at = 0
            for group in groups:
                mine = slice(at, at + len(group))
                narrow = [{name: table[mine] for name, table in each.items()} for each in (tables, singles)]
                flight.passes.append(
                    Pass(flight.rows[mine], narrow[0], narrow[1], self.newest, self._cache, self.drafting, gate)
                )
                at = mine.stop
            for i, row in enumerate(flight.rows[at:], at):
                mine_alone = {name: table[i] for name, table in tables.items()}
                flight.passes.append(Arrival(row, self._cache, mine_alone, self.newest))
            self.stream.run(lambda: flight.run(lambda: self._run(flight)))

    def _run(self, flight: Flight) -> None:
        for each in flight.passes:
            each.run(self.runner)

    def close(self) -> None:
        """Wait for what is in flight, and let the worker go."""
        self.stream.record().synchronize()
        self.stream.close()


def fetched(values: Tensor) -> Tensor:
    """On their way to the host: to be read when the stream's event is over."""
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return here.copy_(values, non_blocking=True)


def moved(values: Any, like: Tensor) -> Tensor:
    """Whole numbers, to where ``like`` is, without waiting for the device."""
    made = torch.tensor(values, dtype=torch.int64)
    if like.device.type == "cuda":
        return made.pin_memory().to(like.device, non_blocking=True)
    return made
