"""The file backend and the system around it: other processes, permissions, links, full and failing disks, old files."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

import attrs
import pytest

from prefixloom import CompositionError, PrefixloomError, StorageError, open_store
from prefixloom.storage import HEADER_BYTES, Checksum, Miss, Record
from prefixloom.testing.laws.storage import ONE, ROOMY, key_of, missed, record_of, same, stored
from prefixloom_hicache import FileBackend
from prefixloom_hicache.file_store.disk import Disk
from prefixloom_hicache.file_store.segment_format import HEAD_BYTES
from tests.support.processes import python

SEGMENT = 16 << 10


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


# ---------------------------------------------------------------- processes


def test_a_second_writer_is_refused_clearly(tmp_path: Path) -> None:
    first = FileBackend(tmp_path / "s", ROOMY)
    with pytest.raises(StorageError, match="has a writer already: open it with read_only=True"):
        FileBackend(tmp_path / "s", ROOMY)
    first.close()
    FileBackend(tmp_path / "s", ROOMY).close()


def test_a_url_says_all_that_the_store_needs_to_know(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    url = f"file:{str(folder).replace(' ', '%20')}"
    with_size = open_store(f"{url}?capacity=1MiB&segment_bytes=16KiB")
    assert with_size.status().capacity == 1 << 20
    stored(with_size, record_of(1))
    with_size.close()
    reading = open_store(f"{url}?read_only=1")
    same(reading.get([key_of(1)])[0], record_of(1))
    reading.close()
    for wrong, says in (
        ("file:", "names no directory"),
        (f"file://host{tmp_path}", "names no directory"),
        (f"{url}?capacty=1MiB", "has 'capacty': the store takes capacity, "),
        (f"{url}?capacity=big", "capacity='big' is no size"),
        ("memory:", "storage 'memory' is not opened by a URL"),
        ("fil:/tmp", "Did you mean 'file'"),
    ):
        with pytest.raises(PrefixloomError, match=re.escape(says)):
            open_store(wrong)
    with pytest.raises(CompositionError, match="says all of its store, so it takes no capacity beside it"):
        open_store(url, capacity=1 << 20)


def test_another_process_reads_what_this_one_writes_and_may_not_write(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, record_of(1, 5000))
    told = python(
        "import sys\nfrom prefixloom import StorageError\nfrom prefixloom.storage import *\n"
        "from prefixloom_hicache import *\n"
        "from prefixloom.testing.laws.storage import *\n"
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
from prefixloom.testing.laws.storage import record_of
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


@pytest.mark.parametrize("first", [0x00, 0xFF])
def test_what_was_deleted_is_no_more_for_a_reader_that_knows_it(tmp_path: Path, first: int) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    record = Record(key_of(1), "kv", 16, 32, "layer_first", memoryview(bytes([first]) * 700))
    stored(store, record, record_of(2))
    reader = FileBackend(tmp_path / "s", read_only=True, refresh_seconds=1e9)
    same(reader.get([key_of(1)])[0], record)
    store.delete([key_of(1)])
    missed(reader.get([key_of(1)])[0], "absent")
    same(reader.get([key_of(2)])[0], record_of(2))


def test_what_a_used_segment_holds_by_chance_is_not_taken_for_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another life's bytes at the same place, under a checksum that happens to fit."""
    store = FileBackend(tmp_path / "s", 2 * SEGMENT, segment_bytes=SEGMENT)
    stored(store, record_of(0, 3000))
    reader = FileBackend(tmp_path / "s", read_only=True, refresh_seconds=1e9)
    for seed in range(1, 30):
        stored(store, record_of(seed, 3000))
    monkeypatch.setattr(Checksum, "fits", lambda self, content: True)
    missed(reader.get([key_of(0)])[0], "absent")


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
from prefixloom import CompositionError, PrefixloomError, StorageError, open_store
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
        with pytest.raises(StorageError, match=r"is a link or no directory: name the directory itself"):
            FileBackend(tmp_path / name, ROOMY)
    lock = tmp_path / "s" / "writer.lock"
    for make in (lambda: lock.symlink_to(tmp_path / "file"), lambda: os.mkfifo(lock), lock.mkdir):
        lock.unlink()
        make()
        with pytest.raises(StorageError, match=r"writer\.lock (is no file|cannot be opened)"):
            FileBackend(tmp_path / "s", ROOMY)


