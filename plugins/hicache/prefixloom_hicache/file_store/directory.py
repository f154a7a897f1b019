"""Directory: where a store is on the disk. It is readable by its owner only, and has at most one writer at a time.

The writer's lock is the kernel's, so it ends with its process, however the process ends. This module knows no segment.
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
_fork_hook: list[bool] = []


class WriterLock:
    """The lock of the one process that writes. A child process that it forks does not inherit the lock."""

    def __init__(self, file: OpenFile) -> None:
        self._file: OpenFile | None = file
        _held.add(self)
        if not _fork_hook:
            _fork_hook.append(True)
            os.register_at_fork(after_in_child=_release_all)

    @property
    def held(self) -> bool:
        return self._file is not None

    def release(self) -> None:
        self._file = None


def _release_all() -> None:
    for lock in list(_held):
        lock.release()


def open_directory(path: str | Path, create: bool) -> OpenFile:
    """Open the directory of a store.

    With ``create``, it is made with permissions 0700 if it does not exist. A directory that another user owns, or that
    is open to others, is refused; an empty one of this user is closed to others instead.
    """
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
    """Take the writer's lock. Raise ``StorageError`` if another process has it or the lock file cannot be opened."""
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
