"""The backend ``file``: records in preallocated segments of a directory. One process writes, any number reads.

There is no index on the disk that could be wrong: a store is read from its headers when it is opened, and every read
checks again that what lies there is what was asked for. A segment is the unit of eviction.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from prefixloom import StorageError, hookimpl
from prefixloom.storage import BackendType, Checksum, Key, Miss, Record, Refused, Status, Stored, flat

from .disk import NO_ROOM, Disk
from .frame import HEADER_BYTES, Flaw, Header, Place, read_header
from .index import Index
from .scan import Found
from .segment import Segment, fits
from .shelf import Shelf
from .tally import Tally


@attrs.define(eq=False)
class Entry:
    """Where a record is, its header at ``place`` and its payload at ``body``, and what the header says of it."""

    segment: Segment
    place: Place
    body: int
    size: int
    component: str
    start: int
    end: int
    layout: str
    checksum: Checksum


def _target(key: Key, entry: Entry | Miss, buffer: Any) -> memoryview | Miss:
    """Where to read a record."""
    if isinstance(entry, Miss):
        return entry
    size = entry.size
    if buffer is None:
        return memoryview(bytearray(size))
    view = flat(buffer)
    if len(view) < size:
        return Miss(key, "size", f"the record has {size} bytes, the buffer {len(view)}")
    return view[:size]


def _flaw(entry: Entry, done: int) -> Flaw:
    """Why what was read is not the payload."""
    if done < entry.size:
        return Flaw("corrupt", f"the file ends {entry.size - done} bytes too early")
    if not entry.checksum.known:
        return Flaw("format", f"its checksum is {entry.checksum.algorithm}: install xxhash to read it")
    return Flaw("corrupt", "the payload is not what was written")


class FileBackend:
    """Records in ``directory``, in at most ``capacity`` bytes, for nobody but this user.

    ``read_only`` reads what another process writes; it looks for news at a miss, at most every ``refresh_seconds``.
    ``segment_bytes`` is the size of a file, and the largest record is a little smaller.
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
        self._shelf = Shelf(directory, capacity, segment_bytes, read_only, self._disk)
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._index: Index[Entry] = Index()
        self._tally = Tally()
        self._closed = False
        self._clock, self._refresh_seconds, self._refreshed = clock, refresh_seconds, clock()
        try:
            self._discover()
            if not read_only:
                self._continue()
        except OSError as error:
            raise StorageError(f"{directory} cannot be read: {error.strerror}. Check the disk") from error

    # ------------------------------------------------------------ knowing what is there

    def _discover(self) -> None:
        for segment in self._shelf.discover():
            self._learn(segment)

    def _continue(self) -> None:
        """Write on where the last writer stopped, within the capacity of now."""
        while self._shelf.used > self._shelf.capacity:
            victim = self._shelf.victim()
            assert victim is not None
            self._tally.evicted += self._forget_all(victim)
            self._shelf.remove(victim)
        whole = [s for s in self._shelf.segments.values() if s.head is not None and s.size == self._shelf.segment_bytes]
        self._shelf.active = max(whole, key=lambda s: s.head.order if s.head else 0, default=None)

    def _learn(self, segment: Segment, resync: bool = True) -> None:
        """Take the headers of a segment into the index; a later one of a record stands for an earlier one."""
        try:
            found = segment.learn(resync)
        except OSError as error:
            segment.head, segment.flaw = None, f"cannot be read: {error.strerror}"
            return
        for each in found:
            header = each.header
            if header.kind == "fingerprint":
                self._learn_fingerprint(segment, each)
            elif not header.deleted:
                said = (header.size, header.component, header.start, header.end, header.layout, header.checksum)
                self._place(header.fingerprint, header.content, Entry(segment, header.place, header.body, *said))

    def _learn_fingerprint(self, segment: Segment, found: Found) -> None:
        try:
            told = segment.fingerprint(found)
        except OSError:
            told = None
        if told is not None:
            segment.told.add(told.digest)
            self._index.tell(told)

    def _place(self, digest: bytes, content: bytes, entry: Entry) -> None:
        self._forget(digest, content)
        self._index.add(digest, content, entry)
        entry.segment.keys.add((digest, content))

    def _forget(self, digest: bytes, content: bytes, entry: Entry | None = None) -> bool:
        found = self._index.at(digest, content)
        if found is None or not self._index.drop(digest, content, entry):
            return False
        found.segment.keys.discard((digest, content))
        return True

    def _forget_all(self, segment: Segment) -> int:
        gone = list(segment.keys)
        for digest, content in gone:
            self._forget(digest, content)
        return len(gone)

    def _refresh(self) -> None:
        """A reader's look at what the writer did meanwhile."""
        now = self._clock()
        if self._shelf.lock is not None or self._closed or now - self._refreshed < self._refresh_seconds:
            return
        self._refreshed = now
        # Of what cannot be read now, what is known stays known, and is checked when it is read.
        for segment in list(self._shelf.segments.values()):
            with contextlib.suppress(OSError):
                self._renew(segment)
        with contextlib.suppress(OSError):
            self._discover()

    def _renew(self, segment: Segment) -> None:
        if self._shelf.is_gone(segment):
            self._forget_all(segment)
            del self._shelf.segments[segment.name]
            return
        head = segment.look()
        if head != segment.head:
            self._forget_all(segment)
            segment.adopt(head)
        self._learn(segment, resync=False)

    # ------------------------------------------------------------ reading

    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        """Each step over all keys: what copies a payload drives all else out of the processor's caches."""
        buffers: Sequence[Any] = [None] * len(keys) if into is None else into
        with self._lock:
            known = [self._known(key) for key in keys]
        targets = [_target(*each) for each in zip(keys, known, buffers, strict=True)]
        read = [self._read(*each) for each in zip(keys, known, targets, strict=True)]
        writes = self._shelf.writes
        out = tuple(self._answer(*each, writes) for each in zip(keys, known, read, strict=True))
        with self._lock:
            return self._tally.answered(out)

    def _known(self, key: Key) -> Entry | Miss:
        if self._closed:
            return Miss(key, "closed")
        entry = self._find(key)
        if entry is None:
            return self._index.missing(key)
        self._shelf.touch(entry.segment)
        return entry

    def _find(self, key: Key) -> Entry | None:
        entry = self._index.find(key)
        if entry is None:
            self._refresh()
            entry = self._index.find(key)
        return entry

    def _read(self, key: Key, entry: Entry | Miss, target: memoryview | Miss) -> memoryview | Miss:
        """The payload, if it is what was written; its header was read when the entry was made."""
        if isinstance(entry, Miss):
            return entry
        if isinstance(target, Miss):
            return target
        try:
            done = self._disk.read_into(entry.segment.file.number, target, entry.body)
        except OSError as error:
            return Miss(key, "io", f"{entry.segment.name}: {error.strerror}")
        if done == entry.size and entry.checksum.fits(target):
            return target
        return self._disproved(key, entry, _flaw(entry, done))

    def _answer(self, key: Key, entry: Entry | Miss, found: memoryview | Miss, writes: bool) -> Record | Miss:
        """The record, if the segment has not begun another life before it was read."""
        if isinstance(entry, Miss):
            return entry
        if isinstance(found, Miss):
            return found
        try:
            if entry.segment.lives(entry.place.life, writes):
                return Record(key, entry.component, entry.start, entry.end, entry.layout, found, entry.checksum)
        except OSError as error:
            return Miss(key, "io", f"{entry.segment.name}: {error.strerror}")
        return self._disproved(key, entry, Flaw("corrupt", entry.segment.flaw or "the segment was used again"))

    def _disproved(self, key: Key, entry: Entry, flaw: Flaw) -> Miss:
        """What lies there is not the record: it went meanwhile, or it is damaged. Either way it is here no more."""
        with self._lock:
            known = self._forget(key.fingerprint.digest, key.content, entry)
        if not known or self._went(entry):
            return Miss(key, "absent", "it was removed meanwhile")
        return Miss(key, flaw.reason, f"{entry.segment.name} at {entry.body}: {flaw.detail}")

    def _went(self, entry: Entry) -> bool:
        """Whether the segment has begun another life, or the record was deleted."""
        try:
            data = self._disk.read(entry.segment.file.number, HEADER_BYTES, entry.place.offset)
            header = read_header(data, entry.place)
            head = entry.segment.look()  # after the header, which is of this life only if that has lasted until here
        except OSError:
            return False
        return (head is not None and head.life != entry.place.life) or (isinstance(header, Header) and header.deleted)

    def exists(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        with self._lock:
            return tuple(not self._closed and self._find(key) is not None for key in keys)

    # ------------------------------------------------------------ writing

    def put(self, records: Sequence[Record]) -> tuple[Stored | Refused, ...]:
        with self._writing:
            return tuple(map(self._put, records))

    def _put(self, record: Record) -> Stored | Refused:
        key = record.key
        with self._lock:
            if self._closed:
                return self._tally.refuse(key, "closed", "the store was closed")
            if not self._shelf.writes:
                return self._tally.refuse(key, "read_only", "another process may write here, and this one may not")
            known = self._index.find(key)
            if known is not None:
                self._shelf.touch(known.segment)
                return self._tally.stored(key, fresh=False)
        try:
            segment = self._shelf.active
            if segment is None or not segment.takes(record):
                if not fits(self._shelf.segment_bytes, key.fingerprint, len(record.payload)):
                    return self._too_large(record)
                segment = self._emptied()
            place, body = segment.append(record)
        except OSError as error:
            with self._lock:
                return self._tally.refuse(key, "capacity" if error.errno in NO_ROOM else "io", str(error.strerror))
        with self._lock:
            self._shelf.touch(segment)
            self._index.tell(key.fingerprint)
            said = (record.component, record.start, record.end, record.layout, record.checksum)
            entry = Entry(segment, place, body, len(record.payload), *said)
            self._place(key.fingerprint.digest, key.content, entry)
            return self._tally.stored(key)

    def _too_large(self, record: Record) -> Refused:
        told = f"{len(record.payload)} bytes do not fit into a segment of {self._shelf.segment_bytes}"
        with self._lock:
            return self._tally.refuse(record.key, "size", told)

    def _emptied(self) -> Segment:
        """A segment that has nothing yet: a new one, or one that is given up."""
        failure = OSError(errno.ENOSPC, "the capacity is less than a segment")
        while True:
            if self._shelf.can_grow():
                try:
                    with self._lock:
                        return self._shelf.grow()
                except OSError as error:
                    failure = error  # a full disk: what is here already may be used again
            victim = self._shelf.victim()
            if victim is None:
                try:
                    raise failure
                finally:
                    del failure  # which keeps this frame, and with it all files
            with self._lock:
                self._tally.evicted += self._forget_all(victim)
                fresh = self._shelf.reuse(victim)
            if fresh is not None:
                return fresh

    def delete(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        with self._writing:
            return tuple(map(self._delete, keys))

    def _delete(self, key: Key) -> bool:
        with self._lock:
            entry = None if self._closed or not self._shelf.writes else self._index.find(key)
            if entry is None:
                return False
            self._forget(key.fingerprint.digest, key.content)
        with contextlib.suppress(OSError):  # it may come back when the store is opened again, and is then what it was
            entry.segment.spoil(entry.place, entry.body)
        return True

    def flush(self) -> bool:
        with self._writing:
            if self._closed or not self._shelf.writes:
                return False
            try:
                self._shelf.sync()
            except OSError:
                return False
            return True

    # ------------------------------------------------------------ the rest

    def status(self) -> Status:
        with self._lock:
            sizes = len(self._index), self._shelf.used, self._shelf.capacity
            return self._tally.status(*sizes, foreign=self._index.foreign(), notes=self._shelf.notes())

    def close(self) -> None:
        with self._writing, self._lock:
            self._closed = True
            self._index = Index()
            self._shelf.close()


prefixloom_api = 1  # of the plugin contract: clause O3 of docs/hooks.md


@hookimpl
def prefixloom_storage() -> BackendType:
    """Offer the backend to the registry."""
    return BackendType("file", FileBackend, "records in files of one machine, several processes, survives a crash")
