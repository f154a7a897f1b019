"""Shelf: the segments of a directory, and which of them is written, used again or removed. It knows no key."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from prefixloom import StorageError

from .directory import WriterLock, lock_directory, open_directory
from .disk import Disk, OpenFile
from .segment import Segment

NAME = re.compile(r"segment-(\d{8})\.loom")
LARGEST = 64 << 20
SHARE = 8
"""A store has at least so many segments, so that an eviction costs no more than this part of it."""
SMALLEST = 16 << 10


def segment_size(capacity: int, asked: int | None) -> int:
    size = min(LARGEST, capacity // SHARE) if asked is None else asked
    size = size // 4096 * 4096
    if size < SMALLEST or size > capacity:
        raise StorageError(
            f"a store of {capacity} bytes with segments of {size} cannot be: a segment has at least {SMALLEST} bytes, "
            f"and by default a store has {SHARE}. Choose a larger capacity"
        )
    return size


class Shelf:
    """Opens the directory and its segments. ``active`` is the one that is being written."""

    def __init__(self, path: str | Path, capacity: int, segment_bytes: int | None, read_only: bool, disk: Disk) -> None:
        self.segment_bytes = 0 if read_only else segment_size(capacity, segment_bytes)
        self.path, self.capacity, self.disk = Path(path), capacity, disk
        self.directory = open_directory(path, create=not read_only)
        self.lock: WriterLock | None = None if read_only else lock_directory(disk, self.directory, path)
        self.segments: dict[str, Segment] = {}
        self.active: Segment | None = None
        self.strange: dict[str, str] = {}
        self._ticks = 0

    @property
    def used(self) -> int:
        return sum(segment.size for segment in self.segments.values())

    @property
    def writes(self) -> bool:
        return self.lock is not None and self.lock.held

    def touch(self, segment: Segment) -> None:
        """It was used now."""
        self._ticks += 1
        segment.used_at = self._ticks

    # ------------------------------------------------------------ what is there

    def discover(self) -> Iterator[Segment]:
        """Open what was not open yet, oldest first. What stands in a segment's place and is none is left alone."""
        new: list[Segment] = []
        for name in sorted(self.disk.names(self.directory.number)):
            if NAME.fullmatch(name) and name not in self.segments:
                segment = self._opened(name)
                if segment is not None:
                    new.append(segment)
        new.sort(key=lambda segment: segment.head.order if segment.head else 0)
        for segment in new:
            self.segments[segment.name] = segment
            self.touch(segment)
            yield segment

    def _opened(self, name: str) -> Segment | None:
        try:
            access = os.O_RDWR if self.lock is not None else os.O_RDONLY
            file = OpenFile(self.disk.open(name, access, self.directory.number))
            found = self.disk.stat(file.number)
            if not stat.S_ISREG(found.st_mode):
                self.strange[name] = f"{name} is no file"
                return None
            segment = Segment(self.disk, name, file, found.st_size)
            segment.head = segment.look()
        except OSError as error:
            self.strange[name] = f"{name} cannot be read: {error.strerror}"
            return None
        self.strange.pop(name, None)
        return segment

    def is_gone(self, segment: Segment) -> bool:
        """Whether somebody removed the file."""
        return self.disk.stat(segment.file.number).st_nlink == 0

    def notes(self) -> tuple[str, ...]:
        flaws = (f"{segment.name}: {segment.flaw}" for segment in self.segments.values() if segment.flaw)
        skipped = sum(segment.skipped for segment in self.segments.values())
        damaged = (f"damaged headers between others: {skipped}",) if skipped else ()
        return (*self.strange.values(), *flaws, *damaged)

    # ------------------------------------------------------------ room

    def can_grow(self) -> bool:
        return self.used + self.segment_bytes <= self.capacity

    def victim(self) -> Segment | None:
        """What goes next: a file that is no segment, then one without records, then the least recently used."""
        if not self.segments:
            return None
        return min(self.segments.values(), key=lambda s: (s.head is not None, bool(s.keys), s.used_at))

    def grow(self) -> Segment:
        """A new file. Raises ``OSError``, and leaves nothing behind."""
        name, file = self._created()
        segment = Segment(self.disk, name, file, self.segment_bytes)
        try:
            self.disk.allocate(file.number, self.segment_bytes)
            self._begin(segment)
        except OSError:
            self.disk.remove(name, self.directory.number)
            raise
        self.segments[name] = segment
        return segment

    def _created(self) -> tuple[str, OpenFile]:
        """An empty file of a name that nothing has."""
        while True:
            numbers = [int(name[8:16]) for name in (*self.segments, *self.strange)]
            name = f"segment-{max(numbers, default=0) + 1:08}.loom"
            try:
                access = os.O_RDWR | os.O_CREAT | os.O_EXCL
                return name, OpenFile(self.disk.open(name, access, self.directory.number))
            except FileExistsError:
                self.strange[name] = f"{name} is somebody else's"

    def reuse(self, segment: Segment) -> Segment | None:
        """Begin it anew, or remove a file of another size: then None. Nobody may count on its records any more."""
        if segment.size == self.segment_bytes:
            self._begin(segment)
            return segment
        self.remove(segment)
        return None

    def remove(self, segment: Segment) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.disk.remove(segment.name, self.directory.number)
        del self.segments[segment.name]

    def _begin(self, segment: Segment) -> None:
        orders = [other.head.order for other in self.segments.values() if other.head is not None]
        segment.begin(max(orders, default=0) + 1)
        self.touch(segment)
        self.active = segment

    def sync(self) -> None:
        for segment in list(self.segments.values()):
            segment.sync()
        os.fsync(self.directory.number)

    def close(self) -> None:
        """Let go of everything; files that are being read stay open until the read is over."""
        self.segments.clear()
        self.active = None
        if self.lock is not None:
            self.lock.release()
