"""A prefill process and a decode process, each with a cache of its own, and content that goes through a pipe.

The decode process is the caller's; the prefill process is spawned. What every slot must hold follows from the tokens
alone: a checksum of (namespace, tokens up to the position), so that either side knows without the other what is right.
The decode side takes slots before the content is there (a window's tail, everything of the path, one state), runs other
sequences meanwhile, fills them when it comes, speculates and takes tokens back.

Run the whole, 10,240 sequences: ``python -m tests.lessons.two_processes`` (with ``tests`` and the sources on the path).
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import attrs
import torch

from prefixloom import CapacityError, Path, Point, Window
from prefixloom.cache.cache import Cache
from tests.support.helpers import cache_of, owners, part

W = 10
REWIND = 3
WHOLE = 10_240
"""Sequences of the whole soak. The bug showed after 2,000 requests."""
NAMESPACES = ("", "", "a", "b")
WAITING = 4
"""Sequences whose content is on its way."""
RUNNING = 5
PATIENCE = 60.0
"""Seconds after which a prefill process that says nothing is taken for dead."""


def cache_of_three(page: int) -> Cache:
    state = part("state", Point(), max_rewind=REWIND, checkpoint_every=8)
    parts = (part("full", Path()), part("window", Window(W)), state)
    tokens = 512 if page < 16 else 1024
    short = {"window": tokens // 2}  # windows must be given back early
    return cache_of(*parts, page=page, tokens=tokens, slots=100, debug=False, max_rewind=REWIND, capacity=short)


# ---------------------------------------------------------------- content


def sums_of(namespace: str, tokens: Sequence[int]) -> list[int]:
    """The checksum of every prefix, the empty one first."""
    digest = hashlib.blake2b(namespace.encode() + b"\0", digest_size=8)
    sums = [int.from_bytes(digest.digest(), "little", signed=True)]
    for token in tokens:
        digest.update(token.to_bytes(4, "little"))
        sums.append(int.from_bytes(digest.digest(), "little", signed=True))
    return sums


class Content:
    """What the slots of a cache hold, written and compared by what the tokens say."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.compared = 0

    def values(self, sums: list[int], positions: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[sums[p + 1], p] for p in positions], dtype=torch.int64).reshape(-1, 2)

    def compute(self, sequence: Any, upto: int) -> None:
        """One step over what is reserved up to ``upto``: its positions, the running state, those of single tokens."""
        start = sequence.committed
        sequence.grow(upto - sequence.reserved)
        with self.cache.step([sequence]) as step:
            step.run_ops()
            self.state_is(sequence, start)
            sums = sums_of(sequence.namespace, sequence.tokens.tolist()[:upto])
            for each in self.cache.composition.parts:
                if each.page_tokens:
                    self.write(sequence, each.name, range(start, upto), self.values(sums, range(start, upto)))
            states = self.cache.pool("state").buffers["data"][0]
            states[sequence.pages("state")[0]] = torch.tensor([sums[upto], upto])
            for slot, at in zip(sequence.rewind_slots("state"), range(start + 1, upto + 1), strict=False):
                states[slot] = torch.tensor([sums[at], at])

    def write(self, sequence: Any, name: str, positions: Sequence[int], values: torch.Tensor) -> None:
        if len(positions):
            slots, offsets = self.places(sequence, name, positions)
            self.cache.pool(name).buffers["data"][0][slots, offsets] = values

    def places(self, sequence: Any, name: str, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        page = self.cache.composition.page
        table = torch.tensor(sequence.pages(name), dtype=torch.int64)
        at = torch.tensor(positions, dtype=torch.int64)
        slots = table[at // page]
        assert bool((slots >= 0).all()), f"{name}: an absent page is used"
        return slots, at % page

    def read(self, sequence: Any, name: str, positions: Sequence[int]) -> torch.Tensor:
        slots, offsets = self.places(sequence, name, positions)
        return self.cache.pool(name).buffers["data"][0][slots, offsets]

    def check(self, sequence: Any) -> None:
        """What going on from what is committed reads is what the tokens say."""
        at = sequence.committed
        sums = sums_of(sequence.namespace, sequence.tokens.tolist()[:at])
        for each in self.cache.composition.parts:
            name = each.name
            for positions in (range(low, high) for low, high in each.reach.needs(at) if low < high):
                self.compared += len(positions)
                wrong = (self.read(sequence, name, positions) != self.values(sums, positions)).any(1)
                assert not bool(wrong.any()), f"{name}: {int(wrong.sum())} entries are somebody else's"

    def state_is(self, sequence: Any, boundary: int) -> None:
        """After the ops the running state stands for ``boundary``; zeros before the first token."""
        found = self.cache.pool("state").buffers["data"][0][sequence.pages("state")[0]].tolist()
        sums = sums_of(sequence.namespace, sequence.tokens.tolist()[:boundary])
        assert found == ([sums[boundary], boundary] if boundary else [0, 0]), "the state is somebody else's"
        self.compared += 1


# ---------------------------------------------------------------- the prefill process


@attrs.frozen
class Asked:
    """Compute ``tokens`` and send what is needed at their end, of the positions from ``first`` on."""

    number: int
    namespace: str
    tokens: list[int]
    first: int


@attrs.frozen
class Sent:
    """Entries by component as (first position, values), and the state of the end."""

    number: int
    entries: dict[str, tuple[int, list[list[int]]]]
    state: list[int]


@attrs.frozen
class Ended:
    """What the prefill process has to say at its end."""

    compared: int
    hits: int
    refused: int
    evicted: dict[str, int]


def prefill(pipe: Connection, page: int, seed: int, fault: str) -> None:
    """The whole life of the prefill process; what goes wrong in it is sent, too."""
    try:
        torch.set_num_threads(1)
        pipe.send(Prefill(pipe, page, seed, fault).serve())
    except BaseException:
        pipe.send(traceback.format_exc())
    finally:
        pipe.close()


class Prefill:
    """``fault``: what goes wrong after a while, for the tests of this test: "raises", "dies" or "lies"."""

    def __init__(self, pipe: Connection, page: int, seed: int, fault: str) -> None:
        self.pipe = pipe
        self.fault = fault
        self.draw = random.Random(f"prefill {seed}")
        self.cache = cache_of_three(page)
        self.content = Content(self.cache)
        self.live: list[Any] = []
        self.hits = self.refused = 0

    def serve(self) -> Ended:
        while (asked := self.pipe.recv()) is not None:
            sent = self.answer(asked)
            if self.fault and asked.number > 8:
                self.go_wrong(sent)
            self.pipe.send(sent)
            while len(self.live) > 3:
                self.end(self.live.pop(self.draw.randrange(len(self.live))))
            if self.draw.random() < 0.01:
                self.cache.drop_namespace(self.draw.choice(NAMESPACES))
            if asked.number % 16 == 0:
                owners(self.cache, self.live)
        for sequence in self.live:
            self.end(sequence)
        self.live.clear()
        evicted = {name: figures.evicted for name, figures in self.cache.stats().components.items()}
        nothing_is_lost(self.cache)
        return Ended(self.content.compared, self.hits, self.refused, evicted)

    def go_wrong(self, sent: Sent) -> None:
        if self.fault == "dies":
            os._exit(1)
        if self.fault == "raises":
            raise ArithmeticError("on purpose")
        sent.entries["full"][1][-1][0] ^= 1

    def answer(self, asked: Asked) -> Sent:
        while True:
            sequence = self.cache.open(asked.tokens, namespace=asked.namespace)
            try:
                return self.computed(sequence, asked)
            except CapacityError:
                self.refused += 1
                sequence.abort()
                self.end(self.live.pop(0))  # preempt somebody, and try again

    def computed(self, sequence: Any, asked: Asked) -> Sent:
        end, page = len(asked.tokens), self.cache.composition.page
        self.hits += sequence.ready > 0
        if sequence.ready == end:
            with self.cache.step([sequence]) as step:  # no tokens, but the copy of its state
                step.run_ops()
            self.content.state_is(sequence, end)
        chunk = self.draw.choice((page, 4 * page, 64))
        while sequence.committed < end:
            self.content.check(sequence)
            self.content.compute(sequence, min(end, sequence.committed // chunk * chunk + chunk))
            if self.draw.random() < 0.5:
                sequence.publish()
        self.content.check(sequence)
        self.live.append(sequence)
        entries = {}
        for name, needed in (("full", 0), ("window", max(0, end - W + 1))):
            first = max(asked.first, needed // page * page)  # a page from its start: an earlier boundary may need it
            values = self.content.read(sequence, name, range(first, end)) if first < end else torch.empty(0, 2)
            entries[name] = (first, values.tolist())
        return Sent(asked.number, entries, [sums_of(asked.namespace, asked.tokens)[-1], end])

    def end(self, sequence: Any) -> None:
        self.content.check(sequence)
        sequence.close() if self.draw.random() < 0.7 else sequence.abort()


def nothing_is_lost(cache: Cache) -> None:
    """Nothing runs, nothing is leased, every slot has one owner; and when all may go, all is free."""
    owners(cache, [])
    for name, figures in cache.stats().components.items():
        assert (figures.running, figures.leased) == (0, 0), name
    cache.evict({name: figures.cached for name, figures in cache.stats().components.items()})
    for name, figures in cache.stats().components.items():
        assert figures.free == figures.capacity, f"{name}: {figures.capacity - figures.free} slots leaked"


# ---------------------------------------------------------------- the decode process


class Decode:
    """Drives: opens a sequence, takes its slots, asks for its content, and runs others until it is there."""

    def __init__(self, pipe: Connection, page: int, seed: int) -> None:
        self.pipe = pipe
        self.draw = random.Random(f"decode {seed}")
        self.cache = cache_of_three(page)
        self.content = Content(self.cache)
        self.waiting: dict[int, Any] = {}
        self.borders: dict[int, int] = {}
        self.live: list[Any] = []
        self.counts = dict.fromkeys(("arrived", "hits", "rewound", "refused", "cancelled", "tails"), 0)
        self.history: list[tuple[str, list[int]]] = [(name, []) for name in NAMESPACES]

    def run(self, count: int) -> None:
        for number in range(count):
            self.open(number)
            while len(self.waiting) >= WAITING:
                self.arrive()
            for sequence in list(self.live):
                if self.draw.random() < 0.5:
                    self.speculate(sequence)
            while len(self.live) > RUNNING:
                self.end(self.live.pop(self.draw.randrange(len(self.live))))
            if self.draw.random() < 0.01:
                self.cache.drop_namespace(self.draw.choice(NAMESPACES))
            if self.draw.random() < 0.1:
                self.history.append((self.draw.choice(NAMESPACES), []))
            if number % 16 == 0:
                owners(self.cache, [*self.live, *self.waiting.values()])
        while self.waiting:
            self.arrive()
        for sequence in self.live:
            self.end(sequence)
        self.live.clear()

    def open(self, number: int) -> None:
        """Slots are taken for all that will arrive, and for the tail that is computed here, before anything is sent."""
        draw = self.draw
        namespace, base = draw.choice(self.history)
        kept = base[: draw.choice((0, len(base), draw.randrange(len(base) + 1)))][:64]
        tokens = kept + [draw.randrange(64) for _ in range(draw.randrange(1, 40))]
        self.history = [*self.history[-7:], (namespace, tokens)]
        try:
            sequence = self.cache.open(tokens, namespace=namespace, leave=1)
        except CapacityError:
            self.counts["refused"] += 1
            return
        ready = sequence.ready
        self.content.check(sequence)
        border = len(tokens) - min(draw.choice((0, 1, W, len(tokens))), len(tokens) - ready)
        try:
            sequence.grow(border - ready, arriving=True)
        except CapacityError:
            self.counts["refused"] += 1
            sequence.abort()
            return
        self.counts["hits"] += ready > 0
        self.waiting[number] = sequence
        self.borders[number] = border
        self.pipe.send(Asked(number, namespace, tokens[:border], ready)) if border > ready else self.go_on(number)

    def arrive(self) -> None:
        """Wait for one that was asked for, and fill its slots."""
        if not self.pipe.poll(PATIENCE):
            raise TimeoutError("the prefill process says nothing")
        sent = self.pipe.recv()
        assert isinstance(sent, Sent), f"the prefill process failed: {sent}"
        sequence = self.waiting[sent.number]
        if self.draw.random() < 0.05:  # somebody hung up: slots that were granted and never written
            self.counts["cancelled"] += 1
            self.waiting.pop(sent.number)
            sequence.abort()
            return
        border, page = self.borders[sent.number], self.cache.composition.page
        with self.cache.step([sequence]) as step:  # its layers are the copy
            step.run_ops()
            self.content.state_is(sequence, sequence.ready)
            for name, (first, values) in sent.entries.items():
                start, slots = sequence.ready // page, sequence.pages(name)
                granted = [at for at in range(start, -(-border // page)) if slots[at] >= 0]
                positions = [p for at in granted for p in range(at * page, min(border, (at + 1) * page))]
                assert not positions or positions[0] >= first, f"{name}: slots were granted for what nobody sends"
                self.counts["tails"] += name == "window" and len(granted) < -(-border // page) - start
                values = [values[p - first] for p in positions]
                self.content.write(sequence, name, positions, torch.tensor(values, dtype=torch.int64).reshape(-1, 2))
            self.cache.pool("state").buffers["data"][0][sequence.pages("state")[0]] = torch.tensor(sent.state)
        self.counts["arrived"] += 1
        self.go_on(sent.number)

    def go_on(self, number: int) -> None:
        """All is there up to the border: the tail is computed here."""
        sequence, border = self.waiting.pop(number), self.borders.pop(number)
        assert sequence.committed == border
        self.content.check(sequence)
        try:
            if sequence.named > sequence.committed:
                self.content.compute(sequence, sequence.named)
        except CapacityError:
            self.counts["refused"] += 1
            sequence.abort()
            return
        self.content.check(sequence)
        self.live.append(sequence)

    def speculate(self, sequence: Any) -> None:
        """A step over a few drafted tokens, of which some are taken back."""
        count = self.draw.randrange(1, REWIND + 2)
        back = self.draw.randrange(count)
        self.content.check(sequence)
        sequence.append([self.draw.randrange(64) for _ in range(count)])
        try:
            self.content.compute(sequence, sequence.named)
        except CapacityError:
            self.counts["refused"] += 1
            self.live.remove(sequence)
            sequence.abort()
            return
        sequence.rewind(back)
        self.counts["rewound"] += back > 0
        self.content.check(sequence)
        if self.draw.random() < 0.3:
            sequence.publish()

    def end(self, sequence: Any) -> None:
        self.content.check(sequence)
        self.history = [*self.history[-7:], (sequence.namespace, sequence.tokens.tolist())]
        sequence.close() if self.draw.random() < 0.7 else sequence.abort()


@attrs.frozen
class Told:
    """What a soak did."""

    decode: dict[str, int]
    compared: int
    prefill: Ended
    evicted: dict[str, int]
    seconds: float


def soak(count: int, page: int, seed: int = 0, fault: str = "") -> Told:
    """``count`` sequences through both; raises where a slot is lost, owned twice, or holds the wrong thing."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs, page, seed, fault), daemon=True)
    process.start()
    theirs.close()
    began = time.perf_counter()
    try:
        decode = Decode(ours, page, seed)
        decode.run(count)
        ours.send(None)
        if not ours.poll(PATIENCE):
            raise TimeoutError("the prefill process does not end")
        ended = ours.recv()
        assert isinstance(ended, Ended), f"the prefill process failed: {ended}"
        evicted = {name: figures.evicted for name, figures in decode.cache.stats().components.items()}
        nothing_is_lost(decode.cache)
        process.join(PATIENCE)
        assert process.exitcode == 0
        seconds = time.perf_counter() - began
        return Told(decode.counts, decode.content.compared, ended, evicted, seconds)
    except (OSError, EOFError) as error:  # it died: what it had to say comes before the end of the pipe
        told = []
        with suppress(OSError, EOFError):
            while ours.poll(0):
                told.append(ours.recv())
        raise AssertionError(f"the prefill process failed: {told[-1] if told else error}") from error
    finally:
        with suppress(OSError):
            ours.close()
        if process.is_alive():
            process.kill()
        process.join()


if __name__ == "__main__":
    for page in (1, 4, 16):
        print(f"page {page}:", soak(int(sys.argv[1]) if len(sys.argv) > 1 else WHOLE, page))
