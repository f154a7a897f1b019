"""The file backend: other processes, permissions, links, older stores, what is evicted, and reads beside writes."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import attrs
import pytest

from prefixloom import CompositionError, PrefixloomError, StorageError, TierManifest, open_store
from prefixloom.storage import HEADER_BYTES, Checksum, Miss, Record, Refused, Stored
from prefixloom.testing.laws.storage import ONE, ROOMY, key_of, missed, record_of, same, stored
from prefixloom_hicache import FileBackend, HostTier
from prefixloom_hicache.file_store.backend import BLOCK, name_of
from prefixloom_hicache.file_store.disk import Disk
from tests.support.processes import python

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
    with_size = open_store(f"{url}?capacity=1MiB")
    assert with_size.status().capacity == 1 << 20
    stored(with_size, record_of(1))
    with_size.close()
    for option, answer in (("1", Refused), ("Yes", Refused), ("0", Stored)):
        store = open_store(f"{url}?read_only={option}")
        same(store.get([key_of(1)])[0], record_of(1))
        assert isinstance(store.put([record_of(2)])[0], answer)
        store.close()
    for wrong, says in (
        ("file:", "names no directory"),
        (f"file://host{tmp_path}", "names no directory"),
        (f"{url}?capacty=1MiB", "has 'capacty': the store takes capacity, "),
        (f"{url}?capacity=big", "capacity='big' is no size"),
        (f"{url}?read_only=never", "read_only='never': write 1 or 0"),
        ("memory:", "storage 'memory' is not opened by a URL"),
        ("fil:/tmp", "Did you mean 'file'"),
        ("file:/tmp/a%00b", "cannot be opened with file:/tmp/a%00b: embedded null byte"),
        ("file", "storage 'file' cannot be opened with the options that it has by default: "),
        (None, "a store is named by a text, its name or a URL, got None"),
    ):
        with pytest.raises(PrefixloomError, match=re.escape(says)):
            open_store(wrong)  # type: ignore[arg-type]
    with pytest.raises(CompositionError, match="says all of its store, so it takes no capacity beside it"):
        open_store(url, capacity=1 << 20)
    with pytest.raises(CompositionError, match="'memory' cannot be opened with the options size: "):
        open_store("memory", size=1 << 20)
    with pytest.raises(CompositionError, match=re.escape("'redis://me:***@host' says all")):
        open_store("redis://me:sesame@host", ttl=5)
    tier = HostTier(TierManifest(capacity=64), identity={"model": "m", "weights": "1"})
    with pytest.raises(StorageError, match=re.escape("takes an open store: open_store('redis://me:***@host')")):
        tier.attach("redis://me:sesame@host")  # type: ignore[arg-type]


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
        "print(reader.put([record_of(2)])[0].reason, reader.exists([key_of(1)]))",
        tmp_path / "s",
    )
    assert told.splitlines() == ["True", "read_only (True,)"]
    same(store.get([key_of(1)])[0], record_of(1, 5000))


FORKING = """
import os, sys
from prefixloom_hicache import FileBackend, HostTier
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


def test_a_reader_sees_news_and_evictions(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * BLOCK)
    reader = FileBackend(tmp_path / "s", read_only=True)
    missed(reader.get([key_of(1)])[0], "absent")
    stored(store, record_of(1))
    same(reader.get([key_of(1)])[0], record_of(1))
    for seed in range(2, 60):
        stored(store, record_of(seed, 3000))
        same(reader.get([key_of(seed)])[0], record_of(seed, 3000))
    missed(reader.get([key_of(1)])[0], "absent")
    assert reader.exists([key_of(1), key_of(59)]) == (False, True)
    assert (reader.status().records, reader.status().used) == (8, 8 * BLOCK)
    assert reader.status().misses == {"absent": 2}


def test_a_reader_removes_nothing_that_is_damaged(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, record_of(1))
    (tmp_path / "s" / name_of(key_of(1))).write_bytes(b"damage")
    reader = FileBackend(tmp_path / "s", read_only=True)
    for _ in range(2):
        missed(reader.get([key_of(1)])[0], "corrupt")
    missed(store.get([key_of(1)])[0], "corrupt")
    missed(reader.get([key_of(1)])[0], "absent")


class Meanwhile(Disk):
    """Something happens before the system call number ``at`` of a read, once."""

    def __init__(self) -> None:
        self.left = -1
        self.act: Callable[[], object] = lambda: None

    def _call(self) -> None:
        self.left -= 1
        if self.left == -1:
            self.act()

    def open(self, name: str, flags: int, directory: int) -> int:
        self._call()
        return super().open(name, flags, directory)

    def stat(self, file: int) -> os.stat_result:
        self._call()
        return super().stat(file)

    def read_into(self, file: int, buffer: memoryview, offset: int) -> int:
        self._call()
        return super().read_into(file, buffer, offset)


