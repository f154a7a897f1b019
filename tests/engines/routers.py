"""A real router beside our events: NVIDIA Dynamo's indexer must say of every prompt what the caches say.

    python -m tests.engines.routers --ops 10000 --folder .engines

Two caches of a hybrid (full attention, a window and a state) in pools that are too small each publish their events. The
indexer (``python -m dynamo.indexer`` of ``ai-dynamo-runtime``, a Rust program) knows full attention alone, and reads
both. After every operation it is asked about some prompts. Its environment is made once, in ``FOLDER/dynamo``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import prefixloom
from prefixloom import Buffer, Cache, CapacityError, Component, Manifest, Point, Window, compose
from prefixloom_events import EventPublisher, Mirror, PageLabel, RebuiltCache, salt_digest

RELEASE = "ai-dynamo-runtime==1.6.1"
PAGE = 4
PATIENCE = 10.0
"""Seconds until the indexer must have read what was published."""
BUFFER = [Buffer("content", (), "int64")]
NAMESPACES = ("", "", "tenant")


def python_of(folder: Path) -> Path:
    """Return the interpreter of an environment that has the indexer. It is made if it is not there."""
    python = folder / "dynamo" / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "dynamo" / "venv")], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", RELEASE], check=True)
    return python


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Indexer:
    """The indexer's process."""

    def __init__(self, python: Path, log: Path) -> None:
        self.port = free_port()
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [str(python), "-m", "dynamo.indexer", "--port", str(self.port), "--threads", "1"],
            stdout=self._log, stderr=self._log, env={**os.environ, "NO_COLOR": "1"},
        )  # fmt: skip
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                self.call("/health")
                return
            if self._process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"the indexer did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)

    def call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read() or b"null")

    def register(self, worker: int, publisher: EventPublisher) -> None:
        """Have it read a publisher's events, from the first one on."""
        listed = {
            "instance_id": worker, "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint,
            "model_name": "model", "block_size": PAGE,
        }  # fmt: skip
        self.call("/register", listed)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            active = [each["instance_id"] for each in self.call("/workers") if each["status"] == "active"]
            if worker in active:
                return
            time.sleep(0.02)
        raise AssertionError("the indexer does not listen")

    def ask(self, tokens: Sequence[int], namespace: str) -> dict[int, int]:
        """Return by worker how many tokens it would find."""
        prompt = {"token_ids": list(tokens), "model_name": "model"}
        if namespace:
            prompt["cache_salt"] = salt_digest(PageLabel(namespace))
        scores = self.call("/query", prompt)["scores"]
        return {int(worker): ranks["0"] for worker, ranks in scores.items()}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


