"""The file backend and the process's descriptors: how many it holds, and what it answers when there are no more."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from prefixloom.storage import Record
from prefixloom.testing.laws.storage import key_of, record_of, same, stored
from prefixloom_hicache import FileBackend
from tests.support.processes import python

SEGMENT = 16 << 10
PER_SEGMENT = 3
"""The records of 3000 bytes that a segment takes."""


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


MANY = """
import os, resource, sys
from prefixloom.testing.laws.storage import key_of, record_of, same, stored
from prefixloom_hicache import FileBackend

SEGMENT = 16 << 10
folder, segments = sys.argv[1], 300
resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
seeds = range(3 * segments)
store = FileBackend(folder, 400 * SEGMENT, segment_bytes=SEGMENT)
stored(store, *(record_of(seed, 3000) for seed in seeds))
for opened in (store, FileBackend(folder, read_only=True, refresh_seconds=0)):
    for seed in seeds:
        same(opened.get([key_of(seed)])[0], record_of(seed, 3000))
opened.get([key_of(9999)])  # it looks for news in every segment
assert store.flush()
store.close()
store = FileBackend(folder, 400 * SEGMENT, segment_bytes=SEGMENT)
assert store.delete([key_of(seed) for seed in seeds[::3]]) == (True,) * segments
same(store.get([key_of(1)])[0], record_of(1, 3000))
assert store.flush() and store.status().notes == ()
open("/dev/null").close()
print(len([name for name in os.listdir(folder) if name.startswith("segment-")]))
"""


def test_a_store_of_many_segments_leaves_descriptors_for_others(tmp_path: Path) -> None:
    assert python(MANY, tmp_path / "s") == "300\n"


EXHAUSTED = """
import os, resource, sys
from prefixloom.storage import *
from prefixloom.testing.laws.storage import key_of, record_of, same, stored
from prefixloom_hicache import FileBackend

SEGMENT = 16 << 10
folder = sys.argv[1]
store = FileBackend(folder, 200 * SEGMENT, segment_bytes=SEGMENT)
stored(store, *(record_of(seed, 3000) for seed in range(3 * 200)))  # full: the next segment is one that exists
assert store.flush()
reader = FileBackend(folder, read_only=True, refresh_seconds=0)
resource.setrlimit(resource.RLIMIT_NOFILE, (220, 220))


def exhausted():
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return taken


taken = exhausted()
put = store.put([record_of(seed, 3000) for seed in range(1000, 1012)])
refused = [answer for answer in put if isinstance(answer, Refused)]
found = store.get([key_of(seed) for seed in range(3 * 200)])
read = reader.get([key_of(seed) for seed in range(3 * 200)])
try:
    FileBackend(folder, read_only=True)
except Exception as error:
    told = str(error)
for number in taken:
    os.close(number)
assert refused and {answer.reason for answer in refused} == {"io"}
assert all("Too many open files" in answer.detail for answer in refused), refused[0]
for answers in (found, read):
    missed = [answer for answer in answers if isinstance(answer, Miss)]
    assert {answer.reason for answer in missed} == {"io"}, {answer.reason for answer in missed}
    assert all("Too many open files" in answer.detail for answer in missed)
assert "Too many open files" in told and "ulimit -n" in told, told
for answers in (store.get([key_of(seed) for seed in range(3 * 200)]), reader.get([key_of(3)])):
    assert all(isinstance(answer, Record) for answer in answers), "nothing was evicted for want of a descriptor"
stored(store, *(record_of(seed, 3000) for seed in range(1000, 1012)))
for seed in range(1000, 1012):
    same(store.get([key_of(seed)])[0], record_of(seed, 3000))
assert store.status().notes == reader.status().notes == ()
print("recovered")
"""


def test_without_descriptors_nothing_is_stored_or_lost_and_it_goes_on_when_there_are_some(tmp_path: Path) -> None:
    assert python(EXHAUSTED, tmp_path / "s") == "recovered\n"


@pytest.mark.parametrize("read_only", [False, True])
def test_threads_that_read_at_once_share_a_bounded_number_of_descriptors(tmp_path: Path, read_only: bool) -> None:
    segments, threads = 150, 6
    seeds = range(PER_SEGMENT * segments)
    store = FileBackend(tmp_path / "s", 200 * SEGMENT, segment_bytes=SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in seeds))
    if read_only:
        store.close()
        store = FileBackend(tmp_path / "s", read_only=True)
    before_reading, wrong, most = len(os.listdir("/proc/self/fd")), [], 0

    def read(first: int) -> None:
        for step in range(len(seeds)):
            seed = (first + 7 * step) % len(seeds)
            (found,) = store.get([key_of(seed)])
            if not isinstance(found, Record) or found != record_of(seed, 3000):
                wrong.append(found)

    running = [threading.Thread(target=read, args=(100 * number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    while any(thread.is_alive() for thread in running):
        most = max(most, len(os.listdir("/proc/self/fd")))
    assert wrong == []
    assert len(files(tmp_path / "s")) == segments
    store.close()
    closed = len(os.listdir("/proc/self/fd"))
    assert most - closed < 100 and before_reading - closed < 100


def test_a_closed_store_holds_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = FileBackend(tmp_path / "s", 8 * SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in range(10)))
    same(store.get([key_of(1)])[0], record_of(1, 3000))
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_store_that_could_not_be_opened_holds_no_lock(tmp_path: Path) -> None:
    """Whoever keeps the error keeps the frames of the opening too."""
    FileBackend(tmp_path / "s", 8 * SEGMENT).close()
    told = python(
        "import resource, sys, os\nfrom prefixloom import StorageError\nfrom prefixloom_hicache import FileBackend\n"
        "from prefixloom_hicache.file_store.disk import Disk\n"
        "class Failing(Disk):\n"
        "    def names(self, directory):\n        raise OSError(5, 'Input/output error')\n"
        "try:\n    FileBackend(sys.argv[1], disk=Failing())\n"
        "except StorageError as error:\n    kept = error\n"
        "FileBackend(sys.argv[1]).close()\nprint(kept)",
        tmp_path / "s",
    )
    assert "cannot be read: Input/output error" in told
