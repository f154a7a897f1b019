"""The law of schedules: steps are planned but have not run, and the scheduling thread goes on with other requests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ...errors import CapacityError
from ...script import require, text_of
from ..inside import backdoor
from ..kit.bench import Bench, BenchSequence
from ..kit.case import ComponentCase, LawBroken
from ..schedules.explore import ExplorationReport, FailingSchedule, Program, ScheduleRun, explore
from ..schedules.watch import Watch

BUDGET = 500
"""The most schedules that are run of one scenario. A scenario with more orders is tried in only so many of them."""


class ScheduleBench:
    """A bench on two explored streams, with pools that are almost too small and one cached prompt."""

    def __init__(self, run: ScheduleRun, case: ComponentCase, beside: tuple[str, ...], units: int) -> None:
        self.stream, self.second = run.stream("forward"), run.stream("second")
        self.bench = Bench(case, beside, units=units, stream=self.stream, exact=False, rewind=0)
        self.watch = Watch(self.bench.cache, run)
        self.unit = self.bench.unit
        self.cached = text_of(0)[: 2 * self.unit + self.bench.cache.composition.lookahead]
        self.other = text_of(2)[: 4 * self.unit + self.bench.cache.composition.lookahead]
        self.open: list[BenchSequence] = []
        warm = self.start(self.cached)
        if warm is not None:
            self.bench.run(warm, 2 * self.unit)
            self.end(warm)
        while self.stream.ready:
            self.stream.advance()
        self.bench.cache.poll()
        run.at_end(self.check)

    def start(self, tokens: tuple[int, ...], **options: Any) -> BenchSequence | None:
        """Open a sequence; return None if there is no room for it."""
        try:
            run = self.bench.open(tokens, **options)
        except CapacityError:
            return None
        self.open.append(run)
        return run

    def end(self, run: BenchSequence | None, publish: bool = True) -> None:
        if run is not None and run in self.open:
            self.open.remove(run)
            run.sequence.close() if publish else run.sequence.abort()

    def step(self, run: BenchSequence | None, count: int, *, second: bool = False) -> None:
        """Plan one step and enqueue its layers on one of the streams; the explorer decides when they run."""
        if run is not None and run in self.open and run.sequence.open:
            with contextlib.suppress(CapacityError):
                count = min(count, run.sequence.named - run.sequence.reserved)
                self.bench.run(run, count, self.second if second else self.stream)

    def check(self) -> None:
        """Check, after any order, that everything read was right and every slot was given back."""
        for run in list(self.open):
            self.end(run)
        cache = self.bench.cache
        cache.poll()
        self.bench.raise_late_failures()
        for error in (*backdoor.stream_errors(self.stream), *backdoor.stream_errors(self.second)):
            raise error
        self.watch.check()
        for name, figures in cache.stats().components.items():
            said = "in the end %s slots of %s are running and %s leased"
            require((figures.running, figures.leased) == (0, 0), "books", said, figures.running, name, figures.leased)
        again = self.bench.open(self.cached)
        self.bench.verify(again)
        again.sequence.abort()


def chunked(stage: ScheduleBench) -> dict[str, Program]:
    """A prompt is computed in two chunks and published while it runs; a second sequence reads what was published."""
    run = stage.start(stage.other)

    def chunks() -> Program:
        for number in (1, 2):
            yield f"plan chunk {number}"
            stage.step(run, 2 * stage.unit)
            yield f"publish chunk {number}"
            if run is not None and run in stage.open:
                run.sequence.publish()

    def reader() -> Program:
        yield "open the same prompt"
        found = stage.start((*stage.other, 1))
        yield "plan its step"
        stage.step(found, 4 * stage.unit, second=True)

    return {"chunks": chunks(), "reader": reader()}


def aborted(stage: ScheduleBench) -> dict[str, Program]:
    """A step is planned, its sequence is aborted at any time, and another sequence takes the slots."""
    run = stage.start(stage.other)

    def scheduler() -> Program:
        yield "plan a step"
        stage.step(run, 2 * stage.unit)
        yield "plan the next one"
        stage.step(run, 2 * stage.unit)

    def user() -> Program:
        yield "abort"
        stage.end(run, publish=False)
        yield "open another prompt"
        found = stage.start(text_of(3)[10 : 10 + 3 * stage.unit], namespace="b")
        yield "plan its step"
        stage.step(found, 3 * stage.unit, second=True)

    return {"scheduler": scheduler(), "user": user()}


def evicted(stage: ScheduleBench) -> dict[str, Program]:
    """A cached prompt is found, with states to copy from; then everything is evicted and the slots are reused."""

    def reader() -> Program:
        yield "open the cached prompt"
        found = stage.start((*stage.cached, *stage.other[: stage.unit]))
        yield "plan its step"
        stage.step(found, 2 * stage.unit)
        yield "close it"
        stage.end(found)

    def janitor() -> Program:
        yield "evict everything"
        stage.bench.cache.evict({part.name: part.capacity for part in stage.bench.parts})
        yield "open another prompt"
        found = stage.start(stage.other, namespace="b")
        yield "plan its step"
        stage.step(found, 2 * stage.unit, second=True)

    return {"reader": reader(), "janitor": janitor()}


SCENARIOS: tuple[Callable[[ScheduleBench], dict[str, Program]], ...] = (chunked, aborted, evicted)


def explored(
    case: ComponentCase, scenario: Callable[[ScheduleBench], dict[str, Program]], beside: tuple[str, ...]
) -> ExplorationReport:
    """Run one scenario in all orders, or in as many as the budget allows."""

    def scene(run: ScheduleRun) -> None:
        stage = ScheduleBench(run, case, beside, units=8)
        for name, program in scenario(stage).items():
            run.actor(name, program)

    return explore(scene, budget=BUDGET)


def law_no_schedule_of_steps_goes_wrong(case: ComponentCase) -> None:
    """Chunks, aborts and evictions may come between a step's plan and its run; in every order, what is read is right.

    Clauses: X1, X2, W1, P4, P5, H4.
    """
    for beside in ((), ("path",) if case.has_states else ("state",)):
        for scenario in SCENARIOS:
            try:
                report = explored(case, scenario, beside)
                if not report.complete:
                    case.memo.setdefault("orders", []).append(f"{scenario.__name__}: {report}")
            except FailingSchedule as error:
                raise LawBroken(f"{scenario.__name__}: {error.error}", f"# {scenario.__doc__}\n{error}") from error
