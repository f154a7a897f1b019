"""What a dead writer leaves behind: wherever it stopped, whichever byte is damaged, and after kill -9."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixloom.storage import HEADER_BYTES, Backend, Key, Miss, Record, Stored
from prefixloom.testing.laws.storage import key_of, record_of
from prefixloom_hicache import FileBackend
from prefixloom_hicache.file_store.backend import BLOCK, name_of
from prefixloom_hicache.file_store.disk import Disk

CAPACITY = 8 * BLOCK
SEEDS = 24
KEYS = [key_of(seed) for seed in range(SEEDS)]
Act = Callable[[Path], object]


class Recording(Disk):
    """Keeps every change of the directory in order, as a function that makes it in a copy of the directory.

    A write of n bytes is n + 1 changes or fewer: what was written of it when the writer died.
    """

    def __init__(self) -> None:
        self.log: list[Act] = []
        self.step = 1

    def open(self, name: str, flags: int, directory: int) -> int:
        if flags & os.O_CREAT and name == "spare":
            self.log.append(lambda copy: (copy / name).touch(0o600))
        return super().open(name, flags, directory)

    def make_folder(self, name: str, directory: int) -> None:
        super().make_folder(name, directory)
        self.log.append(lambda copy: (copy / name).mkdir(0o700))

    def write(self, file: int, content: Any, offset: int) -> None:
        super().write(file, content, offset)
        whole = bytes(content)
        for cut in sorted({*range(0, len(whole), self.step), 1, len(whole) - 1, len(whole)}):
            self.log.append(functools.partial(written, whole[:cut], offset))

    def cut(self, file: int, size: int) -> None:
        super().cut(file, size)
        self.log.append(lambda copy: os.truncate(copy / "spare", size))

    def rename(self, name: str, new: str, directory: int) -> None:
        super().rename(name, new, directory)
        self.log.append(lambda copy: (copy / name).rename(copy / new))

    def remove(self, name: str, directory: int) -> None:
        super().remove(name, directory)
        self.log.append(lambda copy: (copy / name).unlink())

    def remove_folder(self, name: str, directory: int) -> None:
        super().remove_folder(name, directory)
        self.log.append(lambda copy: (copy / name).rmdir())


def written(content: bytes, offset: int, copy: Path) -> None:
    with (copy / "spare").open("r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.fixture
def quick() -> Iterator[Path]:
    """A folder in memory, where there is one: thousands of small stores are opened there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def sized(seed: int) -> Record:
    return record_of(seed, 1 + seed * 97 % 700)


def story(store: Backend) -> Iterator[Callable[[], object]]:
    """Puts and, since there is room for few records, evictions."""
    for seed in range(6):
        yield lambda seed=seed: store.put([sized(seed)])  # type: ignore[misc]
    yield lambda: store.put([sized(2), sized(6)])
    for seed in range(7, SEEDS):
        yield lambda seed=seed: store.put([record_of(seed, 2900)])  # type: ignore[misc]
    yield lambda: store.put([sized(1)])


@functools.cache
def expected(seed: int) -> Record:
    return sized(seed) if seed < 7 else record_of(seed, 2900)


def present(store: Backend) -> set[int]:
    return {seed for seed, there in enumerate(store.exists(KEYS)) if there}


def check(store: Backend, required: set[int]) -> None:
    for seed, found in enumerate(store.get(KEYS)):
        if isinstance(found, Record):
            assert found == expected(seed)
        else:
            assert seed not in required, f"{seed} was stored and is lost: {found}"
            assert found.reason in ("absent", "fingerprint"), "a file stands under the name of a record and is none"


def test_a_writer_may_die_at_any_byte_that_it_writes(quick: Path) -> None:
    disk = Recording()
    store = FileBackend(quick / "live", CAPACITY, disk=disk)
    before: set[int] = set()
    states = 0
    copy = quick / "copy"
    copy.mkdir(mode=0o700)
    disk.log.clear()
    for act in story(store):
        disk.step = 1 if states < 1000 else 97
        act()
        after = present(store)
        for change in disk.log:
            change(copy)
            states += 1
            check(FileBackend(copy, CAPACITY, read_only=True), before & after)
            if states % 97 == 0:
                write_on(copy, before & after)
        disk.log.clear()
        check(store, after)
        before = after
    assert states > 1500 and store.status().evicted > 4


