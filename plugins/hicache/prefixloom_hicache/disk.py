"""Disk: the system calls that the file backend makes, in one place, so that a test can make each of them fail."""

from __future__ import annotations

import errno
import os
from typing import Any

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Disk:
    """Calls as the operating system has them; a short read or write is continued."""

    def open(self, name: str, flags: int, directory: int) -> int:
        """A file within the directory, never through a link, never waiting for a pipe's other end."""
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=directory)

    def names(self, directory: int) -> list[str]:
        return os.listdir(directory)

    def stat(self, file: int) -> os.stat_result:
        return os.fstat(file)

    def allocate(self, file: int, size: int) -> None:
        """Make the file this long, with room on the disk for all of it."""
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
        """Up to ``size`` bytes: fewer only at the end of the file."""
        content = more = os.pread(file, size, offset)
        while more and len(content) < size:  # before a part that cannot be read, say
            more = os.pread(file, size - len(content), offset + len(content))
            content += more
        return content

    def read_into(self, file: int, buffer: memoryview, offset: int) -> int:
        """How many bytes were read into the buffer: fewer than it has only at the end of the file."""
        done = more = os.preadv(file, (buffer,), offset)
        while more and done < len(buffer):
            more = os.preadv(file, (buffer[done:],), offset + done)
            done += more
        return done

    def sync(self, file: int) -> None:
        os.fdatasync(file)

    def remove(self, name: str, directory: int) -> None:
        os.unlink(name, dir_fd=directory)


class OpenFile:
    """A file descriptor that is closed when nobody refers to it any more, so that no read meets another file."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)
