"""The schedule explorer: it runs a scenario in every order that its streams and actors allow.

Orders that differ only in steps that commute count as one. A scenario is a function that takes a ``ScheduleRun``, makes
streams on it (``run.stream``) and adds actors (``run.actor``). An actor is a generator: each ``yield`` ends one
indivisible action of the scheduling thread and names the next action. The explorer decides when each piece of work on a
stream runs. It calls the scenario anew for each schedule.

```python
def scenario(run):
    stream, slot, seen = run.stream("forward"), [0], []

    def writer():
        yield "write"
        stream.run(lambda: (touch(writes=["slot"]), slot.append(1)))

    def reader():
        yield "look"
        touch(reads=["slot"])
        seen.append(slot[-1])

    run.actor("writer", writer())
    run.actor("reader", reader())
    run.at_end(lambda: seen)


report = explore(scenario)  # 3 schedules: look before the write, while it waits, and after it ran
```

The reduction is right only if ``touch`` is called for everything whose result depends on an order. Actions of the
scheduling thread never commute. Pieces of work that call no ``touch`` are taken to touch one thing that all such pieces
share, so they do not commute with each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Hashable, Iterable

from ...device.streams import Event, host_clock
from ...errors import InvariantError
from ...script import fewest
from .interleaving import Happening, Search, Thing, orders
from .simulated import SimulatedStream

Gate = Event | Callable[[], Event | bool]
"""What an action waits for: an event, or a condition. A condition that became true stays true. It may also return the
event to wait for, once there is one."""
Program = Generator[str | tuple[str, Gate], None, None]
Scenario = Callable[["ScheduleRun"], object]

HOST = "the scheduling thread"
UNTOLD = "what pieces do that tell nothing"
BUDGET = 20_000
_now: list[ScheduleRun] = []


def touch(reads: Iterable[Thing] = (), writes: Iterable[Thing] = ()) -> None:
    """Report that the running piece of work reads and writes these things. Outside a schedule this does nothing."""
    for run in _now:
        run.told = True
        run.reads.update(reads)
        run.writes.update(writes)


class ExploredStream(SimulatedStream):
    """A simulated stream that remembers which step enqueued each piece, and which steps ask whether work is over."""

    __slots__ = ("_run", "born", "labels", "ran")

    def __init__(self, name: str, run: ScheduleRun) -> None:
        super().__init__(name)
        self._run = run
        self.labels: dict[int, str] = {}
        self.born: dict[int, int] = {}  # for each tick: the number of the happening that enqueued it
        self.ran: dict[int, int] = {}  # for each tick: the number of the happening in which it ran

    def run(self, work: Callable[[], object]) -> None:
        super().run(work)
        self._enqueued(getattr(work, "__name__", repr(work)))

    def _wait(self, event: Event) -> None:
        super()._wait(event)
        self._enqueued(f"wait for work {event.tick} of {event.stream.name!r}")

    def _enqueued(self, label: str) -> None:
        self.labels[self.tick] = label
        self.born[self.tick] = self._run.count

    def reached(self, event: Event) -> bool:
        for run in _now:
            run.reads.add((self.name, event.tick))
        return super().reached(event)

    def until(self, event: Event, timeout: float | None) -> bool:
        if _now and not self.reached(event):
            raise InvariantError(
                f"the scheduling thread waits for {event!r}: it never may, and here nobody would go on"
            )
        return super().until(event, timeout)


class Actor:
    """An actor on the scheduling thread. ``label`` names its next action, and ``gate`` is what that waits for."""

    __slots__ = ("_program", "_was_willing", "gate", "label", "name", "over")

    def __init__(self, name: str, program: Program) -> None:
        self.name = name
        self._program = program
        self.over = False
        self.go()

    def go(self) -> None:
        self._was_willing = False
        try:
            said = next(self._program)
        except StopIteration:
            self.over, self.label, self.gate = True, "", None
        else:
            self.label, self.gate = (said, None) if isinstance(said, str) else said

    gate: Gate | None
    label: str

    def awaited(self) -> Event | bool:
        return self.gate() if callable(self.gate) else self.gate or True

    def willing(self) -> bool:
        willing = bool(self.awaited())
        if self._was_willing and not willing:
            raise InvariantError(f"{self.name}: {self.label!r} waits for something that became true and then false")
        self._was_willing = willing
        return willing

    def able(self) -> bool:
        awaited = self.awaited()
        return awaited.stream.reached(awaited) if isinstance(awaited, Event) else self.willing()

    def close(self) -> None:
        with contextlib.suppress(Exception):  # the schedule may have left a block open
            self._program.close()


class ScheduleRun:
    """One schedule of a scenario. A scenario may set ``outcome``; the report collects the different outcomes."""

    def __init__(self, scenario: Scenario) -> None:
        self.streams: dict[str, ExploredStream] = {}
        self.actors: dict[str, Actor] = {}
        self.quiet: set[object] = set()
        """The functions that touch nothing when they run as work."""
        self.outcome: Hashable = None
        self.count = -1  # the number of happenings so far; -1 while the scenario is set up
        self.taken: dict[str, int] = {}
        self.trace: list[Happening] = []
        self.lines: list[tuple[str, str]] = []
        self.reads: set[Thing] = set()
        self.writes: set[Thing] = set()
        self.told = False
        self._checks: list[Callable[[], object]] = []
        self._ends: list[Callable[[], object]] = []
        scenario(self)
        self.count = 0

    def stream(self, name: str) -> ExploredStream:
        self.streams[name] = ExploredStream(name, self)
        return self.streams[name]

    def actor(self, name: str, program: Program) -> None:
        self.actors[name] = Actor(name, program)

    def at_end(self, check: Callable[[], object]) -> None:
        """Add a check to be called when everything is over. An exception from it fails the schedule."""
        self._checks.append(check)

    def afterwards(self, undo: Callable[[], object]) -> None:
        """Add a function to be called when the schedule has ended or was given up."""
        self._ends.append(undo)

    # ------------------------------------------------------------ called by the explorer
    def able(self) -> list[str]:
        """Return who can go on. Actors come first, which keeps the scheduling thread ahead of the streams."""
        actors = [actor.name for actor in self.actors.values() if not actor.over and actor.able()]
        return actors + [stream.name for stream in self.streams.values() if stream.ready]

    def willing(self) -> set[str]:
        return {*self.streams, *(actor.name for actor in self.actors.values() if not actor.over and actor.willing())}

    def take(self, name: str) -> tuple[Happening, list[int]]:
        """Let ``name`` do one piece. Return what happened, and the happenings that it depended on."""
        self.reads, self.writes, self.told = set(), set(), False
        self.taken[name] = nth = self.taken.get(name, 0) + 1
        stream = self.streams.get(name)
        _now.append(self)
        try:
            label, after = self._act(self.actors[name]) if stream is None else self._advance(stream)
        finally:
            _now.clear()
        self.count += 1
        self.trace.append(Happening(name, nth, label, self.reads, self.writes))
        return self.trace[-1], [number for number in after if number >= 0]

    def _act(self, actor: Actor) -> tuple[str, list[int]]:
        label, awaited = actor.label, actor.awaited()
        self.lines.append((actor.name, label))
        self.writes.add(HOST)
        after = [self._over(awaited)] if isinstance(awaited, Event) else []
        actor.go()
        return label, after

    def _advance(self, stream: ExploredStream) -> tuple[str, list[int]]:
        tick, head = stream.over + 1, stream.pending[0]
        label = stream.labels[tick]
        self.lines.append((stream.name, label))
        self.writes.add((stream.name, tick))
        after = [stream.born[tick]]
        if isinstance(head, Event):
            after.append(self._over(head))
        stream.advance()
        stream.ran[tick] = self.count
        if not self.told and not isinstance(head, Event) and head not in self.quiet:
            self.writes.add(UNTOLD)
        return label, after

    def _over(self, event: Event) -> int:
        assert isinstance(event.stream, ExploredStream)
        return event.stream.ran.get(event.tick, -1)

    def finish(self) -> None:
        """Check the end of a schedule: nothing may wait any more, and every check must pass."""
        waiting = [f"{actor.name}: {actor.label}" for actor in self.actors.values() if not actor.over]
        waiting += [f"{s.name}: {s.labels[s.over + 1]}" for s in self.streams.values() if s.pending]
        if waiting:
            raise InvariantError(f"nothing can go on, and something waits: {'; '.join(waiting)}")
        for check in self._checks:
            check()

    def close(self) -> None:
        for actor in self.actors.values():
            actor.close()
        for undo in self._ends:
            undo()
        for stream in self.streams.values():
            host_clock.pop(stream.number, None)


class ExplorationReport:
    """What was explored: ``classes`` schedules ran to their end, and they stand for ``orders`` interleavings."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.classes = 0
        self.orders = 0
        self.cut = 0
        """Schedules that were given up because everything that could follow had already run in another order."""
        self.happenings = 0
        self.complete = False
        self.outcomes: set[Hashable] = set()

    def __str__(self) -> str:
        pruned = self.orders - self.classes
        said = f"{self.classes:,} schedules explored, {pruned:,} pruned as equal to one of them ({self.cut:,} begun)"
        return said if self.complete else f"{said}; NOT ALL: the budget of {self.budget:,} is spent"


