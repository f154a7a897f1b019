"""Frame: a record as bytes. A header of fixed size with its own checksum, and the payload, behind the header or apart.

A header says all that is needed to identify its record, so that a store can be opened from its headers alone. It also
says where it was written: a header that is found at any other place is not valid. Nothing is pickled or executed, and
nothing is allocated by a size in a header before that size is checked.

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
from .fingerprint import Fingerprint
from .keys import Key
from .record import MAX_PAYLOAD, MAX_POSITION, Record

MAGIC = b"PLoomRec"
DELETED = b"PLoomDel"
"""The magic of a deleted record. The rest of its header stays valid, so that a scan can go on behind it."""
VERSION = 2
HEADER_BYTES = 256
Kind = Literal["record", "fingerprint"]
KINDS: dict[int, Kind] = {0: "record", 1: "fingerprint"}

# The checksum of the header stands last in the first part. It covers the version, the kind and the whole second part.
_FIRST_PART = struct.Struct("<8sHBBI")
_SECOND_PART = struct.Struct("<QQQQQ32s16sQQ64s32s40x")
assert _FIRST_PART.size + _SECOND_PART.size == HEADER_BYTES


@attrs.frozen
class HeaderPlace:
    """Where a header was written: the generation of a segment, and the offset in it."""

    generation: int = 0
    offset: int = 0


@attrs.frozen
class Flaw:
    """Why bytes are not a valid header or record: ``format`` (of another version), or ``corrupt``."""

    reason: Literal["format", "corrupt"]
    detail: str


@attrs.frozen
class RecordHeader:
    """What a header says, after its own checksum was found right.

    ``size``        the bytes of the payload
    ``payload_at``  where the payload begins; 0: right behind the header
    """

    kind: Kind
    deleted: bool
    size: int
    place: HeaderPlace
    payload_at: int
    checksum: Checksum
    content: bytes
    fingerprint: bytes
    start: int
    end: int
    component: str
    layout: str

    def is_of(self, key: Key) -> bool:
        """Whether this is the header of the record of ``key``."""
        return self.kind == "record" and self.fingerprint + self.content == key.address

    def record(self, key: Key, payload: Any) -> Record | Flaw:
        """Return the record, if this is the header of ``key`` and the payload is what was written."""
        if not self.is_of(key):
            return Flaw("corrupt", "the header belongs to another record")
        if self.deleted:
            return Flaw("corrupt", "the record was deleted")
        if len(payload) != self.size:
            return Flaw("corrupt", f"the payload has {len(payload)} of {self.size} bytes")
        if not self.checksum.known:
            return Flaw("format", f"its checksum is {self.checksum.algorithm}: install xxhash to read it")
        if not self.checksum.fits(payload):
            return Flaw("corrupt", "the payload is not what was written")
        return Record(key, self.component, self.start, self.end, self.layout, payload, self.checksum)


def encode_header(record: Record, place: HeaderPlace = HeaderPlace(), payload_at: int = 0) -> bytes:
    """Return the header of a record, to be written at ``place``."""
    key, checksum = record.key, record.checksum
    names = (record.component.encode(), record.layout.encode())
    identity = (key.content, key.fingerprint.digest, record.start, record.end)
    return _pack(0, checksum, len(record.payload), place, payload_at, *identity, *names)


def encode_fingerprint_header(
    fingerprint: Fingerprint, place: HeaderPlace = HeaderPlace(), payload_at: int = 0
) -> bytes:
    """Return the header of a payload that is the whole text of a fingerprint. It stands before that one's records."""
    text = fingerprint.text.encode()
    checksum = Checksum.of(text, "crc32")
    return _pack(1, checksum, len(text), place, payload_at, bytes(32), fingerprint.digest, 0, 0, b"-", b"-")


def _pack(kind: int, checksum: Checksum, size: int, place: HeaderPlace, payload_at: int, *rest: Any) -> bytes:
    second = _SECOND_PART.pack(size, place.generation, place.offset, payload_at, checksum.value, *rest)
    number = NUMBERS[checksum.algorithm]
    check = zlib.crc32(second, zlib.crc32(bytes((VERSION, 0, kind, number))))
    return _FIRST_PART.pack(MAGIC, VERSION, kind, number, check) + second


def decode_header(data: Any, place: HeaderPlace | None = None) -> RecordHeader | Flaw:
    """Return what a header says, or what is wrong with it.

    ``place`` is where the bytes were found; a header that was written for another place is a flaw. None allows any.
    """
    if len(data) < HEADER_BYTES:
        return Flaw("corrupt", f"{len(data)} bytes are too few for a header of {HEADER_BYTES}")
    data = bytes(data[:HEADER_BYTES])
    magic, version, kind, number, check = _FIRST_PART.unpack_from(data)
    if magic not in (MAGIC, DELETED):
        return Flaw("corrupt", "no header begins here")
    if version != VERSION:
        return Flaw("format", f"written in format {version}, and this is format {VERSION}")
    if check != zlib.crc32(data[_FIRST_PART.size :], zlib.crc32(data[8:12])):
        return Flaw("corrupt", "the header is not what was written")
    fields = _SECOND_PART.unpack_from(data, _FIRST_PART.size)
    size, generation, offset, payload_at, value, content, digest, start, end, component, layout = fields
    algorithm: Algorithm | None = ALGORITHMS.get(number)
    if algorithm is None or kind not in KINDS:
        return Flaw("format", f"a record of kind {kind} with checksum {number}, which this version does not know")
    written_for = HeaderPlace(generation, offset)
    if place is not None and written_for != place:
        return Flaw("corrupt", f"written for {written_for}, found at {place}")
    names = _decode_name(component), _decode_name(layout)
    if not 0 < size <= MAX_PAYLOAD or not start <= end <= MAX_POSITION or not all(names):
        return Flaw("corrupt", f"no record has {size} bytes for [{start}, {end}) of {names}")
    checksum = Checksum(algorithm, value)
    deleted = magic == DELETED
    return RecordHeader(
        KINDS[kind], deleted, size, written_for, payload_at, checksum, content, digest, start, end, *names
    )


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


def decode_record(data: Any, key: Key, place: HeaderPlace | None = None) -> Record | Flaw:
    """Return the record of ``key`` from a header and the payload behind it: for stores that keep both as one value."""
    header = decode_header(memoryview(data)[:HEADER_BYTES], place)
    if isinstance(header, Flaw):
        return header
    return header.record(key, memoryview(data)[HEADER_BYTES:])
