"""The forward stream: a planned step is launched on it, and its results are read later.

The planning thread gives planned rows. Everything that touches content (tokens, logits, pages) happens on the stream,
in ``passes``. The newest token of each job stays in a tensor there, so that the next step can be launched before the
planning thread has read any result of this one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from prefixloom import Cache, InputError, InvariantError, ProtocolError, Stamp, Stream, ThreadStream, stream_for

from ..contract.model import Runner, Span, no_gate
from ..contract.observer import StepFacts
from .drafting import DraftBuffers
from .jobs import PlannedRow
from .passes import ForwardPass, HandoverCopy

OMP_PAUSE_SOFT = 1
"""The argument of OpenMP's ``omp_pause_resource_all`` that ends the threads but keeps the settings."""


class LaunchedStep:
    """A step on the stream. ``seconds``: how long its forward passes took; on CUDA, how long they took to launch."""

    def __init__(self, rows: list[PlannedRow]) -> None:
        self.rows = rows
        self.passes: list[ForwardPass | HandoverCopy] = []
        self.event: Any = None
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.facts: StepFacts | None = None
        """What observers are told of the step."""
        self._stamps: tuple[Stamp, Stamp] | None = None
        self._begun = self._ended = 0.0
        self._read = False

    def run(self, work: Callable[[], object]) -> None:
        """Do ``work`` on the stream, and record its time and its error."""
        started = time.perf_counter()
        try:
            work()
        except BaseException as error:
            self.error = self.error or error
            raise
        finally:
            self._begun, self._ended = self._begun or started, time.perf_counter()
            self.seconds += self._ended - started

    def stamp(self, first: Stamp, last: Stamp) -> None:
        """Time the step by these, as what ``run`` measures is how long a launch takes."""
        self._stamps = first, last

    def times(self) -> tuple[float, float]:
        """Return when the passes of a step that is over began and ended on the stream; zeros if none began."""
        if self._stamps is not None:
            begun, ended = (stamp.seconds or 0.0 for stamp in self._stamps)
            return begun, ended
        return self._begun, self._ended

    def wait(self) -> None:
        """Wait until the stream is behind the step; then each row has its results."""
        if self.event is not None:
            self.event.synchronize()
        if self.error is None and not self._read:
            for each in self.passes:
                each.read_results()
            self._read = True

    def verdict(self) -> list[BaseException | None]:
        """Return the error of each row. The cache asks when it has seen that the step is over."""
        self.wait()
        return [row.error for row in self.rows]


