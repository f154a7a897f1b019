"""Frame: a record as bytes. A header of fixed size, checked by itself, and the payload, behind it or apart.

A header says all that is needed to know the record again, so that a store can be read from its headers alone. ``place``
says where it was written; bytes that lie anywhere else are none. No pickle, nothing executed, nothing allocated by what
a header claims before the claim is checked.
"""

from __future__ import annotations

import functools
import struct
import zlib
from typing import Any, Literal

import attrs

from prefixloom.storage import (
    ALGORITHMS,
    MAX_PAYLOAD,
    MAX_POSITION,
    NUMBERS,
    Algorithm,
    Checksum,
    Fingerprint,
    Key,
    Record,
)

MAGIC = b"PLoomRec"
DELETED = b"PLoomDel"
"""Written over the magic; the rest of the header stays good, so that a scan can pass over it."""
VERSION = 2
HEADER_BYTES = 256
Kind = Literal["record", "fingerprint"]
KINDS: dict[int, Kind] = {0: "record", 1: "fingerprint"}

_START = struct.Struct("<8sHBBI")
_REST = struct.Struct("<QQQQQ32s16sQQ64s32s40x")
assert _START.size + _REST.size == HEADER_BYTES


@attrs.frozen
class Place:
    """Where a header was written: the life of a segment, and the offset in it."""

    life: int = 0
    offset: int = 0


@attrs.frozen
class Flaw:
    """Why bytes are no frame: ``format`` (another version), else ``corrupt``."""

    reason: Literal["format", "corrupt"]
    detail: str


@attrs.frozen
class Header:
    """What a header says, after its own checksum was found good.

    ``size`` and ``body``: of the payload, how long it is and where it begins (0: behind the header).
    """

    kind: Kind
    deleted: bool
    size: int
    place: Place
    body: int
    checksum: Checksum
    content: bytes
    fingerprint: bytes
    start: int
    end: int
    component: str
    layout: str

    def record(self, key: Key, payload: Any) -> Record | Flaw:
        """The record, if it is the one of this key and its payload is what was written."""
        if self.kind != "record" or self.fingerprint + self.content != key.address:
            return Flaw("corrupt", "the record is another one's")
        if self.deleted:
            return Flaw("corrupt", "the record was deleted")
        if len(payload) != self.size:
            return Flaw("corrupt", f"the payload has {len(payload)} of {self.size} bytes")
        if not self.checksum.known:
            return Flaw("format", f"its checksum is {self.checksum.algorithm}: install xxhash to read it")
        if not self.checksum.fits(payload):
            return Flaw("corrupt", "the payload is not what was written")
        return Record(key, self.component, self.start, self.end, self.layout, payload, self.checksum)


def header_of(record: Record, place: Place = Place(), body: int = 0) -> bytes:
    """The header of a record, to stand at ``place``."""
    key, checksum = record.key, record.checksum
    named = (record.component.encode(), record.layout.encode())
    where = (key.content, key.fingerprint.digest, record.start, record.end)
    return _packed(0, checksum, len(record.payload), place, body, *where, *named)


def header_of_fingerprint(fingerprint: Fingerprint, place: Place = Place(), body: int = 0) -> bytes:
    """The header of a payload that tells a fingerprint in full (``text``), for the records that come next."""
    text = fingerprint.text.encode()
    checksum = Checksum.of(text, "crc32")
    return _packed(1, checksum, len(text), place, body, bytes(32), fingerprint.digest, 0, 0, b"-", b"-")


def _packed(kind: int, checksum: Checksum, size: int, place: Place, body: int, *rest: Any) -> bytes:
    tail = _REST.pack(size, place.life, place.offset, body, checksum.value, *rest)
    number = NUMBERS[checksum.algorithm]
    check = zlib.crc32(tail, zlib.crc32(bytes((VERSION, 0, kind, number))))
    return _START.pack(MAGIC, VERSION, kind, number, check) + tail


def read_header(data: Any, place: Place | None = None) -> Header | Flaw:
    """What a header says, or what is wrong with it. ``place`` is where it was found; None: anywhere will do."""
    if len(data) < HEADER_BYTES:
        return Flaw("corrupt", f"{len(data)} bytes are no header of {HEADER_BYTES}")
    data = bytes(data[:HEADER_BYTES])
    magic, version, kind, number, check = _START.unpack_from(data)
    if magic not in (MAGIC, DELETED):
        return Flaw("corrupt", "no header begins here")
    if version != VERSION:
        return Flaw("format", f"written in format {version}, and this is format {VERSION}")
    if check != zlib.crc32(data[_START.size :], zlib.crc32(data[8:12])):
        return Flaw("corrupt", "the header is not what was written")
    fields = _REST.unpack_from(data, _START.size)
    size, life, offset, body, value, content, digest, start, end, component, layout = fields
    algorithm: Algorithm | None = ALGORITHMS.get(number)
    if algorithm is None or kind not in KINDS:
        return Flaw("format", f"a record of kind {kind} with checksum {number}, which this version does not know")
    found = Place(life, offset)
    if place is not None and found != place:
        return Flaw("corrupt", f"written for {found}, found at {place}")
    names = _name(component), _name(layout)
    if not 0 < size <= MAX_PAYLOAD or not start <= end <= MAX_POSITION or not all(names):
        return Flaw("corrupt", f"no record has {size} bytes for [{start}, {end}) of {names}")
    checksum = Checksum(algorithm, value)
    return Header(KINDS[kind], magic == DELETED, size, found, body, checksum, content, digest, start, end, *names)


@functools.lru_cache(maxsize=1024)
def _name(padded: bytes) -> str:
    """The name in a field, or "" if there is none that could have been written."""
    name, end, rest = padded.partition(b"\0")
    if not end or any(rest):
        return ""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return ""


def read(data: Any, key: Key, place: Place | None = None) -> Record | Flaw:
    """The record of ``key`` from a whole frame: for stores whose values are frames."""
    header = read_header(memoryview(data)[:HEADER_BYTES], place)
    if isinstance(header, Flaw):
        return header
    return header.record(key, memoryview(data)[HEADER_BYTES:])
