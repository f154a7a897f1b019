"""The file backend whose files go away under it: no success is told of what nobody will find again."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefixloom.storage import Miss, Refused, Stored
from prefixloom.testing.laws.storage import key_of, record_of, same, stored
from prefixloom_hicache import FileBackend
from prefixloom_hicache.file_store.disk import Disk

SEGMENT = 16 << 10


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def replace(folder: Path) -> None:
    shutil.rmtree(folder)
    FileBackend(folder, 8 * SEGMENT).close()


def move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def move_and_replace(folder: Path) -> None:
    move(folder)
    folder.mkdir(mode=0o700)


@pytest.mark.parametrize("befall", [remove, replace, move, move_and_replace])
def test_a_directory_that_went_is_noticed(tmp_path: Path, befall: Callable[[Path], None]) -> None:
    folder = tmp_path / "s"
    store = FileBackend(folder, 8 * SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in range(5)))
    befall(folder)
    assert not store.flush()
    for seed in (0, 5, 6, 7, 8, 9):  # a known one; and more than a segment takes
        (answer,) = store.put([record_of(seed, 3000)])
        assert isinstance(answer, Refused) and answer.reason == "io"
        assert str(folder) in answer.detail and "open the store again" in answer.detail
    status = store.status()
    assert status.refused == {"io": 6} and status.evicted == 0
    assert any(str(folder) in note and "open the store again" in note for note in status.notes)
    assert not store.flush()


def test_a_directory_that_came_back_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    store = FileBackend(folder, 8 * SEGMENT)
    stored(store, record_of(1))
    move(folder)
    assert isinstance(store.put([record_of(2)])[0], Refused)
    folder.with_name("elsewhere").rename(folder)
    stored(store, record_of(2))
    assert store.flush() and store.status().notes == ()


def test_a_path_that_was_closed_to_this_process_says_nothing_of_the_directory(tmp_path: Path) -> None:
    class Closed(Disk):
        def find(self, name: str, directory: int | None = None) -> os.stat_result:
            if directory is None:
                raise PermissionError(errno.EACCES, "a directory above was closed")
            return super().find(name, directory)

    disk = Disk()
    store = FileBackend(tmp_path / "s", 8 * SEGMENT, disk=disk)
    stored(store, record_of(1))
    disk.__class__ = Closed
    stored(store, record_of(2))
    assert store.flush() and store.status().notes == ()


def test_a_reader_is_told_that_its_directory_went(tmp_path: Path) -> None:
    FileBackend(tmp_path / "s", 8 * SEGMENT).close()
    reader = FileBackend(tmp_path / "s", read_only=True)
    replace(tmp_path / "s")
    (note,) = reader.status().notes
    assert str(tmp_path / "s") in note and "open the store again" in note


def test_a_store_is_found_again_wherever_its_process_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = FileBackend("s", 8 * SEGMENT)
    move_and_replace(tmp_path / "s")
    assert isinstance(store.put([record_of(0)])[0], Refused)
    store = FileBackend("t", 8 * SEGMENT)
    monkeypatch.chdir("/")
    stored(store, record_of(1))
    assert store.flush()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_segment_that_went_takes_its_records_with_it(tmp_path: Path, replaced: bool) -> None:
    folder = tmp_path / "s"
    store = FileBackend(folder, 8 * SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in range(8)))
    for file in files(folder)[1:]:  # an older one, and the one that is written
        file.unlink()
        if replaced:
            file.write_bytes(b"of somebody else")
            file.chmod(0o600)
    assert not store.flush(), "what was stored is gone"
    assert store.exists([key_of(seed) for seed in range(8)]) == (True,) * 3 + (False,) * 5
    assert "segment-00000002.loom was removed or replaced" in " ".join(store.status().notes)
    stored(store, *(record_of(seed, 3000) for seed in range(3, 30)))
    assert store.flush()
    store.close()
    assert not replaced or all(file.read_bytes() == b"of somebody else" for file in files(folder)[1:3])
    reader = FileBackend(folder, read_only=True)
    same(reader.get([key_of(29)])[0], record_of(29, 3000))


def test_a_record_whose_segment_went_is_never_there_already(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in range(8)))
    files(tmp_path / "s")[0].unlink()
    assert store.put([record_of(0, 3000)]) == (Stored(key_of(0)),)
    store.close()
    same(FileBackend(tmp_path / "s", read_only=True).get([key_of(0)])[0], record_of(0, 3000))


def test_what_is_written_to_a_segment_that_went_is_refused_once(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, record_of(0, 3000))
    files(tmp_path / "s")[0].unlink()
    (answer,) = store.put([record_of(1, 3000)])
    assert isinstance(answer, Refused) and answer.reason == "io" and "removed or replaced" in answer.detail
    (miss,) = store.get([key_of(0)])
    assert isinstance(miss, Miss)
    stored(store, record_of(1, 3000))
    same(store.get([key_of(1)])[0], record_of(1, 3000))


def test_two_processes_never_write_after_the_lock_was_removed(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, record_of(1))
    (tmp_path / "s" / "writer.lock").unlink()
    second = FileBackend(tmp_path / "s", 8 * SEGMENT)
    (answer,) = store.put([record_of(2)])
    assert isinstance(answer, Refused) and "writer.lock was removed or replaced" in answer.detail
    assert store.delete([key_of(1)]) == (False,) and not store.flush()
    stored(second, record_of(3))
    same(second.get([key_of(1)])[0], record_of(1))


# ---------------------------------------------------------------- what flush promises


class Unsynced(Disk):
    """The next so many waits for the disk fail. The kernel tells of a failure once, so the ones after them succeed.

    ``dirty`` are the inodes of the files that were written after they were last synced.
    """

    failing = 0

    def __init__(self) -> None:
        self.dirty: set[int] = set()

    def write(self, file: int, content: Any, offset: int) -> None:
        self.dirty.add(os.fstat(file).st_ino)
        super().write(file, content, offset)

    def sync(self, file: int) -> None:
        if self.failing:
            self.failing -= 1
            raise OSError(errno.EIO, "Input/output error")
        super().sync(file)
        self.dirty.discard(os.fstat(file).st_ino)


def test_after_a_flush_all_that_was_written_is_on_the_disk(tmp_path: Path) -> None:
    disk = Unsynced()
    store = FileBackend(tmp_path / "s", 100 * SEGMENT, segment_bytes=SEGMENT, disk=disk)
    for seed in range(0, 120, 12):
        stored(store, *(record_of(each, 3000) for each in range(seed, seed + 12)))
        store.delete([key_of(seed // 2)])
        assert len(disk.dirty) > 2 and store.flush() and not disk.dirty


def test_a_flush_that_failed_is_not_made_good_by_the_next_one(tmp_path: Path) -> None:
    disk = Unsynced()
    store = FileBackend(tmp_path / "s", 2 * SEGMENT, segment_bytes=SEGMENT, disk=disk)
    stored(store, record_of(0, 3000))
    disk.failing = 1
    assert not store.flush() and not store.flush()
    assert "segment-00000001.loom may not be on the disk" in " ".join(store.status().notes)
    stored(store, record_of(1, 3000))
    assert files(tmp_path / "s")[1:], "a segment that failed is not written any more"
    assert not store.flush(), "the first record is still there, and may be lost"
    stored(store, *(record_of(seed, 3000) for seed in range(2, 7)))
    assert not store.exists([key_of(0)])[0] and store.flush() and store.status().notes == ()


def test_a_flush_that_did_not_bring_the_names_of_segments_to_the_disk_is_not_made_good_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileBackend(tmp_path / "s", 2 * SEGMENT, segment_bytes=SEGMENT)
    stored(store, record_of(0))
    with monkeypatch.context() as patch:
        patch.setattr(Disk, "sync_directory", refuse)
        assert not store.flush()
    assert not store.flush()
    assert "the names of new segments may not be on the disk" in " ".join(store.status().notes)


def refuse(*_: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_flush_promises_what_was_written_long_before_it(tmp_path: Path) -> None:
    """Of many segments not all stay open, and what is closed must be on the disk or be told."""
    disk = Unsynced()
    store = FileBackend(tmp_path / "s", 100 * SEGMENT, segment_bytes=SEGMENT, disk=disk)
    disk.failing = 1
    stored(store, *(record_of(seed, 3000) for seed in range(240)))
    assert not store.flush() and not store.flush()


def test_a_flush_promises_what_an_earlier_process_wrote(tmp_path: Path) -> None:
    """It may have died before it synced."""
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in range(8)))
    store.close()
    disk = Unsynced()
    store = FileBackend(tmp_path / "s", 8 * SEGMENT, disk=disk)
    assert store.put([record_of(0, 3000)]) == (Stored(key_of(0), fresh=False),)
    disk.failing = 1
    assert not store.flush() and not store.flush()


def test_a_flush_does_not_sync_again_what_it_has_synced(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, record_of(0, 3000))
    store.close()
    disk = Unsynced()
    store = FileBackend(tmp_path / "s", 8 * SEGMENT, disk=disk)
    assert store.flush()
    disk.failing = 1  # the next sync
    assert store.flush() and disk.failing == 1


def test_a_flush_promises_the_way_to_the_directory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    fsync = os.fsync

    def noted(file: int) -> None:
        synced.add(os.fstat(file).st_ino)
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    store = FileBackend(tmp_path / "a" / "b" / "s", 8 * SEGMENT)
    stored(store, record_of(1))
    assert store.flush()
    way = [tmp_path, tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "s"]
    assert [folder for folder in way if folder.stat().st_ino not in synced] == []
