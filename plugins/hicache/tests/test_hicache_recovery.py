"""What a dead writer leaves behind: wherever it stopped in its log, whichever byte is damaged, and after kill -9."""

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
from prefixloom_hicache.file_store.disk import Disk
from prefixloom_hicache.file_store.segment_format import HEAD_BYTES

SEGMENT = 16 << 10
SEEDS = 24
KEYS = [key_of(seed) for seed in range(SEEDS)]


class Recording(Disk):
    """Keeps every write in order: (file, offset, bytes), or None where a segment was made."""

    def __init__(self) -> None:
        self.files: dict[int, str] = {}
        self.log: list[tuple[str, int, bytes] | tuple[str, int, None]] = []

    def open(self, name: str, flags: int, directory: int) -> int:
        number = super().open(name, flags, directory)
        self.files[number] = name
        return number

    def allocate(self, file: int, size: int) -> None:
        super().allocate(file, size)
        self.log.append((self.files[file], size, None))

    def write(self, file: int, content: Any, offset: int) -> None:
        super().write(file, content, offset)
        self.log.append((self.files[file], offset, bytes(content)))


@pytest.fixture
def quick() -> Iterator[Path]:
    """A folder in memory, where there is one: thousands of small stores are opened there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def sized(seed: int) -> Record:
    return record_of(seed, 1 + seed * 97 % 700)


def story(store: Backend) -> Iterator[Callable[[], object]]:
    """Puts, deletions and, since there is room for few records, segments that are used again."""
    for seed in range(6):
        yield lambda seed=seed: store.put([sized(seed)])  # type: ignore[misc]
    yield lambda: store.delete([key_of(2)])
    yield lambda: store.put([sized(2), sized(6)])
    for seed in range(7, SEEDS):
        yield lambda seed=seed: store.put([record_of(seed, 2900)])  # type: ignore[misc]
    yield lambda: store.delete([key_of(SEEDS - 1), key_of(SEEDS - 3)])


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


def test_a_writer_may_die_at_any_byte_of_its_log(quick: Path) -> None:
    disk = Recording()
    store = FileBackend(quick / "live", 2 * SEGMENT, segment_bytes=SEGMENT, disk=disk)
    images: dict[str, bytearray] = {}
    before: set[int] = set()
    states = lives = 0
    copy = quick / "copy"
    copy.mkdir(mode=0o700)
    for act in story(store):
        disk.log.clear()
        act()
        after = present(store)
        for name, offset, content in disk.log:
            if content is None:
                images[name] = bytearray(offset)
                continue
            lives += offset == 0
            last = len(content)
            cuts = {*range(0, last, 1 if offset == 0 or states < 1000 else 53), 1, last - 1, last}
            for cut in sorted(cuts):
                images[name][offset : offset + cut] = content[:cut]
                (copy / name).write_bytes(images[name])
                (copy / name).chmod(0o600)
                states += 1
                reader = FileBackend(copy, 2 * SEGMENT, segment_bytes=SEGMENT, read_only=True)
                check(reader, before & after)
                assert "corrupt" not in reader.status().misses, "a header was there before its payload"
                if states % 97 == 0:
                    write_on(copy, before & after)
        check(store, after)
        before = after
    assert states > 1500 and lives > 4, "segments were used again"


def write_on(folder: Path, required: set[int]) -> None:
    """The next writer loses nothing, and what it writes is there for the one after it."""
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    kept.chmod(0o700)
    store = FileBackend(kept, 3 * SEGMENT, segment_bytes=SEGMENT)
    check(store, required)
    assert store.put([record_of(99, 800)]) == (Stored(key_of(99)),)
    store.close()
    store = FileBackend(kept, 3 * SEGMENT, segment_bytes=SEGMENT)
    check(store, required)
    assert store.get([key_of(99)]) == (record_of(99, 800),)
    store.close()
    shutil.rmtree(kept)


def small_log(folder: Path) -> tuple[Path, bytes, list[Key]]:
    store = FileBackend(folder, 8 * SEGMENT)
    store.put([record_of(seed, 40) for seed in range(2)])
    store.close()
    (file,) = folder.glob("segment-*")
    return file, file.read_bytes(), [key_of(seed) for seed in range(2)]


def test_whatever_byte_is_damaged_only_its_own_record_is_lost(quick: Path) -> None:
    file, whole, keys = small_log(quick / "store")
    headers = len(whole) - 3 * HEADER_BYTES
    owner = [-1 if at < HEAD_BYTES or at >= headers + 512 else None for at in range(len(whole))]
    for i in range(2):
        body = whole.index(record_of(i, 40).payload)
        owner[body : body + 40] = [i] * 40
        owner[headers + 256 * (1 - i) : headers + 256 * (2 - i)] = [i] * 256
    missed: set[int] = set()
    for at in (
        *range(40),
        *range(40, HEAD_BYTES, 97),
        *range(HEAD_BYTES, HEAD_BYTES + 700),
        *range(headers, len(whole)),
    ):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        file.write_bytes(damaged)
        reader = FileBackend(file.parent, 8 * SEGMENT, read_only=True)
        lost = {i for i, found in enumerate(reader.get(keys)) if found != record_of(i, 40)}
        assert all(not isinstance(found, Record) for found in reader.get([keys[i] for i in lost]))
        if at >= HEAD_BYTES:
            assert lost <= {owner[at]}, f"byte {at} cost {lost}"
        missed |= lost
    assert missed == {0, 1}


def test_wherever_a_file_is_cut_it_is_a_segment_no_more(quick: Path) -> None:
    file, whole, keys = small_log(quick / "store")
    shutil.copy(file, file.with_name("segment-00000002.loom"))
    for at in (*range(100), *range(100, len(whole), 61), len(whole) - 1):
        file.write_bytes(whole[:at])
        reader = FileBackend(file.parent, 8 * SEGMENT, read_only=True)
        assert reader.get(keys) == tuple(record_of(i, 40) for i in range(2)), "the other one is there"
        assert len(reader.status().notes) == 1, at
    file.with_name("segment-00000002.loom").unlink()
    reader = FileBackend(file.parent, 8 * SEGMENT, read_only=True)
    assert [answer.reason for answer in reader.get(keys) if isinstance(answer, Miss)] == ["absent", "absent"]


def test_a_file_that_is_cut_under_a_reader_is_a_miss(quick: Path) -> None:
    file, _, keys = small_log(quick / "store")
    reader = FileBackend(file.parent, 8 * SEGMENT, read_only=True)
    buffers = [bytearray(40), bytearray(40)]
    assert all(isinstance(answer, Record) for answer in reader.get(keys, buffers))
    os.truncate(file, HEAD_BYTES)
    told = reader.get(keys, buffers)  # which still have what was read before
    assert [answer.reason for answer in told if isinstance(answer, Miss)] == ["corrupt", "corrupt"]


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
        begin = acknowledged[-1] + 2
        store.close()
    assert len(acknowledged) > 100
