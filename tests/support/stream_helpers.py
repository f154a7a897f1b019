"""Work on a stream that does not end before a test says so."""

from __future__ import annotations

import threading

from prefixloom.device.streams import Stream

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
