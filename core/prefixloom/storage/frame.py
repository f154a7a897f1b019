"""Frame: a record as bytes. A header of fixed size with its own checksum, and the payload, behind the header or apart.

A header says all that is needed to identify its record. Nothing is pickled or executed, and nothing is allocated by a
size in a header before that size is checked.

Stores write records so, and processes send each other records so. This module knows the format of one record. It knows
no file, no store and no connection.
"""

from __future__ import annotations

import functools
import struct
import zlib
from typing import Any, Literal

import attrs

from .checksum import ALGORITHMS, NUMBERS, Algorithm, Checksum
from .record import MAX_PAYLOAD, MAX_POSITION, Key, Record

MAGIC = b"PLoomRec"
VERSION = 3
HEADER_BYTES = 256

# The checksum of the header stands last in the first part. It covers the version, a zero, the checksum's number and the
# whole second part. The padding is zero.
_FIRST_PART = struct.Struct("<8sHBBI")
_SECOND_PART = struct.Struct("<Q24xQ32s16sQQ64s32s40x")
assert _FIRST_PART.size + _SECOND_PART.size == HEADER_BYTES


@attrs.frozen
class Flaw:
    """Why bytes are not a valid header or record: ``format`` (of another version), or ``corrupt``."""

    reason: Literal["format", "corrupt"]
    detail: str


@attrs.frozen
class RecordHeader:
    """What a header says, after its own checksum was found right. ``size`` is that of the payload in bytes."""

    size: int
    checksum: Checksum
    content: bytes
    fingerprint: bytes
    start: int
    end: int
    component: str
    layout: str

    def is_of(self, key: Key) -> bool:
        """Return whether this is the header of the record of ``key``."""
        return self.fingerprint + self.content == key.address

    def record(self, key: Key, payload: memoryview | bytes) -> Record | Flaw:
        """Return the record, if this is the header of ``key`` and the payload is what was written."""
        if not self.is_of(key):
            return Flaw("corrupt", "the header belongs to another record")
        if len(payload) != self.size:
            return Flaw("corrupt", f"the payload has {len(payload)} of {self.size} bytes")
        if not self.checksum.known:
            return Flaw("format", f"its checksum is {self.checksum.algorithm}: install xxhash to read it")
        if not self.checksum.fits(payload):
            return Flaw("corrupt", "the payload is not what was written")
        return Record(key, self.component, self.start, self.end, self.layout, payload, self.checksum)


def encode_header(record: Record) -> bytes:
    """Return the header of a record."""
    key, checksum = record.key, record.checksum
    identity = (key.content, key.fingerprint.digest, record.start, record.end)
    names = (record.component.encode(), record.layout.encode())
    second = _SECOND_PART.pack(len(record.payload), checksum.value, *identity, *names)
    number = NUMBERS[checksum.algorithm]
    check = zlib.crc32(second, zlib.crc32(bytes((VERSION, 0, 0, number))))
    return _FIRST_PART.pack(MAGIC, VERSION, 0, number, check) + second


def decode_header(data: Any) -> RecordHeader | Flaw:
    """Return what a header says, or what is wrong with it."""
    if len(data) < HEADER_BYTES:
        return Flaw("corrupt", f"{len(data)} bytes are too few for a header of {HEADER_BYTES}")
    data = bytes(data[:HEADER_BYTES])
    magic, version, kind, number, check = _FIRST_PART.unpack_from(data)
    if magic != MAGIC:
        return Flaw("corrupt", "no header begins here")
    if version != VERSION:
        return Flaw("format", f"written in format {version}, and this is format {VERSION}")
    if check != zlib.crc32(data[_FIRST_PART.size :], zlib.crc32(data[8:12])):
        return Flaw("corrupt", "the header is not what was written")
    fields = _SECOND_PART.unpack_from(data, _FIRST_PART.size)
    size, value, content, digest, start, end, component, layout = fields
    algorithm: Algorithm | None = ALGORITHMS.get(number)
    if algorithm is None or kind:
        return Flaw("format", f"a record of kind {kind} with checksum {number}, which this version does not know")
    names = _decode_name(component), _decode_name(layout)
    if not 0 < size <= MAX_PAYLOAD or not start <= end <= MAX_POSITION or not all(names):
        return Flaw("corrupt", f"no record has {size} bytes for [{start}, {end}) of {names}")
    return RecordHeader(size, Checksum(algorithm, value), content, digest, start, end, *names)


@functools.lru_cache(maxsize=1024)
def _decode_name(padded: bytes) -> str:
    """Return the name in a zero-padded field, or "" if no name that can be written gives these bytes."""
    name, end, rest = padded.partition(b"\0")
    if not end or any(rest):
        return ""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return ""


def decode_record(data: Any, key: Key) -> Record | Flaw:
    """Return the record of ``key`` from a header and the payload behind it: for stores that keep both as one value."""
    header = decode_header(memoryview(data)[:HEADER_BYTES])
    if isinstance(header, Flaw):
        return header
    return header.record(key, memoryview(data)[HEADER_BYTES:])
