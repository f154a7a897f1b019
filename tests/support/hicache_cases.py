"""The two stores as cases of the conformance suite: how to open, reopen, lose and damage them."""

from __future__ import annotations

import atexit
import tempfile
from pathlib import Path
from typing import Any

from prefixloom.storage import HEADER_BYTES, Key
from prefixloom.testing.laws.storage import BackendCase
from prefixloom_hicache import FileBackend, MemoryBackend
from prefixloom_hicache.file_store.backend import name_of


def damage_memory(store: Any, key: Key, at: int, mask: int) -> None:
    store._frames[key.address][HEADER_BYTES + at] ^= mask


def open_file(capacity: int) -> FileBackend:
    return FileBackend(Path(tempfile.mkdtemp(dir=FOLDER.name)) / "store", capacity)


def reopen_file(store: Any) -> FileBackend:
    store.close()
    return FileBackend(store.directory, store.capacity)


def abandon_file(store: Any) -> FileBackend:
    """What the kernel does when the process dies: the lock goes, and nobody closes anything."""
    store._directory.release()
    return FileBackend(store.directory, store.capacity)


def damage_file(store: Any, key: Key, at: int, mask: int) -> None:
    with open(store.directory / name_of(key), "r+b") as file:
        file.seek(at, 0 if at >= 0 else 2)  # what is not of the payload stands behind it
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ mask]))


FOLDER = tempfile.TemporaryDirectory()
atexit.register(FOLDER.cleanup)
MEMORY = BackendCase("memory", MemoryBackend, damage=damage_memory)
FILE = BackendCase("file", open_file, reopen_file, abandon_file, damage_file)
