"""Segment set: the segments of a directory, and which of them is written, begun anew or removed.

It knows files and the room that they take. It knows no key and no record.
"""

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
SEGMENTS = 8
"""A store has at least this many segments, so that one eviction costs no more than this part of it."""
SMALLEST = 16 << 10


def segment_size(capacity: int, asked: int | None) -> int:
    """Return the bytes of each segment of a store: what was asked for, or a share of the capacity."""
    size = min(LARGEST, capacity // SEGMENTS) if asked is None else asked
    size = size // 4096 * 4096
    if size < SMALLEST or size > capacity:
        raise StorageError(
            f"a store of {capacity} bytes cannot have segments of {size} bytes: a segment has at least {SMALLEST} "
            f"bytes, and by default a store has {SEGMENTS} segments. Choose a larger capacity"
        )
    return size


class SegmentSet:
    """The open segments of one directory.

    ``by_name``  the segments by the names of their files
    ``active``   the segment that is being written
    ``ignored``  files that stand in the place of a segment and are none, with the reason
    ``lock``     the writer's lock; None if the directory was opened for reading
    """

    def __init__(self, path: str | Path, capacity: int, segment_bytes: int | None, read_only: bool, disk: Disk) -> None:
        self.segment_bytes = 0 if read_only else segment_size(capacity, segment_bytes)
        self.path, self.capacity, self.disk = Path(path), capacity, disk
        self.directory = open_directory(path, create=not read_only)
        self.lock: WriterLock | None = None if read_only else lock_directory(disk, self.directory, path)
        self.by_name: dict[str, Segment] = {}
        self.active: Segment | None = None
        self.ignored: dict[str, str] = {}
        self._tick = 0

    @property
    def used(self) -> int:
        """The bytes of all segments."""
        return sum(segment.size for segment in self.by_name.values())

    @property
    def is_writer(self) -> bool:
        """Whether this process holds the writer's lock."""
        return self.lock is not None and self.lock.held

    def touch(self, segment: Segment) -> None:
        """Make a segment the most recently used one."""
        self._tick += 1
        segment.last_used = self._tick

    # ------------------------------------------------------------ opening

    def open_new(self) -> Iterator[Segment]:
        """Open the segments that are not open yet, and yield them, the oldest first."""
        new: list[Segment] = []
        for name in sorted(self.disk.names(self.directory.number)):
            if NAME.fullmatch(name) and name not in self.by_name:
                segment = self._open(name)
                if segment is not None:
                    new.append(segment)
        new.sort(key=lambda segment: segment.head.order if segment.head else 0)
        for segment in new:
            self.by_name[segment.name] = segment
            self.touch(segment)
            yield segment

    def _open(self, name: str) -> Segment | None:
        """Open one file. If it is not a regular file or cannot be read, ignore it and return None."""
        try:
            access = os.O_RDWR if self.lock is not None else os.O_RDONLY
            file = OpenFile(self.disk.open(name, access, self.directory.number))
            found = self.disk.stat(file.number)
            if not stat.S_ISREG(found.st_mode):
                self.ignored[name] = f"{name} is no file"
                return None
            segment = Segment(self.disk, name, file, found.st_size)
            segment.head = segment.read_head()
        except OSError as error:
            self.ignored[name] = f"{name} cannot be read: {error.strerror}"
            return None
        self.ignored.pop(name, None)
        return segment

    def was_removed(self, segment: Segment) -> bool:
        """Whether another process removed the file."""
        return self.disk.stat(segment.file.number).st_nlink == 0

    def notes(self) -> tuple[str, ...]:
        """Say which files are ignored, which segments cannot be read, and how many headers are damaged."""
        flaws = (f"{segment.name}: {segment.flaw}" for segment in self.by_name.values() if segment.flaw)
        count = sum(segment.damaged for segment in self.by_name.values())
        damaged = (f"damaged headers between others: {count}",) if count else ()
        return (*self.ignored.values(), *flaws, *damaged)

    # ------------------------------------------------------------ room

    def can_grow(self) -> bool:
        """Whether one more segment is within the capacity."""
        return self.used + self.segment_bytes <= self.capacity

    def next_to_evict(self) -> Segment | None:
        """Return the segment whose room is taken next, or None if there is no segment.

        A file without a valid head goes first, then a segment without records, then the least recently used one.
        """
        if not self.by_name:
            return None
        return min(self.by_name.values(), key=lambda s: (s.head is not None, bool(s.keys), s.last_used))

    def grow(self) -> Segment:
        """Make a new segment and begin it. If this raises ``OSError``, it leaves no file behind."""
        name, file = self._create_file()
        segment = Segment(self.disk, name, file, self.segment_bytes)
        try:
            self.disk.allocate(file.number, self.segment_bytes)
            self._begin(segment)
        except OSError:
            self.disk.remove(name, self.directory.number)
            raise
        self.by_name[name] = segment
        return segment

    def _create_file(self) -> tuple[str, OpenFile]:
        """Create an empty file under a name that is free."""
        while True:
            numbers = [int(name[8:16]) for name in (*self.by_name, *self.ignored)]
            name = f"segment-{max(numbers, default=0) + 1:08}.loom"
            try:
                access = os.O_RDWR | os.O_CREAT | os.O_EXCL
                return name, OpenFile(self.disk.open(name, access, self.directory.number))
            except FileExistsError:
                self.ignored[name] = f"{name} was made by another program"

    def recycle(self, segment: Segment) -> Segment | None:
        """Begin a segment anew and return it. A file of another size is removed instead, and None is returned.

        The caller has forgotten the segment's records before.
        """
        if segment.size == self.segment_bytes:
            self._begin(segment)
            return segment
        self.remove(segment)
        return None

    def remove(self, segment: Segment) -> None:
        """Remove a segment and its file."""
        with contextlib.suppress(FileNotFoundError):
            self.disk.remove(segment.name, self.directory.number)
        self.forget(segment)

    def forget(self, segment: Segment) -> None:
        """Remove a segment from this set, and leave its file alone."""
        del self.by_name[segment.name]

    def _begin(self, segment: Segment) -> None:
        orders = [other.head.order for other in self.by_name.values() if other.head is not None]
        segment.begin(max(orders, default=0) + 1)
        self.touch(segment)
        self.active = segment

    def sync(self) -> None:
        """Wait until all segments, and the directory itself, are on the disk."""
        for segment in list(self.by_name.values()):
            segment.sync()
        os.fsync(self.directory.number)

    def close(self) -> None:
        """Release the files and the lock. A file that is being read stays open until that read is over."""
        self.by_name.clear()
        self.active = None
        if self.lock is not None:
            self.lock.release()
