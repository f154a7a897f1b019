"""The law of schedules: steps that are planned and not yet run, while the scheduling thread does what it may."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ..errors import CapacityError
from .bench import Bench, Running, hold, text_of
from .case import ComponentCase, LawBroken
from .explore import FailingSchedule, Program, Report, Run, explore
from .watch import Watch

BUDGET = 500
"""Schedules of one scenario, at most. One that has more is tried in so many of its orders."""


class Stage:
    """A bench on two explored streams, in pools that are nearly too small, with one prompt cached."""

    def __init__(self, run: Run, case: ComponentCase, beside: tuple[str, ...], units: int) -> None:
        self.stream, self.second = run.stream("forward"), run.stream("second")
        self.bench = Bench(case, beside, units=units, stream=self.stream, coded=False, rewind=0)
        self.watch = Watch(self.bench.cache, run)
        self.unit = self.bench.unit
        self.cached = text_of(0)[: 2 * self.unit + self.bench.cache.composition.lookahead]
        self.other = text_of(2)[: 4 * self.unit + self.bench.cache.composition.lookahead]
        self.open: list[Running] = []
        warm = self.start(self.cached)
        if warm is not None:
            self.bench.run(warm, 2 * self.unit)
            self.end(warm)
        while self.stream.ready:
            self.stream.advance()
        self.bench.cache.poll()
        run.at_end(self.check)

    def start(self, tokens: tuple[int, ...], **options: Any) -> Running | None:
        """A sequence, or None where there is no room for one."""
        try:
            run = self.bench.open(tokens, **options)
        except CapacityError:
            return None
        self.open.append(run)
        return run

    def end(self, run: Running | None, publish: bool = True) -> None:
        if run is not None and run in self.open:
            self.open.remove(run)
            run.sequence.close() if publish else run.sequence.abort()

    def step(self, run: Running | None, count: int, *, second: bool = False) -> None:
        """Plan one step and enqueue its layers on one of the streams: they run when the explorer likes."""
        if run is not None and run in self.open and run.sequence.open:
            with contextlib.suppress(CapacityError):
                count = min(count, run.sequence.named - run.sequence.reserved)
                self.bench.run(run, count, self.second if second else self.stream)

    def check(self) -> None:
        """Whatever the order was: what was read was right, and every slot is back."""
        for run in list(self.open):
            self.end(run)
        cache = self.bench.cache
        cache.poll()
        self.bench.told()
        for _, error in (*self.stream._failures, *self.second._failures):
            raise error
        self.watch.check()
        for name, figures in cache.stats().components.items():
            said = "in the end %s slots of %s are running and %s leased"
            hold((figures.running, figures.leased) == (0, 0), "books", said, figures.running, name, figures.leased)
        again = self.bench.open(self.cached)
        self.bench.verify(again)
        again.sequence.abort()


def chunked(stage: Stage) -> dict[str, Program]:
    """A prompt in two chunks, published while it runs; another reads what it published; all is evicted."""
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


def aborted(stage: Stage) -> dict[str, Program]:
    """A step is planned, its sequence aborted at any time, and another takes the slots."""
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


def evicted(stage: Stage) -> dict[str, Program]:
    """A cached prompt is found, with what is to be copied from it; everything is evicted, and the slots are taken."""

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


SCENARIOS: tuple[Callable[[Stage], dict[str, Program]], ...] = (chunked, aborted, evicted)


def explored(case: ComponentCase, scenario: Callable[[Stage], dict[str, Program]], beside: tuple[str, ...]) -> Report:
    """One scenario in all orders, or in so many as the budget says."""

    def scene(run: Run) -> None:
        stage = Stage(run, case, beside, units=8)
        for name, program in scenario(stage).items():
            run.actor(name, program)

    return explore(scene, budget=BUDGET)


def law_no_schedule_of_steps_goes_wrong(case: ComponentCase) -> None:
    """Chunks, aborts and evictions between a step's plan and its run: in every order, what is read is right.

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
