"""What the file backend trusts: a directory and files that nobody else could have written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from prefixloom import StorageError
from prefixloom.testing.laws.storage import key_of, record_of, same, stored
from prefixloom_hicache import FileBackend
from prefixloom_hicache.file_store.directory import distrust
from prefixloom_hicache.file_store.disk import Disk

SEGMENT = 16 << 10
STRANGER = 12345


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


class Owned(Disk):
    """The files whose size is ``size`` belong to a stranger."""

    def __init__(self, size: int) -> None:
        self.size = size

    def stat(self, file: int) -> os.stat_result:
        found = super().stat(file)
        return found if found.st_size != self.size else os.stat_result((*found[:4], STRANGER, *found[5:]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, record_of(1))
    store.close()
    return tmp_path / "s"


def refused(folder: Path, text: str, **options: Any) -> None:
    with pytest.raises(StorageError, match=text):
        FileBackend(folder, 8 * SEGMENT, **options)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_segment_of_another_user_is_refused(folder: Path, read_only: bool) -> None:
    told = rf"{files(folder)[0]} belongs to user {STRANGER}: remove it, or"
    refused(folder, told, disk=Owned(SEGMENT), read_only=read_only)


def test_files_of_this_user_and_of_root_are_trusted_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    owners = (0, 1, 999, 1000, 1001, STRANGER)
    of = {owner: os.stat_result((0o100600, 0, 0, 1, owner, 0, 0, 0, 0, 0)) for owner in owners}
    assert [owner for owner in owners if not distrust(Path("segment"), of[owner])] == [0, 1000]


def test_a_lock_of_another_user_is_refused(folder: Path) -> None:
    refused(folder, rf"{folder}/writer.lock belongs to user {STRANGER}: remove it, or", disk=Owned(0))


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
@pytest.mark.parametrize("read_only", [False, True])
def test_a_segment_that_others_may_write_is_refused(folder: Path, mode: int, read_only: bool) -> None:
    (segment,) = files(folder)
    segment.chmod(mode)
    refused(folder, rf"others may write {segment}: `chmod 600 {segment}` if", read_only=read_only)
    segment.chmod(0o600)
    same(FileBackend(folder, 8 * SEGMENT, read_only=read_only).get([key_of(1)])[0], record_of(1))


def test_a_lock_that_others_may_write_is_refused(folder: Path) -> None:
    (folder / "writer.lock").chmod(0o606)
    refused(folder, rf"others may write {folder}/writer.lock: `chmod 600 {folder}/writer.lock` if")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_link_in_a_segments_place_is_refused(folder: Path, read_only: bool) -> None:
    goal, place = folder.with_name("goal"), folder / "segment-00000002.loom"
    goal.write_bytes(files(folder)[0].read_bytes())
    before = goal.read_bytes()
    place.symlink_to(goal)
    refused(folder, rf"{place} is a link: remove it", read_only=read_only)
    assert goal.read_bytes() == before and place.is_symlink()


@pytest.mark.parametrize("what", ["open", "link"])
def test_a_running_reader_reads_nothing_that_it_would_refuse(folder: Path, what: str) -> None:
    reader = FileBackend(folder, read_only=True, refresh_seconds=0)
    other = FileBackend(folder.with_name("other"), 8 * SEGMENT)
    stored(other, record_of(2))
    (made,) = files(other.directory)
    new = folder / "segment-00000002.loom"
    if what == "link":
        new.symlink_to(made)
    else:
        made.chmod(0o666)
        made.rename(new)
    assert reader.exists([key_of(2), key_of(1)]) == (False, True)
    assert any("segment-00000002" in note and "remove it" in note for note in reader.status().notes)


def test_a_directory_is_closed_to_others_before_what_is_in_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody puts a file into the empty directory at the last moment before it is closed."""
    folder = tmp_path / "s"
    folder.mkdir()
    folder.chmod(0o777)
    close = os.fchmod

    def late(file: int, mode: int) -> None:
        (folder / "segment-00000001.loom").write_bytes(b"planted")
        close(file, mode)

    monkeypatch.setattr(os, "fchmod", late)
    refused(folder, rf"somebody put segment-00000001.loom into {folder} before it was closed to others: look at it")
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "segment-00000001.loom").read_bytes() == b"planted"
