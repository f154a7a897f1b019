"""The file backend and the system around it: other processes, permissions, links, full and failing disks, old files."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from prefixloom import StorageError
from prefixloom_hicache import FileBackend, Miss, Record, Refused, Stored
from prefixloom_hicache.disk import Disk
from prefixloom_hicache.laws import ONE, ROOMY, key_of, missed, record_of, same, stored
from prefixloom_hicache.scan import HEAD_BYTES

SEGMENT = 16 << 10


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


def python(source: str, *arguments: object) -> str:
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------- processes


def test_a_second_writer_is_refused_clearly(tmp_path: Path) -> None:
    first = FileBackend(tmp_path / "s", ROOMY)
    with pytest.raises(StorageError, match="has a writer already: open it with read_only=True"):
        FileBackend(tmp_path / "s", ROOMY)
    first.close()
    FileBackend(tmp_path / "s", ROOMY).close()


def test_another_process_reads_what_this_one_writes_and_may_not_write(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, record_of(1, 5000))
    told = python(
        "import sys\nfrom prefixloom import StorageError\nfrom prefixloom_hicache import *\n"
        "from prefixloom_hicache.laws import *\n"
        "try:\n    FileBackend(sys.argv[1])\nexcept StorageError as error:\n    print('writer already' in str(error))\n"
        "reader = FileBackend(sys.argv[1], read_only=True)\n"
        "same(reader.get([key_of(1)])[0], record_of(1, 5000))\n"
        "print(reader.put([record_of(2)])[0].reason, reader.delete([key_of(1)]), reader.flush())",
        tmp_path / "s",
    )
    assert told.splitlines() == ["True", "read_only (False,) False"]
    same(store.get([key_of(1)])[0], record_of(1, 5000))


FORKING = """
import os, sys
from prefixloom_hicache import FileBackend
from prefixloom_hicache.laws import record_of
store = FileBackend(sys.argv[1])
here, there = os.pipe()
if os.fork() == 0:
    os.close(there)
    os.write(1, store.put([record_of(1)])[0].reason.encode() + b"\\n")
    os.write(1, b"told\\n")
    os.read(here, 1)  # until the parent is gone
    os._exit(0)
os.close(here)
store.close()
for _ in range(1000):
    try:
        FileBackend(sys.argv[1]).close()
        break
    except Exception:
        os.sched_yield()
else:
    sys.exit("the child has the lock")
