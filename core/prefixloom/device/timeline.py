"""Timeline: when copies between tiers, calls of a store and waits for copies began and ended.

What runs on a stream is timed there, by a stamp before it and one after it. What a store does is timed on the store's
thread. Nothing waits for either: a reader takes what is over. Without a timeline nothing is timed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeVar

import attrs

from .streams import Event, Stream

MOST = 1 << 16
"""The most activities that a timeline holds. Those that come while it is full are left out and counted."""

Kind = Literal["down", "up", "fetch", "search", "read", "write", "wait"]
NOTHING: Mapping[str, int] = {}
T = TypeVar("T")
R = TypeVar("R")


@attrs.frozen
class Activity:
    """Something that was done for a cache beside its operations. Times are seconds of ``time.perf_counter``.

    ``kind``    "down": a copy from the device to the host; "up": one from the host to the device; "fetch": what a store
                brought is written to the host's memory; "search", "read", "write": a call of a store; "wait": a stream
                waited until a step or a copy on another one was over
    ``stream``  the name of the stream that did it; of a store's calls "store"
    ``asked``   when it was enqueued, ``begun`` and ``ended`` when it ran
    ``pages``   by component: pages (states), of which a store may have taken or brought fewer
    ``size``    their bytes
    ``failed``  whether it raised
    """

    kind: Kind
    stream: str
    asked: float
    begun: float
    ended: float
    pages: Mapping[str, int]
    size: int
    failed: bool


Timed = Callable[[], Activity | None]
"""Returns an activity once it is over, and None until then."""


class Timeline:
    """The activities of one cache that are over since they were last taken. Made by ``Cache.timeline``.

    It holds at most ``most``, with those that are not over. More are left out, and counted in ``missing``.
    """

    __slots__ = ("_close", "_held", "_lock", "_most", "missing")

    def __init__(self, most: int, close: Callable[[Timeline], None]) -> None:
        self._close = close
        self._most = most
        self._held: deque[Timed] = deque()
        self._lock = threading.Lock()  # threads of a store add to it
        self.missing = 0

    def take(self) -> list[Activity]:
        """Return the activities that are over and were not taken yet, in the order of their ends. It never waits."""
        over: list[Activity] = []
        for _ in range(len(self._held)):
            timed = self._held.popleft()
            found = timed()
            if found is None:
                self._held.append(timed)
            else:
                over.append(found)
        return sorted(over, key=lambda activity: activity.ended)

    def close(self) -> None:
        """Time nothing any more. A second close does nothing."""
        self._close(self)

    def add(self, timed: Timed) -> None:
        """Hold an activity. It is for the cache, and no part of the public interface. Any thread may call it."""
        with self._lock:
            if len(self._held) >= self._most:
                self.missing += 1
            else:
                self._held.append(timed)


class Timekeeper:
    """Times what is done for one cache, for the timelines that follow it."""

    def __init__(self) -> None:
        self.timelines: tuple[Timeline, ...] = ()

    @contextmanager
    def timed(self, kind: Kind, stream: Stream, pages: Mapping[str, int] = NOTHING, size: int = 0) -> Iterator[None]:
        """Time what the block enqueues on ``stream``, as one activity. It failed if the block raises."""
        asked = time.perf_counter()
        first, raised = stream.stamp(), True
        try:
            yield
            raised = False
        finally:
            last = stream.stamp()

            def activity() -> Activity | None:
                begun, ended = first.seconds, last.seconds
                if begun is None or ended is None:
                    return None
                failed = raised or stream.failure(first.tick, last.tick) is not None
                return Activity(kind, stream.name, asked, begun, ended, pages, size, failed)

            self._add(activity)

    def call(self, kind: Kind, work: Callable[[T], R], pages: Mapping[str, int], size: int) -> Callable[[T], R]:
        """Return a function that does ``work`` on a store's thread, as one activity; if it never runs, none."""
        asked = time.perf_counter()

        def run(store: T) -> R:
            begun, failed = time.perf_counter(), True
            try:
                found = work(store)
                failed = False
                return found
            finally:
                done = Activity(kind, "store", asked, begun, time.perf_counter(), pages, size, failed)
                self._add(lambda: done)

        return run

    def _add(self, timed: Timed) -> None:
        for timeline in self.timelines:
            timeline.add(timed)


def wait_for(stream: Stream, event: Event, times: Timekeeper | None) -> None:
    """Make ``stream`` wait for ``event``, as one activity if a timeline follows."""
    if times is None:
        stream.wait(event)
        return
    with times.timed("wait", stream):
        stream.wait(event)
