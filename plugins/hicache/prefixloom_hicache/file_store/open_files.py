"""Open files: the descriptors that a store holds, a bounded number of them, however many segments it has.

A store may have more segments than its process may have descriptors. A file that is not open is opened again by its
name, and then it must be the same file.

This module knows files by name and identity. It knows no segment and no record.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict

from .disk import Disk, FileId, OpenFile

MOST_OPEN = 64
"""The files that stay open to be used again. Each thread may hold one more."""


class OpenFiles:
    """The open files of one directory. The least recently used one is closed first.

    A file is closed when the last of its users drops it, so a thread that reads or writes holds the ``OpenFile`` until
    it is done. Any thread may call this.
    """

    def __init__(self, disk: Disk, directory: OpenFile, writable: bool) -> None:
        self._disk = disk
        self._directory: OpenFile | None = directory
        self._access = os.O_RDWR if writable else os.O_RDONLY
        self._lock = threading.Lock()
        self._open: OrderedDict[FileId, OpenFile] = OrderedDict()

    @property
    def directory(self) -> OpenFile:
        """The directory. Whoever uses its number holds the ``OpenFile`` meanwhile."""
        directory = self._directory
        if directory is None:
            raise OSError(errno.EBADF, "the store was closed")
        return directory

    def create(self, name: str) -> FileId:
        """Create an empty file. Raise ``FileExistsError`` if the name is taken."""
        directory = self.directory
        file = OpenFile(self._disk.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, directory.number))
        try:
            return self._keep(FileId.of(name, self._disk.stat(file.number)), file)
        except OSError:
            self._disk.remove(name, directory.number)
            raise

    def find(self, name: str) -> tuple[FileId, os.stat_result]:
        """Open the file that stands under a name, and say what it is."""
        file = OpenFile(self._disk.open(name, self._access, self.directory.number))
        found = self._disk.stat(file.number)
        return self._keep(FileId.of(name, found), file), found

    def get(self, wanted: FileId) -> OpenFile:
        """Return the open file. Raise ``OSError`` if it cannot be opened, or if another file has its name."""
        with self._lock:
            file = self._open.get(wanted)
            if file is not None:
                self._open.move_to_end(wanted)
                return file
        file = OpenFile(self._disk.open(wanted.name, self._access, self.directory.number))
        if not wanted.fits(self._disk.stat(file.number)):
            raise OSError(errno.ESTALE, "another file stands in its place")
        self._keep(wanted, file)
        return file

    def is_there(self, wanted: FileId) -> bool:
        """Whether the file still stands under its name."""
        try:
            return wanted.fits(self._disk.find(wanted.name, self.directory.number))
        except FileNotFoundError:
            return False

    def _keep(self, which: FileId, file: OpenFile) -> FileId:
        closed = []
        with self._lock:
            if self._directory is not None:
                self._open[which] = file
                while len(self._open) > MOST_OPEN:
                    closed.append(self._open.popitem(last=False))
        return which

    def forget(self, which: FileId) -> None:
        """Close a file that is not needed any more."""
        with self._lock:
            file = self._open.pop(which, None)
        del file

    def close(self) -> None:
        """Close all files and the directory. A file that is being used stays open until that use is over."""
        with self._lock:
            self._directory = None
            files, self._open = self._open, OrderedDict()
        files.clear()
