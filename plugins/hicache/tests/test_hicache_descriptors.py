"""The file backend and the process's descriptors: how many it holds, and what it answers when there are no more."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from prefixloom.storage import Record
from prefixloom.testing.laws.storage import key_of, record_of, stored
from prefixloom_hicache import FileBackend
from prefixloom_hicache.file_store.backend import BLOCK
from tests.support.processes import python

EXHAUSTED = """
import os, resource, sys
from prefixloom.storage import *
from prefixloom.testing.laws.storage import key_of, record_of, same, stored
from prefixloom_hicache import FileBackend

folder = sys.argv[1]
store = FileBackend(folder, 200 << 12)
stored(store, *(record_of(seed, 3000) for seed in range(200)))  # full
reader = FileBackend(folder, read_only=True)
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
found = store.get([key_of(seed) for seed in range(200)])
read = reader.get([key_of(seed) for seed in range(200)])
try:
    FileBackend(folder, read_only=True)
except Exception as error:
    told = str(error)
for number in taken:
    os.close(number)
assert all(isinstance(answer, Refused) and answer.reason == "io" for answer in put)
assert all("Too many open files" in answer.detail for answer in put), put[0]
for answers in (found[1:], read[1:]):
    assert {answer.reason for answer in answers} == {"io"}, {answer.reason for answer in answers}
    assert all("Too many open files" in answer.detail for answer in answers)
assert "Too many open files" in told and "ulimit -n" in told, told
for opened in (store, reader):
    answers = opened.get([key_of(seed) for seed in range(200)])
    assert all(isinstance(answer, Record) for answer in answers[1:]), "one was evicted to make room, and no more"
stored(store, *(record_of(seed, 3000) for seed in range(1000, 1012)))
for seed in range(1000, 1012):
    same(store.get([key_of(seed)])[0], record_of(seed, 3000))
assert store.status().notes == reader.status().notes == ()
print("recovered")
"""


def test_without_descriptors_nothing_is_stored_and_it_goes_on_when_there_are_some(tmp_path: Path) -> None:
    assert python(EXHAUSTED, tmp_path / "s") == "recovered\n"


@pytest.mark.parametrize("read_only", [False, True])
def test_threads_that_read_at_once_hold_a_descriptor_each(tmp_path: Path, read_only: bool) -> None:
    threads, seeds = 6, range(200)
    before = len(os.listdir("/proc/self/fd"))
    store = FileBackend(tmp_path / "s", 200 * BLOCK)
    stored(store, *(record_of(seed, 3000) for seed in seeds))
    if read_only:
        store.close()
        store = FileBackend(tmp_path / "s", read_only=True)
    wrong, most = [], 0

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
    assert wrong == [] and most <= before + 2 + threads
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "the directory, as long as the object is there"


def test_a_store_that_could_not_be_opened_holds_no_lock(tmp_path: Path) -> None:
    """Whoever keeps the error keeps the frames of the opening too."""
    FileBackend(tmp_path / "s", 8 * BLOCK).close()
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
