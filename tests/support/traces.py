"""Traces, read strictly: as events of Chrome's trace event format, and by what a viewer takes for granted.

Each event has the fields of its kind, each span lies on a track that was named before, spans of one track do not
overlap, and those of a request nest and end.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import attrs


@attrs.define
class TracedSpan:
    """A span with what it carries, its times in microseconds, and the spans in it. ``end`` -1: it is open."""

    name: str
    values: dict[str, int | str]
    begin: float
    end: float = -1
    inside: list[TracedSpan] = attrs.field(factory=list)


@attrs.define
class ReadTrace:
    """``tracks``: by the names of tracks, the outermost spans of all tracks of that name. ``instants``: the events
    without length."""

    tracks: dict[str, list[TracedSpan]]
    instants: list[TracedSpan]

    def spans(self, track: str, name: str = "") -> list[TracedSpan]:
        return [span for span in self.tracks.get(track, []) if name in ("", span.name)]


def read_trace(path: Path, *, killed: bool = False) -> ReadTrace:
    """``killed``: its process was; so spans may be open, and the last line may be cut off."""
    first, *lines, rest = path.read_text().split("\n")
    assert first == "[" and all(line.endswith(",") for line in lines[:-1] if line)
    assert killed or not rest, f"the last line is cut off: {rest}"
    events = [json.loads(line[:-1]) for line in lines]
    names: dict[int, str] = {}
    flat: dict[int, list[TracedSpan]] = defaultdict(list)
    open_: dict[int, list[TracedSpan]] = defaultdict(list)
    requests, instants = list[TracedSpan](), list[TracedSpan]()
    assert [event["args"].get("name") for event in events[:1]] == ["prefixloom"]
    for event in events:
        assert event["name"] and event["pid"] > 0 and event["tid"] >= 0 and event["ts"] > 0, event
        values = event["args"]
        if event["ph"] == "M" and event["name"] == "thread_name":
            assert event["tid"] not in names, f"track {event['tid']} is named twice"
            names[event["tid"]] = values["name"]
        elif event["ph"] == "X":
            assert event["tid"] in names, "a span of a track that nobody named"
            flat[event["tid"]].append(TracedSpan(event["name"], values, event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "i":
            instants.append(TracedSpan(event["name"], values, event["ts"], event["ts"]))
    for event in sorted(
        (each for each in events if each["ph"] in "be"), key=lambda each: each["ts"]
    ):  # as a viewer does
        assert event["cat"] == "request"
        stack = open_[event["id"]]
        if event["ph"] == "b":
            span = TracedSpan(event["name"], event["args"], event["ts"])
            (stack[-1].inside if stack else requests).append(span)
            stack.append(span)
        else:
            assert stack and stack[-1].name == event["name"], "an end of nothing"
            stack[-1].end = event["ts"]
            stack.pop().values.update(event["args"])
    assert killed or not any(open_.values()), "spans have no end"
    tracks: dict[str, list[TracedSpan]] = defaultdict(list, request=requests)
    for number, spans in flat.items():
        spans.sort(key=lambda span: span.begin)
        ends = [span.end for span in spans]
        assert all(end <= span.begin + 0.002 for end, span in zip(ends, spans[1:], strict=False)), names[number]
        tracks[names[number]] += spans
    return ReadTrace(dict(tracks), instants)
