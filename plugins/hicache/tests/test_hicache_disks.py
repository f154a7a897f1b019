"""The file backend on disks that are full or fail: every call of the system in turn."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixloom import StorageError
from prefixloom.storage import Miss, Record, Refused, Stored
from prefixloom.testing.laws.storage import key_of, record_of, same, stored
from prefixloom_hicache import FileBackend
from prefixloom_hicache.file_store.disk import Disk
from tests.support.processes import python

SEGMENT = 16 << 10


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


class Failing(Disk):
    """Fails the n-th call, or all from there on."""

    def __init__(self, at: int, lasting: bool = False, code: int = errno.EIO) -> None:
        self.left, self.lasting, self.code = at, lasting, code

    def _count(self) -> None:
        self.left -= 1
        if self.left == -1 or (self.lasting and self.left < 0):
            raise OSError(self.code, os.strerror(self.code))


def counted(name: str) -> Callable[..., Any]:
    def call(self: Failing, *arguments: Any) -> Any:
        self._count()
        return getattr(Disk, name)(self, *arguments)

    return call


for _name in (
    "open", "names", "find", "stat", "allocate", "write", "read", "read_into", "sync", "sync_directory", "remove",
):  # fmt: skip
    setattr(Failing, _name, counted(_name))


def scenario(store: FileBackend) -> None:
    """Some of everything; answers are checked for being right or a miss."""
    for seed in range(14):
        (answer,) = store.put([record_of(seed, 3000)])
        assert isinstance(answer, Stored) or answer.reason in ("io", "capacity", "closed")
        (found,) = store.get([key_of(seed)])
        if isinstance(found, Record):
            same(found, record_of(seed, 3000))
        if seed % 5 == 4:
            store.delete([key_of(seed - 1)])
            store.flush()
            store.status()


@pytest.mark.parametrize(("lasting", "code"), [(False, errno.EIO), (True, errno.EIO), (False, errno.EMFILE)])
def test_every_call_of_the_system_may_fail(tmp_path: Path, lasting: bool, code: int) -> None:
    reached = 0
    for at in range(400):
        disk = Failing(at, lasting, code)
        folder = tmp_path / str(at)
        try:
            store = FileBackend(folder, 2 * SEGMENT, segment_bytes=SEGMENT, disk=disk)
        except StorageError:
            assert at < 4
            continue
        scenario(store)
        assert store.status().used <= 2 * SEGMENT
        store.close()
        reached += disk.left < 0
        with_no_fault = FileBackend(folder, 2 * SEGMENT, segment_bytes=SEGMENT)
        keys = [key_of(seed) for seed in range(14)]
        for seed, found in enumerate(with_no_fault.get(keys)):
            if isinstance(found, Record):
                same(found, record_of(seed, 3000))
        scenario(with_no_fault)
        assert with_no_fault.status().refused == {}
        with_no_fault.close()
        if disk.left >= 0:
            break
    assert reached > 50


def test_opening_again_over_a_failing_disk_is_a_refusal_or_an_emptier_store(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in range(8)))
    store.close()
    for at in range(60):
        disk = Failing(at)
        try:
            store = FileBackend(tmp_path / "s", 8 * SEGMENT, disk=disk)
        except StorageError as error:
            assert "cannot be" in str(error)
            continue
        for seed, found in enumerate(store.get([key_of(seed) for seed in range(8)])):
            assert isinstance(found, Miss) or found == record_of(seed, 3000)
        store.close()
        if disk.left >= 0:
            return
    raise AssertionError("the scan has no end")


def test_a_full_disk_is_a_counted_refusal_then_a_smaller_store(tmp_path: Path) -> None:
    class Full(Disk):
        room = 0

        def allocate(self, file: int, size: int) -> None:
            if self.room < size:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.room -= size
            super().allocate(file, size)

    disk = Full()
    store = FileBackend(tmp_path / "s", 8 * SEGMENT, disk=disk)
    (answer,) = store.put([record_of(1)])
    assert answer == Refused(key_of(1), "capacity", "No space left on device")
    assert store.status().refused == {"capacity": 1} and files(tmp_path / "s") == []
    disk.room = 2 * SEGMENT
    for seed in range(40):
        stored(store, record_of(seed, 3000))
        same(store.get([key_of(seed)])[0], record_of(seed, 3000))
    assert len(files(tmp_path / "s")) == 2


def test_segments_of_another_size_go_one_by_one_when_the_disk_is_full(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in range(15)))
    store.close()
    assert len(files(tmp_path / "s")) == 5

    class Full(Disk):
        freed = 0

        def remove(self, name: str, directory: int) -> None:
            super().remove(name, directory)
            self.freed += SEGMENT

        def allocate(self, file: int, size: int) -> None:
            if self.freed < size:
                self.freed -= SEGMENT  # the new file is removed, too
                raise OSError(errno.ENOSPC, "No space left on device")
            super().allocate(file, size)

    store = FileBackend(tmp_path / "s", 16 * SEGMENT, segment_bytes=2 * SEGMENT, disk=Full())
    stored(store, record_of(99, 3000))
    assert store.status().records == 1 + 3 * 3, "two made room for one"


def test_a_limit_of_the_system_on_files_is_a_counted_refusal(tmp_path: Path) -> None:
    told = python(
        "import sys, resource\nfrom prefixloom.storage import *\n"
        "from prefixloom_hicache import *\nfrom prefixloom.testing.laws.storage import *\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))\n"
        "store = FileBackend(sys.argv[1], 1 << 20)\n"
        "print(store.put([record_of(1)])[0].reason, store.get([key_of(1)])[0].reason, store.status().refused)",
        tmp_path / "s",
    )
    assert told == "capacity absent {'capacity': 1}\n"


def test_a_segment_that_cannot_be_read_hides_no_news_of_others(tmp_path: Path) -> None:
    names: dict[int, str] = {}

    class Bad(Disk):
        fails = False

        def open(self, name: str, flags: int, directory: int) -> int:
            file = super().open(name, flags, directory)
            names[file] = name
            return file

        def read(self, file: int, size: int, offset: int) -> bytes:
            if self.fails and names[file] == "segment-00000001.loom":
                raise OSError(errno.EIO, "Input/output error")
            return super().read(file, size, offset)

    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, record_of(0, 3000))
    disk = Bad()
    reader = FileBackend(tmp_path / "s", read_only=True, refresh_seconds=0, disk=disk)
    disk.fails = True
    for seed in range(1, 10):
        stored(store, record_of(seed, 3000))
    same(reader.get([key_of(9)])[0], record_of(9, 3000))
    (miss,) = reader.get([key_of(0)])
    assert isinstance(miss, Miss) and miss.reason == "io"
    disk.fails = False
    same(reader.get([key_of(0)])[0], record_of(0, 3000))


def test_a_store_that_met_a_full_disk_lets_go_of_its_files(tmp_path: Path) -> None:
    """At once, without a collection: no error keeps the frame that keeps it."""

    class Full(Disk):
        def allocate(self, file: int, size: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        store = FileBackend(tmp_path / "s", 8 * SEGMENT, disk=Full())
        for _ in range(5):
            assert store.put([record_of(1)]) == (Refused(key_of(1), "capacity", "No space left on device"),)
        store.close()
        del store
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_a_system_that_writes_nothing_and_says_nothing_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    honest = os.pwrite
    takes = [100, 10, 0]

    def short(file: int, content: Any, offset: int) -> int:
        return honest(file, memoryview(content)[: takes.pop(0)], offset) if takes else 1 // 0

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", short)
        (answer,) = store.put([record_of(1, 3000)])
    assert answer == Refused(key_of(1), "io", "nothing was written") and not takes
    assert store.exists([key_of(1)]) == (False,)
    stored(store, record_of(1, 3000))
    same(store.get([key_of(1)])[0], record_of(1, 3000))


class Closed(Disk):
    """Opens no file that is there, while it has an error to tell."""

    code = 0

    def open(self, name: str, flags: int, directory: int) -> int:
        if self.code and not flags & os.O_CREAT:
            raise OSError(self.code, os.strerror(self.code))
        return super().open(name, flags, directory)


def with_one_file_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[FileBackend, Closed]:
    """Two segments of three records each. The file of the older one is closed."""
    monkeypatch.setattr("prefixloom_hicache.file_store.open_files.MOST_OPEN", 1)
    disk = Closed()
    store = FileBackend(folder, 2 * SEGMENT, segment_bytes=SEGMENT, disk=disk)
    stored(store, *(record_of(seed, 3000) for seed in range(6)))
    assert store.flush() and len(files(folder)) == 2
    same(store.get([key_of(5)])[0], record_of(5, 3000))
    return store, disk


def test_a_segment_that_cannot_be_opened_is_given_up_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, disk = with_one_file_open(tmp_path / "s", monkeypatch)
    old, kept = files(tmp_path / "s")
    disk.code = errno.EIO
    stored(store, record_of(9, 3000))
    new = files(tmp_path / "s")
    assert old not in new and kept in new and len(new) == 2
    assert (store.status().records, store.status().evicted) == (4, 3)


def test_a_segment_is_not_given_up_for_want_of_a_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, disk = with_one_file_open(tmp_path / "s", monkeypatch)
    disk.code = errno.EMFILE
    (answer,) = store.put([record_of(9, 3000)])
    assert answer == Refused(key_of(9), "io", "Too many open files")
    disk.code = 0
    for seed in range(6):
        same(store.get([key_of(seed)])[0], record_of(seed, 3000))
    stored(store, record_of(9, 3000))
    assert store.status().evicted == 3
