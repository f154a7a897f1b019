"""Several processes on one store: one writes from its cache until it is killed, others read what it stored."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as File

import pytest

from prefixloom import StorageError, open_store
from prefixloom_hicache import FileBackend
from tests.support.helpers import settle
from tests.support.store_process import CAPACITY, parts, prompt
from tests.support.store_servers import azure, azure_url, mooncake, mooncake_url, redis, redis_url, s3, s3_url
from tests.support.stores import behind, composed, idle, read_back
from tests.support.tiers import serve

SERVERS = {
    "redis": lambda prefix: redis_url(redis(), prefix=prefix),
    "s3": lambda prefix: s3_url(s3(), prefix=prefix, timeout=5),
    "az": lambda prefix: azure_url(azure(), prefix=prefix, timeout=5),
    "mooncake": lambda prefix: mooncake_url(mooncake(), prefix=prefix),
}
OUTSIDE = {"redis": ["redis-server"], "az": ["azurite-blob"], "mooncake": ["mooncake_master", "mooncake_client"]}
KINDS = [
    pytest.param(kind, marks=pytest.mark.outside(*OUTSIDE[kind]) if kind in OUTSIDE else ())
    for kind in ("file", *SERVERS)
]


def url_of(kind: str, folder: File) -> str:
    if kind == "file":
        return f"file:{folder / 'store'}?capacity={CAPACITY}"
    return SERVERS[kind](f"{os.getpid()}-{folder.name}".lower().replace("_", "-"))


@contextmanager
def writer(url: str) -> Iterator[subprocess.Popen[str]]:
    """It is killed in the end, in the middle of whatever it does."""
    call = [sys.executable, str(File(__file__).parents[1] / "support" / "store_process.py"), url]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def said(process: subprocess.Popen[str], count: int) -> dict[int, int]:
    """The next so many prompts that it has stored."""
    assert process.stdout is not None
    lines = [process.stdout.readline().split() for _ in range(count)]
    return {int(number): int(tokens) for number, tokens in lines}


def test_a_reader_finds_what_the_writer_stored_while_both_run(tmp_path: File) -> None:
    folder = tmp_path / "store"
    with writer(url_of("file", tmp_path)) as process:
        early = said(process, 3)
        with pytest.raises(StorageError, match="has a writer already"):
            FileBackend(folder, capacity=CAPACITY)
        reading = FileBackend(folder, read_only=True)
        cache, _ = composed(*parts(), store=reading, tokens=512)
        assert {number: read_back(cache, [*prompt(number), 1]) for number in early} == early
        late = said(process, 3)
        time.sleep(0.1)  # it looks for news only so often
        assert {number: read_back(cache, [*prompt(number), 1]) for number in late} == late
        serve(cache, list(range(500, 540)))
        idle(cache)
        stored = behind(cache).writes
        assert stored.stored == 0 and stored.refused > 0  # the directory is another one's to write
        settle(cache)
    reading.close()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_engines_on_one_server_restore_what_the_other_computed_while_both_run(kind: str, tmp_path: File) -> None:
    """Path, window and state: up to the deepest boundary that all three have."""
    url = url_of(kind, tmp_path)
    with writer(url) as process:
        early = said(process, 3)
        cache, _ = composed(*parts(), store=open_store(url), tokens=512)
        assert {number: read_back(cache, [*prompt(number), 1]) for number in early} == early
        late = said(process, 3)
        assert {number: read_back(cache, [*prompt(number), 1]) for number in late} == late
        serve(cache, list(range(500, 540)))  # this one writes as well
        idle(cache)
        assert behind(cache).writes.stored > 0 and behind(cache).writes.refused == 0
        settle(cache)
    third, _ = composed(*parts(), store=open_store(url), tokens=512)
    assert read_back(third, [*range(500, 540), 1]) > 0
    settle(third)
    other, _ = composed(*parts(), store=open_store(url), tokens=512, model="another")
    assert {number: read_back(other, [*prompt(number), 1]) for number in early} == dict.fromkeys(early, 0)
    settle(other)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_killed_process_had_stored_is_served_by_the_next(kind: str, tmp_path: File) -> None:
    url = url_of(kind, tmp_path)
    with writer(url) as process:
        had = said(process, 4)
        time.sleep(random.random() * 0.05)  # it goes on writing
    cache, _ = composed(*parts(), store=open_store(url), tokens=512)
    assert {number: read_back(cache, [*prompt(number), 1]) for number in had} == had
    for number in range(len(had), len(had) + 12):  # what it had just written, or was writing: right, as far as it goes
        read_back(cache, [*prompt(number), 1])
        serve(cache, prompt(number), chunk=20)
    idle(cache)
    if kind != "mooncake":  # it keeps the names that a killed client had begun to write, for some minutes
        assert behind(cache).writes.refused == 0
    settle(cache)
