"""Simulated streams: work runs when a test says so, one piece at a time, in any order that the events allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...device.streams import Event, Stream
from ...errors import InvariantError


class SimulatedStream(Stream):
    """A stream whose queue a test empties. ``pending`` holds work, and events that the stream must wait for."""

    __slots__ = ("over", "pending")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.pending: deque[Callable[[], object] | Event] = deque()
        self.over = 0

    def run(self, work: Callable[[], object]) -> None:
        self.tick += 1
        self.pending.append(work)

    def _wait(self, event: Event) -> None:
        self.tick += 1
        self.pending.append(event)

    def reached(self, event: Event) -> bool:
        return self.over >= event.tick

    def until(self, event: Event, timeout: float | None) -> bool:
        while not self.reached(event):
            if not self.ready:
                raise InvariantError(f"{event!r} is waited for, and {self!r} cannot go on")
            self.advance()
        return True

    @property
    def ready(self) -> bool:
        """Whether there is a next piece and the event that it waits for is over."""
        if not self.pending:
            return False
        head = self.pending[0]
        return not isinstance(head, Event) or head.stream.reached(head)

    def advance(self) -> None:
        """Run the next piece."""
        head = self.pending.popleft()
        if not isinstance(head, Event):
            try:
                head()
            except BaseException as error:
                self._failed(self.over + 1, error)
        self.over += 1


class Simulation:
    """Several simulated streams, and which of them can advance."""

    def __init__(self, *names: str) -> None:
        self.streams = [SimulatedStream(name) for name in names]

    def __getitem__(self, name: str) -> SimulatedStream:
        for stream in self.streams:
            if stream.name == name:
                return stream
        raise KeyError(name)

    @property
    def ready(self) -> list[SimulatedStream]:
        return [stream for stream in self.streams if stream.ready]

    def drain(self) -> None:
        """Run all pending work, in the order of the streams."""
        while ready := self.ready:
            ready[0].advance()
        for stream in self.streams:
            if stream.pending:
                raise InvariantError(f"{stream!r} waits for what never comes")
