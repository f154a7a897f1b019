"""Directory: where a store is on the disk. It is readable by its owner only, and has at most one writer at a time.

The writer's lock is the kernel's, so it ends with its process, however the process ends. This module knows no record.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from pathlib import Path

from prefixloom import StorageError

from .disk import Disk, OpenFile, remedy

LOCK = "writer.lock"


def distrust(path: object, found: os.stat_result) -> str:
    """Say why a file of the store must not be trusted, and what to do; "" if this user or root alone can write it."""
    if found.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {found.st_uid}: remove it, or `chown {os.geteuid()} {path}` if you trust it"
    if stat.S_IMODE(found.st_mode) & 0o022:
        return f"others may write {path}: `chmod go-w {path}` if you trust what is in it, or remove it"
    return ""


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _close_to_others(path: Path, directory: OpenFile) -> None:
    """Give an empty directory permissions 0700.

    It is looked into twice. A directory that is in use for something else must not be changed. And only what is found
    after the change is certain: until then, others might put files there.
    """
    if os.listdir(directory.number):
        raise StorageError(f"{path} is open to others: `chmod 700 {path}`, or choose an empty directory")
    os.fchmod(directory.number, 0o700)
    planted = sorted(os.listdir(directory.number))
    if planted:
        raise StorageError(
            f"somebody put {planted[0]} into {path} before it was closed to others: look at it, remove it if it is not "
            f"yours, and open the store again"
        )


def open_directory(path: Path, create: bool) -> OpenFile:
    """Open the directory of a store.

    With ``create``, it is made with permissions 0700 if it does not exist. A directory that another user owns, or that
    is open to others, is refused; an empty one of this user is closed to others instead.
    """
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        directory = OpenFile(os.open(path, _DIRECTORY))
        found = os.fstat(directory.number)
        if found.st_uid != os.geteuid():
            raise StorageError(f"{path} belongs to user {found.st_uid}: choose a directory of your own")
        if stat.S_IMODE(found.st_mode) & 0o077:
            if not create:
                raise StorageError(f"{path} is open to others: `chmod 700 {path}`, or choose another directory")
            _close_to_others(path, directory)
        if create and not os.access(path, os.W_OK | os.X_OK):
            raise StorageError(f"{path} cannot be written: give its owner permissions 0700, or open it read_only")
    except (NotADirectoryError, FileExistsError) as error:
        raise StorageError(f"{path} is a link or no directory: name the directory itself ({error.strerror})") from error
    except OSError as error:
        hint = remedy(error, "Check its permissions and parents")
        raise StorageError(f"{path} cannot be opened: {error.strerror}. {hint}") from error
    return directory


def lock_directory(disk: Disk, directory: OpenFile, path: Path) -> OpenFile:
    """Take the writer's lock. Raise ``StorageError`` if another process has it or the lock file cannot be opened."""
    try:
        file = OpenFile(disk.open(LOCK, os.O_RDWR | os.O_CREAT, directory.number))
        found = disk.stat(file.number)
        if not stat.S_ISREG(found.st_mode):
            raise StorageError(f"{path}/{LOCK} is no file: remove it")
        if reason := distrust(path / LOCK, found):
            raise StorageError(reason)
        fcntl.flock(file.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(
            f"{path} has a writer already: open it with read_only=True, or choose another directory"
        ) from error
    except OSError as error:
        hint = remedy(error, "Remove what is in its place")
        raise StorageError(f"{path}/{LOCK} cannot be opened: {error.strerror}. {hint}") from error
    return file


class Directory:
    """The open directory of a store, and the writer's lock unless it is opened for reading.

    A child process that this one forks does not inherit the lock.
    """

    def __init__(self, path: str | Path, read_only: bool, disk: Disk) -> None:
        self.path, self._disk = Path(path), disk
        self._file = open_directory(self.path, create=not read_only)
        self._place = os.path.abspath(path)  # the process may change its working directory
        self._found = os.fstat(self.number)
        self._lock = None if read_only else lock_directory(disk, self._file, self.path)
        _opened.add(self)

    @property
    def number(self) -> int:
        """The descriptor. It stays open as long as this object."""
        return self._file.number

    @property
    def is_writer(self) -> bool:
        """Whether this process holds the writer's lock."""
        return self._lock is not None

    def check(self) -> None:
        """Raise ``OSError`` if files written now would not be found again under the path of the store."""
        what = ""
        try:
            if not os.path.samestat(self._found, self._disk.find(self._place)):
                what = "is another directory now"
        except (FileNotFoundError, NotADirectoryError):
            what = "was removed or moved"
        except PermissionError:
            pass  # a directory above it was closed to this process meanwhile: this says nothing of what is there
        if what:
            raise OSError(errno.ESTALE, f"{self.path} {what}: open the store again")
        if self._lock is not None and self._disk.stat(self._lock.number).st_nlink == 0:
            what = f"{self.path / LOCK} was removed or replaced, so another process may write here"
            raise OSError(errno.ESTALE, f"{what}: open the store again")

    def release(self) -> None:
        """Release the writer's lock."""
        self._lock = None


_opened: weakref.WeakSet[Directory] = weakref.WeakSet()


def _release_all() -> None:
    for directory in list(_opened):
        directory.release()


os.register_at_fork(after_in_child=_release_all)
