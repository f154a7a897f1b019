"""The file backend whose files go away under it: no success is told of what nobody will find again."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from prefixloom.storage import Miss, Refused, Stored
from prefixloom.testing.laws.storage import key_of, record_of, same, stored
from prefixloom_hicache import FileBackend
from prefixloom_hicache.file_store.backend import BLOCK, name_of
from prefixloom_hicache.file_store.disk import Disk

CAPACITY = 32 * BLOCK


def place(folder: Path, seed: int) -> Path:
    return folder / name_of(key_of(seed))


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def replace(folder: Path) -> None:
    shutil.rmtree(folder)
    FileBackend(folder, CAPACITY).close()


def move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def move_and_replace(folder: Path) -> None:
    move(folder)
    folder.mkdir(mode=0o700)


@pytest.mark.parametrize("befall", [remove, replace, move, move_and_replace])
def test_a_directory_that_went_is_noticed(tmp_path: Path, befall: Callable[[Path], None]) -> None:
    folder = tmp_path / "s"
    store = FileBackend(folder, CAPACITY)
    stored(store, *(record_of(seed, 3000) for seed in range(5)))
    befall(folder)
    for seed in (0, 5, 6, 7, 8, 9):  # a known one, and others
        (answer,) = store.put([record_of(seed, 3000)])
        assert isinstance(answer, Refused) and answer.reason == "io"
        assert str(folder) in answer.detail and "open the store again" in answer.detail
    status = store.status()
    assert status.refused == {"io": 6} and status.evicted == 0
    assert any(str(folder) in note and "open the store again" in note for note in status.notes)


def test_a_directory_that_came_back_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    store = FileBackend(folder, CAPACITY)
    stored(store, record_of(1))
    move(folder)
    assert isinstance(store.put([record_of(2)])[0], Refused)
    folder.with_name("elsewhere").rename(folder)
    stored(store, record_of(2))
    assert store.status().notes == ()


def test_a_path_that_was_closed_to_this_process_says_nothing_of_the_directory(tmp_path: Path) -> None:
    class Closed(Disk):
        def find(self, name: str, directory: int | None = None) -> os.stat_result:
            if directory is None:
                raise PermissionError(errno.EACCES, "a directory above was closed")
            return super().find(name, directory)

    disk = Disk()
    store = FileBackend(tmp_path / "s", CAPACITY, disk=disk)
    stored(store, record_of(1))
    disk.__class__ = Closed
    stored(store, record_of(2))
    assert store.status().notes == ()


def test_a_reader_is_told_that_its_directory_went(tmp_path: Path) -> None:
    FileBackend(tmp_path / "s", CAPACITY).close()
    reader = FileBackend(tmp_path / "s", read_only=True)
    replace(tmp_path / "s")
    (note,) = reader.status().notes
    assert str(tmp_path / "s") in note and "open the store again" in note


def test_a_store_is_found_again_wherever_its_process_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = FileBackend("s", CAPACITY)
    move_and_replace(tmp_path / "s")
    assert isinstance(store.put([record_of(0)])[0], Refused)
    store = FileBackend("t", CAPACITY)
    monkeypatch.chdir("/")
    stored(store, record_of(1))


def test_a_record_whose_file_went_is_absent_and_can_be_written_again(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", CAPACITY)
    stored(store, *(record_of(seed, 3000) for seed in range(8)))
    for seed in (2, 3):
        place(tmp_path / "s", seed).unlink()
    keys = [key_of(seed) for seed in range(8)]
    assert store.exists(keys) == tuple(seed not in (2, 3) for seed in range(8))
    assert [answer.reason for answer in store.get(keys) if isinstance(answer, Miss)] == ["absent", "absent"]
    assert store.put([record_of(2, 3000)]) == (Stored(key_of(2)),)
    assert store.status().used == 8 * BLOCK
    place(tmp_path / "s", 2).unlink()
    assert store.put([record_of(2, 3000)]) == (Stored(key_of(2)),), "it is never there already"
    place(tmp_path / "s", 0).unlink()
    stored(store, *(record_of(seed, 3000) for seed in range(50, 100)))  # which evicts what went
    assert store.status().used == CAPACITY


def test_a_folder_that_went_is_made_anew_after_one_refusal(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", CAPACITY)
    stored(store, record_of(0, 3000), record_of(1, 3000))
    shutil.rmtree(place(tmp_path / "s", 0).parent)
    (answer,) = store.put([record_of(2, 3000)])
    assert isinstance(answer, Refused) and answer.reason == "io"
    stored(store, record_of(2, 3000), record_of(0, 3000))
    store.close()
    reader = FileBackend(tmp_path / "s", read_only=True)
    for seed in (0, 2):
        same(reader.get([key_of(seed)])[0], record_of(seed, 3000))
    assert reader.status().records == 2


def test_two_processes_never_write_after_the_lock_was_removed(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", CAPACITY)
    stored(store, record_of(1))
    (tmp_path / "s" / "writer.lock").unlink()
    second = FileBackend(tmp_path / "s", CAPACITY)
    (answer,) = store.put([record_of(2)])
    assert isinstance(answer, Refused) and "writer.lock was removed or replaced" in answer.detail
    stored(second, record_of(3))
    same(second.get([key_of(1)])[0], record_of(1))
