"""The store ``file``: one file a record, in a directory of one user. One process writes, any number read.

    writer.lock               locked by the process that writes
    spare                     the file that is being written
    <fingerprint>/text        what a fingerprint says, so that a miss can tell what is different
    <fingerprint>/<content>   a record: its payload, and its header behind it

The writer completes ``spare`` and renames it, so wherever the writer dies, a file under a record's name is complete. An
evicted record is renamed to ``spare`` and written over, because the kernel takes three times as long for a file of new
pages (# 0087). Whoever still reads it meets another address or a wrong checksum.

The directory is the only index: a read opens the file under the record's name. The writer alone knows sizes and the
order of use, to keep the store within its capacity.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from prefixloom import StorageError, hookimpl, parse_memory
from prefixloom.storage import (
    HEADER_BYTES,
    MAX_TEXT,
    BackendType,
    Fingerprint,
    Key,
    Miss,
    Reason,
    Record,
    Refused,
    Status,
    Stored,
    UrlOption,
    encode_header,
    flat,
    options_of,
    yes_or_no,
)

from ..records import StoreCounts, checked, differences, header_for
from .directory import Directory, distrust
from .disk import NO_ROOM, Disk, OpenFile, remedy

SPARE = "spare"
TEXT = "text"
FOLDER, RECORD = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{32}/[0-9a-f]{64}")
UNREADABLE = ("corrupt", "format")
"""The reasons of misses after which the writer removes a file, so that its record can be written again."""
BLOCK = 4096
"""A file takes a multiple of this on the disk."""


def name_of(key: Key) -> str:
    """Return the name of a record's file."""
    return f"{key.fingerprint.digest.hex()}/{key.content.hex()}"


