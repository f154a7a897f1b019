"""Directory: a store's place on the disk, for nobody but its owner, with at most one writer at a time.

The writer's lock is the kernel's: it ends with its process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import stat
import weakref
from pathlib import Path

from prefixloom import StorageError

from .disk import Disk, OpenFile

LOCK = "writer.lock"
_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()
_watching: list[bool] = []


class WriterLock:
    """Held by one process; a child that it forks does not inherit it."""

    def __init__(self, file: OpenFile) -> None:
        self._file: OpenFile | None = file
        _held.add(self)
        if not _watching:
            _watching.append(True)
            os.register_at_fork(after_in_child=_forget)

    @property
    def held(self) -> bool:
        return self._file is not None

    def release(self) -> None:
        self._file = None


def _forget() -> None:
    for lock in list(_held):
        lock.release()


def open_directory(path: str | Path, create: bool) -> OpenFile:
    """The directory, made with permissions 0700 if need be; refused if others could read it or put files into it."""
    path = Path(path)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        directory = OpenFile(os.open(path, flags))
        found = os.fstat(directory.number)
        if found.st_uid != os.geteuid():
            raise StorageError(f"{path} belongs to user {found.st_uid}: choose a directory of your own")
        if stat.S_IMODE(found.st_mode) & 0o077:
            if not create or os.listdir(directory.number):
                raise StorageError(f"{path} is open to others: `chmod 700 {path}`, or choose an empty directory")
            os.fchmod(directory.number, 0o700)
        if create and not os.access(path, os.W_OK | os.X_OK):
            raise StorageError(f"{path} cannot be written: give its owner permissions 0700, or open it read_only")
    except (NotADirectoryError, FileExistsError) as error:
        raise StorageError(f"{path} is a link or no directory: name the directory itself ({error.strerror})") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error.strerror}. Check its permissions and parents") from error
    return directory


def lock_directory(disk: Disk, directory: OpenFile, path: str | Path) -> WriterLock:
    """Become the writer, or say who cannot."""
    try:
        file = OpenFile(disk.open(LOCK, os.O_RDWR | os.O_CREAT, directory.number))
        if not stat.S_ISREG(disk.stat(file.number).st_mode):
            raise StorageError(f"{path}/{LOCK} is no file: remove it")
        fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(
            f"{path} has a writer already: open it with read_only=True, or choose another directory"
        ) from error
    except OSError as error:
        raise StorageError(f"{path}/{LOCK} cannot be opened: {error.strerror}. Remove what is in its place") from error
    return WriterLock(file)
