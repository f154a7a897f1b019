"""Stores on servers, whose clients and servers are killed in the midst of their calls: never a wrong byte.

``python -m tests.random.server_kills [--kinds redis,s3,mooncake] [--kills 1000] [--servers 50]``

A process opens the store and writes and reads records, until it is killed at a random moment. It tells of each record
when the store has answered that it has it. Then another client must find every such record, and of all others find
nothing, or exactly what was meant to be written. In ``--servers`` of the rounds the server is killed instead, and
started again: then its records may be gone, and the
client must go on by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import attrs

from prefixloom import open_store
from prefixloom.storage import Miss, Record, Stored
from prefixloom.testing.laws.storage import record_of
from tests.support.store_servers import (
    Server,
    make_bucket,
    mooncake_servers,
    mooncake_url,
    redis_server,
    redis_url,
    s3_server,
    s3_url,
)

SIZES = (1, 700, 4096, 40_000, 262_144)
LOT = 8
"""Records of one call."""
SPAN = 400
"""Numbers of records that a round writes, again and again: so some are there already."""


def record(number: int) -> Record:
    return record_of(number, SIZES[number % len(SIZES)] + number % 97)


def client(url: str, first: int, seed: int, told: Connection) -> None:
    """Write and read until it is killed. ``told``: numbers that the store has; -1: it began; -2: a wrong byte."""
    rng = random.Random(seed)
    store = open_store(url)
    told.send([-1])
    buffers = [bytearray(max(SIZES) + 97) for _ in range(LOT)]
    while True:
        records = [record(first + rng.randrange(SPAN)) for _ in range(LOT)]
        answers = store.put(records)
        told.send(
            [each.start // 16 for each, answer in zip(records, answers, strict=True) if isinstance(answer, Stored)]
        )
        found = store.get([each.key for each in records], buffers)
        if any(isinstance(one, Record) and one != each for one, each in zip(found, records, strict=True)):
            told.send([-2])


@attrs.define
class Kind:
    """A server, how to kill it, and how to start it again."""

    servers: Sequence[Server]
    url: str
    victim: int
    after_start: Callable[[Server], None] = lambda server: None

    def restart(self) -> None:
        victim = self.servers[self.victim]
        victim.kill()
        victim.start()
        self.after_start(victim)


def kind_of(name: str) -> Kind:
    if name == "redis":
        server = redis_server("--appendonly", "yes")
        return Kind([server], redis_url(server, timeout=2), 0)
    if name == "s3":
        server = s3_server()
        return Kind([server], s3_url(server, timeout=2), 0, make_bucket)
    servers = mooncake_servers()
    return Kind(servers, mooncake_url(servers), 1)


def run(name: str, kills: int, servers: int, seed: int) -> Counter[str]:
    kind, rng, counts = kind_of(name), random.Random(seed), Counter[str]()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["prefixloom.testing.laws.storage", "tests.support.store_servers"])
    of_servers = set(rng.sample(range(kills), servers))
    judge = open_store(kind.url)
    try:
        for number in range(kills):
            first = SPAN * (number // 8)  # some rounds go on where others were killed
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=client, args=(kind.url, first, number, send), daemon=True)
            process.start()
            send.close()
            assert receive.poll(60) and receive.recv() == [-1], "the client did not begin"
            time.sleep(rng.random() * 0.08)
            of_server = number in of_servers
            if of_server:
                kind.restart()
                time.sleep(rng.random() * 0.2)  # the client goes on, or finds out
                assert process.is_alive(), "the end of a server ended its client"
            process.kill()
            process.join()
            had: set[int] = set()
            with contextlib.suppress(EOFError):
                while True:
                    had.update(receive.recv())
            receive.close()
            counts["wrong"] += -2 in had
            may_be_gone = of_server or any(each in of_servers for each in range(number // 8 * 8, number))
            judged(judge, first, had - {-2}, may_be_gone, counts)
            counts["servers killed" if of_server else "clients killed"] += 1
    finally:
        judge.close()
        for each in kind.servers:
            each.kill()
    return counts


def judged(store: Any, first: int, had: set[int], may_be_gone: bool, counts: Counter[str]) -> None:
    """Look at every record of a round."""
    begun = time.monotonic()
    while True:  # a server that was started again answers soon
        for at in range(first, first + SPAN, 40):
            records = [record(number) for number in range(at, at + 40)]
            found = store.get([each.key for each in records])
            if any(isinstance(each, Miss) and each.reason == "io" for each in found):
                break
            for number, wanted, answer in zip(range(at, at + 40), records, found, strict=True):
                if answer == wanted:
                    counts["right"] += 1
                elif isinstance(answer, Record) or answer.reason != "absent":
                    counts["wrong"] += 1
                elif number in had:
                    counts["gone" if may_be_gone else "lost"] += 1
        else:
            return
        if time.monotonic() > begun + 60:
            counts["never again"] += 1
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="redis,s3,mooncake")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--servers", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    wrong = 0
    for name in given.kinds.split(","):
        begun = time.monotonic()
        counts = run(name, given.kills, min(given.servers, given.kills), given.seed)
        bad = {each: counts[each] for each in ("wrong", "lost", "never again")}
        wrong += sum(bad.values())
        print(f"{name}: {dict(counts)}, {bad}, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("GLOG_minloglevel", "3")
    sys.exit(main())