def room_of(size: int) -> int:
    """Return the room that a file of ``size`` bytes takes."""
    return -(-size // BLOCK) * BLOCK


class FileBackend:
    """Records in ``directory``, in at most ``capacity`` bytes. Only the user who owns the directory can read them.

    ``read_only``  read what another process writes
    ``disk``       what tests put in the place of the system calls

    Two locks: ``_writing`` is held through a whole write, ``_lock`` only while the counts or the order of use change. A
    payload is read under neither.
    """

    def __init__(
        self, directory: str | Path, capacity: int = 16 << 30, *, read_only: bool = False, disk: Disk | None = None
    ) -> None:
        if not isinstance(capacity, int) or capacity < 2 * BLOCK:
            raise StorageError(f"capacity must be at least {2 * BLOCK} bytes, got {capacity!r}")
        self.capacity = capacity
        self._disk = Disk() if disk is None else disk
        self._directory = Directory(directory, read_only, self._disk)
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._rooms: OrderedDict[str, int] = OrderedDict()
        """The room of each record by its name, the least recently used one first."""
        self._used = 0
        self._folders: Counter[str] = Counter()
        """The number of records by folder."""
        self._texts: dict[str, Fingerprint] = {}
        self._counts = StoreCounts()
        self._closed = False
        try:
            if read_only:
                self._scan()
            else:
                self._resume_writing()
        except BaseException as error:
            self._directory.release()  # whoever keeps the error keeps this object
            if not isinstance(error, OSError):
                raise
            raise StorageError(
                f"{directory} cannot be read: {error.strerror}. {remedy(error, 'Check the disk')}"
            ) from error

    @property
    def directory(self) -> Path:
        return self._directory.path

    # ------------------------------------------------------------ what is in the directory

    def _scan(self, refuse: bool = True) -> list[tuple[int, str, int]]:
        """Return the time of writing, the name and the room of each record, the oldest first.

        ``refuse``  raise ``StorageError`` for a file of an older store, and for one that must not be trusted
        """
        found = []
        for folder in self._disk.names(self._directory.number):
            if refuse and folder.startswith("segment-"):
                raise StorageError(
                    f"{self.directory} has {folder}, of an older version of this store: remove its segments, or choose "
                    f"another directory"
                )
            if not FOLDER.fullmatch(folder) or self._find(folder, stat.S_ISDIR, refuse) is None:
                continue
            for name in self._names(folder):
                name = f"{folder}/{name}"
                if RECORD.fullmatch(name) and (status := self._find(name, stat.S_ISREG, refuse)) is not None:
                    found.append((status.st_mtime_ns, name, room_of(status.st_size)))
        return sorted(found)

    def _find(self, name: str, is_right: Callable[[int], bool], refuse: bool) -> os.stat_result | None:
        """Return the status of a file; None if it is gone, is of another kind, or others may have made it."""
        try:
            found, path = self._disk.find(name, self._directory.number), f"{self.directory}/{name}"
        except FileNotFoundError:
            return None
        reason = distrust(path, found) if is_right(found.st_mode) else f"{path} is a link or no file: remove it"
        if reason and refuse:
            raise StorageError(reason)
        return None if reason else found

    def _names(self, folder: str) -> list[str]:
        try:
            opened = self._open(folder, os.O_RDONLY | os.O_DIRECTORY)
            return self._disk.names(opened.number)
        except FileNotFoundError:  # the writer evicted its last record meanwhile
            return []

    def _resume_writing(self) -> None:
        """Take over what the writers before left, and evict what exceeds the capacity."""
        for _, name, room in self._scan():
            self._keep(name, room)
        self._make_room(0)
        self._remove_spare()

    def _open(self, name: str, flags: int) -> OpenFile:
        return OpenFile(self._disk.open(name, flags, self._directory.number))

    def _keep(self, name: str, room: int) -> None:
        """Count a record in, as the most recently used one."""
        self._rooms[name] = room
        self._used += room
        self._folders[name.partition("/")[0]] += 1

    def _forget(self, name: str) -> None:
        """Count a record out, and remove the folder of the last record of a fingerprint."""
        with self._lock:
            self._used -= self._rooms.pop(name)
            folder = name.partition("/")[0]
            self._folders[folder] -= 1
            last = not self._folders[folder]
            if last:
                del self._folders[folder]
                self._texts.pop(folder, None)
        if last:
            with contextlib.suppress(OSError):
                self._disk.remove(f"{folder}/{TEXT}", self._directory.number)
            with contextlib.suppress(OSError):
                self._disk.remove_folder(folder, self._directory.number)

    # ------------------------------------------------------------ reading

    def get(self, keys: Sequence[Key], into: Sequence[Any] | None = None) -> tuple[Record | Miss, ...]:
        buffers: Sequence[Any] = [None] * len(keys) if into is None else into
        out = tuple(self._get(key, buffer) for key, buffer in zip(keys, buffers, strict=True))
        with self._lock:
            for found in out:
                name = name_of(found.key)
                if isinstance(found, Record) and name in self._rooms:
                    self._rooms.move_to_end(name)
            return self._counts.read(out)

    def _get(self, key: Key, buffer: Any) -> Record | Miss:
        if self._closed:
            return Miss(key, "closed")
        found = self._read(key, buffer)
        if isinstance(found, Record) or found.reason not in UNREADABLE:
            return found
        with self._writing:  # nobody evicts it here, so what is damaged now is damaged on the disk
            found = self._read(key, buffer)
            if isinstance(found, Miss) and found.reason in UNREADABLE and self._directory.is_writer:
                self._remove(name_of(key))
        return found

    def _read(self, key: Key, buffer: Any) -> Record | Miss:
        """Read the header, then the payload into ``buffer`` or new memory, and check both."""
        name = name_of(key)
        try:
            file = self._open(name, os.O_RDONLY)
            status = self._disk.stat(file.number)
            size = status.st_size - HEADER_BYTES
            if reason := distrust(f"{self.directory}/{name}", status):
                return Miss(key, "corrupt", reason)
            if not stat.S_ISREG(status.st_mode) or size <= 0:
                return Miss(key, "corrupt", f"{name} is no file, or too short for a record")
            encoded = memoryview(bytearray(HEADER_BYTES))
            self._disk.read_into(file.number, encoded, size)
            target = None if buffer is None else flat(buffer)
            header = header_for(key, encoded, size, target)
            if isinstance(header, Miss):
                return header
            target = memoryview(bytearray(size)) if target is None else target[:size]
            return checked(key, header, target[: self._disk.read_into(file.number, target, 0)])
        except (FileNotFoundError, NotADirectoryError):
            return self._absent(key)
        except OSError as error:
            return Miss(key, "corrupt" if error.errno == errno.ELOOP else "io", f"{name}: {error.strerror}")

    def _absent(self, key: Key) -> Miss:
        """Return the miss for a record without a file: ``fingerprint``, if all records here have another one."""
        own, others = key.fingerprint.digest.hex(), []
        with contextlib.suppress(OSError):
            folders = [name for name in self._disk.names(self._directory.number) if FOLDER.fullmatch(name)]
            if own not in folders:
                others = differences(key.fingerprint, map(self._text, folders))
        return Miss(key, "fingerprint", others[0]) if others else Miss(key, "absent")

    def _text(self, folder: str) -> Fingerprint | None:
        """Return the fingerprint of a folder; None if its text cannot be read."""
        found = self._texts.get(folder)
        if found is None:
            content = memoryview(bytearray(MAX_TEXT))
            with contextlib.suppress(OSError):
                file = self._open(f"{folder}/{TEXT}", os.O_RDONLY)
                found = Fingerprint.read(bytes(content[: self._disk.read_into(file.number, content, 0)]))
            if found is None or found.digest.hex() != folder:
                return None
            self._texts[folder] = found
        return found

    def exists(self, keys: Sequence[Key]) -> tuple[bool, ...]:
        return tuple(not self._closed and self._is_there(name_of(key)) for key in keys)

    def _is_there(self, name: str) -> bool:
        try:
            return stat.S_ISREG(self._disk.find(name, self._directory.number).st_mode)
        except OSError:
            return False

    # ------------------------------------------------------------ writing

    def put(self, records: Sequence[Record]) -> tuple[Stored | Refused, ...]:
        with self._writing:
            gone = self._gone()
            return tuple(self._put(record, gone) for record in records)

    def _gone(self) -> str:
        """Say why files written now would not be found again; "" if they would."""
        try:
            self._directory.check()
        except OSError as error:
            return str(error.strerror)
        return ""

    def _put(self, record: Record, gone: str) -> Stored | Refused:
        key, name, size = record.key, name_of(record.key), len(record.payload) + HEADER_BYTES
        try:
            if self._closed:
                return self._refused(key, "closed", "the store was closed")
            if not self._directory.is_writer:
                return self._refused(key, "read_only", "this process may not write here, another process may")
            if gone:
                return self._refused(key, "io", gone)
            if name in self._rooms:
                if self._is_there(name):
                    with self._lock:
                        self._rooms.move_to_end(name)
                        return self._counts.stored(key, fresh=False)
                self._forget(name)  # another program removed its file
            if room_of(size) > self.capacity:
                return self._refused(key, "size", f"{size} bytes do not fit into {self.capacity}")
            self._make_room(room_of(size))
            self._write_record(name, record)
        except OSError as error:
            return self._refused(key, "capacity" if error.errno in NO_ROOM else "io", str(error.strerror))
        with self._lock:
            self._keep(name, room_of(size))
            return self._counts.stored(key)

    def _refused(self, key: Key, reason: Reason, detail: str) -> Refused:
        with self._lock:
            return self._counts.refused(key, reason, detail)

    def _describe(self, fingerprint: Fingerprint) -> None:
        """Make the folder of a fingerprint, with its text."""
        folder = fingerprint.digest.hex()
        if self._text(folder) is not None:
            return
        with contextlib.suppress(FileExistsError):
            self._disk.make_folder(folder, self._directory.number)
        self._write(f"{folder}/{TEXT}", fingerprint.text.encode())
        self._texts[folder] = fingerprint

    def _write_record(self, name: str, record: Record) -> None:
        """Write a record's file. If the disk is full, evict as many bytes as it has, and try once more."""
        parts = record.payload, encode_header(record)
        room = room_of(sum(map(len, parts)))
        try:
            self._describe(record.key.fingerprint)
            self._write(name, *parts)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or room > self._used:
                raise
            self._make_room(self.capacity - self._used + room)
            self._describe(record.key.fingerprint)  # the last record of a fingerprint took its folder along
            self._write(name, *parts)

    def _spare(self) -> OpenFile:
        """Open the file that is written next: the evicted one, unless it has another name or cannot be written."""
        with contextlib.suppress(PermissionError):
            file = self._open(SPARE, os.O_RDWR | os.O_CREAT)
            if self._disk.stat(file.number).st_nlink == 1:
                return file
        self._remove_spare()
        return self._open(SPARE, os.O_RDWR | os.O_CREAT)

    def _write(self, name: str, *parts: Any) -> None:
        """Write a file of all ``parts``, which has its name once it is whole."""
        try:
            file, end = self._spare(), 0
            for part in parts:
                self._disk.write(file.number, part, end)
                end += len(part)
            if self._disk.stat(file.number).st_size != end:
                self._disk.cut(file.number, end)
            try:
                self._disk.rename(SPARE, name, self._directory.number)
            except IsADirectoryError:  # made by another program: an empty one would refuse this record for ever
                self._disk.remove_folder(name, self._directory.number)
                self._disk.rename(SPARE, name, self._directory.number)
        except OSError as error:
            if error.errno == errno.ENOENT:  # another program removed the folder: the next write makes it anew
                self._texts.pop(name.partition("/")[0], None)
            self._remove_spare()
            raise

    def _remove_spare(self) -> None:
        with contextlib.suppress(OSError):
            self._disk.remove(SPARE, self._directory.number)

    def _make_room(self, room: int) -> None:
        """Evict the least recently used records until there is so much room. The last one becomes ``spare``."""
        while self._used + room > self.capacity and self._rooms:
            with self._lock:
                name = next(iter(self._rooms))
            with contextlib.suppress(FileNotFoundError):
                self._disk.rename(name, SPARE, self._directory.number)
            self._forget(name)
            self._counts.evicted += 1

    def _remove(self, name: str) -> None:
        """Remove a record, unless its file cannot be removed."""
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(name, self._directory.number)
            if name in self._rooms:
                self._forget(name)

    # ------------------------------------------------------------ status and end

    def status(self) -> Status:
        """Return the counts of this process, and the sizes: the writer knows them, a reader looks at the directory."""
        gone = self._gone()
        with self._lock:
            records, used = len(self._rooms), self._used
        if not self._directory.is_writer and not self._closed:
            with contextlib.suppress(OSError):
                found = self._scan(refuse=False)
                records, used = len(found), sum(room for *_, room in found)
        with self._lock:
            return self._counts.status(records, used, self.capacity, (gone,) if gone else ())

    def close(self) -> None:
        with self._writing, self._lock:
            self._closed = True
            self._rooms.clear()
            self._folders.clear()
            self._used = 0
            self._directory.release()


prefixloom_api = 1  # of the plugin contract: clause O3 of docs/hooks.md


@hookimpl
def prefixloom_storage() -> BackendType:
    """Offer the store to the registry."""
    summary = "records in files of one machine, several processes, survives a crash"
    return BackendType("file", FileBackend, summary, open_url)


OPTIONS: Mapping[str, UrlOption] = {
    "capacity": lambda text: parse_memory(text, "capacity"),
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
