"""Work on a stream that does not end before a test says so, and a stream whose work begins late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from prefixloom.device.streams import Stream, ThreadStream

SOON = 10.0
"""Longer than any of this takes."""


class Gate:
    """Work that does not end before it is told to."""

    def __init__(self, stream: Stream) -> None:
        self.begun = threading.Event()
        self.free = threading.Event()
        stream.run(self)

    def __call__(self) -> None:
        self.begun.set()
        assert self.free.wait(SOON)


class LateStream(ThreadStream):
    """A stream whose work begins late, by so many seconds as ``delay`` says each time."""

    def __init__(self, name: str, delay: Callable[[], float]) -> None:
        super().__init__(name)
        self._delay = delay

    def run(self, work: Callable[[], object]) -> None:
        def late() -> None:
            time.sleep(self._delay())
            work()

        super().run(late)
