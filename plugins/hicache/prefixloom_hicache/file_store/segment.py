"""Segment: one preallocated file of a store. It is appended to, read from, and begun anew when its room is needed.

A payload is written before its header, so a header that can be read means that its payload is complete. Whenever the
writing process dies, it leaves complete records, and behind them bytes that no header describes.

A segment knows its file and the format. It knows no other segment, no index and no policy.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable

from prefixloom.storage import (
    DELETED,
    HEADER_BYTES,
    MAX_TEXT,
    Fingerprint,
    Flaw,
    HeaderPlace,
    Record,
    RecordHeader,
    decode_header,
    encode_fingerprint_header,
    encode_header,
)

from .disk import Disk, FileId, OpenFile
from .open_files import OpenFiles
from .segment_format import (
    HEAD_BYTES,
    PACKED_HEAD_BYTES,
    FoundHeader,
    SegmentHead,
    decode_head,
    header_offset,
    payload_start,
    scan_headers,
)


class Segment:
    """A segment file, and what this process knows of it.

    ``id``            which file it is
    ``head``          None if the file has no head that can be read: then it has no records and is recycled first.
                      ``flaw`` says what is wrong
    ``payloads_end``  where the last payload ends; the next one goes behind it
    ``count``         the number of the next header
    ``damaged``       how many headers before that are not valid
    ``fingerprints``  digests of the fingerprints whose full text is in this segment
    ``keys``          the records whose newest header is here. The store keeps them
    ``inherited``     whether an earlier process wrote it, which may have died before it synced
    ``last_used``     the tick of the last use. The segment set keeps it
    ``unsynced``      the file, held open from the first write to the next ``sync``: the kernel tells only who has the
                      file open for certain that what was written could not be brought to the disk
    ``unsafe``        why what was written may not be on the disk; "" if it is or can be brought there. The kernel tells
                      of a failure once, so a later ``sync`` proves nothing
    """

    __slots__ = (
        "count", "damaged", "disk", "files", "fingerprints", "flaw", "head", "id", "inherited", "keys", "last_used",
        "payloads_end", "size", "unsafe", "unsynced",
    )  # fmt: skip

    def __init__(self, disk: Disk, files: OpenFiles, which: FileId, size: int) -> None:
        self.disk, self.files, self.id, self.size = disk, files, which, size
        self.head: SegmentHead | None = None
        self.flaw = ""
        self.payloads_end, self.count, self.damaged = HEAD_BYTES, 0, 0
        self.keys: set[tuple[bytes, bytes]] = set()
        self.last_used = 0
        self.inherited = False
        self.fingerprints: set[bytes] = set()
        self.unsynced: OpenFile | None = None
        self.unsafe = ""

    @property
    def name(self) -> str:
        return self.id.name

    def _file(self) -> OpenFile:
        """Return the file. Whoever uses its number holds what is returned meanwhile."""
        return self.unsynced or self.files.get(self.id)

    # ------------------------------------------------------------ reading

    def read_head(self) -> SegmentHead | None:
        """Return the head as it is on the disk now. If there is no valid one, set ``flaw`` and return None."""
        found = decode_head(self.read(PACKED_HEAD_BYTES, 0))
        if isinstance(found, Flaw):
            self.flaw = found.detail
            return None
        if found.size != self.size:  # the file was cut or lengthened, or was still being made when it was opened
            file = self._file()
            self.size = self.disk.stat(file.number).st_size
        if found.size != self.size:
            self.flaw = f"it has {self.size} bytes, and was made with {found.size}"
            return None
        self.flaw = ""
        return found

    def is_generation(self, generation: int, is_writer: bool) -> bool:
        """Whether the segment is still of this generation. The writer knows without reading the disk."""
        head = self.head if is_writer else self.read_head()
        return head is not None and head.generation == generation

    def read_new_headers(self, past_damage: bool = True) -> list[FoundHeader]:
        """Return the headers behind the known ones. From then on they are known."""
        if self.head is None:
            return []
        found = list(scan_headers(self.read, self.head, self.count, self.payloads_end, past_damage))
        if any(each.damaged for each in found):
            # Either headers are damaged, or they were written between two reads of the scan. Whatever stands before the
            # last valid header was written before it. So a second scan finds it, unless it is damaged.
            last = found[-1].number
            again = scan_headers(self.read, self.head, self.count, self.payloads_end)
            found = list(itertools.takewhile(lambda each: each.number <= last, again))
        if found:
            self.payloads_end, self.count = found[-1].payload_end, found[-1].number + 1
            self.damaged += sum(each.damaged for each in found)
        return found

    def forget(self, head: SegmentHead | None) -> None:
        """Forget the records, because this process or another one has begun the segment anew with ``head``."""
        self.head, self.payloads_end, self.count, self.damaged = head, HEAD_BYTES, 0, 0
        self.fingerprints.clear()

    def read(self, size: int, offset: int) -> bytes:
        """Read ``size`` bytes. It returns fewer only at the end of the file."""
        file = self._file()
        return self.disk.read(file.number, size, offset)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the buffer and return the number of bytes. It reads fewer only at the end of the file."""
        file = self._file()
        return self.disk.read_into(file.number, buffer, offset)

    def read_fingerprint(self, found: FoundHeader) -> Fingerprint | None:
        """Return the fingerprint that a header of a fingerprint describes. Return None if its text is damaged."""
        header = found.header
        text = self.read(min(header.size, MAX_TEXT), header.payload_at)
        fingerprint = Fingerprint.read(text) if header.checksum.fits(text) else None
        return fingerprint if fingerprint is not None and fingerprint.digest == header.fingerprint else None

    # ------------------------------------------------------------ writing

    def hold(self) -> OpenFile:
        """Return the file, and hold it open until the next ``sync``. If this raises, nothing has changed."""
        if self.unsynced is None:
            self.unsynced = self.files.get(self.id)
        return self.unsynced

    def begin(self, order: int) -> None:
        """Empty the segment by a new generation: no header that was written before is valid from here on."""
        file = self.hold()
        head = SegmentHead(secrets.randbits(64) | 1, order, self.size)
        self.forget(None)
        self.disk.write(file.number, head.encode(), 0)
        self.head, self.flaw, self.unsafe = head, "", ""

    def has_room_for(self, record: Record) -> bool:
        """Whether the record fits between the last payload and the last header."""
        fingerprint, after, number = record.key.fingerprint, self.payloads_end, self.count
        if fingerprint.digest not in self.fingerprints:
            after, number = _payload_end(after, len(fingerprint.text), number, self.size), number + 1
        end = _payload_end(after, len(record.payload), number, self.size)
        return self.head is not None and end <= header_offset(number, self.size)

    def append(self, record: Record) -> tuple[HeaderPlace, int]:
        """Write a record. Return where its header stands, and where its payload begins."""
        fingerprint = record.key.fingerprint
        if fingerprint.digest not in self.fingerprints:
            text = fingerprint.text.encode()
            self._write(text, lambda place, start: encode_fingerprint_header(fingerprint, place, start))
            self.fingerprints.add(fingerprint.digest)
        return self._write(record.payload, lambda place, start: encode_header(record, place, start))

    def _write(
        self, payload: bytes | memoryview, header: Callable[[HeaderPlace, int], bytes]
    ) -> tuple[HeaderPlace, int]:
        assert self.head is not None
        file = self.hold().number  # which stays open, since only a sync lets go of it
        start = payload_start(self.payloads_end, len(payload), self.count, self.size)
        place = HeaderPlace(self.head.generation, header_offset(self.count, self.size))
        self.disk.write(file, payload, start)
        self.payloads_end = start + len(payload)  # before the header: if that write fails, it may be readable anyway
        try:
            self.disk.write(file, header(place, start), place.offset)
        except OSError:
            self._keep_if_readable(place)
            raise
        self.count += 1
        return place, start

    def _keep_if_readable(self, place: HeaderPlace) -> None:
        """Keep a header whose writing failed if it can be read all the same.

        A reader that saw it goes on behind it, and would never see another header that is written over it.
        """
        with contextlib.suppress(OSError):
            self.count += isinstance(decode_header(self.read(HEADER_BYTES, place.offset), place), RecordHeader)

    def mark_deleted(self, place: HeaderPlace, payload_at: int) -> None:
        """Delete a record on the disk.

        Its header says so. A reader that does not read the header again finds a payload that fails its checksum.
        """
        file = self.hold().number
        self.disk.write(file, DELETED, place.offset)
        for first in self.read(1, payload_at):
            self.disk.write(file, bytes((first ^ 0xFF,)), payload_at)

    def was_removed(self) -> bool:
        """Whether the file has no name any more. This costs less than a look at the directory."""
        file = self._file()
        return self.disk.stat(file.number).st_nlink == 0

    def sync(self) -> None:
        """Wait until what was written is on the disk, and let go of the file. ``unsafe`` says whether this failed."""
        if self.unsynced is None:
            return
        try:
            self.disk.sync(self.unsynced.number)
        except OSError as error:
            self.unsafe = f"{self.name} may not be on the disk: {error.strerror}"
        self.unsynced, self.inherited = None, False


def _payload_end(after: int, payload: int, number: int, size: int) -> int:
    """Return where the next payload ends, given that the one before it ends at ``after``."""
    return payload_start(after, payload, number, size) + payload


def fits_in_empty(size: int, fingerprint: Fingerprint, payload: int) -> bool:
    """Whether an empty segment of ``size`` bytes has room for a record of this fingerprint and payload size."""
    after = _payload_end(HEAD_BYTES, len(fingerprint.text), 0, size)
    return _payload_end(after, payload, 1, size) <= header_offset(1, size)
