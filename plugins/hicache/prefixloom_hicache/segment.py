"""Segment: one preallocated file of a store, to be appended to, read from and used again.

A payload is written before its header, so a header that can be read means a payload that is whole: whenever the
writing process dies, what it leaves is records, and behind them bytes that are none.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable

from prefixloom.storage import MAX_TEXT, Fingerprint, Record

from .disk import Disk, OpenFile
from .frame import DELETED, HEADER_BYTES, Flaw, Header, Place, header_of, header_of_fingerprint, read_header
from .scan import FIRST_BYTES, HEAD_BYTES, Found, Head, berth, headers, read_head, slot_of


class Segment:
    """``head`` is None while the file holds none that can be read: then it has no records, and is the next to go.

    ``keys`` are the records whose newest header is here, ``told`` the fingerprints that it tells. The next payload goes
    behind ``end``, and the next header has the number ``count``; ``skipped`` before that are damaged.
    """

    __slots__ = (
        "count", "dirty", "disk", "end", "file", "flaw", "head", "keys", "name", "size", "skipped", "told", "used_at"
    )  # fmt: skip

    def __init__(self, disk: Disk, name: str, file: OpenFile, size: int) -> None:
        self.disk, self.name, self.file, self.size = disk, name, file, size
        self.head: Head | None = None
        self.flaw = ""
        self.end, self.count, self.skipped = HEAD_BYTES, 0, 0
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
        if found.size != self.size:  # cut or lengthened, or it was only just being made when it was opened
            self.size = self.disk.stat(self.file.number).st_size
        if found.size != self.size:
            self.flaw = f"it has {self.size} bytes, and was made with {found.size}"
            return None
        self.flaw = ""
        return found

    def lives(self, life: int, writes: bool) -> bool:
        """Whether what was read until now is of this life. Who ``writes`` here knows without a look."""
        head = self.head if writes else self.look()
        return head is not None and head.life == life

    def learn(self, resync: bool = True) -> list[Found]:
        """The headers behind what is known; from then on those are."""
        if self.head is None:
            return []
        found = list(headers(self._read, self.head, self.count, self.end, resync))
        if any(each.skipped for each in found):
            # Damage, or written between two reads. Whatever stands before the last one was written before it: now it is
            # there, and is none only if it is damaged.
            last = found[-1].number
            again = headers(self._read, self.head, self.count, self.end)
            found = list(itertools.takewhile(lambda each: each.number <= last, again))
        if found:
            self.end, self.count = found[-1].end, found[-1].number + 1
            self.skipped += sum(each.skipped for each in found)
        return found

    def adopt(self, head: Head | None) -> None:
        """It was begun anew, here or by another process: nothing of it is known."""
        self.head, self.end, self.count, self.skipped = head, HEAD_BYTES, 0, 0
        self.told.clear()

    def _read(self, size: int, offset: int) -> bytes:
        return self.disk.read(self.file.number, size, offset)

    def fingerprint(self, found: Found) -> Fingerprint | None:
        """What a header of a fingerprint stands for, if it is whole."""
        header = found.header
        text = self._read(min(header.size, MAX_TEXT), header.body)
        told = Fingerprint.read(text) if header.checksum.fits(text) else None
        return told if told is not None and told.digest == header.fingerprint else None

    # ------------------------------------------------------------ writing

    def begin(self, order: int) -> None:
        """Empty it: from here on no header that was written before is one."""
        head = Head(secrets.randbits(64) | 1, order, self.size)
        self.adopt(None)
        self.dirty = True
        self.disk.write(self.file.number, head.pack(), 0)
        self.head, self.flaw = head, ""

    def takes(self, record: Record) -> bool:
        """Whether there is room between the last payload and the last header."""
        fingerprint, at, number = record.key.fingerprint, self.end, self.count
        if fingerprint.digest not in self.told:
            at, number = _behind(at, len(fingerprint.text), number, self.size), number + 1
        end = _behind(at, len(record.payload), number, self.size)
        return self.head is not None and end <= slot_of(number, self.size)

    def append(self, record: Record) -> tuple[Place, int]:
        """Write a record; where its header stands, and its payload."""
        assert self.head is not None
        self.dirty = True
        fingerprint = record.key.fingerprint
        if fingerprint.digest not in self.told:
            text = fingerprint.text.encode()
            self._write(text, lambda place, body: header_of_fingerprint(fingerprint, place, body))
            self.told.add(fingerprint.digest)
        return self._write(record.payload, lambda place, body: header_of(record, place, body))

    def _write(self, payload: bytes | memoryview, header: Callable[[Place, int], bytes]) -> tuple[Place, int]:
        assert self.head is not None
        file = self.file.number
        body = berth(self.end, len(payload), self.count, self.size)
        place = Place(self.head.life, slot_of(self.count, self.size))
        self.disk.write(file, payload, body)
        self.end = body + len(payload)  # if the header fails, it may stand for this all the same
        try:
            self.disk.write(file, header(place, body), place.offset)
        except OSError:
            self._pass_over(place)
            raise
        self.count += 1
        return place, body

    def _pass_over(self, place: Place) -> None:
        """Leave a header where it is if it can be read although its writing failed: a reader that saw it goes on behind
        it, and would never see one that is written over it."""
        with contextlib.suppress(OSError):
            self.count += isinstance(read_header(self._read(HEADER_BYTES, place.offset), place), Header)

    def spoil(self, place: Place, body: int) -> None:
        """Delete a record: its header says so, and whoever does not read that finds a payload that does not fit."""
        self.dirty = True
        self.disk.write(self.file.number, DELETED, place.offset)
        for first in self._read(1, body):
            self.disk.write(self.file.number, bytes((first ^ 0xFF,)), body)

    def sync(self) -> None:
        if self.dirty:
            self.disk.sync(self.file.number)
            self.dirty = False


def _behind(at: int, payload: int, number: int, size: int) -> int:
    """Where a payload ends that is written behind ``at``."""
    return berth(at, payload, number, size) + payload


def fits(size: int, fingerprint: Fingerprint, payload: int) -> bool:
    """Whether a new segment of ``size`` could take such a record."""
    return _behind(_behind(HEAD_BYTES, len(fingerprint.text), 0, size), payload, 1, size) <= slot_of(1, size)
