"""A store on a server against a plain loop of the same client's calls, and what a server that stalls costs a scheduler.

Both sides write the same records, of random bytes and under their own names, and read them into the same buffers, in
turn and 64 at a time. The plain loop moves header and payload as one value, as the store does. It checks nothing. Time
is what passes, so the server's part is in it.

``pid`` is the server's process, on this machine. It is stopped and continued. Meanwhile a cache with this store
behind its host tier opens requests that it has never seen. The times are those of ``open`` alone, and of all of the
scheduler's own calls, ``open``, ``restore``, ``close`` and ``poll``: without a store, with the server as it is, and
while it is stopped.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.runner.figures import Rows
from prefixloom import Buffer, Component, Manifest, Path, Point, TierManifest, compose, open_store
from prefixloom.storage import Fingerprint, Key, Record, Stored, encode_header
from prefixloom_hicache import HostTier
from prefixloom_hicache.servers.mooncake_values import MooncakeValues
from prefixloom_hicache.servers.object_values import ObjectValues
from prefixloom_hicache.servers.redis_values import RedisValues

LOT = 64
HERE = Fingerprint("bench", "bfloat16", 16, "kv", "1")
Values = Sequence[tuple[str, bytes]]


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


def seconds_of(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def transfers(url: str, records: int, size: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each side, one figure per turn."""
    store: Any = open_store(url)
    plain = PLAIN[type(store.values)](store.values)
    took: dict[str, list[float]] = {}
    buffers = [memoryview(bytearray(size + 256)) for _ in range(LOT)]
    payloads = [os.urandom(size) for _ in range(LOT)]
    for turn in range(rounds + 1):  # the first one warms up
        spent = dict.fromkeys(("plain write", "store write", "plain read", "store read"), 0.0)
        for lot in range(records // LOT):
            seeds = [(turn * records + lot * LOT + at).to_bytes(16, "little") + os.urandom(16) for at in range(LOT)]
            ours = [Record(Key(seed, HERE), "kv", 0, 16, "record", p) for seed, p in zip(seeds, payloads, strict=True)]
            theirs = [(f"plain/{each.key.content.hex()}", encode_header(each) + bytes(each.payload)) for each in ours]
            keys, names = [each.key for each in ours], [name for name, _ in theirs]

            def put(ours: Any = ours) -> None:
                assert all(isinstance(answer, Stored) for answer in store.put(ours))

            def get(keys: Any = keys) -> None:
                assert all(isinstance(answer, Record) for answer in store.get(keys, [each[:size] for each in buffers]))

            def write(theirs: Any = theirs) -> None:
                plain.write(theirs)

            def read(names: Any = names) -> None:
                plain.read(names, buffers)

            for pair in ((("plain write", write), ("store write", put)), (("plain read", read), ("store read", get))):
                for name, run in pair if lot % 2 else reversed(pair):
                    spent[name] += seconds_of(run)
            store.values.remove([*names, *map(store.name_of, keys)])
        if turn:
            for name, value in spent.items():
                took.setdefault(name, []).append(value)
    store.close()
    return took


def opens(url: str | None, pid: int | None, requests: int) -> tuple[list[float], list[float]]:
    """Return the seconds of ``open``, and of all calls of the scheduler, for each request of 512 new tokens."""
    kv = Component("kv", Manifest([Buffer("k", (2, 64), "float32")]), Path())
    state = Component("state", Manifest([Buffer("s", (64, 64), "float32")]), Point())
    host = HostTier(TierManifest(memory="64MiB"), identity={"model": "bench", "weights": "1"}, fetch="best_effort")
    cache = compose(None, plugins=[kv, state, host], page_size=16, capacity={"kv": 8192, "state": 32})
    if url is not None:
        host.attach(open_store(url))
    rng, alone, took = random.Random(1), list[float](), list[float]()
    if pid is not None:
        os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(requests):
            tokens = [rng.randrange(50_000) for _ in range(512)]
            begun = time.perf_counter()
            sequence = cache.open(tokens, leave=1)
            alone.append(time.perf_counter() - begun)
            sequence.restore()
            spent = time.perf_counter() - begun
            sequence.grow(512)
            with cache.step([sequence]) as step:
                step.run_ops()
            begun = time.perf_counter()
            sequence.close()
            cache.poll()
            took.append(spent + time.perf_counter() - begun)
            time.sleep(0.002)  # in place of layers
    finally:
        if pid is not None:
            os.kill(pid, signal.SIGCONT)
    if host.store is not None:
        host.detach()
    return alone, took


def server_stores(
    url: str, records: int = 512, kib: int = 256, turns: int = 5, pid: int | None = None, requests: int = 2000
) -> Rows:
    """Return the speed of each side and their ratio; with ``pid``, a scheduler's calls beside the stopped server."""
    size = kib << 10
    took = transfers(url, records, size, turns)
    found: Rows = {}
    for kind in ("write", "read"):
        plain, store = (took[f"{who} {kind}"] for who in ("plain", "store"))
        found[f"{kind}, plain, MB/s"] = [records * size / each / 1e6 for each in plain]
        found[f"{kind}, store, MB/s"] = [records * size / each / 1e6 for each in store]
        found[f"{kind}, of a plain loop"] = [theirs / ours for theirs, ours in zip(plain, store, strict=True)]
    if pid is not None:
        sides = {"no store": (None, None), "server runs": (url, None), "server stopped": (url, pid)}
        for name, side in sides.items():
            for calls, seconds in zip(("open", "all calls"), opens(*side, requests), strict=True):
                times = sorted(seconds)
                found[f"{calls}, {name}, us"] = [1e6 * statistics.median(times)]
                found[f"{calls}, {name}, 99%, us"] = [1e6 * times[len(times) * 99 // 100]]
    return found
