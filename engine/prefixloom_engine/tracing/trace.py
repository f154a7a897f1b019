"""A trace: follows an engine and its cache, and writes what they do to a file that Perfetto's viewer opens.

Everything is noted in the engine's thread, in a few microseconds per step, and turned into events by the file's thread.
"""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Any

from prefixloom import Cache, InputError, ProtocolError, Timeline

from ..contract.observer import Observer, StepFacts
from ..contract.requests import Answer
from .events import TraceEvents
from .file import TraceFile

MOST = 1 << 16
"""How many entries may wait for the file: about 20 MB."""
SIZE = 1 << 30
"""The greatest size of the file, unless another one is given: hours of work."""


class Trace(Observer):
    """Writes a trace of one engine: ``Engine(..., observers=[trace])``. As a context manager, it closes itself.

    ``path``  the file; if there is one, it is replaced
    ``size``  the greatest size of the file in bytes; then the trace ends
    ``most``  how many entries may wait for the file; those that come meanwhile are left out, and counted in ``dropped``
    ``seconds``  how often it is written: so much is missing after a crash
    """

    def __init__(
        self, path: str | os.PathLike[str], *, size: int = SIZE, most: int = MOST, seconds: float = 0.5
    ) -> None:
        for name, value in (("size", size), ("most", most)):
            if value.__class__ is not int or value < 1:
                raise InputError(f"the {name} of a trace is a whole number from 1 up, got {value!r}")
        self._events = events = TraceEvents()
        self._file = TraceFile(
            path, events.first(), events.left_out, events.last, most=most, size=size, seconds=seconds
        )
        self._timeline: Timeline | None = None
        self._missing = 0
        self._attached = False

    @property
    def error(self) -> str:
        """Why nothing is written any more, such as a full disk; empty while it is."""
        return self._file.error

    @property
    def dropped(self) -> int:
        """How many entries were left out since too many waited."""
        return self._file.dropped + self._missing

    def close(self) -> None:
        """Write the entries that wait, and end the file. Close the engine before. A second call does nothing."""
        self.closed()
        self._file.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ------------------------------------------------------------ in the engine's thread
    def attached(self, cache: Cache) -> None:
        if self._attached:
            raise ProtocolError("a trace follows one engine: make another one for this engine")
        self._attached = True
        self._timeline = cache.timeline()

    def queued(self, number: int, answer: Answer) -> None:
        request = answer.request
        about = {"prompt": len(request.tokens), "most": request.max_tokens}
        self._file.put(self._events.request, number, time.perf_counter(), about)

    def admitted(self, number: int, ready: int) -> None:
        self._phase(number, "restoring", {"on the device": ready})

    def restored(self, number: int, ready: int, brought: int) -> None:
        self._phase(number, "waiting", {"hit": ready, "restored": brought})

    def launched(self, step: StepFacts) -> None:
        self._file.put(self._events.launched, step)

    def over(self, step: StepFacts) -> None:
        self._file.put(self._events.over, step)

    def first_token(self, number: int) -> None:
        self._phase(number, "decode", {})

    def requeued(self, number: int, retracted: bool) -> None:
        self._phase(number, "queued", {"retracted" if retracted else "starts over": 1})

    def ended(self, number: int, answer: Answer) -> None:
        about: dict[str, Any] = {
            "reason": answer.reason, "hit": answer.hit, "restored": answer.restored, "tokens": len(answer.tokens),
            "drafted": answer.drafted, "accepted": answer.accepted,
        }  # fmt: skip
        self._file.put(self._events.end, number, time.perf_counter(), about, urgent=True)

    def stepped(self) -> None:
        if self._timeline is not None:
            for activity in self._timeline.take():
                self._file.put(self._events.activity, activity)
            self._missing = self._timeline.missing

    def closed(self) -> None:
        if self._timeline is not None:
            self.stepped()
            self._timeline.close()
            self._timeline = None

    def _phase(self, number: int, name: str, about: dict[str, int]) -> None:
        self._file.put(self._events.phase, number, time.perf_counter(), name, about)
