"""A store against a plain loop of the same calls, in one run, with the same records of random bytes.

Both sides write the same records and read them into the same buffers, in turn and 64 at a time, each as often first as
second. The store's side includes making and checking checksums; the plain loop checks nothing. The first turns are not
counted: they warm up, and fill files that later ones write over, as a full store does.

Without a ``url`` it is the file store, beside a loop over one file. The data goes no further than the kernel's memory,
and time is thread CPU time, which is nearly all of the time. With the ``url`` of a server, the loop makes the calls of
the same client, and moves header and payload as one value, as the store does. Time is what passes, so the server's part
is in it. Payloads come from ``pages`` buffers in turn; with one buffer, it never leaves the processor's cache.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from bench.runner.figures import Rows
from prefixloom import open_store
from prefixloom.storage import Fingerprint, Key, Record, Stored, encode_header
from prefixloom_hicache import FileBackend
from prefixloom_hicache.servers.mooncake_values import MooncakeValues
from prefixloom_hicache.servers.object_values import ObjectValues
from prefixloom_hicache.servers.redis_values import RedisValues

LOT = 64
HERE = Fingerprint("bench", "bfloat16", 16, "kv", "1")
Values = Sequence[tuple[str, bytes]]


class PlainFile:
    """One file, in which each of ``records`` records has its place."""

    def __init__(self, path: Path, records: int, size: int) -> None:
        self.file, self.records, self.size = os.open(path, os.O_RDWR | os.O_CREAT, 0o600), records, size
        os.posix_fallocate(self.file, 0, records * size)

    def write(self, numbers: Sequence[int], payloads: Sequence[Any]) -> None:
        for number, payload in zip(numbers, payloads, strict=True):
            os.pwrite(self.file, payload, number % self.records * self.size)

    def read(self, numbers: Sequence[int], into: Sequence[memoryview]) -> None:
        for number, buffer in zip(numbers, into, strict=True):
            assert os.preadv(self.file, [buffer], number % self.records * self.size) == self.size


class PlainRedis:
    def __init__(self, values: RedisValues) -> None:
        self.client: Any = values.client

    def write(self, values: Values) -> None:
        pipeline = self.client.pipeline(transaction=False)
        for name, content in values:
            pipeline.set(name, content)
        pipeline.execute()

    def read(self, names: Sequence[str], into: Sequence[memoryview]) -> None:
        pipeline = self.client.pipeline(transaction=False)
        for name in names:
            pipeline.get(name)
        for content, buffer in zip(pipeline.execute(), into, strict=True):
            buffer[: len(content)] = content


class PlainObjects:
    def __init__(self, values: ObjectValues) -> None:
        import obstore

        self.client, self.store = obstore, values.bucket
        self.threads = ThreadPoolExecutor(32)

    def write(self, values: Values) -> None:
        list(self.threads.map(lambda each: self.client.put(self.store, each[0], each[1], use_multipart=False), values))

    def read(self, names: Sequence[str], into: Sequence[memoryview]) -> None:
        def one(name: str, buffer: memoryview) -> None:
            content = self.client.get(self.store, name).bytes()
            buffer[: len(content)] = memoryview(content)

        list(self.threads.map(one, names, into))


class PlainMooncake:
    def __init__(self, values: MooncakeValues) -> None:
        self.client: Any = values.client

    def write(self, values: Values) -> None:
        self.client.put_batch([name for name, _ in values], [content for _, content in values])

    def read(self, names: Sequence[str], into: Sequence[memoryview]) -> None:
        for content, buffer in zip(self.client.get_batch([*names]), into, strict=True):
            buffer[: len(content)] = content


PLAIN: dict[type, Callable[[Any], Any]] = {
    RedisValues: PlainRedis, ObjectValues: PlainObjects, MooncakeValues: PlainMooncake,
}  # fmt: skip


def put(store: Any, records: Sequence[Record]) -> None:
    assert all(isinstance(answer, Stored) for answer in store.put(records))


def get(store: Any, keys: Sequence[Key], into: Sequence[memoryview]) -> None:
    assert all(isinstance(answer, Record) for answer in store.get(keys, into))


class OnFiles:
    """The calls of both sides on files."""

    clock, warm = staticmethod(time.thread_time), 2

    def __init__(self, folder: Path, records: int, size: int) -> None:
        self.plain = PlainFile(folder / "plain", records, size)
        self.store = FileBackend(folder / "store", records * (size + 4096))

    def calls(self, numbers: Sequence[int], records: Sequence[Record], buffers: Sequence[Any]) -> dict[str, Any]:
        store, keys, payloads = self.store, [each.key for each in records], [each.payload for each in records]
        return {
            "plain write": partial(self.plain.write, numbers, payloads),
            "store write": partial(put, store, records),
            "plain read": partial(self.plain.read, numbers, buffers),
            "store read": partial(get, store, keys, buffers),
        }

    def forget(self, records: Sequence[Record]) -> None:
        """Keep all: a later turn writes over it."""


class OnServer(OnFiles):
    """The calls of both sides on a server."""

    clock, warm = staticmethod(time.perf_counter), 1

    def __init__(self, url: str) -> None:
        self.store: Any = open_store(url)
        self.plain = PLAIN[type(self.store.values)](self.store.values)

    def calls(self, numbers: Sequence[int], records: Sequence[Record], buffers: Sequence[Any]) -> dict[str, Any]:
        values = [(self.plain_name(each), encode_header(each) + bytes(each.payload)) for each in records]
        whole = [memoryview(bytearray(len(content))) for _, content in values]
        return super().calls(numbers, records, buffers) | {
            "plain write": partial(self.plain.write, values),
            "plain read": partial(self.plain.read, [name for name, _ in values], whole),
        }

    def plain_name(self, record: Record) -> str:
        return f"plain/{record.key.content.hex()}"

    def forget(self, records: Sequence[Record]) -> None:
        self.store.values.remove([*map(self.plain_name, records), *(self.store.name_of(each.key) for each in records)])


def stores(
    url: str = "", records: int = 256, kib: int = 512, pages: int = 64, turns: int = 3, directory: str | None = None
) -> Rows:
    """Return the speed of writes and reads: of the plain loop, of the store, and the ratio, one figure per turn."""
    size = kib << 10
    pool = [memoryview(bytearray(os.urandom(size))) for _ in range(pages)]
    found: Rows = {}
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        sides = OnServer(url) if url else OnFiles(Path(folder), records, size)
        for turn in range(turns + sides.warm):
            took = dict.fromkeys(("plain write", "store write", "plain read", "store read"), 0.0)
            for lot, start in enumerate(range(turn * records, (turn + 1) * records, LOT)):
                numbers = range(start, min(start + LOT, (turn + 1) * records))
                keys = [Key(number.to_bytes(16, "little") + os.urandom(16), HERE) for number in numbers]
                buffers = [pool[number % pages] for number in numbers]
                lots = [
                    Record(key, "kv", 0, 16, "layer_first", buffer) for key, buffer in zip(keys, buffers, strict=True)
                ]
                calls = sides.calls(numbers, lots, buffers)
                for kind in ("write", "read"):
                    for name in sorted((f"plain {kind}", f"store {kind}"), reverse=bool(lot % 2)):
                        before = sides.clock()
                        calls[name]()
                        took[name] += sides.clock() - before
                sides.forget(lots)
            for kind in ("write", "read") if turn >= sides.warm else ():
                plain, store = took[f"plain {kind}"], took[f"store {kind}"]
                found.setdefault(f"{kind}, plain, GB/s", []).append(records * size / plain / 1e9)
                found.setdefault(f"{kind}, store, GB/s", []).append(records * size / store / 1e9)
                found.setdefault(f"{kind}, of a plain loop", []).append(plain / store)
        sides.store.close()
    return found
