"""Traces, read strictly: with Perfetto's own messages, and by what its viewer takes for granted.

Each packet is known to Perfetto's schema as a whole, each event stands on a track that was described before, spans nest
and end, and no span of a track runs beyond the one around it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
from google.protobuf.unknown_fields import UnknownFieldSet
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

BEGIN, END, INSTANT = (getattr(protos.TrackEvent, f"TYPE_{kind}") for kind in ("SLICE_BEGIN", "SLICE_END", "INSTANT"))


@attrs.define
class TracedSpan:
    """A span of a track with what it carries, its times in nanoseconds, and the spans in it. ``end`` -1: it is open."""

    name: str
    values: dict[str, int | str]
    begin: int
    end: int = -1
    inside: list[TracedSpan] = attrs.field(factory=list)


@attrs.define
class ReadTrace:
    """``tracks``: by the names of tracks, the outermost spans of all tracks of that name. ``instants``: the events
    without length. ``rest``: the bytes of a last packet that is not whole."""

    tracks: dict[str, list[TracedSpan]]
    instants: list[TracedSpan]
    parents: dict[str, str]
    rest: int

    def spans(self, track: str, name: str = "") -> list[TracedSpan]:
        return [span for span in self.tracks.get(track, []) if name in ("", span.name)]


def read_trace(path: Path, *, killed: bool = False) -> ReadTrace:
    """``killed``: its process was; so spans may be open, and the last packet may be cut off."""
    data = path.read_bytes()
    packets, rest = whole_packets(data)
    assert killed or not rest, f"{rest} bytes are left at the end"
    known(protos.Trace.FromString(data[: len(data) - rest]))
    names: dict[int, str] = {}
    parents: dict[str, str] = {}
    stacks: dict[int, list[TracedSpan]] = defaultdict(list)
    tracks: dict[str, list[TracedSpan]] = defaultdict(list)
    instants: list[TracedSpan] = []
    events: list[tuple[int, Any]] = []
    for number, packet in enumerate(packets):
        assert packet.trusted_packet_sequence_id == 1
        assert packet.first_packet_on_sequence == (not number)
        if packet.HasField("track_descriptor"):
            told = packet.track_descriptor
            assert told.uuid and told.uuid not in names, f"track {told.uuid} is described twice"
            assert not told.parent_uuid or told.parent_uuid in names
            names[told.uuid] = told.process.process_name or told.name
            parents[names[told.uuid]] = names.get(told.parent_uuid, "")
        elif packet.HasField("track_event"):
            assert packet.track_event.track_uuid in names, "an event of a track that nobody described"
            assert packet.timestamp >= packets[0].timestamp, "an event before the trace"
            events.append((packet.timestamp, packet.track_event))
    assert packets[0].HasField("clock_snapshot") and packets[1].track_descriptor.process.pid
    clocks = {each.clock_id: each.timestamp for each in packets[0].clock_snapshot.clocks}
    assert abs(clocks[protos.BUILTIN_CLOCK_REALTIME] - time.time_ns()) < 3600e9, "a viewer tells another time of day"
    for when, event in sorted(
        events, key=lambda each: each[0]
    ):  # as the viewer does: those of one moment as they stand
        values = {each.name: each.string_value or each.uint_value for each in event.debug_annotations}
        stack = stacks[event.track_uuid]
        if event.type == BEGIN:
            assert event.name
            span = TracedSpan(event.name, values, when)
            (stack[-1].inside if stack else tracks[names[event.track_uuid]]).append(span)
            stack.append(span)
        elif event.type == END:
            assert stack, "an end of nothing"
            span = stack.pop()
            span.end = when
            span.values.update(values)
        else:
            assert event.type == INSTANT
            instants.append(TracedSpan(event.name, values, when, when))
    assert killed or not any(stacks.values()), "spans have no end"
    return ReadTrace(dict(tracks), instants, parents, rest)


def whole_packets(data: bytes) -> tuple[list[Any], int]:
    """The packets, one after the other, and how many bytes are left of one that was cut off."""
    found, at = [], 0
    while at < len(data):
        assert data[at] == 0x0A, f"no packet begins at {at}"
        size, start = 0, at + 1
        for shift in range(0, 35, 7):
            if start >= len(data):
                return found, len(data) - at
            byte = data[start]
            start += 1
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
        if start + size > len(data):
            return found, len(data) - at
        found.append(protos.TracePacket.FromString(data[start : start + size]))
        at = start + size
    return found, 0


def known(message: Any) -> None:
    """Perfetto knows each field of a message, and of those in it."""
    unknown = [field.field_number for field in UnknownFieldSet(message)]
    assert not unknown, f"{message.DESCRIPTOR.full_name} has the fields {unknown}, which nobody knows"
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for each in value if descriptor.is_repeated else (value,):
                known(each)


def inside(spans: list[TracedSpan]) -> Iterator[TracedSpan]:
    for span in spans:
        yield span
        yield from inside(span.inside)
