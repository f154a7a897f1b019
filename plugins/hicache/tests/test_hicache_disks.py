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
from prefixloom_hicache.file_store.backend import BLOCK
from prefixloom_hicache.file_store.disk import Disk
from tests.support.processes import python

CAPACITY = 6 * BLOCK


def files(folder: Path) -> list[str]:
    """The names of all files."""
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


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
    "open", "make_folder", "names", "find", "stat", "write", "read_into", "cut", "rename",
    "remove", "remove_folder",
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
            store.status()


@pytest.mark.parametrize(("lasting", "code"), [(False, errno.EIO), (True, errno.EIO), (False, errno.EMFILE)])
def test_every_call_of_the_system_may_fail(tmp_path: Path, lasting: bool, code: int) -> None:
    reached = 0
    for at in range(600):
        disk = Failing(at, lasting, code)
        folder = tmp_path / str(at)
        try:
            store = FileBackend(folder, CAPACITY, disk=disk)
        except StorageError:
            assert at < 8
            continue
        scenario(store)
        assert store.status().used <= CAPACITY
        store.close()
        reached += disk.left < 0
        with_no_fault = FileBackend(folder, CAPACITY)
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
    store = FileBackend(tmp_path / "s", CAPACITY)
    stored(store, *(record_of(seed, 3000) for seed in range(6)))
    store.close()
    for at in range(120):
        disk = Failing(at)
        try:
            store = FileBackend(tmp_path / "s", CAPACITY, disk=disk)
        except StorageError as error:
            assert "cannot be" in str(error)
            continue
        for seed, found in enumerate(store.get([key_of(seed) for seed in range(6)])):
            assert isinstance(found, Miss) or found == record_of(seed, 3000)
        store.close()
        if disk.left >= 0:
            return
    raise AssertionError("the scan has no end")


class Full(Disk):
    """A disk that has room for ``room`` bytes of new files. What is removed makes room."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, file: int, content: Any, offset: int) -> None:
        grows = max(0, offset + len(content) - os.fstat(file).st_size)
        if self.room < grows:
            super().write(file, content[: len(content) // 2], offset)
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= grows
        super().write(file, content, offset)

    def cut(self, file: int, size: int) -> None:
        self.room += os.fstat(file).st_size - size
        super().cut(file, size)


def test_a_full_disk_is_a_counted_refusal_then_a_smaller_store(tmp_path: Path) -> None:
    disk = Full(1000)
    store = FileBackend(tmp_path / "s", CAPACITY, disk=disk)
    (answer,) = store.put([record_of(1, 3000)])
    assert answer == Refused(key_of(1), "capacity", "No space left on device")
    assert store.status().refused == {"capacity": 1} and files(tmp_path / "s") == ["text", "writer.lock"]
    disk.room = 7000
    for seed in range(40):
        stored(store, record_of(seed, 3000))
        same(store.get([key_of(seed)])[0], record_of(seed, 3000))
    assert store.status().records == 2
    assert store.put([record_of(99, 9000)]) == (Refused(key_of(99), "capacity", "No space left on device"),)
    assert store.status().records == 2, "nothing is evicted for what does not fit even so"
    assert len(files(tmp_path / "s")) == 4, "of what was refused nothing is left"


def test_a_full_disk_evicts_the_last_record_of_a_fingerprint_for_the_next(tmp_path: Path) -> None:
    disk = Full(5000)
    store = FileBackend(tmp_path / "s", CAPACITY, disk=disk)
    stored(store, record_of(0, 3000))
    disk.room = 1000  # for the text of the fingerprint, whose removal this disk does not count
    for seed in range(1, 5):
        stored(store, record_of(seed, 3000))
        same(store.get([key_of(seed)])[0], record_of(seed, 3000))
    assert store.status().records == 1 and store.status().refused == {}


def test_a_limit_of_the_system_on_files_is_a_counted_refusal(tmp_path: Path) -> None:
    told = python(
        "import sys, resource\nfrom prefixloom.storage import *\n"
        "from prefixloom_hicache import *\nfrom prefixloom.testing.laws.storage import *\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))\n"
        "store = FileBackend(sys.argv[1], 1 << 20)\n"
        "print(store.put([record_of(1, 20000)])[0].reason, store.get([key_of(1)])[0].reason, store.status().refused)",
        tmp_path / "s",
    )
    assert told == "capacity absent {'capacity': 1}\n"


def test_a_store_that_met_a_full_disk_lets_go_of_its_files(tmp_path: Path) -> None:
    """At once, without a collection: no error keeps the frame that keeps it."""

    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        store = FileBackend(tmp_path / "s", CAPACITY, disk=Full(1000))
        for _ in range(5):
            refused = Refused(key_of(1), "capacity", "No space left on device")
            assert store.put([record_of(1, 3000)]) == (refused,)
        store.close()
        del store
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_a_system_that_writes_nothing_and_says_nothing_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileBackend(tmp_path / "s", CAPACITY)
    honest = os.pwrite
    stored(store, record_of(0))  # whose fingerprint has its text
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
