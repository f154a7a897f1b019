"""The schedule explorer: every class of schedules once, none left out; and a failure is told as it happened."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterable
from typing import Any

import pytest

from prefixloom import InvariantError
from prefixloom.testing.schedules.explore import FailingSchedule, explore, touch
from prefixloom.testing.schedules.explore import ScheduleRun as Run

Steps = Generator[Any, None, None]


def piece(*reads: str, writes: Iterable[str] = ()) -> Callable[[], None]:
    return lambda: touch(reads, writes)


def streams_of(*lengths: int, shared: bool) -> Callable[[Run], None]:
    """Streams with so many pieces each, all enqueued before anything is explored."""

    def scenario(run: Run) -> None:
        for number, length in enumerate(lengths):
            stream = run.stream(f"s{number}")
            for _ in range(length):
                stream.run(piece(writes=["the slot" if shared else f"slot {number}"]))

    return scenario


# ---------------------------------------------------------------- known counts


@pytest.mark.parametrize("lengths", [(1, 1), (3, 4), (2, 2, 2), (5, 1, 3)])
def test_streams_that_share_nothing_are_one_schedule_that_stands_for_all(lengths: tuple[int, ...]) -> None:
    report = explore(streams_of(*lengths, shared=False))
    everything = math.factorial(sum(lengths)) // math.prod(map(math.factorial, lengths))
    assert (report.classes, report.cut, report.orders, report.complete) == (1, 0, everything, True)
    assert str(report) == f"1 schedules explored, {everything - 1:,} pruned as equal to one of them (0 begun)"


def test_without_the_reduction_every_order_is_explored() -> None:
    report = explore(streams_of(3, 4, shared=False), reduce=False)
    assert (report.classes, report.cut) == (math.comb(7, 3), 0)


def test_pieces_that_tell_nothing_are_taken_to_touch_the_same() -> None:
    def scenario(run: Run) -> None:
        for name in ("a", "b"):
            run.stream(name).run(lambda: None)

    def quietly(run: Run) -> None:
        scenario(run)
        run.quiet.update(stream.pending[0] for stream in run.streams.values())

    assert (explore(scenario).classes, explore(quietly).classes) == (2, 1)


def test_actions_of_the_scheduling_thread_come_in_every_order_that_their_gates_allow() -> None:
    def scenario(run: Run) -> None:
        order: list[str] = []

        def actor(name: str, after: str = "") -> Steps:
            yield f"{name}1", lambda: not after or after in order
            order.append(f"{name}1")
            yield f"{name}2"
            order.append(f"{name}2")

        run.actor("a", actor("a"))
        run.actor("b", actor("b", after="a1"))
        run.at_end(lambda: setattr(run, "outcome", tuple(order)))

    report = explore(scenario)
    assert report.outcomes == {("a1", "a2", "b1", "b2"), ("a1", "b1", "a2", "b2"), ("a1", "b1", "b2", "a2")}
    assert (report.classes, report.cut) == (3, 0)


def test_a_gate_may_be_an_event_that_is_not_there_yet() -> None:
    def scenario(run: Run) -> None:
        stream, events, seen = run.stream("a"), [], []

        def enqueueing() -> Steps:
            yield "enqueue"
            stream.run(piece(writes=["slot"]))
            events.append(stream.record())
            yield "and more"

        def waiting() -> Steps:
            yield "wait", lambda: bool(events) and events[0]
            seen.append(events[0].done)

        run.actor("enqueueing", enqueueing())
        run.actor("waiting", waiting())
        run.at_end(lambda: setattr(run, "outcome", tuple(seen)))

    report = explore(scenario)
    assert (report.outcomes, report.classes) == ({(True,)}, 2)
    assert report.orders == explore(scenario, reduce=False).classes == 3


# ---------------------------------------------------------------- against no reduction


class Program:
    """A random scenario. What every thing saw is the outcome: two schedules have the same if they are one class."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        names = ["a", "b", "c"][: self.random.choice([2, 2, 3])]
        self.things = ["x", "y", "z"][: self.random.randint(1, 3)]
        self.streams = {name: self._pieces(self.random.randint(0, 2), name) for name in names}
        self.actors = [[self._action(names) for _ in range(self.random.randint(1, 3))] for _ in range(2)]

    def _pieces(self, count: int, who: str) -> list[tuple[str, list[str], list[str]]]:
        return [(f"{who}{n}", self._some(), self._some()) for n in range(count)]

    def _some(self) -> list[str]:
        return [thing for thing in self.things if self.random.random() < 0.35]

    def _action(self, names: list[str]) -> tuple[str, str, str]:
        one, other = self.random.sample(names, 2)
        return self.random.choice(["run", "run", "wait", "ask", "gate"]), one, other

    def __call__(self, run: Run) -> None:
        logs: dict[str, list[Any]] = {thing: [frozenset()] for thing in [*self.things, "host"]}

        def work(name: str, reads: list[str], writes: list[str]) -> Callable[[], None]:
            def seen() -> None:
                touch(reads, writes)
                for thing in self.things:
                    if thing in writes:
                        logs[thing] += [name, frozenset()]
                    elif thing in reads:
                        logs[thing][-1] |= {name}

            return seen

        streams = {name: run.stream(name) for name in self.streams}
        for name, pieces in self.streams.items():
            for each in pieces:
                streams[name].run(work(*each))

        def actor(number: int) -> Steps:
            for n, (what, one, other) in enumerate(self.actors[number]):
                name = f"{what} {number}{n}"
                yield (name, streams[one].record()) if what == "gate" else name
                logs["host"].append(name)
                if what == "run":
                    streams[one].run(work(name, [self.things[0]], [self.things[-1]] if number else []))
                elif what == "wait":
                    streams[other].wait(streams[one].record())
                elif what == "ask":
                    logs["host"].append(streams[one].record().done)

        for number in range(2):
            run.actor(f"actor {number}", actor(number))
        run.at_end(lambda: setattr(run, "outcome", repr(sorted((k, _told(v)) for k, v in logs.items()))))