class FailingSchedule(AssertionError):
    """A schedule fails. It is shortened as far as possible; ``lines`` lists who did what, in order."""

    def __init__(self, error: BaseException, lines: list[tuple[str, str]], report: ExplorationReport) -> None:
        self.error = error
        self.lines = lines
        self.report = report
        width = max((len(who) for who, _ in lines), default=0)
        listed = "\n".join(f"  {n:3}  {who:{width}}  {what}" for n, (who, what) in enumerate(lines, 1))
        super().__init__(
            f"{type(error).__name__}: {error}\nafter {report.classes} schedules that went well; it fails so:\n{listed}"
        )


def explore(scenario: Scenario, *, budget: int = BUDGET, reduce: bool = True) -> ExplorationReport:
    """Run ``scenario`` in every order, or in at most ``budget`` orders. FailingSchedule: one of them fails."""
    report, search = ExplorationReport(budget), Search(reduce)
    while report.classes + report.cut < budget:
        run = ScheduleRun(scenario)
        try:
            ended = _explore_one(run, search)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or not run.lines:
                raise
            raise FailingSchedule(*shrunk(scenario, search.path, error), report) from error
        finally:
            run.close()
        report.happenings += run.count
        if ended:
            report.classes += 1
            report.orders += orders(search.trace)
            report.outcomes.add(run.outcome)
        else:
            report.cut += 1
        if not search.back():
            report.complete = True
            break
    return report