os.write(1, b"mine again\\n")
"""


def test_a_forked_child_neither_keeps_the_lock_nor_writes(tmp_path: Path) -> None:
    told = python(FORKING, tmp_path / "s")
    assert sorted(told.splitlines()) == ["mine again", "read_only", "told"]


def test_a_reader_sees_news_removals_and_segments_used_again(tmp_path: Path) -> None:
    now = [0.0]
    store = FileBackend(tmp_path / "s", 2 * SEGMENT, segment_bytes=SEGMENT)
    options: dict[str, Any] = {"read_only": True, "refresh_seconds": 5, "clock": lambda: now[0]}
    reader, second = (FileBackend(tmp_path / "s", 2 * SEGMENT, **options) for _ in range(2))
    stored(store, record_of(1))
    missed(reader.get([key_of(1)])[0], "absent")
    now[0] = 6
    same(reader.get([key_of(1)])[0], record_of(1))
    same(second.get([key_of(1)])[0], record_of(1))
    store.delete([key_of(1)])
    missed(reader.get([key_of(1)])[0], "absent")
    stored(store, record_of(1))
    for seed in range(2, 60):
        stored(store, record_of(seed, 3000))
        now[0] += 6
        same(reader.get([key_of(seed)])[0], record_of(seed, 3000))
    missed(second.get([key_of(1)])[0], "absent")
    assert reader.status().records == store.status().records
    assert reader.status().misses == {"absent": 2}, "what went is absent, not corrupt"


def test_large_payloads_begin_on_pages_and_are_found_by_readers_and_later_writers(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    reader = FileBackend(tmp_path / "s", read_only=True, refresh_seconds=0)
    sizes = (70_000, 100, 40_000, 40_000, 32_767, 32_768)
    for seed, size in enumerate(sizes):
        stored(store, record_of(seed, size))
        same(reader.get([key_of(seed)])[0], record_of(seed, size))
        entry = store._index.find(key_of(seed))
        assert entry is not None and (size < 32_768 or (entry.place.offset + 256) % 4096 == 0)
    store.close()
    store = FileBackend(tmp_path / "s", ROOMY)
    assert store.status().notes == () and store.status().records == len(sizes)


def test_a_segment_that_was_removed_under_a_reader_is_forgotten(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, record_of(1))
    reader = FileBackend(tmp_path / "s", read_only=True, refresh_seconds=0)
    store.close()
    files(tmp_path / "s")[0].unlink()
    missed(reader.get([key_of(2)])[0], "absent")
    assert reader.status().records == reader.status().used == 0


# ---------------------------------------------------------------- permissions, links


def test_files_and_directories_are_nobody_elses(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        stored(FileBackend(tmp_path / "a" / "s", ROOMY), record_of(1))
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a" / "s").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "a" / "s").iterdir()} == {0o600}
    assert len(list((tmp_path / "a" / "s").iterdir())) == 2


def test_an_open_directory_is_closed_if_empty_and_refused_if_not(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o755)
    FileBackend(folder, ROOMY).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    for read_only in (False, True):
        with pytest.raises(StorageError, match=r"is open to others: `chmod 700"):
            FileBackend(folder, ROOMY, read_only=read_only)


DENIED = """
import os, sys
from prefixloom import StorageError
from prefixloom_hicache import FileBackend
os.setuid(int(sys.argv[1]))
for path in sys.argv[2:]:
    try:
        FileBackend(path, 1 << 20)
    except StorageError as error:
        print(error)
