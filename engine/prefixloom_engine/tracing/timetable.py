"""The timetable: turns what happened into the events of a trace. Used by the writing thread alone.

Tracks below the one of the process:

- "engine": what the engine's thread did, "plan" a step or "wait" for the results of one
- one for each stream: the steps, or the copies, as they ran there; and one for what the stream waited for
- "store": the calls of a store, side by side as far as they ran at the same time
- "requests": one span for each request, and in it what it was doing, one after the other
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from prefixloom import Activity

from ..contract.observer import StepFacts
from . import packets
from .packets import Events, values

PROCESS, REQUESTS, STORE = 1, 2, 3
"""The numbers of tracks; others count on from ``NEXT``, and those of requests from ``FIRST_REQUEST``."""
NEXT = 16
FIRST_REQUEST = 1 << 32
RANKS = {"engine": 1, "steps": 2, "requests": 3}
SPANS = {
    "down": "copy to the host", "up": "copy to the device", "fetch": "from the store", "search": "search",
    "read": "read", "write": "write", "wait": "wait",
}  # fmt: skip


class Timetable:
    """Makes the bytes of events. A time that is given is one of ``time.perf_counter``."""

    def __init__(self) -> None:
        monotonic, realtime = time.perf_counter_ns(), time.time_ns()
        clock = getattr(time, "CLOCK_BOOTTIME", None)
        boottime = monotonic if clock is None else time.clock_gettime_ns(clock)
        self._shift = boottime - monotonic
        self.first = packets.clocks(boottime, monotonic, realtime) + packets.process_track(
            PROCESS, os.getpid(), "prefixloom"
        )
        self.first += packets.child_track(REQUESTS, PROCESS, "requests", RANKS["requests"])
        self.first += packets.child_track(STORE, PROCESS, "store", 8)
        self._tracks: dict[str, Events] = {}
        self._lanes: list[tuple[int, Events]] = []
        """Of the store: when the last call of each ended, and its events."""
        self._requests: dict[int, tuple[Events, str]] = {}
        """Those that have begun and not ended, with what each is doing."""

    def _at(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._shift

    def _track(self, name: str, rank: int, made: list[bytes]) -> Events:
        known = self._tracks.get(name)
        if known is None:
            track = NEXT + len(self._tracks)
            made.append(packets.child_track(track, PROCESS, name, rank))
            known = self._tracks[name] = Events(track)
        return known

    # ------------------------------------------------------------ steps
    def step(self, step: StepFacts) -> bytes:
        """A step, of which everything is known: how it was planned, ran, and was waited for."""
        made: list[bytes] = []
        engine = self._track("engine", RANKS["engine"], made)
        numbered = values({"step": step.number})
        made.append(engine.begin(self._at(step.planned), "plan", numbered))
        made.append(engine.end(self._at(step.launched)))
        if step.ended:
            steps = self._track("steps", RANKS["steps"], made)
            name, about = "decode", {"step": step.number, "rows": step.decoded, "decode": step.decoded}
            if step.chunks:
                name, prefilled = "prefill and decode" if step.decoded else "prefill", step.prefilled
                about["rows"] += len(step.chunks)
                about["prefill"] = prefilled
                about["arrived"] = sum(chunk.end - chunk.start for chunk in step.chunks) - prefilled
            if step.drafted:
                about["drafted"] = step.drafted
            if step.error is not None:
                about["failed"] = 1
            made.append(steps.begin(self._at(step.begun), name, values(about)))
            made.append(steps.end(self._at(step.ended)))
        if step.waited:
            made.append(engine.begin(self._at(step.waited), "wait for the device", numbered))
            made.append(engine.end(self._at(step.read)))
        return b"".join(made)

    # ------------------------------------------------------------ copies, calls and waits
    def activity(self, activity: Activity) -> bytes:
        made: list[bytes] = []
        begun, ended = self._at(activity.begun), self._at(activity.ended)
        about: dict[str, int | str] = {f"pages of {name}": count for name, count in activity.pages.items()}
        if activity.size:
            about["bytes"] = activity.size
        about["ns until it began"] = max(begun - self._at(activity.asked), 0)
        if activity.failed:
            about["failed"] = 1
        if activity.stream == "store":
            events = self._lane(begun, ended, made)
        elif activity.kind == "wait":
            events = self._track(f"{activity.stream}: waits", 5, made)
        else:
            events = self._track(f"{activity.stream}: copies", 6, made)
        made.append(events.begin(begun, SPANS[activity.kind], values(about)))
        made.append(events.end(ended))
        return b"".join(made)

    def _lane(self, begun: int, ended: int, made: list[bytes]) -> Events:
        """A track of the store on which nothing else ran meanwhile."""
        for at, (free, events) in enumerate(self._lanes):
            if free <= begun:
                self._lanes[at] = ended, events
                return events
        track = FIRST_REQUEST - 1 - len(self._lanes)
        made.append(packets.child_track(track, STORE, "store"))
        self._lanes.append((ended, Events(track)))
        return self._lanes[-1][1]

    # ------------------------------------------------------------ requests
    def request(self, number: int, when: float, about: Mapping[str, int]) -> bytes:
        """A request begins, and is queued."""
        track = FIRST_REQUEST + number
        events, at = Events(track), self._at(when)
        self._requests[number] = events, "queued"
        made = packets.child_track(track, REQUESTS, "request")
        made += events.begin(at, "request", values({"request": number, **about}))
        return made + events.begin(at, "queued")

    def phase(self, number: int, when: float, name: str, about: Mapping[str, int]) -> bytes:
        """A request does something else from now on. Nothing is made for one whose beginning was left out."""
        known = self._requests.get(number)
        if known is None:
            return b""
        events, at = known[0], self._at(when)
        self._requests[number] = events, name
        return events.end(at) + events.begin(at, name, values(about) if about else b"")

    def turn(self, number: int, when: float) -> bytes:
        """A chunk of a prompt is over: if its request does nothing else already, it waits for its turn."""
        known = self._requests.get(number)
        return self.phase(number, when, "waiting", {}) if known is not None and known[1] == "prefill" else b""

    def end(self, number: int, when: float, about: Mapping[str, int | str]) -> bytes:
        """A request ended."""
        known = self._requests.pop(number, None)
        if known is None:
            return b""
        events, at = known[0], self._at(when)
        return events.end(at) + events.end(at, values(about))

    # ------------------------------------------------------------ the file
    def left_out(self, count: int) -> bytes:
        """So many events could not be kept until they were written."""
        made: list[bytes] = []
        engine = self._track("engine", RANKS["engine"], made)
        made.append(engine.instant(self._at(time.perf_counter()), "events were left out", values({"events": count})))
        return b"".join(made)

    def last(self) -> bytes:
        """End what is open."""
        now = time.perf_counter()
        return b"".join(self.end(number, now, {"reason": "the trace ends"}) for number in list(self._requests))
