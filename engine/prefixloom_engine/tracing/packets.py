"""Packets: the bytes of a trace in Perfetto's own format, a sequence of protobuf messages (``TracePacket``).

Each packet stands alone: it has its names in full, and nothing in it depends on an earlier packet but the description
of its track. So a file that ends in the midst of a packet is good up to there. The numbers of fields below are those of
Perfetto's ``trace_packet.proto``, ``track_event.proto``, ``track_descriptor.proto`` and ``clock_snapshot.proto``.
"""

from __future__ import annotations

from collections.abc import Mapping

Values = Mapping[str, "int | str"]
"""What an event carries. The names and texts are few: they are made of no request's content."""

BEGIN, END, INSTANT = 1, 2, 3
"""The kinds of an event."""
REALTIME, MONOTONIC, BOOTTIME = 1, 3, 6
"""The numbers of clocks. An event has its time by the last of these."""
SEQUENCE = b"\x50\x01"
"""``trusted_packet_sequence_id``: all packets have one writer."""
FIRST = b"\x68\x01" + b"\xb8\x05\x01"
"""``sequence_flags``: nothing came before this packet; and ``first_packet_on_sequence``."""
LOST = b"\xd0\x02\x01"
"""``previous_packet_dropped``"""


def varint(number: int) -> bytes:
    """A whole number from 0 up, in as few bytes as it takes: seven bits each, the lowest first."""
    if number < 0x80:
        return _SMALL[number]
    found = b""
    while number > 0x3FFF:
        found += _PAIRS[number & 0x3FFF]
        number >>= 14
    if number < 0x80:
        return found + _SMALL[number]
    return found + bytes((number & 0x7F | 0x80, number >> 7))


_SMALL = [bytes((number,)) for number in range(0x80)]
_PAIRS = [bytes((number & 0x7F | 0x80, number >> 7 | 0x80)) for number in range(0x4000)]
"""Two bytes after which more come, by their fourteen bits: times are long."""


def field(number: int, value: int | bytes | str) -> bytes:
    """One field of a message: a whole number, or a text or message with its length before it."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def packet(content: bytes) -> bytes:
    """A packet, as an element of the file's one repeated field."""
    return b"\x0a" + varint(len(content)) + content


def clocks(boottime: int, monotonic: int, realtime: int) -> bytes:
    """The first packet: the same moment by three clocks, in nanoseconds. It tells the viewer the time of day."""
    moments = ((BOOTTIME, boottime), (MONOTONIC, monotonic), (REALTIME, realtime))
    snapshot = b"".join(field(1, field(1, clock) + field(2, moment)) for clock, moment in moments)
    return packet(field(8, boottime) + field(6, snapshot + field(2, BOOTTIME)) + SEQUENCE + FIRST)


def process_track(track: int, pid: int, name: str) -> bytes:
    """The track of a process, whose children stand in the order of their ranks."""
    return packet(SEQUENCE + field(60, field(1, track) + field(3, field(1, pid) + field(6, name)) + field(11, 3)))


def child_track(track: int, parent: int, name: str, rank: int = 0) -> bytes:
    """A track below another one. Tracks of one name below one parent are shown together."""
    return packet(SEQUENCE + field(60, field(1, track) + field(2, name) + field(5, parent) + field(12, rank)))


def values(given: Values) -> bytes:
    """What an event carries."""
    found = b""
    for name, value in given.items():
        one = value_named(name) + (b"\x18" + varint(value) if isinstance(value, int) else field(6, value))
        found += b"\x22" + varint(len(one)) + one
    return found


_names: dict[str, bytes] = {}


def value_named(name: str) -> bytes:
    known = _names.get(name)
    if known is None:
        known = _names[name] = field(10, name)
    return known


class Events:
    """The packets of the events of one track."""

    def __init__(self, track: int) -> None:
        told = field(11, track)
        self._kinds = {kind: field(9, kind) + told for kind in (BEGIN, END, INSTANT)}
        self._names: dict[str, bytes] = {}

    def begin(self, when: int, name: str, more: bytes = b"") -> bytes:
        """A span begins, with what ``values`` made of what it carries. Times are nanoseconds."""
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = self._kinds[BEGIN] + field(23, name)
        return _event(when, known + more)

    def end(self, when: int, more: bytes = b"") -> bytes:
        """The last span that began and has not ended on this track ends."""
        return _event(when, self._kinds[END] + more)

    def instant(self, when: int, name: str, more: bytes = b"") -> bytes:
        return _event(when, self._kinds[INSTANT] + field(23, name) + more)


def _event(when: int, event: bytes) -> bytes:
    content = b"\x40" + varint(when) + b"\x5a" + varint(len(event)) + event + SEQUENCE
    return b"\x0a" + varint(len(content)) + content