"""


def test_a_directory_without_permission_is_refused_with_what_to_do() -> None:
    user = 65534 if os.geteuid() == 0 else os.geteuid()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o711)
        for name, mode in (("closed", 0), ("reading", 0o500)):
            (folder / name).mkdir()
            os.chown(folder / name, user, -1)
            (folder / name).chmod(mode)
        told = python(DENIED, user, folder / "closed", folder / "reading", folder / "closed" / "s").splitlines()
    assert len(told) == 3 and "Check its permissions" in told[0] and "0700" in told[1] and "permissions" in told[2]


def test_somebody_elses_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FileBackend(tmp_path / "s", ROOMY).close()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StorageError, match="choose a directory of your own"):
        FileBackend(tmp_path / "s", ROOMY)


def test_a_link_where_the_directory_or_the_lock_should_be_is_refused(tmp_path: Path) -> None:
    FileBackend(tmp_path / "s", ROOMY).close()
    (tmp_path / "link").symlink_to(tmp_path / "s")
    (tmp_path / "file").write_bytes(b"")
    for name in ("link", "file"):
        with pytest.raises(StorageError, match=r"name the directory itself|cannot be opened"):
            FileBackend(tmp_path / name, ROOMY)
    lock = tmp_path / "s" / "writer.lock"
    for make in (lambda: lock.symlink_to(tmp_path / "file"), lambda: os.mkfifo(lock), lock.mkdir):
        lock.unlink()
        make()
        with pytest.raises(StorageError, match=r"writer\.lock (is no file|cannot be opened)"):
            FileBackend(tmp_path / "s", ROOMY)


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_what_is_no_file_in_a_segments_place_is_left_alone(tmp_path: Path, what: str) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, record_of(1))
    place, goal = tmp_path / "s" / "segment-00000002.loom", tmp_path / "goal"
    goal.write_bytes(files(tmp_path / "s")[0].read_bytes())
    {"link": lambda: place.symlink_to(goal), "pipe": lambda: os.mkfifo(place), "folder": place.mkdir}[what]()
    stored(store, *(record_of(seed, 5 << 20) for seed in (2, 3)))  # the second one needs a new segment
    same(store.get([key_of(1)])[0], record_of(1))
    store.close()
    store = FileBackend(tmp_path / "s", ROOMY)
    assert any("segment-00000002" in note for note in store.status().notes)
    same(store.get([key_of(1)])[0], record_of(1))
    stored(store, record_of(5, 5 << 20), record_of(6, 5 << 20))
    assert goal.stat().st_size == ROOMY // 8 and os.path.lexists(place)
    reader = FileBackend(tmp_path / "s", read_only=True)
    same(reader.get([key_of(1)])[0], record_of(1))


# ---------------------------------------------------------------- full and failing disks


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


for _name in ("open", "names", "stat", "allocate", "write", "read", "read_into", "sync", "remove"):
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


@pytest.mark.parametrize("lasting", [False, True])
def test_every_call_of_the_system_may_fail(tmp_path: Path, lasting: bool) -> None:
    reached = 0
    for at in range(400):
        disk = Failing(at, lasting)
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
        "import sys, resource\nfrom prefixloom_hicache import *\nfrom prefixloom_hicache.laws import *\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))\n"
        "store = FileBackend(sys.argv[1], 1 << 20)\n"
        "print(store.put([record_of(1)])[0].reason, store.get([key_of(1)])[0].reason, store.status().refused)",
        tmp_path / "s",
    )
    assert told == "capacity absent {'capacity': 1}\n"


# ---------------------------------------------------------------- other files, other sizes


def test_older_foreign_empty_and_oversized_files_are_told_and_make_room_first(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, record_of(1))
    store.close()
    whole = files(tmp_path / "s")[0].read_bytes()
    older = bytearray(whole)
    older[8] = 0
    odd = {2: bytes(older), 3: os.urandom(SEGMENT), 4: b"", 5: whole + bytes(3 * SEGMENT), 6: whole[: HEAD_BYTES + 100]}
    for number, content in odd.items():
        (tmp_path / "s" / f"segment-{number:08}.loom").write_bytes(content)
    store = FileBackend(tmp_path / "s", 16 * SEGMENT, segment_bytes=SEGMENT)
    told = " ".join(store.status().notes)
    assert "segment of format 0, and this is format 1" in told and "no segment begins here" in told
    same(store.get([key_of(1)])[0], record_of(1))
    for seed in range(2, 200):
        stored(store, record_of(seed, 3000))
        assert store.status().used <= 16 * SEGMENT
    assert store.status().notes == ()


def test_a_smaller_capacity_holds_from_the_opening_on(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in range(30)))
    store.close()
    store = FileBackend(tmp_path / "s", 3 * SEGMENT, segment_bytes=SEGMENT)
    assert store.status().used == 3 * SEGMENT
    same(store.get([key_of(29)])[0], record_of(29, 3000))
    with pytest.raises(StorageError, match="Choose a larger capacity"):
        FileBackend(tmp_path / "t", 100_000)


def test_what_is_read_stays_and_what_is_not_goes(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    for seed in range(60):
        stored(store, record_of(seed, 3000))
        same(store.get([key_of(0)])[0], record_of(0, 3000))
    assert store.exists([key_of(0), key_of(10)]) == (True, False)


def test_a_segment_that_is_used_again_tells_its_fingerprints_again(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 2 * SEGMENT, segment_bytes=SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in range(30)))
    store.close()
    store = FileBackend(tmp_path / "s", 2 * SEGMENT, segment_bytes=SEGMENT)
    (miss,) = store.get([key_of(29, attrs.evolve(ONE, dtype="float16"))])
    assert isinstance(miss, Miss) and miss.detail == "dtype is 'bfloat16' there and 'float16' here"