class ForwardStream:
    """Runs the steps of one engine: in a worker thread on a CPU, on a CUDA stream, or at once in the calling thread."""

    def __init__(self, runner: Runner, cache: Cache, rows: int, overlap: bool) -> None:
        self.runner = runner
        self._cache = cache
        self._device = cache.composition.device
        self._on_cuda = self._device.startswith("cuda")
        self._parts = [part.name for part in cache.composition.parts]
        self._states = [part.name for part in cache.composition.parts if not part.page_tokens]
        drafter = getattr(runner, "drafter", None)
        depth = cache.composition.max_rewind
        self.drafts = None if drafter is None else DraftBuffers(drafter, rows, depth, self._device)
        self.newest = torch.zeros(rows, dtype=torch.int64, device=self._device)
        """By device row: the newest token of each job."""
        self.stream = self._stream(overlap)
        self._gated = not isinstance(self.stream, ThreadStream)
        """Whether layers are enqueued while the step's block is open, so that each layer can wait for its own load. A
        worker thread gets a forward pass as a whole, and waits for the whole load before it."""

    def _stream(self, overlap: bool) -> Stream:
        if self._device.startswith("cuda"):
            raw = torch.cuda.Stream(torch.device(self._device))  # type: ignore[no-untyped-call]
            raw.wait_stream(torch.cuda.current_stream(torch.device(self._device)))
            return stream_for(raw, self._device, {})
        return ThreadStream("prefixloom engine") if overlap else stream_for(None, self._device, {})

    def check(self, length: int, name: str) -> None:
        """Refuse a request whose last position the runner cannot compute; ``length`` is one more than that."""
        try:
            self.runner.groups([Span(length - 1, length)])
        except InputError as error:
            raise InputError(f"{name} may come to {length} tokens, which the model refuses: {error}") from error

    # ------------------------------------------------------------ launching
    def launch(self, rows: Sequence[PlannedRow], *, timed: bool = False) -> LaunchedStep:
        """Enqueue a step over these rows. If it fails right here, it has committed nothing and carries the error.

        ``timed``: ``LaunchedStep.times`` is asked. On a CPU it is known anyway.
        """
        if not self._gated:
            release_openmp_team()
        launched = LaunchedStep(list(rows))
        first = self.stream.stamp() if timed and self._on_cuda else None
        try:
            computed = [row for row in rows if row.incoming is None]
            groups = self.runner.groups([row.span for row in computed])
            ordered = [computed[i] for group in groups for i in group]
            launched.rows = [*ordered, *(row for row in rows if row.incoming is not None)]
            self._launch_guessing(launched)
            self._launch_passes(launched, groups)
        except Exception as error:
            if launched.error is None and isinstance(error, (InvariantError, ProtocolError)):
                raise  # a bug, of the model or of prefixloom: no request has caused it
            launched.error = launched.error or error
        if first is not None:
            launched.stamp(first, self.stream.stamp())
        launched.event = self.stream.record()
        return launched

    def _launch_guessing(self, launched: LaunchedStep) -> None:
        drafts, rows = self.drafts, [row for row in launched.rows if row.guesses_kept >= 0]
        if drafts is None or not rows:
            return
        with self._cache.step([row.sequence for row in rows], role="draft") as step:
            step.run_ops(self.stream)
            tables = {name: step.table(name) for name in self._parts if name not in self._states}
            self.stream.run(lambda: launched.run(lambda: drafts.guess(rows, tables)))

    def _launch_passes(self, launched: LaunchedStep, groups: list[list[int]]) -> None:
        ahead = 0 if self.drafts is None else 1  # a pass writes the draft's entries with the tokens that it samples
        with self._cache.step([row.sequence for row in launched.rows], ahead=ahead) as step:
            gated = self._gated and not any(row.incoming or row.hands_over for row in launched.rows)
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
                launched.passes.append(
                    ForwardPass(launched.rows[mine], narrow[0], narrow[1], self.newest, self._cache, self.drafts, gate)
                )
                at = mine.stop
            for i, row in enumerate(launched.rows[at:], at):
                table_rows = {name: table[i] for name, table in tables.items()}
                launched.passes.append(HandoverCopy(row, self._cache, table_rows, self.newest))
            step.judge(launched.verdict)
            self.stream.run(lambda: launched.run(lambda: self._run_passes(launched)))

    def _run_passes(self, launched: LaunchedStep) -> None:
        for each in launched.passes:
            each.run(self.runner)

    def close(self) -> None:
        """Wait for the work in flight, and end the worker thread."""
        self.stream.record().synchronize()
        self.stream.close()


# ---------------------------------------------------------------- threads of OpenMP


def release_openmp_team() -> None:
    """End the OpenMP threads of the calling thread, if it has any. Does nothing where torch uses another library.

    Each thread that ever ran a parallel op keeps a team of OpenMP threads of its own. GNU OpenMP counts all of them.
    Where they are more than the cores, no team waits by spinning any more: every op puts its threads to sleep and wakes
    them, the worker's ops included, which then take 25 to 50 % more time. The planning thread has a team from
    making pools or weights and never uses it, so the team is ended here. The next parallel op of this thread makes a
    new one.
    """
    if torch.get_num_threads() > 1:
        _omp_pause()(OMP_PAUSE_SOFT)


@functools.cache
def _omp_pause() -> Callable[[int], int]:
    """Find ``omp_pause_resource_all`` of the GNU OpenMP that torch has loaded; else return a dummy."""
    home = Path(torch.__file__).parent
    for folder in (home / "lib", home.parent / "torch.libs"):
        for library in folder.glob("libgomp*.so*"):
            try:
                found = ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
                return found.omp_pause_resource_all
            except (OSError, AttributeError):  # another library is loaded, or one older than OpenMP 5.0
                continue
    return lambda kind: 0
