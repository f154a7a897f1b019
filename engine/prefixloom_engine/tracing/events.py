"""The events of a trace, in Chrome's trace event format, which Perfetto's viewer reads.

Each track is a thread of that format: "engine" (what the engine's thread did), "steps" (the forward passes as they ran
on their stream), the copies and the waits of each stream, and "store", of which there are as many as calls ran at the
same time. A request is an asynchronous span, and in it is what the request was doing, one after the other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from prefixloom import Activity

from ..contract.observer import StepFacts
from .file import Event

SPANS = {
    "down": "copy to the host", "up": "copy to the device", "fetch": "from the store", "search": "search",
    "read": "read", "write": "write", "wait": "wait",
}  # fmt: skip
"""By kind of an ``Activity``: the name of its span."""
Values = Mapping[str, "int | str"]


class TraceEvents:
    """Makes events on the writing thread. A time that is given is one of ``time.perf_counter``."""

    def __init__(self) -> None:
        self._tracks: dict[str, int] = {}
        self._lanes: list[float] = []
        """Of each track of the store: when its last call ended."""
        self._requests: dict[int, tuple[str, int]] = {}
        """What each request that has begun and not ended is doing, and up to which token."""

    def first(self) -> list[Event]:
        """Return the events that name the process, and say when the trace began."""
        names = {"process_name": {"name": "prefixloom"}, "process_labels": {"labels": f"{time.strftime('%F %T%z')}"}}
        return [self._event("M", name, time.perf_counter(), 0, args=args) for name, args in names.items()]

    def _event(self, kind: str, name: str, when: float, track: int = 0, **more: object) -> Event:
        return {"ph": kind, "name": name, "ts": round(when * 1e6, 3), "pid": os.getpid(), "tid": track, **more}

    def _span(self, track: str, name: str, begun: float, ended: float, values: Values) -> list[Event]:
        """Return a span of a track, after the track's name if this is its first."""
        made, number = [], self._tracks.get(track)
        if number is None:
            number = self._tracks[track] = len(self._tracks) + 1
            named = {"name": track.partition("#")[0]}
            made.append(self._event("M", "thread_name", begun, number, args=named))
            made.append(self._event("M", "thread_sort_index", begun, number, args={"sort_index": number}))
        length = round(max(ended - begun, 0.0) * 1e6, 3)
        return [*made, self._event("X", name, begun, number, dur=length, args=values)]

    # ------------------------------------------------------------ steps
    def launched(self, step: StepFacts) -> list[Event]:
        """Begin the prefills of a step that was enqueued. Their requests do nothing else until the step is over."""
        made = []
        for chunk in step.chunks:
            values = {"from": chunk.start, "to": chunk.end, "step": step.number}
            made += self.phase(chunk.request, step.launched, "prefill", values, chunk.end)
        return made

    def over(self, step: StepFacts) -> list[Event]:
        """Trace how a step was planned, ran and was waited for. Requests with more to compute wait for a turn."""
        made = self._span("engine", "plan", step.planned, step.launched, {"step": step.number})
        if step.ended:
            name = "prefill and decode" if step.chunks and step.decoded else "prefill" if step.chunks else "decode"
            arrived = sum(chunk.end - chunk.start for chunk in step.chunks) - step.prefilled
            values = {
                "step": step.number, "rows": step.decoded + len(step.chunks), "decode": step.decoded,
                "prefill": step.prefilled, "arrived": arrived, "drafted": step.drafted,
                "failed": int(step.error is not None),
            }  # fmt: skip
            told = {key: value for key, value in values.items() if value or key in ("step", "rows")}
            made += self._span("steps", name, step.begun, step.ended, told)
        if step.waited:
            made += self._span("engine", "wait for the device", step.waited, step.read, {"step": step.number})
        for chunk in step.chunks:
            if not chunk.last and self._requests.get(chunk.request) == ("prefill", chunk.end):
                made += self.phase(chunk.request, step.read, "waiting", {})
        return made

    # ------------------------------------------------------------ copies, calls and waits
    def activity(self, activity: Activity) -> list[Event]:
        """Trace a copy of a stream, a wait of one, or a call of a store that is over."""
        values: dict[str, int | str] = {f"pages of {name}": count for name, count in activity.pages.items()}
        if activity.size:
            values["bytes"] = activity.size
        values["us until it began"] = round(max(activity.begun - activity.asked, 0.0) * 1e6)
        if activity.failed:
            values["failed"] = 1
        track = f"{activity.stream}: {'waits' if activity.kind == 'wait' else 'copies'}"
        if activity.stream == "store":
            track = self._lane(activity.begun, activity.ended)
        return self._span(track, SPANS[activity.kind], activity.begun, activity.ended, values)

    def _lane(self, begun: float, ended: float) -> str:
        """Return a track of the store on which nothing else ran meanwhile."""
        lane = next((at for at, free in enumerate(self._lanes) if free <= begun), len(self._lanes))
        self._lanes[lane : lane + 1] = [ended]
        return f"store#{lane}"

    # ------------------------------------------------------------ requests
    def _of_request(self, kind: str, number: int, name: str, when: float, values: Values) -> Event:
        return self._event(kind, name, when, cat="request", id=number, args=values)

    def request(self, number: int, when: float, values: Values) -> list[Event]:
        """Begin a request, which is queued."""
        self._requests[number] = "queued", 0
        begun = self._of_request("b", number, "request", when, {"request": number, **values})
        return [begun, self._of_request("b", number, "queued", when, {})]

    def phase(self, number: int, when: float, name: str, values: Values, end: int = 0) -> list[Event]:
        """Begin another phase of a request. Return nothing for one whose beginning was left out."""
        known = self._requests.get(number)
        if known is None:
            return []
        self._requests[number] = name, end
        ended = self._of_request("e", number, known[0], when, {})
        return [ended, self._of_request("b", number, name, when, values)]

    def end(self, number: int, when: float, values: Values) -> list[Event]:
        """End a request."""
        known = self._requests.pop(number, None)
        if known is None:
            return []
        return [self._of_request("e", number, name, when, told) for name, told in ((known[0], {}), ("request", values))]

    # ------------------------------------------------------------ the file
    def left_out(self, count: int) -> list[Event]:
        """Say that so many entries could not be kept until they were written."""
        return [self._event("i", "events were left out", time.perf_counter(), s="p", args={"events": count})]

    def last(self) -> list[Event]:
        """End the requests that are open."""
        now = time.perf_counter()
        return [
            event for number in list(self._requests) for event in self.end(number, now, {"reason": "the trace ends"})
        ]