@pytest.mark.parametrize("what", ["pipe", "folder"])
def test_what_is_no_file_in_a_segments_place_is_left_alone(tmp_path: Path, what: str) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, record_of(1))
    place = tmp_path / "s" / "segment-00000002.loom"
    {"pipe": lambda: os.mkfifo(place), "folder": place.mkdir}[what]()
    stored(store, *(record_of(seed, 5 << 20) for seed in (2, 3)))  # the second one needs a new segment
    same(store.get([key_of(1)])[0], record_of(1))
    store.close()
    store = FileBackend(tmp_path / "s", ROOMY)
    assert any("segment-00000002" in note for note in store.status().notes)
    same(store.get([key_of(1)])[0], record_of(1))
    stored(store, record_of(5, 5 << 20), record_of(6, 5 << 20))
    assert place.exists() and not place.is_file()
    reader = FileBackend(tmp_path / "s", read_only=True)
    same(reader.get([key_of(1)])[0], record_of(1))
    assert "segment-00000002.loom is no file" in reader.status().notes


# ---------------------------------------------------------------- other files, other sizes


def test_older_foreign_empty_and_oversized_files_are_told_and_make_room_first(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, record_of(1))
    store.close()
    whole = files(tmp_path / "s")[0].read_bytes()
    older = bytearray(whole)
    older[8] = 0
    cut = whole[: HEAD_BYTES + 100]
    odd = {2: bytes(older), 3: os.urandom(SEGMENT), 4: b"", 5: whole + bytes(3 * SEGMENT), 6: cut}
    for number, content in odd.items():
        place = tmp_path / "s" / f"segment-{number:08}.loom"
        place.write_bytes(content)
        place.chmod(0o600)
    store = FileBackend(tmp_path / "s", 16 * SEGMENT, segment_bytes=SEGMENT)
    told = " ".join(store.status().notes)
    assert "segment of format 0, and this is format 2" in told and "no segment begins here" in told
    assert f"it has {len(cut)} bytes, and was made with {SEGMENT}" in told
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


def test_what_is_put_again_was_used(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    for seed in range(60):
        stored(store, record_of(seed, 3000))
        store.put([record_of(0, 3000)])
    assert store.exists([key_of(0), key_of(10)]) == (True, False)
    assert store.status().stored == 60


def test_a_segment_that_is_used_again_tells_its_fingerprints_again(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 2 * SEGMENT, segment_bytes=SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in range(30)))
    store.close()
    store = FileBackend(tmp_path / "s", 2 * SEGMENT, segment_bytes=SEGMENT)
    (miss,) = store.get([key_of(29, attrs.evolve(ONE, dtype="float16"))])
    assert isinstance(miss, Miss) and miss.detail == "dtype is 'bfloat16' there and 'float16' here"


def test_what_was_written_first_goes_first_however_often_the_store_is_opened_again(tmp_path: Path) -> None:
    for begin in range(0, 60, 3):
        store = FileBackend(tmp_path / "s", 3 * SEGMENT, segment_bytes=SEGMENT)
        stored(store, *(record_of(seed, 3000) for seed in range(begin, begin + 3)))
        store.close()
        reader = FileBackend(tmp_path / "s", read_only=True)
        there = reader.exists([key_of(seed) for seed in range(begin + 3)])
        assert all(there[there.index(True) :]) and sum(there) >= min(begin + 3, 8), there
        reader.close()


def test_a_later_writer_goes_on_in_the_last_segment_of_its_own_size(tmp_path: Path) -> None:
    for seed, (size, files) in enumerate(((1, 1), (1, 1), (2, 2), (1, 2), (2, 2))):
        store = FileBackend(tmp_path / "s", 8 * SEGMENT, segment_bytes=size * SEGMENT)
        stored(store, record_of(seed, 500))
        store.close()
        assert len(list((tmp_path / "s").glob("segment-*"))) == files


def test_a_reader_waits_for_a_header_that_it_cannot_read_yet(tmp_path: Path) -> None:
    """What stands behind it may be there already: the writer's pages come to a reader in any order."""

    class Behind(Disk):
        hidden = -HEADER_BYTES

        def read(self, file: int, size: int, offset: int) -> bytes:
            data = bytearray(super().read(file, size, offset))
            for at in range(max(offset, self.hidden), min(offset + size, self.hidden + HEADER_BYTES)):
                data[at - offset] = 0
            return bytes(data)

    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, record_of(1))
    disk = Behind()
    reader = FileBackend(tmp_path / "s", read_only=True, refresh_seconds=0, disk=disk)
    stored(store, record_of(2), record_of(3))
    location = store.locate(key_of(2))
    assert location is not None
    disk.hidden = location.place.offset
    missed(reader.get([key_of(3)])[0], "absent")
    disk.hidden = -HEADER_BYTES
    for seed in (2, 3):
        same(reader.get([key_of(seed)])[0], record_of(seed))
    assert reader.status().notes == ()
