"""Disk: the system calls of the file store, in one place, so that a test can make each of them fail."""

from __future__ import annotations

import errno
import os
from typing import Any

import attrs

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The errors that mean a full disk, a quota or a limit on file sizes."""

NO_MORE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""The errors that mean that this process has no more descriptors or memory now. They say nothing of the file."""

GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""The errors that mean that a file does not stand under its name any more."""


def remedy(error: OSError, otherwise: str) -> str:
    """Say what to do about an error: ``otherwise``, unless the descriptors are used up."""
    return "Raise the limit of open files: `ulimit -n`" if error.errno in NO_MORE else otherwise


class Disk:
    """The system calls. A short read or write is continued, as the operating system asks its callers to do."""

    def open(self, name: str, flags: int, directory: int) -> int:
        """Open a file of the directory. It follows no link, and does not wait for the other end of a pipe."""
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=directory)

    def names(self, directory: int) -> list[str]:
        return os.listdir(directory)

    def find(self, name: str, directory: int | None = None) -> os.stat_result:
        """Say what stands under a name of the directory, or under a whole path."""
        return os.stat(name, dir_fd=directory, follow_symlinks=directory is None)

    def stat(self, file: int) -> os.stat_result:
        return os.fstat(file)

    def allocate(self, file: int, size: int) -> None:
        """Make the file ``size`` bytes long, with all of its room reserved on the disk."""
        os.posix_fallocate(file, 0, size)
        os.ftruncate(file, size)

    def write(self, file: int, content: Any, offset: int) -> None:
        done = os.pwrite(file, content, offset)
        while done < len(content):
            more = os.pwrite(file, memoryview(content)[done:], offset + done)
            if more <= 0:
                raise OSError(errno.EIO, "nothing was written")
            done += more

    def read(self, file: int, size: int, offset: int) -> bytes:
        """Read ``size`` bytes. It returns fewer only at the end of the file."""
        content = more = os.pread(file, size, offset)
        while more and len(content) < size:  # a read ends early, for instance, in front of a bad sector
            more = os.pread(file, size - len(content), offset + len(content))
            content += more
        return content

    def read_into(self, file: int, buffer: memoryview, offset: int) -> int:
        """Fill the buffer and return the number of bytes. It reads fewer only at the end of the file."""
        done = more = os.preadv(file, (buffer,), offset)
        while more and done < len(buffer):
            more = os.preadv(file, (buffer[done:],), offset + done)
            done += more
        return done

    def sync(self, file: int) -> None:
        os.fdatasync(file)

    def sync_directory(self, directory: int) -> None:
        os.fsync(directory)

    def remove(self, name: str, directory: int) -> None:
        os.unlink(name, dir_fd=directory)


class OpenFile:
    """A file descriptor that closes when its last user drops it, so that no read meets another file of its number."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


@attrs.frozen
class FileId:
    """Which file of a directory is meant: its name, and the numbers by which the kernel tells it from all others."""

    name: str
    device: int
    inode: int

    @classmethod
    def of(cls, name: str, found: os.stat_result) -> FileId:
        return cls(name, found.st_dev, found.st_ino)

    def fits(self, found: os.stat_result) -> bool:
        """Whether this is the file that was found."""
        return found.st_ino == self.inode and found.st_dev == self.device
