"""Random traffic on real threads: the scheduler runs ahead, layers read and write slots on worker threads.

What a position holds is a hash of the namespace and of all tokens up to it, so any content in the wrong place, too
early or too late is seen by the next layer that reads it. Layers check what they read against the tokens, and page
tables against what the scheduler said. A content error counts unless its sequence was told that a step before it had
failed.

With ``--tiers`` there is a host tier below: copies down and up run beside the layers, and some fail.

``python -m tests.random.overlap --steps 10000 --seed 1 [--compositions FSM] [--tiers]``
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import prefixloom.tiers.host_copies
from prefixloom import Buffer, CapacityError, Codec, Component, Manifest, Path, Point, Reach, Window, compose
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from prefixloom.contract.manifest import LAYOUTS, TierManifest
from prefixloom.device.pool import Pool
from prefixloom.device.streams import Stream
from prefixloom.operations.step import Step
from prefixloom.testing.inside.backdoor import tier_lanes, transfer_streams
from prefixloom_hicache import HostTier
from tests.support.helpers import part
from tests.support.stream_helpers import LateStream

MASK = (1 << 61) - 1
WINDOW = 10
REWIND = 3
STATES = ("M", "C")
RUNNING = 10
AHEAD = 3
"""Steps that may be in flight: if the scheduler runs further ahead, all is closed before a failure is seen."""
WRITES = ("through", "back", "selective")
whole = prefixloom.tiers.host_copies.copy_between
SHARED = 12
"""Conversations that are picked up again and again."""


def folded(hashes: list[int], namespace: str, tokens: list[int]) -> list[int]:
    """``hashes`` and those after each of ``tokens``: a new list, since layers in flight read the old one."""
    out = list(hashes)
    for token in tokens:
        out.append((out[-1] * 1_000_003 + token + (7 if namespace == "a" else 1007)) & MASK)
    return out


def component(letter: str) -> Any:
    """F, S, M; and C, a state that rests as int8, which is exact for rows of equal values."""
    reach: Reach = {"F": Path(), "S": Window(WINDOW), "M": Point(), "C": Point()}[letter]
    facts: dict[str, Any] = {"checkpoint_every": 8, "max_rewind": REWIND} if letter in STATES else {}
    if letter == "C":
        manifest = Manifest([Buffer("data", (2,), "float32")], stored_as=Codec("int8", tolerance=0.004), **facts)
        return Component(letter, manifest, reach)
    return part(letter, reach, **facts)


def held_as(letter: str, h: int) -> int:
    """What stands for a hash in a slot: a float32 has no more than 24 bits for it."""
    return h & 0xFFFFFF if letter == "C" else h


class Injected(RuntimeError):
    """A layer that fails on its stream."""


Job = tuple["Request", list[int], int, int]
"""A request, its hashes as they were, and the positions that a step computes of it."""


@dataclass(eq=False)
class Request:
    sequence: Sequence
    namespace: str
    tokens: list[int]
    """All that is named, the hashes one more."""
    hashes: list[int]
    drafted: int = 0
    finish: int = 0
    errors: list[str] = field(default_factory=list)


class Traffic:
    device = "cpu"

    def __init__(
        self, comps: str, seed: int, *, failing: float = 0.01, delay: float = 2e-4, debug: bool = True
    ) -> None:
        self.rng = random.Random(f"{comps} {seed}")
        self.comps = comps
        self.page = self.rng.choice((1, 4, 4, 8))
        tokens = 320
        self.cache: Cache = compose(
            None,
            plugins=[*(component(letter) for letter in comps), *self.tiers()],
            page_size=self.page,
            capacity={
                c: 40 if c == "M" else 100 if c == "C" else tokens // (2 if c == "S" else 1) // 8 * 8 for c in comps
            },
            max_rewind=REWIND,
            max_running=RUNNING if "C" in comps else None,
            layout=random.Random(f"layout {comps} {seed}").choice(LAYOUTS),
            device=self.device,
            debug=debug,
        )
        self.streams = self.make_streams(random.Random(seed), delay)
        self.failing = failing
        self.running: list[Request] = []
        self.ended: list[Request] = []
        self.told: dict[int, tuple[str, list[int]]] = {}
        self.counts: Counter[str] = Counter()

    def make_streams(self, slow: random.Random, delay: float) -> list[Stream]:
        """A stream for prompts and one for answers, whose work begins late now and then."""
        return [
            LateStream(name, lambda: delay * slow.random() if slow.random() < 0.3 else 0.0)
            for name in ("prefill", "decode")
        ]

    def tiers(self) -> list[Any]:
        """Tiers below the device, if there are any."""
        return []

    def opened(self, sequence: Sequence) -> None:
        """A sequence was just opened."""

    # ------------------------------------------------------------ the device's side
    def layers(self, batch: list[Job], tables: dict[str, Any], rows: dict[str, Any], fail: bool) -> None:
        for k, (request, hashes, start, end) in enumerate(batch):
            for letter in self.comps:
                data = self.cache.pool(letter).buffers["data"][0]
                table = self.checked(request, letter, tables[letter][k], rows[letter][k])
                if letter in STATES:
                    self.recur(request, letter, [held_as(letter, h) for h in hashes], data, table, start, end, fail)
                else:
                    self.attend(request, hashes, letter, data, table, start, end, fail)
        if fail:
            raise Injected("a layer failed")

    def checked(self, request: Request, letter: str, parts: list[Any], row: list[int]) -> Any:
        """The table of a request, which must begin as the scheduler said."""
        table = torch.cat(parts)
        if table.tolist()[: len(row)] != row:
            request.errors.append(f"{letter}: table {table.tolist()} instead of {row}")
        return table

    def recur(
        self, request: Request, letter: str, hashes: list[int], data: Any, table: Any, start: int, end: int, fail: bool
    ) -> None:
        slot, *steps = table.tolist()
        if int(data[slot, 0]) != hashes[start]:
            request.errors.append(f"{letter}: the state at {start} is {int(data[slot, 0])}, not {hashes[start]}")
        if end == start:
            return
        data[slot] = 5 if fail else hashes[end]
        if end - start <= len(steps):
            for i in range(end - start):
                data[steps[i]] = hashes[start + i + 1]

    def attend(
        self, request: Request, hashes: list[int], letter: str, data: Any, table: Any, start: int, end: int, fail: bool
    ) -> None:
        page = self.page
        low = max(0, start - WINDOW + 1) if letter == "S" else 0
        if start > low:
            pages = table[low // page : -(-start // page)].long()
            if bool((pages < 0).any()):
                request.errors.append(f"{letter}: a page that {start} needs is absent")
                return
            there = data[pages, :, 0].reshape(-1)
            first = low // page * page
            want = torch.tensor(hashes[first + 1 : start + 1])
            if not there[low - first : start - first].equal(want[low - first :]):
                request.errors.append(f"{letter}: positions [{low}, {start}) hold something else")
        for p in range(start, (start + end) // 2 if fail else end):
            data[int(table[p // page]), p % page] = hashes[p + 1]

    # ------------------------------------------------------------ the scheduler's side
    def run(self, steps: int) -> None:
        try:
            for _ in range(steps):
                self.turn()
            self.finish()
        finally:
            for stream in self.streams:
                stream.close()

    def turn(self) -> None:
        rng = self.rng
        if len(self.running) < 4 or rng.random() < 0.15:
            self.open()
        batch = [request for request in self.running if rng.random() < 0.6]
        if batch:
            self.step(batch)
        if self.running and rng.random() < 0.3:
            self.alone(rng.choice(self.running))
        flying = self.cache.core.flight.works[:-AHEAD]
        if flying and flying[-1].event is not None:
            flying[-1].event.synchronize()
        for request in list(self.running):
            self.after(request)
        if rng.random() < 0.8:
            self.poll()
        if rng.random() < 0.03:
            self.cache.evict(rng.randrange(1, 60))
        if rng.random() < 0.003:
            self.cache.drop_namespace(rng.choice("ab"))

    def open(self) -> None:
        rng = self.rng
        key = rng.randrange(SHARED)
        namespace, tokens = self.told.get(key, (rng.choice("ab"), [key] * rng.randrange(4, 30)))
        if rng.random() < 0.3:
            tokens = tokens[: rng.randrange(len(tokens))]
        tokens = [*tokens[:60], *(rng.randrange(9) for _ in range(rng.randrange(1, 25)))]
        self.told[key] = (namespace, tokens)
        try:
            sequence = self.cache.open(tokens, namespace=namespace, leave=1)
        except CapacityError:
            self.counts["open refused"] += 1
            return
        self.opened(sequence)
        hashes = folded([0], namespace, tokens)
        self.counts["hit"] += sequence.ready > 0
        self.running.append(Request(sequence, namespace, tokens, hashes, finish=len(tokens) + rng.randrange(12)))

    def name(self, request: Request, count: int) -> None:
        fresh = [self.rng.randrange(9) for _ in range(count)]
        request.sequence.append(fresh)
        request.tokens = [*request.tokens, *fresh]
        request.hashes = folded(request.hashes, request.namespace, fresh)

    def reserve(self, request: Request) -> bool:
        """Slots for the next chunk, or for a few drafted tokens."""
        sequence, rng = request.sequence, self.rng
        left = sequence.named - sequence.reserved
        request.drafted = 0
        try:
            if left > 0:
                sequence.grow(min(left, rng.choice((1, 5, 8, 16))))
                return True
            count = rng.choice((1, 1, 2, 4))
            self.name(request, count)
            sequence.grow(count)
            if count == sequence.reserved - sequence.committed:  # no step was dropped before: a rewind has its states
                request.drafted = count
            return True
        except CapacityError:
            self.counts["grow refused"] += 1
            self.end(request, abort=rng.random() < 0.5)
            return False

    def step(self, batch: list[Request]) -> None:
        rng = self.rng
        batch = [request for request in batch if request.sequence.open and self.reserve(request)]
        stream = rng.choice(self.streams)
        role = rng.random()
        step = self.cache.step([request.sequence for request in batch])
        if role < 0.03:
            self.counts["dropped step"] += 1
            return
        if role < 0.06 and batch:  # between plan and run
            self.end(rng.choice(batch), abort=True)
            self.counts["abort after plan"] += 1
        if role < 0.09:
            self.cache.evict(20)
        starts = [request.sequence.committed for request in batch]
        kept = None
        with step:
            step.run_ops(stream)
            self.enqueue(step, batch, starts, stream)
            if any(request.drafted for request in batch):
                kept = [self.kept(request, start) for request, start in zip(batch, starts, strict=True)]
                if set(STATES) & set(self.comps):
                    step.accept(torch.tensor(kept, device=self.device))
        self.counts["step"] += 1
        if kept is None:
            return
        for request, keep in zip(batch, kept, strict=True):
            if request.drafted and request.sequence.open:
                self.take_back(request, request.drafted - keep)

    def alone(self, request: Request) -> None:
        """Outside of steps: who comes after these layers is for the core to know."""
        sequence, stream = request.sequence, self.rng.choice(self.streams)
        if not sequence.open or not self.reserve(request):
            return
        start, fail = sequence.committed, self.rng.random() < self.failing
        sequence.fill(stream)
        rows = {c: [[*sequence.pages(c), *sequence.rewind_slots(c)]] for c in self.comps}
        tables = {c: [[torch.tensor(rows[c][0])]] for c in self.comps}
        stream.run(partial(self.layers, [(request, request.hashes, start, sequence.reserved)], tables, rows, fail))
        sequence.commit()
        self.counts.update({"alone": 1, "failing step": fail})
        if request.drafted:
            self.take_back(request, request.drafted - self.kept(request, start))

    def kept(self, request: Request, start: int) -> int:
        """How many of its tokens a request keeps: of drafted ones some, of its prompt all."""
        return self.rng.randrange(1, request.drafted + 1) if request.drafted else request.sequence.reserved - start

    def publish_some(self) -> None:
        for request in self.running:
            if request.sequence.open and self.rng.random() < 0.3:
                request.sequence.publish()
                self.counts["publish in a block"] += 1

    def enqueue(self, step: Step, batch: list[Request], starts: list[int], stream: Stream) -> None:
        if self.rng.random() < 0.1:
            self.publish_some()
        work, rows, live = [], {c: [] for c in self.comps}, []
        tables = {c: [step.table(c), *([step.rewind_table(c)] if c in STATES else ())] for c in self.comps}
        for k, request in enumerate(batch):
            if request.sequence.open:
                live.append(k)
                work.append((request, request.hashes, starts[k], request.sequence.reserved))
                for c in self.comps:
                    row = request.sequence.pages(c)
                    rows[c].append([*row, *request.sequence.rewind_slots(c)] if c in STATES else row)
        fail = bool(work) and self.rng.random() < self.failing
        self.counts["failing step"] += fail
        chosen = {c: [[table[k] for table in tables[c]] for k in live] for c in self.comps}
        stream.run(partial(self.layers, work, chosen, rows, fail))

    def take_back(self, request: Request, count: int) -> None:
        request.sequence.rewind(count)
        if count:
            self.counts["rewind"] += 1
            request.tokens = request.tokens[:-count]
            request.hashes = request.hashes[:-count]

    def after(self, request: Request) -> None:
        rng, sequence = self.rng, request.sequence
        if not sequence.open:
            return
        if rng.random() < 0.3:
            sequence.publish()
            self.counts["publish"] += 1
        if sequence.committed >= request.finish:
            self.end(request, abort=False)
        elif rng.random() < 0.02:
            self.end(request, abort=True)

    def end(self, request: Request, abort: bool) -> None:
        request.sequence.abort() if abort else request.sequence.close()
        self.counts["abort" if abort else "close"] += 1
        self.running.remove(request)
        self.ended.append(request)

    def poll(self) -> None:
        self.cache.poll()
        for request in list(self.running):
            if not request.sequence.open:
                self.counts["lost with a step"] += 1
                self.running.remove(request)
                self.ended.append(request)
        if not self.cache.core.flight.works:
            waiting = {c: self.cache.pool(c).retiring for c in self.comps if self.cache.pool(c).retiring}
            assert not waiting, f"no step runs, and slots wait for one: {waiting}"
            self.check()

    def check(self) -> None:
        for request in self.ended + self.running:
            if request.errors and request.sequence.running.failed is None:
                raise AssertionError(f"{request.sequence!r}: {request.errors}")
            request.errors.clear()
        self.ended.clear()

    def quiet(self) -> None:
        """Wait for all that runs."""
        for stream in self.streams:
            stream.record().synchronize()

    def finish(self) -> None:
        """Everything ends; what is cached is read once more; nothing is left."""
        self.quiet()
        self.poll()
        for request in list(self.running):
            self.end(request, abort=False)
        self.failing = 0.0
        for namespace, tokens in self.told.values():
            self.running.clear()
            with self.cache.open(tokens, namespace=namespace, leave=1) as sequence:
                request = Request(sequence, namespace, tokens, folded([0], namespace, tokens))
                with self.cache.step([sequence]) as step:
                    step.run_ops(self.streams[0])
                    self.enqueue(step, [request], [sequence.committed], self.streams[0])
                self.streams[0].record().synchronize()
                self.counts["read again"] += sequence.ready > 0
                assert not request.errors, request.errors
        self.quiet()
        self.cache.poll()
        self.check()
        self.cache.flush()
        for c in self.comps:
            pool = self.cache.pool(c)
            assert (pool.free, pool.retiring) == (pool.capacity, 0), (c, pool.free, pool.retiring)
            stats = self.cache.stats().components[c]
            assert stats.free == stats.capacity, stats


class Tiered(Traffic):
    """``write`` is the tier's policy; ``lame``: so many of its copies fail half-way."""

    def __init__(self, comps: str, seed: int, write: str, *, lame: float = 0.03, **options: Any) -> None:
        rng = random.Random(f"{comps} {seed} {write}")
        self.manifest = TierManifest(
            capacity={c: rng.choice((30, 60)) if c in "MC" else rng.choice((160, 640)) for c in comps},
            write=write,  # type: ignore[arg-type]
            hits=1,
            layout=rng.choice(("layer_first", "page_first")),  # type: ignore[arg-type]
            overlap=rng.random() < 0.7,
        )
        self.lame = lame
        self.dice = rng
        super().__init__(comps, seed, **options)

    def tiers(self) -> list[Any]:
        return [HostTier(self.manifest)]

    def opened(self, sequence: Sequence) -> None:
        ready = sequence.ready
        told = sequence.restore()
        self.counts["restored"] += told.ready > ready
        self.counts["restored less"] += told.ready < told.wanted
        assert told.ready == sequence.ready >= ready

    def copy(self, source: Pool, src: Many[int], target: Pool, dst: Many[int]) -> None:
        if self.dice.random() < self.lame:
            whole(source, src[: len(src) // 2], target, dst[: len(src) // 2])
            self.counts["failed copy"] += 1
            raise Injected("a copy failed")
        time.sleep(2e-4 * self.dice.random())
        whole(source, src, target, dst)

    def run(self, steps: int) -> None:
        prefixloom.tiers.host_copies.copy_between = self.copy  # type: ignore[assignment]
        try:
            super().run(steps)
            for stream in transfer_streams(self.cache).values():
                stream.close()
        finally:
            prefixloom.tiers.host_copies.copy_between = whole

    def quiet(self) -> None:
        super().quiet()
        self.cache.poll()  # copies that waited for a step
        for stream in transfer_streams(self.cache).values():
            stream.record().synchronize()

    def finish(self) -> None:
        self.lame = 0.0
        super().finish()
        for lane in tier_lanes(self.cache):
            assert lane.pool.free == lane.pool.capacity and not lane.in_tree, lane.pool.name


def main(plain: type[Traffic] = Traffic, tiered: type[Tiered] = Tiered, both: bool = False) -> None:
    """Run random traffic on each composition: without a tier, or with one, or ``both``."""
    parser = argparse.ArgumentParser(description="Random traffic on streams that run beside the scheduler.")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compositions", nargs="*", default=["F", "FS", "M", "FM", "FSM", "FSC"])
    parser.add_argument("--no-debug", action="store_true")
    parser.add_argument("--tiers", action="store_true", help="over a host tier")
    given = parser.parse_args()
    writes = ("", *WRITES) if both else WRITES if given.tiers else ("",)
    cases = [(comps, write) for comps in given.compositions for write in writes]
    for comps, write in cases:
        begun, debug = time.monotonic(), not given.no_debug
        traffic = tiered(comps, given.seed, write, debug=debug) if write else plain(comps, given.seed, debug=debug)
        traffic.run(given.steps // len(cases))
        told = ", ".join(f"{what} {count}" for what, count in sorted(traffic.counts.items()))
        below = write or "no tier below"
        print(f"{comps}, {below}, page {traffic.page}, {time.monotonic() - begun:.1f} s: {told}", flush=True)
    print("no race, no wrong content, nothing left")


if __name__ == "__main__":
    main()
