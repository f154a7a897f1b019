"""Interleavings: which orders of a run's events still have to be tried.

A *happening* is one indivisible step of one actor. Two happenings commute unless both touch a common thing and at least
one of them writes it. Runs that differ only in the order of commuting happenings form one *class*. ``Search`` visits
every class once, by dynamic partial-order reduction with source sets and sleep sets (Abdulla, Aronsson, Jonsson and
Sagonas, 2014): it finds the races of each run, and goes back to try the other order of each race.

This module knows names of actors and of things. It must not know streams or caches. The caller must ensure that an
actor that can go on is never blocked again by what others do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ...errors import InvariantError

Thing = Hashable


class Happening:
    """One indivisible step of one actor.

    ``clock``: for each actor, how many of its happenings are ordered before this one, this one included.
    """

    __slots__ = ("actor", "clock", "name", "nth", "reads", "writes")

    def __init__(self, actor: str, nth: int, name: str, reads: Iterable[Thing], writes: Iterable[Thing]) -> None:
        self.actor = actor
        self.nth = nth
        self.name = name
        self.reads = frozenset(reads)
        self.writes = frozenset(writes)
        self.clock: dict[str, int] = {}

    def before(self, other: Happening) -> bool:
        return other.clock.get(self.actor, 0) >= self.nth

    def touches(self, other: Happening) -> bool:
        """Return whether the order of the two matters."""
        return bool(self.writes & other.writes or self.writes & other.reads or self.reads & other.writes)

    def same(self, other: Happening) -> bool:
        return (self.actor, self.nth, self.reads, self.writes) == (other.actor, other.nth, other.reads, other.writes)


class Choice:
    """A point of a run at which the next actor was chosen.

    ``able``: the actors that could go on, in the order of preference. ``willing``: those, and the actors that only wait
    for work of others. ``asleep``: the actors that need not go next because every run that begins so was visited, each
    with its next happening.
    """

    __slots__ = ("able", "asleep", "chosen", "todo", "willing")

    def __init__(self, able: list[str], willing: set[str], asleep: dict[str, Happening]) -> None:
        self.able = able
        self.willing = willing
        self.asleep = asleep
        self.todo: set[str] = set()
        self.chosen = ""


class Search:
    """The runs that are still to be tried: a path of choices, and the alternatives at each.

    To drive a search: replay ``path``; then call ``choose`` and ``happened`` in turn, until no actor is able or
    ``choose`` returns None (everything that could follow was visited); then call ``back``, and begin again while it
    returns True. Without ``reduce`` every order is tried.
    """

    def __init__(self, reduce: bool = True) -> None:
        self._reduce = reduce
        self.choices: list[Choice] = []
        self.trace: list[Happening] = []

    @property
    def path(self) -> list[str]:
        return [choice.chosen for choice in self.choices]

    def choose(self, able: list[str], willing: set[str]) -> str | None:
        """Return the actor that goes next at a new point; None if everything from here on was visited."""
        asleep: dict[str, Happening] = {}
        if self.choices and self._reduce:
            last = self.trace[-1]
            asleep = {actor: h for actor, h in self.choices[-1].asleep.items() if not h.touches(last)}
        choice = Choice(able, willing, asleep)
        awake = [actor for actor in able if actor not in asleep]
        if not awake:
            return None
        choice.chosen = awake[0]
        choice.todo = {choice.chosen} if self._reduce else set(able)
        self.choices.append(choice)
        return choice.chosen

    def happened(self, new: Happening, after: Iterable[int]) -> None:
        """Record ``new`` as the result of the newest choice. It had to come after the happenings ``after``."""
        clock = new.clock
        for number in after:
            _join(clock, self.trace[number].clock)
        races = []
        for number in range(len(self.trace) - 1, -1, -1):
            old = self.trace[number]
            if old.actor == new.actor and clock.get(old.actor, 0) < old.nth:
                _join(clock, old.clock)
            elif not old.before(new) and old.touches(new):
                races.append(number)
                _join(clock, old.clock)
        clock[new.actor] = new.nth
        if self._reduce:
            for number in races:
                self._other_order(number, new)
        self.trace.append(new)

    def _other_order(self, number: int, new: Happening) -> None:
        """Plan a run in which ``new`` comes before the happening ``number``, with which it races."""
        choice = self.choices[number]
        if new.actor not in choice.willing:  # the earlier one made the later one possible
            return
        old = self.trace[number]
        between = [h for h in self.trace[number + 1 :] if not old.before(h)] + [new]
        first: list[str] = []
        seen: list[Happening] = []
        for happening in between:
            if not any(other.before(happening) for other in seen):
                first.append(happening.actor)
            seen.append(happening)
        if not set(first) <= set(choice.able):
            raise InvariantError(f"{first} could have gone before {old.name!r}, and only {choice.able} were able to")
        if choice.todo.isdisjoint(first):
            choice.todo.add(new.actor if new.actor in first else first[0])

    def back(self) -> bool:
        """Go back to the last point with an alternative that is not tried. Return False if there is none."""
        while self.choices:
            choice = self.choices[-1]
            del self.trace[len(self.choices) :]
            choice.asleep[choice.chosen] = self.trace.pop()
            for actor in choice.able:
                if actor in choice.todo and actor not in choice.asleep:
                    choice.chosen = actor
                    return True
            self.choices.pop()
        return False


def _join(into: dict[str, int], other: dict[str, int]) -> None:
    for actor, count in other.items():
        if into.get(actor, 0) < count:
            into[actor] = count


def orders(trace: list[Happening]) -> int:
    """Return the size of the trace's class: how many orders keep all dependent happenings in this order."""
    actors = sorted({happening.actor for happening in trace})
    work: list[list[list[int]]] = [
        [[h.clock.get(actor, 0) for actor in actors] for h in trace if h.actor == mine] for mine in actors
    ]
    counts = {(0,) * len(actors): 1}
    for _ in trace:
        grown: dict[tuple[int, ...], int] = {}
        for done, ways in counts.items():
            for i, mine in enumerate(work):
                at = done[i]
                if at < len(mine) and all(
                    need <= have for j, (need, have) in enumerate(zip(mine[at], done, strict=True)) if j != i
                ):
                    after = (*done[:i], at + 1, *done[i + 1 :])
                    grown[after] = grown.get(after, 0) + ways
        counts = grown
    return sum(counts.values())