def _told(log: list[Any]) -> list[Any]:
    return [sorted(entry) if isinstance(entry, frozenset) else entry for entry in log]


@pytest.mark.parametrize("seeds", [range(30), range(30, 60), range(60, 90)], ids=str)
def test_on_random_programs_every_class_is_explored_once_and_stands_for_as_many_as_there_are(seeds: range) -> None:
    compared = 0
    for seed in seeds:
        few = explore(Program(seed), budget=400)
        if not few.complete or few.orders > 400:  # too many for the other way
            continue
        every = explore(Program(seed), reduce=False)
        assert few.outcomes == every.outcomes, seed
        assert few.classes == len(every.outcomes), f"{seed}: a class twice, or one that nothing tells from another"
        assert few.orders == every.classes, f"{seed}: the classes are not all, or counted wrongly"
        compared += 1 < few.classes < few.orders
    assert compared > len(seeds) // 4


# ---------------------------------------------------------------- budget, failures


def test_a_budget_that_is_spent_is_told() -> None:
    report = explore(streams_of(4, 4, shared=True), budget=10)
    assert (report.classes, report.complete) == (10, False)
    assert str(report).endswith("NOT ALL: the budget of 10 is spent")


def lost_update(run: Run) -> None:
    """Two streams read, add one and write; in between there is much that does not matter."""
    value, held = [0], {}
    for name in ("a", "b"):
        stream = run.stream(name)

        def read(name: str = name) -> None:
            touch(reads=["value"])
            held[name] = value[0]

        def write(name: str = name) -> None:
            touch(writes=["value"])
            value[0] = held[name] + 1

        for work in (piece(writes=[f"{name} alone"]), read, piece(writes=[f"{name} alone"]), write):
            stream.run(work)

    def check() -> None:
        assert value == [2], f"{value[0]} of 2 updates are left"

    run.at_end(check)


def test_a_failure_names_what_ran_in_which_order_as_short_as_can_be() -> None:
    with pytest.raises(FailingSchedule, match="AssertionError: 1 of 2 updates are left") as failure:
        explore(lost_update)
    order = [(who, what) for who, what in failure.value.lines if what in ("read", "write")]
    assert order == [("b", "read"), ("a", "read"), ("a", "write"), ("b", "write")] or order == [
        ("a", "read"), ("b", "read"), ("a", "write"), ("b", "write")
    ]  # fmt: skip
    assert "  read\n" in str(failure.value)
    assert isinstance(failure.value.__cause__, AssertionError)


def test_a_failure_tells_nothing_that_it_does_not_need() -> None:
    """A look that comes too early: whatever else could have run is left out."""

    def scenario(run: Run) -> None:
        stream, ran = run.stream("a"), []

        def actor() -> Steps:
            for number in range(4):
                yield f"action {number}"
                stream.run(lambda: ran.append(1))
            yield "look"
            assert len(ran) == 4

        run.actor("actor", actor())

    with pytest.raises(FailingSchedule) as failure:
        explore(scenario)
    assert failure.value.lines == [("actor", f"action {number}") for number in range(4)] + [("actor", "look")]


def test_a_schedule_in_which_nothing_can_go_on_is_a_failure() -> None:
    def scenario(run: Run) -> None:
        def never() -> Steps:
            yield "go on", lambda: False

        run.actor("waiting", never())

    with pytest.raises(InvariantError, match="nothing can go on, and something waits: waiting: go on"):
        explore(scenario)


def test_the_scheduling_thread_may_not_wait_and_a_gate_may_not_close() -> None:
    def waiting(run: Run) -> None:
        stream = run.stream("a")
        stream.run(piece())

        def actor() -> Steps:
            yield "wait"
            stream.record().synchronize()

        run.actor("actor", actor())

    def closing(run: Run) -> None:
        opened = [True]

        def other() -> Steps:
            yield "close the gate"
            opened.clear()

        def gated() -> Steps:
            yield "go through", lambda: bool(opened)

        run.actor("other", other())
        run.actor("gated", gated())

    with pytest.raises(FailingSchedule, match="it never may"):
        explore(waiting)
    with pytest.raises(FailingSchedule, match="became true and then false"):
        explore(closing)


def test_a_scenario_that_is_another_one_each_time_is_refused() -> None:
    calls: list[int] = []

    def scenario(run: Run) -> None:
        calls.append(1)
        streams_of(2, 2, shared=len(calls) < 2)(run)

    with pytest.raises(FailingSchedule, match="not the same each time"):
        explore(scenario)
