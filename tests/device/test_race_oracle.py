"""The race detector against an oracle: random programs, and a graph of all that happened before, by brute force."""

from __future__ import annotations

import random

import pytest

from prefixloom import RaceError
from prefixloom.device.race import Race
from prefixloom.device.streams import Event, InlineStream, Stream
from prefixloom.testing.schedules.simulated import Simulation
from tests.support.sampling import slow

POOL = "state"


class Oracle:
    """Happens-before as a graph of single actions; what is ordered is its transitive closure, by brute force."""

    def __init__(self) -> None:
        self.before: list[int] = []  # of each action, the set of those before it, as bits
        self.last: dict[str, int] = {}
        self.touched: list[tuple[int, str, set[int], set[int]]] = []

    def act(self, actor: str, *after: int) -> int:
        """A new action, after the actor's last one and these. Streams go on from where the host has come to."""
        number = len(self.before)
        bits = 0
        for other in (*after, *(self.last[a] for a in {actor, "host"} if a in self.last)):
            bits |= self.before[other] | 1 << other
        self.before.append(bits)
        self.last[actor] = number
        return number

    def races(self, number: int, reads: set[int], writes: set[int]) -> set[str]:
        """The accesses so far that conflict with this one and are not before it."""
        return {
            what
            for other, what, r, w in self.touched
            if not self.before[number] >> other & 1 and (writes & (r | w) or reads & w)
        }


class Program:
    """A random program over three simulated streams, and an inline one, which is the scheduling thread."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.oracle = Oracle()
        self.sim = Simulation("a", "b", "c")
        self.race = Race()
        self.inline = InlineStream("inline")
        self.events: list[tuple[Event, int]] = []
        self.found = self.silent = 0
        if self.random.random() < 0.8:
            self.race.follow(*self.sim.streams)
        else:  # the detector gets to know them by their first work
            for stream in self.sim.streams:
                self._told(stream, "start", set(), set())

    def _slots(self) -> set[int]:
        return {self.random.randrange(4) for _ in range(self.random.choice((0, 1, 1, 2)))}

    def run(self, length: int) -> None:
        acts = (self.touch, self.touch, self.touch, self.record, self.wait, self.observe, self.advance)
        for number in range(length):
            act = self.random.choice(acts)
            if act == self.touch:
                self.touch(f"op {number}")
            else:
                act("")

    def touch(self, what: str) -> None:
        stream = self.random.choice((*self.sim.streams, *self.sim.streams, self.inline, self.inline))
        self._told(stream, what, self._slots(), self._slots())

    def _told(self, stream: Stream, what: str, reads: set[int], writes: set[int]) -> None:
        stream.run(lambda: None)
        number = self.oracle.act("host" if stream.inline else stream.name)
        races = self.oracle.races(number, reads, writes)
        try:
            self.race.access(stream, what, POOL, reads=reads, writes=writes)
        except RaceError as error:
            old = str(error).split("ordered after '")[1].split("'")[0]
            assert old in races, (what, old, races)
            self.found += 1
        else:
            assert not races, (what, races)
            self.silent += 1
            self.oracle.touched.append((number, what, reads, writes))

    def record(self, _: str) -> None:
        stream = self.random.choice((*self.sim.streams, self.inline))
        self.events.append((stream.record(), self.oracle.act("host" if stream.inline else stream.name)))

    def wait(self, _: str) -> None:
        if self.events:
            event, number = self.random.choice(self.events)
            stream = self.random.choice((*self.sim.streams, *self.sim.streams, self.inline))
            if stream.inline:
                self.sim.drain()  # a simulated stream that waits for another one does not go on by itself
            stream.wait(event)
            self.oracle.act("host" if stream.inline else stream.name, number)

    def observe(self, _: str) -> None:
        if self.events:
            event, number = self.random.choice(self.events)
            if event.done:
                self.oracle.act("host", number)

    def advance(self, _: str) -> None:
        for _ in range(self.random.randrange(6)):
            if ready := self.sim.ready:
                self.random.choice(ready).advance()


@pytest.mark.parametrize("programs", [800, slow(4000)])
def test_it_agrees_with_a_graph_of_all_that_happened_before(programs: int) -> None:
    found = silent = 0
    for seed in range(programs):
        program = Program(seed)
        program.run(40)
        found += program.found
        silent += program.silent
    print(f"{found} races found, {silent} accesses without")
    assert found > 2 * programs and silent > 2 * programs