def _explore_one(run: ScheduleRun, search: Search) -> bool:
    """Run one schedule: replay the search's path, then choose anew. Return False if it was given up."""
    for number, name in enumerate(search.path):
        happening, after = run.take(name)
        if number == len(search.trace):
            search.happened(happening, after)
        elif not happening.same(search.trace[number]):
            raise InvariantError(f"the scenario is not the same each time: {happening.name!r} did something else")
    while able := run.able():
        chosen = search.choose(able, run.willing())
        if chosen is None:
            return False
        search.happened(*run.take(chosen))
    run.finish()
    return True


def shrunk(
    scenario: Scenario, path: list[str], error: BaseException, tries: int = 300
) -> tuple[BaseException, list[tuple[str, str]]]:
    """Shorten ``path`` while it leads to an error of the same type. Return the error and its lines."""
    best = error, _replayed(scenario, path)[1]

    def fails(shorter: list[str]) -> bool:
        nonlocal best, tries
        tries -= 1
        found, lines = _replayed(scenario, shorter) if tries >= 0 else (None, [])
        if found is None or type(found) is not type(error):
            return False
        best = found, lines
        return True

    fewest(path, fails)
    return best


def _replayed(scenario: Scenario, path: list[str]) -> tuple[BaseException | None, list[tuple[str, str]]]:
    """Replay ``path``, then let the streams go first. Return the error, if any, and what was done."""
    run = ScheduleRun(scenario)
    try:
        for name in path:
            if name in run.able():
                run.take(name)
        while able := run.able():
            run.take(next((name for name in able if name in run.streams), able[0]))
        run.finish()
    except BaseException as error:
        return error, run.lines
    finally:
        run.close()
    return None, run.lines