class Worker:
    """One cache, its publisher, and what it was asked for so far."""

    def __init__(self, number: int, seed: object) -> None:
        self.number = number
        self.rng = random.Random(f"{seed} {number}")
        parts = [
            Component("full", Manifest(BUFFER), prefixloom.Path()),
            Component("near", Manifest(BUFFER), Window(9)),
            Component("state", Manifest(BUFFER), Point()),
        ]
        capacity = {"full": 400, "near": 240, "state": 24}
        self.cache: Cache = compose(None, plugins=parts, page_size=PAGE, capacity=capacity)
        self.publisher = EventPublisher(self.cache, "tcp://127.0.0.1:0", rank=0)
        self._journal = self.cache.journal()
        self._mirror = Mirror(self.cache.composition, lambda namespace: PageLabel(namespace or None))
        self._rebuilt = RebuiltCache()
        self.prompts: dict[tuple[str, tuple[int, ...]], None] = {}
        """By namespace, the last that ran here."""

    def serve(self, namespace: str, prompt: Sequence[int]) -> None:
        """Compute a prompt as an engine does: in chunks, with a checkpoint where only a state was missing."""
        cache, rng = self.cache, self.rng
        with contextlib.suppress(CapacityError), cache.open(prompt, namespace=namespace, leave=1) as sequence:
            stops = {len(prompt), sequence.branch or 0, *(rng.randrange(len(prompt)) // PAGE * PAGE for _ in range(2))}
            for stop in sorted(stops):
                if stop > sequence.reserved:
                    sequence.grow(stop - sequence.reserved)
                    with cache.step([sequence]) as step:
                        step.run_ops()
                    if rng.random() < 0.7:
                        sequence.publish()
        self.prompts.pop((namespace, tuple(prompt)), None)
        self.prompts[namespace, tuple(prompt)] = None
        while len(self.prompts) > 120:
            del self.prompts[next(iter(self.prompts))]

    def shrink(self) -> None:
        """Lose something: by eviction mostly."""
        rng, cache = self.rng, self.cache
        which = rng.random()
        if which < 0.94:
            cache.evict({rng.choice(("full", "near", "state")): rng.randrange(1, 9)})
        elif which < 0.98:
            cache.drop_namespace("tenant")
        else:
            cache.flush()

    def full_alone(self, namespace: str, prompt: Sequence[int]) -> int:
        """How many tokens full attention has, whatever else is missing: what engines announce without such a rule."""
        self._rebuilt.apply(self._mirror.apply(self._journal.take()))
        return self._rebuilt.pages(prompt, group=1, salt=namespace or None)

    def announced(self, namespace: str, prompt: Sequence[int]) -> int:
        """What the rule of the events says a router finds: as far as some prompt goes from which can be resumed."""
        found = 0
        for where, other in self.prompts:
            if where == namespace:
                common = next(
                    (at for at, (mine, its) in enumerate(zip(prompt, other, strict=False)) if mine != its),
                    min(len(prompt), len(other)),
                )
                if common // PAGE * PAGE > found:
                    ready = self.cache.peek(other, namespace=namespace)
                    found = max(found, min(common // PAGE * PAGE, ready))
        return max(found, self.cache.peek(prompt, namespace=namespace))


def next_prompt(rng: random.Random, worker: Worker) -> tuple[str, tuple[int, ...]]:
    """Return a new conversation, the next turn of one, or another continuation from somewhere in one."""
    known = list(worker.prompts)
    which = rng.random()
    if known and which < 0.75:
        namespace, prompt = rng.choice(known[-40:])
        kept = len(prompt) if which < 0.5 else rng.randrange(1, len(prompt) + 1)
        more = tuple(rng.randrange(1000) for _ in range(rng.randrange(1, 30)))
        prompt = prompt[:kept] + more
        if len(prompt) < 120:
            return namespace, prompt
    return rng.choice(NAMESPACES), tuple(rng.randrange(3) for _ in range(8)) + tuple(
        rng.randrange(1000) for _ in range(rng.randrange(1, 40))
    )


@contextlib.contextmanager
def two_workers(python: Path, log: Path, seed: object) -> Iterator[tuple[Indexer, list[Worker]]]:
    indexer = Indexer(python, log)
    workers = [Worker(1, seed), Worker(2, seed)]
    try:
        for worker in workers:
            worker.publisher.flush()
            indexer.register(worker.number, worker.publisher)
        yield indexer, workers
    finally:
        for worker in workers:
            worker.publisher.close()
        indexer.close()


def compare(indexer: Indexer, workers: Sequence[Worker], namespace: str, prompt: Sequence[int]) -> Counter[str]:
    """Ask about one prompt, and wait until the indexer has read all that was published."""
    right = {worker.number: worker.announced(namespace, prompt) for worker in workers}
    peeks = {worker.number: worker.cache.peek(prompt, namespace=namespace) for worker in workers}
    until, found = time.monotonic() + PATIENCE, {}
    while time.monotonic() < until:
        found = indexer.ask(prompt, namespace)
        if all(found.get(number, 0) == answer for number, answer in right.items()):
            counts = Counter(asked=len(workers))
            for number, answer in right.items():
                assert answer >= peeks[number], "a router would miss what can be resumed"
                counts["hits"] += answer > 0
                counts["as peek says"] += answer == peeks[number]
                counts["more than peek"] += answer > peeks[number]
                alone = workers[number - 1].full_alone(namespace, prompt)
                counts["full attention alone has more than peek"] += alone > peeks[number]
                assert answer <= alone
            return counts
        time.sleep(0.005)
    raise AssertionError(f"of {len(prompt)} tokens in {namespace!r} the indexer says {found}, the caches say {right}")


def run(python: Path, ops: int, seed: object, log: Path) -> Counter[str]:
    """Random operations on two caches; after each the indexer is asked about what ran, and about something else."""
    rng = random.Random(f"routers {seed}")
    counts: Counter[str] = Counter()
    with two_workers(python, log, seed) as (indexer, workers):
        for _ in range(ops):
            worker = rng.choice(workers)
            if rng.random() < 0.2:
                worker.shrink()
                namespace, prompt = next_prompt(rng, worker)
            else:
                namespace, prompt = next_prompt(rng, worker)
                worker.serve(namespace, prompt)
            for each in workers:
                assert each.publisher.flush(), "the publisher does not keep up"
            counts["operations"] += 1
            counts += compare(indexer, workers, namespace, (*prompt, 7, 7, 7, 7))
            other = rng.choice(workers)
            if other.prompts:
                counts += compare(indexer, workers, *rng.choice(list(other.prompts)))
        for worker in workers:
            assert worker.publisher.failed is None and worker.publisher.counts.restarts == 1
            counts["evicted"] += sum(part.evicted for part in worker.cache.stats().components.values())
            counts["batches"] += int(worker.publisher.counts.batches)
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="NVIDIA Dynamo's indexer over our events.")
    parser.add_argument("--ops", type=int, default=1000)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--folder", type=Path, default=Path(".engines"), help="where its environment is kept")
    options = parser.parse_args(arguments)
    python = python_of(options.folder)
    begun = time.monotonic()
    counts = run(python, options.ops, options.seed, options.folder / "dynamo" / "indexer.log")
    counted = ", ".join(f"{what} {times}" for what, times in counts.items())
    print(f"Dynamo's indexer: {counted}; {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
