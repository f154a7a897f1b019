"""What the file backend trusts: a directory and files that nobody else could have written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from prefixloom import StorageError
from prefixloom.testing.laws.storage import key_of, missed, record_of, same, stored
from prefixloom_hicache import FileBackend
from prefixloom_hicache.file_store.backend import name_of
from prefixloom_hicache.file_store.directory import distrust
from prefixloom_hicache.file_store.disk import Disk

CAPACITY = 1 << 20
STRANGER = 12345


class Owned(Disk):
    """The files whose size is ``size`` belong to a stranger."""

    def __init__(self, size: int) -> None:
        self.size = size

    def _changed(self, found: os.stat_result) -> os.stat_result:
        return found if found.st_size != self.size else os.stat_result((*found[:4], STRANGER, *found[5:]))

    def stat(self, file: int) -> os.stat_result:
        return self._changed(super().stat(file))

    def find(self, name: str, directory: int | None = None) -> os.stat_result:
        return self._changed(super().find(name, directory))


def place(folder: Path, seed: int = 1) -> Path:
    return folder / name_of(key_of(seed))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = FileBackend(tmp_path / "s", CAPACITY)
    stored(store, record_of(1))
    store.close()
    return tmp_path / "s"


def refused(folder: Path, text: str, **options: Any) -> None:
    with pytest.raises(StorageError, match=text):
        FileBackend(folder, CAPACITY, **options)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_record_of_another_user_is_refused(folder: Path, read_only: bool) -> None:
    told = rf"{place(folder)} belongs to user {STRANGER}: remove it, or"
    refused(folder, told, disk=Owned(place(folder).stat().st_size), read_only=read_only)


def test_files_of_this_user_and_of_root_are_trusted_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    owners = (0, 1, 999, 1000, 1001, STRANGER)
    of = {owner: os.stat_result((0o100600, 0, 0, 1, owner, 0, 0, 0, 0, 0)) for owner in owners}
    assert [owner for owner in owners if not distrust("record", of[owner])] == [0, 1000]


def test_a_lock_of_another_user_is_refused(folder: Path) -> None:
    refused(folder, rf"{folder}/writer.lock belongs to user {STRANGER}: remove it, or", disk=Owned(0))


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("what", ["record", "folder"])
def test_what_others_may_write_is_refused(folder: Path, what: str, mode: int, read_only: bool) -> None:
    wrong = place(folder) if what == "record" else place(folder).parent
    before = wrong.stat().st_mode
    wrong.chmod(mode)
    refused(folder, rf"others may write {wrong}: `chmod go-w {wrong}` if", read_only=read_only)
    wrong.chmod(before)
    same(FileBackend(folder, CAPACITY, read_only=read_only).get([key_of(1)])[0], record_of(1))


def test_a_lock_that_others_may_write_is_refused(folder: Path) -> None:
    (folder / "writer.lock").chmod(0o606)
    refused(folder, rf"others may write {folder}/writer.lock: `chmod go-w {folder}/writer.lock` if")


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("what", ["record", "folder"])
def test_a_link_is_refused(folder: Path, what: str, read_only: bool) -> None:
    link = place(folder) if what == "record" else place(folder).parent
    goal = folder.with_name("goal")
    link.rename(goal)
    link.symlink_to(goal)
    refused(folder, rf"{link} is a link or no file: remove it", read_only=read_only)
    assert goal.exists() and link.is_symlink()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("what", ["open", "link", "owner"])
def test_a_running_store_reads_nothing_that_it_would_refuse(folder: Path, what: str, read_only: bool) -> None:
    disk = Owned(-1)
    store = FileBackend(folder, CAPACITY, read_only=read_only, disk=disk)
    other = FileBackend(folder.with_name("other"), CAPACITY)
    stored(other, record_of(2, 1234))
    made, new = place(other.directory, 2), place(folder, 2)
    if what == "link":
        new.symlink_to(made)
    else:
        made.chmod(0o666 if what == "open" else 0o600)
        made.rename(new)
        disk.size = new.stat().st_size if what == "owner" else -1
    missed(store.get([key_of(2)])[0], "corrupt")
    same(store.get([key_of(1)])[0], record_of(1))
    assert new.is_symlink() or new.exists() or not read_only


def test_a_directory_is_closed_to_others_before_what_is_in_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody puts a file into the empty directory at the last moment before it is closed."""
    folder = tmp_path / "s"
    folder.mkdir()
    folder.chmod(0o777)
    close = os.fchmod

    def late(file: int, mode: int) -> None:
        (folder / "planted").write_bytes(b"planted")
        close(file, mode)

    monkeypatch.setattr(os, "fchmod", late)
    refused(folder, rf"somebody put planted into {folder} before it was closed to others: look at it")
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "planted").read_bytes() == b"planted"
