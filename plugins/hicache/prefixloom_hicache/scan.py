"""Scan: reading a segment from its bytes alone. The index of a store is nothing but what a scan finds.

A segment is a head, then payloads side by side; its headers stand at its end, the first one last, in slots of one size.
Both grow until they meet. The ``life`` of a segment is a random number that every header repeats, so that what an
earlier use of the file left behind is not mistaken for one. A damaged header costs its own record and no other.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

import attrs

from .frame import DELETED, HEADER_BYTES, MAGIC, Flaw, Header, Place, read_header

HEAD_MAGIC = b"PLoomSeg"
HEAD_VERSION = 2
HEAD_BYTES = 4096
"""Room before the first payload."""
LINE, PAGE, WIDEST = 8, 4096, 512 << 10
"""Payloads begin at multiples of a line at least, and of the widest at most."""
_HEAD = struct.Struct("<8sHxxIQQQ")
FIRST_BYTES = _HEAD.size
_COMMON = MAGIC[:5]
_FEW = 16
"""Headers that are read at once, to begin with."""
_MANY = 4096
"""And at most."""
assert DELETED.startswith(_COMMON)

Read = Callable[[int, int], bytes]
"""(size, offset) -> bytes, fewer at the end."""


@attrs.frozen
class Head:
    """``life`` tells this use of the file from all others; ``order`` counts up with every segment that is begun;
    ``size`` is what the file had then."""

    life: int
    order: int
    size: int

    def pack(self) -> bytes:
        tail = struct.pack("<QQQ", self.life, self.order, self.size)
        return _HEAD.pack(HEAD_MAGIC, HEAD_VERSION, zlib.crc32(tail), self.life, self.order, self.size)


def read_head(data: bytes) -> Head | Flaw:
    if len(data) < _HEAD.size:
        return Flaw("corrupt", f"{len(data)} bytes are no segment")
    magic, version, check, life, order, size = _HEAD.unpack_from(data)
    if magic != HEAD_MAGIC:
        return Flaw("corrupt", "no segment begins here")
    if version != HEAD_VERSION:
        return Flaw("format", f"a segment of format {version}, and this is format {HEAD_VERSION}")
    if check != zlib.crc32(data[16 : _HEAD.size]) or not life:
        return Flaw("corrupt", "the head is not what was written")
    return Head(life, order, size)


def slot_of(number: int, size: int) -> int:
    """Where the header of this number stands in a segment of this size."""
    return size - (number + 1) * HEADER_BYTES


def berth(at: int, payload: int, number: int, size: int) -> int:
    """Where a payload begins that is the next to be written, behind ``at``; its header has this number.

    At a multiple of the largest power of two that divides it, as far as little room is lost by that: then payloads of
    one size lie side by side and each in large parts of the kernel's memory. On a page, if it is not small.
    """
    step = max(min(payload & -payload, WIDEST), LINE if payload < 8 * PAGE else PAGE)
    little = size // 64
    spare, early = min(payload // 32, little), little if payload <= 4 * little else 0
    latest = slot_of(number, size) - payload
    while True:
        begin = -(-at // step) * step
        if step <= LINE or (begin <= latest and (begin - at <= spare or begin <= early)):
            return begin
        step //= 2


@attrs.frozen
class Found:
    """The good header of this number; ``skipped`` before it were none."""

    number: int
    header: Header
    skipped: int = 0

    @property
    def end(self) -> int:
        """Behind its payload."""
        return self.header.body + self.header.size


def headers(read: Read, head: Head, number: int = 0, floor: int = HEAD_BYTES, resync: bool = True) -> Iterator[Found]:
    """The good headers from this number on, in order; without ``resync``, up to the first that is none.

    ``floor``: the end of the payload before. Each payload lies behind the one before it and before all headers.
    """
    step, skipped = _FEW, 0
    while (count := min(step, (slot_of(number - 1, head.size) - floor) // HEADER_BYTES)) > 0:
        bottom = slot_of(number + count - 1, head.size)
        data = read(count * HEADER_BYTES, bottom)
        if len(data) < count * HEADER_BYTES:
            return
        expected, behind = number, number + count
        for hit in _hits(data):
            this = behind - 1 - hit // HEADER_BYTES
            skipped += this - expected
            expected = this + 1
            if skipped and not resync:
                return
            header = read_header(data[hit : hit + HEADER_BYTES], Place(head.life, bottom + hit))
            if isinstance(header, Flaw) or not floor <= header.body <= header.place.offset - header.size:
                skipped += 1
                continue
            found = Found(this, header, skipped)
            floor, skipped = found.end, 0
            yield found
        skipped += behind - expected
        if skipped and not resync:
            return
        number, step = behind, min(8 * step, _MANY)


def _hits(data: bytes) -> Iterator[int]:
    """Where a slot begins as headers do, from the end on."""
    end = len(data)
    while (hit := data.rfind(_COMMON, 0, end)) >= 0:
        end = hit + len(_COMMON) - 1
        if hit % HEADER_BYTES == 0:
            yield hit
