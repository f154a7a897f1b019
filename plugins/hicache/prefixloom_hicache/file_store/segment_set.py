"""Segment set: the segments of a directory, and which of them is written, begun anew or removed.

It knows files and the room that they take. It knows no key and no record.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from prefixloom import StorageError

from .directory import LOCK, WriterLock, distrust, lock_directory, open_directory
from .disk import NO_MORE, Disk, FileId
from .open_files import OpenFiles
from .segment import Segment

NAME = re.compile(r"segment-(\d{8})\.loom")
LARGEST = 64 << 20
SEGMENTS = 8
"""A store has at least this many segments, so that one eviction costs no more than this part of it."""
SMALLEST = 16 << 10
MOST_UNSYNCED = 16
"""The segments that may stay open because they were written and not synced. Beyond them the first one is synced."""


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
    """The segments of one directory.

    ``by_name``  the segments by the names of their files
    ``active``   the segment that is being written
    ``ignored``  files that stand in the place of a segment and are none, with the reason
    ``lock``     the writer's lock; None if the directory was opened for reading
    """

    def __init__(self, path: str | Path, capacity: int, segment_bytes: int | None, read_only: bool, disk: Disk) -> None:
        self.segment_bytes = 0 if read_only else segment_size(capacity, segment_bytes)
        self.path, self.capacity, self.disk = Path(path), capacity, disk
        directory = open_directory(disk, self.path, create=not read_only)
        self._place = os.path.abspath(path)  # the process may change its working directory
        self._directory_id = FileId.of(self._place, os.fstat(directory.number))
        self.lock: WriterLock | None = None if read_only else lock_directory(disk, directory, self.path)
        self.files = OpenFiles(disk, directory, writable=not read_only)
        self._unsynced: dict[Segment, None] = {}
        self._directory_unsafe = ""
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

    def open_new(self, refuse: bool = False) -> Iterator[Segment]:
        """Open the segments that are not known yet, and yield them, the oldest first.

        ``refuse``  raise ``StorageError`` for a file that must not be trusted. Otherwise it is ignored
        """
        new: list[Segment] = []
        directory = self.files.directory
        for name in self.disk.names(directory.number):
            if NAME.fullmatch(name) and name not in self.by_name:
                segment = self._open(name, refuse)
                if segment is not None:
                    new.append(segment)
        new.sort(key=lambda segment: (segment.head.order if segment.head else 0, segment.name))
        for segment in new:
            self.by_name[segment.name] = segment
            self.touch(segment)
            yield segment

    def _open(self, name: str, refuse: bool) -> Segment | None:
        """Open one file. If it is not a regular file, cannot be read or is not trusted, ignore it and return None."""
        untrusted = ""
        try:
            which, found = self.files.find(name)
            untrusted = distrust(self.path / name, found) if stat.S_ISREG(found.st_mode) else ""
            if untrusted or not stat.S_ISREG(found.st_mode):
                self.files.forget(which)
                self.ignored[name] = untrusted or f"{name} is no file"
            else:
                segment = Segment(self.disk, self.files, which, found.st_size)
                segment.head, segment.inherited = segment.read_head(), True
                self.ignored.pop(name, None)
                return segment
        except OSError as error:
            if error.errno in NO_MORE:
                raise
            untrusted = f"{self.path / name} is a link: remove it" if error.errno == errno.ELOOP else ""
            self.ignored[name] = untrusted or f"{name} cannot be read: {error.strerror}"
        if untrusted and refuse:
            raise StorageError(untrusted)
        return None

    # ------------------------------------------------------------ what others did to the files

    def check_place(self) -> None:
        """Raise ``OSError`` if what is written now would not be found again under the path of the store."""
        what = ""
        try:
            if not self._directory_id.fits(self.disk.find(self._place)):
                what = "is another directory now"
        except (FileNotFoundError, NotADirectoryError):
            what = "was removed or moved"
        except PermissionError:
            pass  # a directory above it was closed to this process meanwhile: this says nothing of what is there
        if what:
            raise OSError(errno.ESTALE, f"{self.path} {what}: open the store again")
        if self.lock is not None and self.lock.was_removed(self.disk):
            what = f"{self.path / LOCK} was removed or replaced, so another process may write here"
            raise OSError(errno.ESTALE, f"{what}: open the store again")

    def is_there(self, segment: Segment) -> bool:
        """Whether the file of the segment still stands under its name."""
        return self.files.is_there(segment.id)

    def lose(self, segment: Segment) -> OSError:
        """Leave a segment out whose file is not there any more, and return what to say of it.

        The caller has forgotten the segment's records before.
        """
        self.ignored[segment.name] = f"{segment.name} was removed or replaced by another program"
        self.forget(segment)
        return OSError(errno.ESTALE, self.ignored[segment.name])

    def notes(self) -> tuple[str, ...]:
        """Say what happened to the directory, which files are ignored, and which segments are not as they should be."""
        gone: tuple[str, ...] = ()
        try:
            self.check_place()
        except OSError as error:
            gone = (str(error.strerror),)
        segments = self.by_name.values()
        flaws = (f"{segment.name}: {segment.flaw}" for segment in segments if segment.flaw)
        count = sum(segment.damaged for segment in segments)
        damaged = (f"damaged headers between others: {count}",) if count else ()
        return (*gone, *self.ignored.values(), *flaws, *damaged, *self._unsafe())

    def _unsafe(self) -> tuple[str, ...]:
        """Say what may not survive a crash of the machine although it was to be synced."""
        found = (*(segment.unsafe for segment in self.by_name.values()), self._directory_unsafe)
        return tuple(text for text in found if text)

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
        segment = Segment(self.disk, self.files, self._create_file(), self.segment_bytes)
        try:
            file = segment.hold()
            self.disk.allocate(file.number, self.segment_bytes)
            self._begin(segment)
        except OSError:
            self._unsynced.pop(segment, None)
            self._remove_file(segment)
            raise
        self.by_name[segment.name] = segment
        return segment

    def _create_file(self) -> FileId:
        """Create an empty file under a name that is free."""
        while True:
            numbers = [int(name[8:16]) for name in (*self.by_name, *self.ignored)]
            name = f"segment-{max(numbers, default=0) + 1:08}.loom"
            try:
                return self.files.create(name)
            except FileExistsError:
                self.ignored[name] = f"{name} was made by another program"

    def can_recycle(self, segment: Segment) -> bool:
        """Whether the segment can be begun anew: its file has the right size, is there and can be written.

        Raise ``OSError`` if this process has no descriptor for it now.
        """
        if segment.size != self.segment_bytes or not self.is_there(segment):
            return False
        try:
            segment.hold()
        except OSError as error:
            if error.errno in NO_MORE:
                raise
            return False
        return True

    def recycle(self, segment: Segment) -> Segment:
        """Begin a segment anew and return it. The caller has forgotten its records before."""
        self._begin(segment)
        return segment

    def remove(self, segment: Segment) -> None:
        """Remove a segment and its file. A file that another program has put in its place is left alone."""
        if self.is_there(segment):
            self._remove_file(segment)
        self.forget(segment)

    def _remove_file(self, segment: Segment) -> None:
        directory = self.files.directory
        self.files.forget(segment.id)
        with contextlib.suppress(FileNotFoundError):
            self.disk.remove(segment.name, directory.number)

    def forget(self, segment: Segment) -> None:
        """Remove a segment from this set, and leave its file alone."""
        del self.by_name[segment.name]
        self._unsynced.pop(segment, None)
        self.files.forget(segment.id)
        segment.unsynced = None
        if self.active is segment:
            self.active = None

    def _begin(self, segment: Segment) -> None:
        self._unsynced[segment] = None
        orders = [other.head.order for other in self.by_name.values() if other.head is not None]
        segment.begin(max(orders, default=0) + 1)
        self.touch(segment)
        self.active = segment

    def wrote(self, segment: Segment) -> None:
        """Remember that a segment was written, or at least begun to be. If there are many such, sync the first."""
        self._unsynced.pop(segment, None)
        self._unsynced[segment] = None
        while len(self._unsynced) > MOST_UNSYNCED:
            first = next(iter(self._unsynced))
            del self._unsynced[first]
            first.sync()

    def sync(self) -> bool:
        """Wait until all segments, and the directory itself, are on the disk. Return whether they are.

        Raise ``OSError`` if a file cannot be opened for this.
        """
        for segment in self.by_name.values():
            if segment.inherited:
                segment.hold()
                segment.sync()
        while self._unsynced:
            segment, _ = self._unsynced.popitem()
            segment.sync()
        directory = self.files.directory
        try:
            self.disk.sync_directory(directory.number)
        except OSError as error:
            self._directory_unsafe = f"the names of new segments may not be on the disk: {error.strerror}"
        return not self._unsafe()

    def close(self) -> None:
        """Release the files and the lock. A file that is being used stays open until that use is over."""
        self.by_name.clear()
        self._unsynced.clear()
        self.files.close()
        self.active = None
        if self.lock is not None:
            self.lock.release()
