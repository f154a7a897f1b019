"""The file store against a plain loop that reads and writes the same bytes, in one run.

A record has 16 tokens x 32 layers x 1 KiB. It is written from, and read into, the pages of a pool; ``pages`` is their
number, and with one page the only page never leaves the processor's cache. Both sides write into files that exist
already, because a full store writes over what it evicts. The sides take turns every 64 records, each as often first as
second. The store's side includes making and checking checksums. Keys are made beforehand: they belong to the caller,
like the loop's offsets. Figures are thread CPU time, which is nearly all of the time: the data goes no further than the
kernel's memory.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.runner.figures import Rows
from prefixloom.storage import Fingerprint, Key, Record, Stored
from prefixloom_hicache import FileBackend

SIZE = 16 * 32 * 1024
HERE = Fingerprint("bench", "bfloat16", 16, "kv", "1")


def key_of(number: int) -> Key:
    return Key(number.to_bytes(32, "little"), HERE)


def seconds_of(run: Callable[[], None]) -> float:
    before = time.thread_time()
    run()
    return time.thread_time() - before


Pool = list[memoryview]


def plain_write(file: int, pool: Pool, numbers: range, records: int) -> None:
    for number in numbers:
        os.pwrite(file, pool[number % len(pool)], number % records * SIZE)


def plain_read(file: int, pool: Pool, numbers: range, records: int) -> None:
    for number in numbers:
        assert os.preadv(file, [pool[number % len(pool)]], number % records * SIZE) == SIZE


def store_write(store: FileBackend, pool: Pool, numbers: range, keys: list[Key]) -> None:
    for n, key in zip(numbers, keys, strict=True):
        record = Record(key, "kv", 0, 16, "layer_first", pool[n % len(pool)])
        assert isinstance(store.put([record])[0], Stored)


def store_read(store: FileBackend, pool: Pool, numbers: range, keys: list[Key]) -> None:
    found = store.get(keys, [pool[n % len(pool)] for n in numbers])
    assert all(isinstance(answer, Record) for answer in found)


def file_tier(records: int = 256, pages: int = 64, turns: int = 3, directory: str | None = None) -> Rows:
    """Return the speed of writes and reads: of the plain loop, of the store, and the ratio."""
    pool = [memoryview(bytearray(os.urandom(SIZE))) for _ in range(pages)]
    times: dict[str, list[float]] = {name: [] for name in ("plain write", "store write", "plain read", "store read")}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        file = os.open(Path(folder) / "plain", os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(file, 0, records * SIZE)
        store = FileBackend(Path(folder) / "store", records * (SIZE + 4096))
        for turn in range(turns + 2):  # the first two turns fill the files
            took = dict.fromkeys(times, 0.0)
            batches = [
                (range(at, at + 64), [key_of(number) for number in range(at, at + 64)])
                for at in range(turn * records, (turn + 1) * records, 64)
            ]
            for kind, sides in (("write", (plain_write, store_write)), ("read", (plain_read, store_read))):
                plain, stored = sides
                for number, (numbers, keys) in enumerate(batches):
                    calls = {
                        f"plain {kind}": partial(plain, file, pool, numbers, records),
                        f"store {kind}": partial(stored, store, pool, numbers, keys),
                    }
                    for name in sorted(calls, reverse=bool(number % 2)):
                        took[name] += seconds_of(calls[name])
            for name, seconds in took.items():
                times[name] += [seconds] if turn > 1 else []
        store.close()
        os.close(file)
    found: Rows = {}
    for kind in ("write", "read"):
        plain, store = (times[f"{who} {kind}"] for who in ("plain", "store"))
        for who, each in (("plain", plain), ("store", store)):
            found[f"{kind}, {who}, GB/s"] = [records * SIZE / statistics.median(each) / 1e9]
        found[f"{kind}, of a plain loop"] = [statistics.median(p / s for p, s in zip(plain, store, strict=True))]
    return found
