"""Segment format: where the parts of a segment file stand, and how to find its records from its bytes alone.

    0        HEAD_BYTES                                                            size
    | head   | payload 0 | payload 1 | ...      free      ... | header 1 | header 0 |

Payloads grow from the beginning and headers from the end, until they meet. All headers have one size, so the place of
each is known. The ``generation`` of a segment is a random number that is drawn whenever the file is begun anew; every
header repeats it, so that a header of an earlier generation is not taken for one of this. A damaged header costs its
own record and no other.

This module knows bytes and offsets. It knows no file and no index: a store's index is what ``scan_headers`` finds.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

import attrs

from prefixloom.storage import DELETED, HEADER_BYTES, MAGIC, Flaw, HeaderPlace, RecordHeader, decode_header

HEAD_MAGIC = b"PLoomSeg"
HEAD_VERSION = 2
HEAD_BYTES = 4096
"""The room of the head: the first payload begins behind it."""
_HEAD = struct.Struct("<8sHxxIQQQ")
PACKED_HEAD_BYTES = _HEAD.size
"""The bytes of the head that are written."""
SMALLEST_STEP, PAGE, LARGEST_STEP = 8, 4096, 512 << 10
"""A payload begins at a multiple of the smallest step at least, and of the largest step at most."""
_COMMON_MAGIC = MAGIC[:5]
_FIRST_BATCH = 16
"""The headers that the first read of a scan takes."""
_LARGEST_BATCH = 4096
"""The headers that one read of a scan takes at most."""
assert DELETED.startswith(_COMMON_MAGIC)

Read = Callable[[int, int], bytes]
"""(size, offset) -> the bytes there; fewer than ``size`` only at the end of the file."""


@attrs.frozen
class SegmentHead:
    """The head of a segment.

    ``generation``  tells this use of the file from all others
    ``order``       one more than in the segment that was begun before
    ``size``        the bytes of the file when this generation was begun
    """

    generation: int
    order: int
    size: int

    def encode(self) -> bytes:
        tail = struct.pack("<QQQ", self.generation, self.order, self.size)
        return _HEAD.pack(HEAD_MAGIC, HEAD_VERSION, zlib.crc32(tail), self.generation, self.order, self.size)


def decode_head(data: bytes) -> SegmentHead | Flaw:
    """Return the head of a segment from the first bytes of its file, or what is wrong with it."""
    if len(data) < _HEAD.size:
        return Flaw("corrupt", f"{len(data)} bytes are too few for a segment")
    magic, version, check, generation, order, size = _HEAD.unpack_from(data)
    if magic != HEAD_MAGIC:
        return Flaw("corrupt", "no segment begins here")
    if version != HEAD_VERSION:
        return Flaw("format", f"a segment of format {version}, and this is format {HEAD_VERSION}")
    if check != zlib.crc32(data[16 : _HEAD.size]) or not generation:
        return Flaw("corrupt", "the head is not what was written")
    return SegmentHead(generation, order, size)


def header_offset(number: int, size: int) -> int:
    """Return where header ``number`` stands in a segment of ``size`` bytes."""
    return size - (number + 1) * HEADER_BYTES


def payload_start(after: int, payload: int, number: int, size: int) -> int:
    """Return where the next payload begins, given that the one before it ends at ``after``.

    ``payload`` is its size, ``number`` the number of its header, ``size`` that of the segment. The start is a multiple
    of the largest power of two that divides the payload's size, where that costs little room. Then payloads of one size
    lie side by side, each in large pieces of the kernel's page cache. A payload of several pages begins on a page.
    """
    step = max(min(payload & -payload, LARGEST_STEP), SMALLEST_STEP if payload < 8 * PAGE else PAGE)
    little = size // 64
    gap, early = min(payload // 32, little), little if payload <= 4 * little else 0
    latest = header_offset(number, size) - payload
    while True:
        start = -(-after // step) * step
        if step <= SMALLEST_STEP or (start <= latest and (start - after <= gap or start <= early)):
            return start
        step //= 2


@attrs.frozen
class FoundHeader:
    """A valid header that a scan found. ``damaged`` is the number of invalid headers right before it."""

    number: int
    header: RecordHeader
    damaged: int = 0

    @property
    def payload_end(self) -> int:
        return self.header.payload_at + self.header.size


def scan_headers(
    read: Read, head: SegmentHead, number: int = 0, payloads_from: int = HEAD_BYTES, past_damage: bool = True
) -> Iterator[FoundHeader]:
    """Yield the valid headers from ``number`` on, in their order.

    ``payloads_from``  where the payload before ends. Each payload lies behind the one before it, and before all headers
    ``past_damage``    False: stop at the first header that is not valid
    """
    batch, damaged = _FIRST_BATCH, 0
    while (count := min(batch, (header_offset(number - 1, head.size) - payloads_from) // HEADER_BYTES)) > 0:
        bottom = header_offset(number + count - 1, head.size)
        data = read(count * HEADER_BYTES, bottom)
        if len(data) < count * HEADER_BYTES:
            return
        expected, behind = number, number + count
        for at in _possible_headers(data):
            this = behind - 1 - at // HEADER_BYTES
            damaged += this - expected
            expected = this + 1
            if damaged and not past_damage:
                return
            header = decode_header(data[at : at + HEADER_BYTES], HeaderPlace(head.generation, bottom + at))
            if isinstance(header, Flaw) or not payloads_from <= header.payload_at <= header.place.offset - header.size:
                damaged += 1
                continue
            found = FoundHeader(this, header, damaged)
            payloads_from, damaged = found.payload_end, 0
            yield found
        damaged += behind - expected
        if damaged and not past_damage:
            return
        number, batch = behind, min(8 * batch, _LARGEST_BATCH)


def _possible_headers(data: bytes) -> Iterator[int]:
    """Yield the offsets at which the bytes begin as headers do, from the end backwards."""
    end = len(data)
    while (at := data.rfind(_COMMON_MAGIC, 0, end)) >= 0:
        end = at + len(_COMMON_MAGIC) - 1
        if at % HEADER_BYTES == 0:
            yield at
