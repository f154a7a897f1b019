"""Simulated streams and a race detector that is told of all they are given, for the tests of the detector."""

from __future__ import annotations

from collections.abc import Iterable

from prefixloom.device.race import Race
from prefixloom.device.streams import InlineStream, Stream
from prefixloom.testing.schedules.simulated import Simulation

POOL = "state"


class World:
    """Some simulated streams, and a race detector that is told of what they are given."""

    def __init__(self) -> None:
        self.sim = Simulation("a", "b", "c")
        self.a, self.b, self.c = self.sim.streams
        self.race = Race()
        self.race.follow(*self.sim.streams)
        self.host = InlineStream("the scheduling thread")

    def touch(
        self, stream: Stream, what: str, reads: Iterable[int] = (), writes: Iterable[int] = (), pool: str = POOL
    ) -> None:
        stream.run(lambda: None)
        self.race.access(stream, what, pool, reads=reads, writes=writes)

    def writes(self, stream: Stream, what: str = "first", slot: int = 7) -> None:
        self.touch(stream, what, writes=[slot])

    def reads(self, stream: Stream, what: str = "first", slot: int = 7) -> None:
        self.touch(stream, what, reads=[slot])
