"""The store ``file``: records in preallocated segments of a directory. One process writes, any number reads.

The index is in memory only, so that no index on the disk can be wrong. A store reads the headers of its segments when
it is opened, and every read checks the payload again. A segment is evicted as a whole.

It knows the contract of stores. Where bytes stand in a segment, and which segment is evicted, the modules below know.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import attrs

from prefixloom import StorageError, hookimpl, parse_memory
from prefixloom.storage import (
    HEADER_BYTES,
    BackendType,
    Checksum,
    Flaw,
    HeaderPlace,
    Key,
    Miss,
    Record,
    RecordHeader,
    Refused,
    Status,
    Stored,
    UrlOption,
    decode_header,
    flat,
    options_of,
    yes_or_no,
)

from ..records.counts import StoreCounts
from ..records.index import RecordIndex
from .disk import GONE, NO_MORE, NO_ROOM, Disk, remedy
from .segment import Segment, fits_in_empty
from .segment_format import FoundHeader
from .segment_set import SegmentSet


@attrs.define(eq=False)
class RecordLocation:
    """Where a record is, and what its header says.

    The header stands at ``place`` of ``segment``, and the payload of ``size`` bytes begins at ``payload_at``.
    """

    segment: Segment
    place: HeaderPlace
    payload_at: int
    size: int
    component: str
    start: int
    end: int
    layout: str
    checksum: Checksum


def _buffer_for(key: Key, location: RecordLocation | Miss, buffer: Any) -> memoryview | Miss:
    """Return the memory to read a record into: the beginning of ``buffer``, or new memory if that is None."""
    if isinstance(location, Miss):
        return location
    size = location.size
    if buffer is None:
        return memoryview(bytearray(size))
    view = flat(buffer)
    if len(view) < size:
        return Miss(key, "size", f"the record has {size} bytes, the buffer {len(view)}")
    return view[:size]


def _payload_flaw(location: RecordLocation, done: int) -> Flaw:
    """Say why the ``done`` bytes that were read are not the payload."""
    if done < location.size:
        return Flaw("corrupt", f"the file ends {location.size - done} bytes too early")
    if not location.checksum.known:
        return Flaw("format", f"its checksum is {location.checksum.algorithm}: install xxhash to read it")
    return Flaw("corrupt", "the payload is not what was written")


class FileBackend:
    """Records in ``directory``, in at most ``capacity`` bytes. Only the user who owns the directory can read them.

    ``read_only``        read what another process writes. At a miss, the store looks for what was written meanwhile,
                         at most once in ``refresh_seconds``
    ``segment_bytes``    the size of each file. The largest record is a little smaller
    ``clock``, ``disk``  what tests put in the place of the time and of the system calls

    Two locks: ``_writing`` is held through a whole write, ``_lock`` only while the index or the counts are used. A
    payload is read under neither.
    """

    def __init__(
        self,
        directory: str | Path,
        capacity: int = 16 << 30,
        *,
        read_only: bool = False,
        segment_bytes: int | None = None,
        refresh_seconds: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
        disk: Disk | None = None,
    ) -> None:
        self._disk = Disk() if disk is None else disk
        self._segments = SegmentSet(directory, capacity, segment_bytes, read_only, self._disk)
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._index: RecordIndex[RecordLocation] = RecordIndex()
        self._counts = StoreCounts()
        self._closed = False
        self._clock, self._refresh_seconds, self._refreshed_at = clock, refresh_seconds, clock()
        try:
            self._index_new_segments(refuse=True)
            if not read_only:
                self._resume_writing()
        except BaseException as error:
            self._segments.close()  # whoever keeps the error keeps this object
            if not isinstance(error, OSError):
                raise
            raise StorageError(
                f"{directory} cannot be read: {error.strerror}. {remedy(error, 'Check the disk')}"
            ) from error

    @property
    def directory(self) -> Path:
        return self._segments.path

    @property
    def capacity(self) -> int:
        return self._segments.capacity

    def locate(self, key: Key) -> RecordLocation | None:
        """Return where the record of a key is, as far as the index knows. For tools that look at the files."""
        with self._lock:
            return self._index.find(key)

    # ------------------------------------------------------------ the index

    def _index_new_segments(self, refuse: bool = False) -> None:
        for segment in self._segments.open_new(refuse):
            self._index_new_headers(segment)

    def _resume_writing(self) -> None:
        """Go on in the segment that the last writer wrote to. First remove what exceeds the present capacity."""
        while self._segments.used > self._segments.capacity:
            victim = self._segments.next_to_evict()
            assert victim is not None
            self._counts.evicted += self._forget_all(victim)
            self._segments.remove(victim)
        segments, size = self._segments.by_name.values(), self._segments.segment_bytes
        usable = [segment for segment in segments if segment.head is not None and segment.size == size]
        self._segments.active = max(usable, key=lambda s: s.head.order if s.head else 0, default=None)

    def _index_new_headers(self, segment: Segment, past_damage: bool = True) -> None:
        """Add the new headers of a segment to the index. Of two headers of one record, the later one counts."""
        try:
            found = segment.read_new_headers(past_damage)
        except OSError as error:
            if error.errno in NO_MORE:
                raise
            segment.head, segment.flaw = None, f"cannot be read: {error.strerror}"
            return
        for each in found:
            header = each.header
            if header.kind == "fingerprint":
                self._index_fingerprint(segment, each)
            elif not header.deleted:
                facts = (header.size, header.component, header.start, header.end, header.layout, header.checksum)
                location = RecordLocation(segment, header.place, header.payload_at, *facts)
                self._add(header.fingerprint, header.content, location)

    def _index_fingerprint(self, segment: Segment, found: FoundHeader) -> None:
        try:
            fingerprint = segment.read_fingerprint(found)
        except OSError:
            fingerprint = None
        if fingerprint is not None:
            segment.fingerprints.add(fingerprint.digest)
            self._index.add_fingerprint(fingerprint)

    def _add(self, digest: bytes, content: bytes, location: RecordLocation) -> None:
        self._forget(digest, content)
        self._index.add(digest, content, location)
        location.segment.keys.add((digest, content))

    def _forget(self, digest: bytes, content: bytes, location: RecordLocation | None = None) -> bool:
        found = self._index.at(digest, content)
        if found is None or not self._index.drop(digest, content, location):
            return False
        found.segment.keys.discard((digest, content))
        return True

    def _forget_all(self, segment: Segment) -> int:
        """Forget all records of a segment, and return how many there were."""
        gone = list(segment.keys)
        for digest, content in gone:
            self._forget(digest, content)
        return len(gone)

    def _refresh(self) -> None:
        """In a reading process, take over what the writer did since the last refresh."""
        now = self._clock()
        if self._segments.lock is not None or self._closed or now - self._refreshed_at < self._refresh_seconds:
            return
        self._refreshed_at = now
        # The index keeps the records of a segment that cannot be read now. Each read checks them anyway.
        for segment in list(self._segments.by_name.values()):
            with contextlib.suppress(OSError):
                self._refresh_segment(segment)
        with contextlib.suppress(OSError):
            self._index_new_segments()

    def _refresh_segment(self, segment: Segment) -> None:
        if not self._segments.is_there(segment):
            self._forget_all(segment)
            self._segments.forget(segment)
            return
        head = segment.read_head()
        if head != segment.head:
            self._forget_all(segment)
            segment.forget(head)
        self._index_new_headers(segment, past_damage=False)

    # ------------------------------------------------------------ reading

    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        """Answer the contract's ``get``.

        Each step runs over all keys before the next step begins: copying a payload drives everything else out of the
        processor's caches.
        """
        buffers: Sequence[Any] = [None] * len(keys) if into is None else into
        with self._lock:
            locations = [self._look_up(key) for key in keys]
        targets = [_buffer_for(*each) for each in zip(keys, locations, buffers, strict=True)]
        payloads = [self._read(*each) for each in zip(keys, locations, targets, strict=True)]
        is_writer = self._segments.is_writer
        out = tuple(self._answer(*each, is_writer) for each in zip(keys, locations, payloads, strict=True))
        with self._lock:
            return self._counts.read(out)

    def _look_up(self, key: Key) -> RecordLocation | Miss:
        if self._closed:
            return Miss(key, "closed")
        location = self._find(key)
        if location is None:
            return self._index.missing(key)
        self._segments.touch(location.segment)
        return location

    def _find(self, key: Key) -> RecordLocation | None:
        location = self._index.find(key)
        if location is None:
            self._refresh()
            location = self._index.find(key)
        return location

    def _read(self, key: Key, location: RecordLocation | Miss, target: memoryview | Miss) -> memoryview | Miss:
        """Read a payload and check it. Its header was read when the location was made."""
        if isinstance(location, Miss):
            return location
        if isinstance(target, Miss):
            return target
        try:
            done = location.segment.read_into(target, location.payload_at)
        except OSError as error:
            return self._unreadable(key, location, error)
        if done == location.size and location.checksum.fits(target):
            return target
        return self._drop_invalid(key, location, _payload_flaw(location, done))

    def _answer(
        self, key: Key, location: RecordLocation | Miss, payload: memoryview | Miss, is_writer: bool
    ) -> Record | Miss:
        """Return the record, if its segment is still of the same generation after the payload was read."""
        if isinstance(location, Miss):
            return location
        if isinstance(payload, Miss):
            return payload
        at = location
        try:
            if at.segment.is_generation(at.place.generation, is_writer):
                return Record(key, at.component, at.start, at.end, at.layout, payload, at.checksum)
        except OSError as error:
            return self._unreadable(key, at, error)
        return self._drop_invalid(key, at, Flaw("corrupt", at.segment.flaw or "the segment was used again"))

    def _unreadable(self, key: Key, location: RecordLocation, error: OSError) -> Miss:
        """Return the miss for a record whose file cannot be read. If the file is gone, forget the record."""
        name = location.segment.name
        if error.errno not in GONE:
            return Miss(key, "io", f"{name}: {error.strerror}")
        with self._lock:
            self._forget(key.fingerprint.digest, key.content, location)
        return Miss(key, "absent", f"{name} was removed meanwhile")

    def _drop_invalid(self, key: Key, location: RecordLocation, flaw: Flaw) -> Miss:
        """Forget a record whose bytes are not there any more, and return the miss.

        A record that was removed meanwhile is ``absent``. Otherwise it is damaged, and ``flaw`` says how.
        """
        with self._lock:
            was_known = self._forget(key.fingerprint.digest, key.content, location)
        if not was_known or self._was_removed(location):
            return Miss(key, "absent", "it was removed meanwhile")
        return Miss(key, flaw.reason, f"{location.segment.name} at {location.payload_at}: {flaw.detail}")

    def _was_removed(self, location: RecordLocation) -> bool:
        """Whether the record was deleted, or its segment was begun anew."""
        try:
            data = location.segment.read(HEADER_BYTES, location.place.offset)
            header = decode_header(data, location.place)
            # The head is read after the header: if the generation is unchanged here, the header was of it too.
            head = location.segment.read_head()
        except OSError:
            return False
        begun_anew = head is not None and head.generation != location.place.generation
        return begun_anew or (isinstance(header, RecordHeader) and header.deleted)

    def exists(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        with self._lock:
            return tuple(not self._closed and self._find(key) is not None for key in keys)

    # ------------------------------------------------------------ writing

    def put(self, records: Sequence[Record]) -> tuple[Stored | Refused, ...]:
        with self._writing:
            gone = self._gone()
            return tuple(self._put(record, gone) for record in records)

    def _gone(self) -> str:
        """Say why what is written now would not be found again; "" if it would."""
        try:
            self._segments.check_place()
        except OSError as error:
            return str(error.strerror)
        return ""

    def _put(self, record: Record, gone: str) -> Stored | Refused:
        key = record.key
        with self._lock:
            if self._closed:
                return self._counts.refused(key, "closed", "the store was closed")
            if not self._segments.is_writer:
                return self._counts.refused(key, "read_only", "this process may not write here, another process may")
            if gone:
                return self._counts.refused(key, "io", gone)
            known = self._index.find(key)
            if known is not None:
                self._segments.touch(known.segment)
        try:
            if known is not None:
                if self._segments.is_there(known.segment):
                    with self._lock:
                        return self._counts.stored(key, fresh=False)
                self._lose(known.segment)
            segment = self._segments.active
            if segment is None or segment.unsafe or not segment.has_room_for(record):
                if not fits_in_empty(self._segments.segment_bytes, key.fingerprint, len(record.payload)):
                    return self._refuse_too_large(record)
                segment = self._empty_segment()
            try:
                place, payload_at = segment.append(record)
            finally:
                self._segments.wrote(segment)
            if segment.was_removed():
                raise self._lose(segment)
        except OSError as error:
            with self._lock:
                return self._counts.refused(key, "capacity" if error.errno in NO_ROOM else "io", str(error.strerror))
        with self._lock:
            self._segments.touch(segment)
            self._index.add_fingerprint(key.fingerprint)
            facts = (record.component, record.start, record.end, record.layout, record.checksum)
            location = RecordLocation(segment, place, payload_at, len(record.payload), *facts)
            self._add(key.fingerprint.digest, key.content, location)
            return self._counts.stored(key)

    def _refuse_too_large(self, record: Record) -> Refused:
        detail = f"{len(record.payload)} bytes do not fit into a segment of {self._segments.segment_bytes}"
        with self._lock:
            return self._counts.refused(record.key, "size", detail)

    def _lose(self, segment: Segment) -> OSError:
        """Forget a segment whose file another program took away, and return what to say of it."""
        with self._lock:
            self._forget_all(segment)
            return self._segments.lose(segment)

    def _empty_segment(self) -> Segment:
        """Return an empty segment: a new one, or one whose records are evicted."""
        self._segments.check_place()
        failure = OSError(errno.ENOSPC, "the capacity is less than a segment")
        while True:
            if self._segments.can_grow():
                try:
                    with self._lock:
                        return self._segments.grow()
                except OSError as error:
                    if error.errno in NO_MORE:
                        raise  # what is stored is not evicted for what may be over in a moment
                    failure = error  # for instance, the disk is full: a segment that exists may be begun anew
            victim = self._segments.next_to_evict()
            if victim is None:
                try:
                    raise failure
                finally:
                    del failure  # it refers to this frame, which would keep all files open
            with self._lock:
                reusable = self._segments.can_recycle(victim)
                self._counts.evicted += self._forget_all(victim)
                if reusable:
                    return self._segments.recycle(victim)
                self._segments.remove(victim)

    def delete(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        with self._writing:
            if self._gone():
                return (False,) * len(keys)
            return tuple(map(self._delete, keys))

    def _delete(self, key: Key) -> bool:
        with self._lock:
            location = None if self._closed or not self._segments.is_writer else self._index.find(key)
            if location is None:
                return False
            self._forget(key.fingerprint.digest, key.content)
        with contextlib.suppress(OSError):  # then the record may come back, unchanged, when the store is opened again
            location.segment.mark_deleted(location.place, location.payload_at)
        self._segments.wrote(location.segment)
        return True

    def flush(self) -> bool:
        with self._writing:
            if self._closed or not self._segments.is_writer:
                return False
            try:
                self._segments.check_place()
                gone = [segment for segment in self._segments.by_name.values() if not self._segments.is_there(segment)]
                for segment in gone:
                    self._lose(segment)
                return self._segments.sync() and not gone
            except OSError:
                return False

    # ------------------------------------------------------------ status and end

    def status(self) -> Status:
        with self._lock:
            sizes = len(self._index), self._segments.used, self._segments.capacity
            return self._counts.status(*sizes, foreign=self._index.foreign(), notes=self._segments.notes())

    def close(self) -> None:
        with self._writing, self._lock:
            self._closed = True
            self._index = RecordIndex()
            self._segments.close()


prefixloom_api = 1  # of the plugin contract: clause O3 of docs/hooks.md


@hookimpl
def prefixloom_storage() -> BackendType:
    """Offer the store to the registry."""
    summary = "records in files of one machine, several processes, survives a crash"
    return BackendType("file", FileBackend, summary, open_url)


OPTIONS: Mapping[str, UrlOption] = {
    "capacity": lambda text: parse_memory(text, "capacity"),
    "segment_bytes": lambda text: parse_memory(text, "segment_bytes"),
    "read_only": yes_or_no,
}
"""What may stand behind the ``?`` of a URL."""


def open_url(url: str) -> FileBackend:
    """Open ``file:DIRECTORY?capacity=20GiB``."""
    plain, options, others = options_of(url, OPTIONS)
    parts = urlsplit(plain)
    directory = unquote(parts.path)
    if not directory or parts.netloc or parts.fragment:
        raise StorageError(f"{url!r} names no directory: write file:/DIRECTORY, or file:DIRECTORY?capacity=20GiB")
    if others:
        raise StorageError(f"{url!r} has {', '.join(map(repr, others))}: the store takes {', '.join(OPTIONS)}")
    return FileBackend(directory, **options)
