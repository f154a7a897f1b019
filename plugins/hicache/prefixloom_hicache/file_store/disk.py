"""Disk: the system calls of the file store, in one place, so that a test can make each of them fail."""

from __future__ import annotations

import errno
import os
from typing import Any

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The errors that mean a full disk, a quota or a limit on file sizes."""

NO_MORE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""The errors that mean that this process has no more descriptors or memory now. They say nothing of the file."""


def remedy(error: OSError, otherwise: str) -> str:
    """Say what to do about an error: ``otherwise``, unless the descriptors are used up."""
    return "Raise the limit of open files: `ulimit -n`" if error.errno in NO_MORE else otherwise


class Disk:
    """The system calls. Names are relative to ``directory``, an open one.

    A short read or write is continued, as the operating system asks its callers to do.
    """

    def open(self, name: str, flags: int, directory: int) -> int:
        """Open a file. It follows no link, and does not wait for the other end of a pipe."""
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=directory)

    def make_folder(self, name: str, directory: int) -> None:
        os.mkdir(name, 0o700, dir_fd=directory)

    def names(self, directory: int) -> list[str]:
        return os.listdir(directory)

    def find(self, name: str, directory: int | None = None) -> os.stat_result:
        """Return the status of a name in the directory, or of a whole path."""
        return os.stat(name, dir_fd=directory, follow_symlinks=directory is None)

    def stat(self, file: int) -> os.stat_result:
        return os.fstat(file)

    def write(self, file: int, content: Any, offset: int) -> None:
        done = os.pwrite(file, content, offset)
        while done < len(content):
            more = os.pwrite(file, memoryview(content)[done:], offset + done)
            if more <= 0:
                raise OSError(errno.EIO, "nothing was written")
            done += more

    def read_into(self, file: int, buffer: memoryview, offset: int) -> int:
        """Fill the buffer and return the number of bytes. It reads fewer only at the end of the file."""
        done = more = os.preadv(file, (buffer,), offset)
        while more and done < len(buffer):  # a read ends early, for instance, in front of a bad sector
            more = os.preadv(file, (buffer[done:],), offset + done)
            done += more
        return done

    def cut(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def rename(self, name: str, new: str, directory: int) -> None:
        os.rename(name, new, src_dir_fd=directory, dst_dir_fd=directory)

    def remove(self, name: str, directory: int) -> None:
        os.unlink(name, dir_fd=directory)

    def remove_folder(self, name: str, directory: int) -> None:
        os.rmdir(name, dir_fd=directory)


class OpenFile:
    """A file descriptor that closes when its last user drops it, so that no read meets another file of its number."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)
