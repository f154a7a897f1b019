"""Scan: reading a segment from its bytes alone. The index of a store is nothing but what a scan finds.

A segment is a head, then frames at multiples of ``ALIGN``. Its ``life`` is a random number that every frame repeats, so
that what an earlier use of the file left behind is not mistaken for a frame. Where a header is damaged, the scan looks
for the next good one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

import attrs

from .frame import DELETED, HEADER_BYTES, MAGIC, Flaw, Header, Place, read_header

HEAD_MAGIC = b"PLoomSeg"
HEAD_VERSION = 1
HEAD_BYTES = 4096
"""Room before the first frame."""
ALIGN = 256
PAGE = 4096
LARGE = 32 << 10
"""From so many bytes on, a payload begins on a page of the disk: its header stands at the end of the page before."""
CHUNK = 1 << 20
_HEAD = struct.Struct("<8sHxxIQQ")
FIRST_BYTES = _HEAD.size
_COMMON = MAGIC[:5]
assert DELETED.startswith(_COMMON) and HEADER_BYTES % ALIGN == 0

Read = Callable[[int, int], bytes]
"""(size, offset) -> bytes, fewer at the end."""


@attrs.frozen
class Head:
    """``life`` tells this use of the file from all others; ``order`` counts up with every segment that is begun."""

    life: int
    order: int

    def pack(self) -> bytes:
        tail = struct.pack("<QQ", self.life, self.order)
        return _HEAD.pack(HEAD_MAGIC, HEAD_VERSION, zlib.crc32(tail), self.life, self.order)


def read_head(data: bytes) -> Head | Flaw:
    if len(data) < _HEAD.size:
        return Flaw("corrupt", f"{len(data)} bytes are no segment")
    magic, version, check, life, order = _HEAD.unpack_from(data)
    if magic != HEAD_MAGIC:
        return Flaw("corrupt", "no segment begins here")
    if version != HEAD_VERSION:
        return Flaw("format", f"a segment of format {version}, and this is format {HEAD_VERSION}")
    if check != zlib.crc32(data[16 : _HEAD.size]) or not life:
        return Flaw("corrupt", "the head is not what was written")
    return Head(life, order)


def room(payload: int) -> int:
    """Bytes of a segment that a frame takes."""
    return -(-(HEADER_BYTES + payload) // ALIGN) * ALIGN


def start_of(at: int, payload: int) -> int:
    """Where the frame begins that is the next to be written, behind ``at``."""
    return at if payload < LARGE else -(-(at + HEADER_BYTES) // PAGE) * PAGE - HEADER_BYTES


@attrs.frozen
class Found:
    """A good header at ``offset``; ``skipped`` bytes before it were none."""

    offset: int
    header: Header
    skipped: int = 0

    @property
    def end(self) -> int:
        return self.offset + room(self.header.size)


def frames(read: Read, life: int, start: int, end: int, resync: bool = True) -> Iterator[Found]:
    """The frames of [start, end), in order; without ``resync``, up to the first place where none begins."""
    at = start
    while at + HEADER_BYTES <= end:
        found = _frame(read(HEADER_BYTES, at), life, at, end)
        if found is None:
            large = start_of(at, LARGE)
            found = _frame(read(HEADER_BYTES, large), life, large, end)
        if found is None and resync:
            found = _next(read, life, at, end)
        if found is None:
            return
        yield found
        at = found.end


def _frame(data: bytes, life: int, at: int, end: int, since: int | None = None) -> Found | None:
    header = read_header(data, Place(life, at))
    if isinstance(header, Flaw) or at + HEADER_BYTES + header.size > end:
        return None
    return Found(at, header, 0 if since is None else at - since)


def _next(read: Read, life: int, since: int, end: int) -> Found | None:
    """The first good frame behind a damaged place."""
    for base in range(since, end, CHUNK):
        data = read(min(CHUNK + HEADER_BYTES, end - base), base)
        hit = data.find(_COMMON)
        while 0 <= hit < CHUNK:
            if (base + hit) % ALIGN == 0:
                found = _frame(data[hit : hit + HEADER_BYTES], life, base + hit, end, since)
                if found is not None:
                    return found
            hit = data.find(_COMMON, hit + 1)
        if len(data) < min(CHUNK, end - base):
            return None
    return None