def write_on(folder: Path, required: set[int]) -> None:
    """The next writer loses nothing, and what it writes is there for the one after it."""
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    kept.chmod(0o700)
    store = FileBackend(kept, 2 * CAPACITY)
    check(store, required)
    assert store.put([record_of(99, 800)]) == (Stored(key_of(99)),)
    store.close()
    store = FileBackend(kept, 2 * CAPACITY)
    check(store, required)
    assert store.get([key_of(99)]) == (record_of(99, 800),)
    store.close()
    shutil.rmtree(kept)


def two_records(folder: Path) -> tuple[list[Path], list[Key]]:
    store = FileBackend(folder, CAPACITY)
    store.put([record_of(seed, 40) for seed in range(2)])
    store.close()
    keys = [key_of(seed) for seed in range(2)]
    return [folder / name_of(key) for key in keys], keys


def test_whatever_byte_is_damaged_its_record_is_a_miss_and_the_other_is_there(quick: Path) -> None:
    (file, _), keys = two_records(quick / "store")
    whole = file.read_bytes()
    assert len(whole) == 40 + HEADER_BYTES
    reader = FileBackend(file.parents[1], read_only=True)
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        miss, found = reader.get(keys)
        assert isinstance(miss, Miss) and miss.reason in ("corrupt", "format"), at
        assert found == record_of(1, 40)


def test_wherever_a_file_is_cut_or_lengthened_it_is_a_miss(quick: Path) -> None:
    (file, _), keys = two_records(quick / "store")
    whole = file.read_bytes()
    reader = FileBackend(file.parents[1], read_only=True)
    for content in (*(whole[:at] for at in range(len(whole))), whole + b"1", whole + whole, b"1" + whole):
        file.write_bytes(content)
        miss, found = reader.get(keys, [bytearray(1000), bytearray(40)])
        assert isinstance(miss, Miss) and miss.reason == "corrupt"
        assert found == record_of(1, 40)
    file.write_bytes(whole)
    assert reader.get(keys) == tuple(record_of(seed, 40) for seed in range(2))


def test_a_file_under_the_name_of_another_record_is_a_miss(quick: Path) -> None:
    (file, other), keys = two_records(quick / "store")
    file.write_bytes(other.read_bytes())
    store = FileBackend(file.parents[1], CAPACITY)
    (miss,) = store.get(keys[:1])
    assert isinstance(miss, Miss) and (miss.reason, miss.detail) == ("corrupt", "the header belongs to another record")
    assert not file.exists(), "it is removed, so that the record can be written again"
    assert store.put([record_of(0, 40)]) == (Stored(keys[0]),)


WRITER = """
import sys, os
from prefixloom_hicache import FileBackend
from prefixloom.testing.laws.storage import record_of
store = FileBackend(sys.argv[1], int(sys.argv[2]))
seed = int(sys.argv[3])
while True:
    (answer,) = store.put([record_of(seed, 1 + seed * 7919 % 30000)])
    os.write(1, b"%d\\n" % seed)
    seed += 1
"""


@pytest.mark.parametrize("capacity", [64 << 20, 1 << 20], ids=["roomy", "evicting"])
def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path, capacity: int) -> None:
    draw = random.Random(7)
    begin, acknowledged = 0, []
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "store"), str(capacity), str(begin)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            heard = b"".join(writer.stdout.readline() for _ in range(draw.randrange(1, 120)))
            for _ in range(draw.randrange(20000)):
                pass
            os.kill(writer.pid, signal.SIGKILL)
            heard += writer.stdout.read()
        told = [int(line) for line in heard.split(b"\n")[:-1]]
        acknowledged += told
        store = FileBackend(tmp_path / "store", capacity)  # the lock went with the process
        for seed, found in zip(acknowledged, store.get([key_of(seed) for seed in acknowledged]), strict=True):
            if isinstance(found, Record):
                assert found == record_of(seed, 1 + seed * 7919 % 30000)
            else:
                assert capacity < 2 << 20 and found.reason == "absent", found
        assert isinstance(store.get([key_of(acknowledged[-1])])[0], Record)
        assert "corrupt" not in store.status().misses
        begin = acknowledged[-1] + 2
        store.close()
    assert len(acknowledged) > 100