@pytest.mark.parametrize("at", range(5))
def test_a_record_that_goes_while_it_is_read_is_absent_and_not_damaged(tmp_path: Path, at: int) -> None:
    store = FileBackend(tmp_path / "s", 4 * BLOCK)
    disk = Meanwhile()
    reader = FileBackend(tmp_path / "s", read_only=True, disk=disk)
    for seed in range(0, 60, 10):
        stored(store, record_of(seed, 3000))
        disk.left = at
        others = [record_of(seed + number, 3000) for number in range(1, 9)]
        disk.act = partial(store.put, others)
        (found,) = reader.get([key_of(seed)])
        if isinstance(found, Record):
            same(found, record_of(seed, 3000))
        else:
            missed(found, "absent")
        missed(reader.get([key_of(seed)])[0], "absent")


@pytest.mark.parametrize("others", range(1, 9))
@pytest.mark.parametrize("at", range(4))
def test_a_record_that_is_written_again_while_it_is_read_is_kept(tmp_path: Path, others: int, at: int) -> None:
    """However many records come between, a read of the old file must not remove the new one."""
    disk = Meanwhile()
    store = FileBackend(tmp_path / "s", 3 * BLOCK, disk=disk)
    stored(store, record_of(0, 3000))
    disk.left, disk.act = at, lambda: store.put([record_of(seed, 3000) for seed in (*range(1, others), 0)])
    (found,) = store.get([key_of(0)])
    same(found, record_of(0, 3000))
    same(store.get([key_of(0)])[0], record_of(0, 3000))


def test_a_system_that_reads_and_writes_little_at_a_time_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.preadv, os.pwrite
    store = FileBackend(tmp_path / "s", ROOMY)
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:700], at))
    stored(store, record_of(1, 5000))
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read(file, [memoryview(into[0])[:900]], at))
    same(store.get([key_of(1)])[0], record_of(1, 5000))


def test_a_checksum_that_cannot_be_computed_here_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, attrs.evolve(record_of(1), checksum=Checksum("xxh3", 1)))
    monkeypatch.setattr("prefixloom.storage.checksum.function", lambda algorithm: None)
    (miss,) = store.get([key_of(1)])
    missed(miss, "format")
    assert isinstance(miss, Miss) and miss.detail.endswith("its checksum is xxh3: install xxhash to read it")


def test_a_record_of_another_format_is_written_again(tmp_path: Path) -> None:
    """A put of what cannot be read must not keep it as the most recently used record."""
    store = FileBackend(tmp_path / "s", 2 * BLOCK)
    stored(store, record_of(1))
    with (tmp_path / "s" / name_of(key_of(1))).open("r+b") as file:
        file.seek(-HEADER_BYTES + 8, os.SEEK_END)
        file.write(b"\x63")  # the version
    with closing(FileBackend(tmp_path / "s", read_only=True)) as reader:
        missed(reader.get([key_of(1)])[0], "format")
    missed(store.get([key_of(1)])[0], "format")
    missed(store.get([key_of(1)])[0], "absent")
    stored(store, record_of(1))
    same(store.get([key_of(1)])[0], record_of(1))


# ---------------------------------------------------------------- permissions, links


def test_files_and_directories_are_nobody_elses(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        stored(FileBackend(tmp_path / "a" / "s", ROOMY), record_of(1))
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "a" / "s").stat().st_mode) == 0o700
    modes = {(file.is_dir(), stat.S_IMODE(file.stat().st_mode)) for file in (tmp_path / "a" / "s").rglob("*")}
    assert modes == {(True, 0o700), (False, 0o600)}


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
from prefixloom import CompositionError, PrefixloomError, StorageError, TierManifest, open_store
from prefixloom_hicache import FileBackend, HostTier
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


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("what", ["pipe", "folder"])
def test_what_is_no_file_in_a_records_place_is_refused(tmp_path: Path, what: str, read_only: bool) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, record_of(1), record_of(2))
    place = tmp_path / "s" / name_of(key_of(1))
    place.unlink()
    {"pipe": lambda: os.mkfifo(place), "folder": place.mkdir}[what]()
    missed(store.get([key_of(1)])[0], "corrupt")
    same(store.get([key_of(2)])[0], record_of(2))
    store.close()
    if place.exists():
        with pytest.raises(StorageError, match=f"{place} is a link or no file: remove it"):
            FileBackend(tmp_path / "s", ROOMY, read_only=read_only)


@pytest.mark.parametrize("empty", [True, False])
def test_a_write_removes_an_empty_folder_in_the_place_of_its_record(tmp_path: Path, empty: bool) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, record_of(2))
    place = tmp_path / "s" / name_of(key_of(1))
    (place if empty else place / "full").mkdir(parents=True)
    (found,) = store.put([record_of(1)])
    assert isinstance(found, Refused) != empty
    assert place.is_dir() != empty
    same(store.get([key_of(2)])[0], record_of(2))


# ---------------------------------------------------------------- older stores, other sizes


@pytest.mark.parametrize("read_only", [False, True])
def test_a_directory_of_an_older_store_is_refused(tmp_path: Path, read_only: bool) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    (folder / "segment-00000001.loom").write_bytes(b"PLoomSeg")
    with pytest.raises(StorageError, match=r"has segment-00000001\.loom, of an older version of this store"):
        FileBackend(folder, ROOMY, read_only=read_only)
    (folder / "segment-00000001.loom").unlink()
    FileBackend(folder, ROOMY, read_only=read_only).close()


