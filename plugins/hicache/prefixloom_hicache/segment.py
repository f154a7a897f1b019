"""Segment: one preallocated file of a store, to be appended to, read from and used again.

A frame's payload is written before its header, so a header that can be read means a payload that is whole: whenever
the writing process dies, what it leaves is frames, and behind them bytes that are none.
"""

from __future__ import annotations

import secrets

from prefixloom.storage import MAX_TEXT, Fingerprint, Record

from .disk import Disk, OpenFile
from .frame import DELETED, HEADER_BYTES, Flaw, Place, fingerprint_frame, header_of
from .scan import FIRST_BYTES, HEAD_BYTES, Found, Head, frames, read_head, room, start_of


class Segment:
    """``head`` is None while the file holds none that can be read: then it has no frames, and is the next to go.

    ``keys`` are the records whose newest frame is here, ``told`` the fingerprints that it tells.
    """

    __slots__ = ("dirty", "disk", "end", "file", "flaw", "head", "keys", "name", "size", "told", "used_at")

    def __init__(self, disk: Disk, name: str, file: OpenFile, size: int) -> None:
        self.disk, self.name, self.file, self.size = disk, name, file, size
        self.head: Head | None = None
        self.flaw = ""
        self.end = HEAD_BYTES
        self.keys: set[tuple[bytes, bytes]] = set()
        self.used_at = 0
        self.told: set[bytes] = set()
        self.dirty = False

    # ------------------------------------------------------------ reading

    def look(self) -> Head | None:
        """The head as it is on the disk now."""
        found = read_head(self.disk.read(self.file.number, FIRST_BYTES, 0))
        if isinstance(found, Flaw):
            self.flaw = found.detail
            return None
        return found

    def frames(self, resync: bool = True) -> list[Found]:
        """The frames behind what is known; ``end`` moves behind the last."""
        if self.head is None:
            return []
        found = list(frames(self._read, self.head.life, self.end, self.size, resync))
        if found:
            self.end = found[-1].end
        return found

    def _read(self, size: int, offset: int) -> bytes:
        return self.disk.read(self.file.number, size, offset)

    def fingerprint(self, frame: Found) -> Fingerprint | None:
        """What a frame of a fingerprint tells, if it is whole."""
        size = min(frame.header.size, MAX_TEXT)
        text = self._read(size, frame.offset + HEADER_BYTES)
        told = Fingerprint.read(text) if frame.header.checksum.fits(text) else None
        return told if told is not None and told.digest == frame.header.fingerprint else None

    # ------------------------------------------------------------ writing

    def begin(self, order: int) -> None:
        """Empty it: from here on no frame that was written before is one."""
        head = Head(secrets.randbits(64) | 1, order)
        self.head = None
        self.dirty = True
        self.disk.write(self.file.number, head.pack(), 0)
        self.head, self.flaw, self.end = head, "", HEAD_BYTES
        self.told.clear()

    def takes(self, record: Record) -> bool:
        """Whether there is room behind the last frame."""
        fingerprint, size = record.key.fingerprint, len(record.payload)
        at = self.end if fingerprint.digest in self.told else self.end + room(len(fingerprint.text))
        return self.head is not None and start_of(at, size) + room(size) <= self.size

    def append(self, record: Record) -> Place:
        """Write a frame; where it stands."""
        assert self.head is not None
        self.dirty = True
        fingerprint = record.key.fingerprint
        if fingerprint.digest not in self.told:
            frame = fingerprint_frame(fingerprint, Place(self.head.life, self.end))
            self._write(self.end, frame[:HEADER_BYTES], frame[HEADER_BYTES:])
            self.told.add(fingerprint.digest)
        place = Place(self.head.life, start_of(self.end, len(record.payload)))
        self._write(place.offset, header_of(record, place), record.payload)
        return place

    def _write(self, at: int, header: bytes, payload: bytes | memoryview) -> None:
        file = self.file.number
        self.disk.write(file, payload, at + HEADER_BYTES)
        self.end = at + room(len(payload))  # if the header fails, nobody knows how much of it is there
        self.disk.write(file, header, at)

    def mark_deleted(self, offset: int) -> None:
        self.dirty = True
        self.disk.write(self.file.number, DELETED, offset)

    def sync(self) -> None:
        if self.dirty:
            self.disk.sync(self.file.number)
            self.dirty = False


def fits(size: int, fingerprint: Fingerprint, payload: int) -> bool:
    """Whether a new segment of ``size`` could take such a record."""
    return start_of(HEAD_BYTES + room(len(fingerprint.text)), payload) + room(payload) <= size