def test_other_files_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    store = FileBackend(folder, 2 * BLOCK)
    stored(store, record_of(0))
    others = [folder / "notes", (folder / name_of(key_of(0))).with_name("notes"), folder / "folder"]
    for each in others[:2]:
        each.write_bytes(b"of somebody else")
    others[2].mkdir()
    stored(store, *(record_of(seed) for seed in range(1, 9)))
    store.close()
    store = FileBackend(folder, 2 * BLOCK)
    assert store.status().records == 2 and store.exists([key_of(7), key_of(8)]) == (True, True)
    assert all(each.exists() for each in others)


def test_a_smaller_capacity_holds_from_the_opening_on(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    for seed in range(10):
        stored(store, record_of(seed, 3000))
        os.utime(tmp_path / "s" / name_of(key_of(seed)), ns=(seed, seed))
    store.close()
    store = FileBackend(tmp_path / "s", 3 * BLOCK)
    assert (store.status().records, store.status().used, store.status().evicted) == (3, 3 * BLOCK, 7)
    assert store.exists([key_of(seed) for seed in range(10)]) == (False,) * 7 + (True,) * 3
    for wrong in (2 * BLOCK - 1, 1e9, "1GiB"):
        with pytest.raises(StorageError, match=f"capacity must be at least {2 * BLOCK} bytes, got"):
            FileBackend(tmp_path / "t", wrong)  # type: ignore[arg-type]


def test_a_file_takes_whole_blocks_of_the_capacity(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * BLOCK)
    most = BLOCK - HEADER_BYTES
    for size, used in ((1, 1), (most, 2), (most + 1, 4), (most + 7 * BLOCK, 8)):
        stored(store, record_of(size, size))
        assert store.status().used == used * BLOCK
    missed(store.get([key_of(1)])[0], "absent")
    (answer,) = store.put([record_of(1, most + 7 * BLOCK + 1)])
    assert isinstance(answer, Refused) and answer.reason == "size"


@pytest.mark.parametrize("uses", ["get", "put"])
def test_what_is_used_stays_and_what_is_not_goes(tmp_path: Path, uses: str) -> None:
    store = FileBackend(tmp_path / "s", 8 * BLOCK)
    for seed in range(60):
        stored(store, record_of(seed, 3000))
        if uses == "get":
            same(store.get([key_of(0)])[0], record_of(0, 3000))
        else:
            store.put([record_of(0, 3000)])
    assert store.exists([key_of(seed) for seed in range(60)]) == (True, *[False] * 52, *[True] * 7)
    assert store.status().stored == 60


def test_the_folder_of_a_fingerprint_without_records_goes(tmp_path: Path) -> None:
    """Else a miss would tell of records that nobody has."""
    other = attrs.evolve(ONE, dtype="float16")
    store = FileBackend(tmp_path / "s", 8 * BLOCK)
    stored(store, record_of(0, 700, other))
    missed(store.get([key_of(1)])[0], "fingerprint")
    stored(store, *(record_of(seed, 3000) for seed in range(8)))
    missed(store.get([key_of(9)])[0], "absent")
    assert [each.name for each in (tmp_path / "s").iterdir() if each.is_dir()] == [ONE.digest.hex()]
    (miss,) = store.get([key_of(9, other)])
    assert isinstance(miss, Miss) and miss.detail == "dtype is 'bfloat16' there and 'float16' here"


class Removing(Disk):
    """Another program removes a folder after it was found."""

    def find(self, name: str, directory: int) -> os.stat_result:
        found = super().find(name, directory)
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(f"/proc/self/fd/{directory}/{name}")
        return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="a folder is removed by its descriptor's path")
def test_an_opening_takes_no_harm_from_a_folder_that_goes_meanwhile(tmp_path: Path) -> None:
    with closing(FileBackend(tmp_path / "s", 1 << 20)) as store:
        stored(store, record_of(1))
    with closing(FileBackend(tmp_path / "s", 1 << 20, read_only=True, disk=Removing())) as reader:
        assert reader.get([key_of(1)]) == (Miss(key_of(1), "absent"),)


def test_an_evicted_file_with_another_name_is_not_written_over(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 2 * BLOCK)
    stored(store, record_of(1, 3000), record_of(2, 3000))
    (file,) = (tmp_path / "s").rglob(key_of(1).content.hex())
    os.link(file, tmp_path / "kept")
    content = file.read_bytes()
    stored(store, record_of(3, 3000))
    assert not file.exists() and (tmp_path / "kept").read_bytes() == content


def test_a_text_that_is_damaged_is_written_again(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, record_of(1))
    store.close()
    text = tmp_path / "s" / ONE.digest.hex() / "text"
    text.write_bytes(b"damage")
    store = FileBackend(tmp_path / "s", ROOMY)
    other = attrs.evolve(ONE, dtype="float16")
    (miss,) = store.get([key_of(1, other)])
    assert isinstance(miss, Miss) and miss.detail == "a fingerprint that cannot be read"
    stored(store, record_of(2))
    assert text.read_text() == ONE.text
