"""Random traffic through both sides of the connector for vLLM, beside a stand-in for vLLM, with an oracle of bytes.

The stand-in does what vLLM's scheduler and workers do with blocks: chunked prefill, decoding one step ahead, guessed
tokens, preemption, aborts, windows and states that are given back early, a device cache, loads that end later, resets.
The connector's sides, the books, the region and the copies are the real ones. A copy runs when the dice say so, or when
a fence waits for it. With ``--device cuda`` the threads and streams that copy are the real ones, too, and the device is
kept busy, so that a step's content is often not there yet when its copies are begun.

A token's content names all tokens before it, the salt, the images and the weights. Each step checks that the blocks it
reads have the content that it expects, and each load that it brought what would have been computed.

``python -m tests.random.vllm_traffic --seeds 300`` runs long, and ``--device cuda`` on a machine with a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import random
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import torch

from prefixloom import Identity
from prefixloom_vllm.books import Books
from prefixloom_vllm.events import HostEvents
from prefixloom_vllm.figures import Figures
from prefixloom_vllm.groups import Group, groups_of
from prefixloom_vllm.options import Options
from prefixloom_vllm.region import Region
from prefixloom_vllm.scheduler import Plan, SchedulerSide, namespace_of, spans_of
from prefixloom_vllm.worker import WorkerSide
from tests.random.vllm_events import HostRouter, block_hashes, expected, form, hash_tokens
from tests.support.vllm_specs import FULL, STATE, WINDOW, config, spec

WIDTH = 2
"""Bytes of a token in a layer."""


@attrs.frozen
class Setup:
    """One model and one way to run it."""

    specs: tuple[Any, ...]
    ahead: int = 1
    """Steps that are scheduled before the output of the first is known."""
    guesses: int = 0
    ranks: int = 1
    slots: int = 72
    blocks: int = 100
    store: bool = False
    journal: int = 0
    """Changes that the journal of events keeps, so few that it has to begin again. 0: as many as usual."""
    errors: float = 0.0
    """How likely each call of the code for events fails."""


WIDE = spec("FullAttentionSpec", block_size=8, unpadded_page_size_bytes=8 * WIDTH)
CHUNK = spec("ChunkedLocalAttentionSpec", attention_chunk_size=8)
SETUPS = {
    "full": Setup((FULL,), blocks=44),
    "full, a step ahead": Setup((FULL,), ahead=2, blocks=44),
    "full, two steps ahead": Setup((FULL,), ahead=3, blocks=44),
    "full, guessed tokens a step ahead": Setup((FULL,), ahead=2, guesses=3, blocks=44),
    "window alone": Setup((WINDOW,), blocks=34),
    "full, window, two ranks": Setup((FULL, WINDOW), ahead=2, ranks=2, blocks=70),
    "full, state": Setup((FULL, STATE), blocks=60),
    "full, state, a step ahead": Setup((FULL, STATE), ahead=2, blocks=60),
    "state alone": Setup((STATE,), blocks=34),
    "window, full in larger blocks, chunk, state": Setup((WINDOW, WIDE, CHUNK, STATE), ahead=2, blocks=90),
    "full, window, guessed tokens": Setup((FULL, WINDOW), guesses=2, blocks=70),
    "full, window, with a store": Setup((FULL, WINDOW), ahead=2, slots=60, blocks=70, store=True),
    "window alone, small journal": Setup((WINDOW,), blocks=34, journal=4),
    "state alone, small journal": Setup((STATE,), blocks=34, journal=4),
    "full, window, with a store, small journal": Setup(
        (FULL, WINDOW), ahead=2, slots=60, blocks=70, store=True, journal=4
    ),
    "full, window, state, errors": Setup((FULL, WINDOW, STATE), blocks=80, errors=0.004),
    "full, window, with a store, errors": Setup(
        (FULL, WINDOW), ahead=2, slots=60, blocks=70, store=True, journal=50, errors=0.004
    ),
}
CYCLES = 40_000_000
"""For how many cycles of a GPU it is kept busy before content is written, at most: about 20 ms. Less shows nothing, as
the threads that copy begin late."""
RING = 64
"""Places in the region's table, so few that their numbers come round."""


# ---------------------------------------------------------------- content


def follow(name: bytes, *what: object) -> bytes:
    """Return the name of what follows ``name``."""
    return hashlib.blake2b(name + repr(what).encode(), digest_size=8).digest()


def content(name: bytes, layer: str, rank: int, size: int) -> bytes:
    return hashlib.blake2b(name + f"{layer} {rank}".encode(), digest_size=size).digest()


def adapter_of(name: str) -> Any:
    """In place of vLLM's ``LoRARequest``."""
    return SimpleNamespace(lora_name=name, lora_path="p", name=name, adapter_id=ord(name))


@attrs.define(eq=False)
class Life:
    """What the device has computed for a request since it was admitted last: so many tokens, with these names."""

    done: int = 0
    names: list[bytes] = attrs.field(factory=list)


@attrs.define(eq=False)
class Request:
    """A request as vLLM has it, and what the device knows of it (``truth``, ``life``) before the scheduler does."""

    request_id: str
    all_token_ids: list[int]
    length: int
    """Tokens of it at its end."""
    cache_salt: str | None = None
    mm_features: list[Any] = attrs.field(factory=list)
    lora_request: Any = None
    prompt_embeds: Any = None
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    state: str = "waiting"
    tables: list[list[int]] = attrs.field(factory=list)
    truth: list[int] = attrs.field(factory=list)
    life: Life = attrs.field(factory=Life)
    steps: int = 0
    """Steps under way."""
    placeholders: int = 0
    offered: int = 0
    loads: int = 0
    """The boundary that a load under way ends at."""
    failed: bool = False
    hash_tokens: int = 4

    def __attrs_post_init__(self) -> None:
        self.truth = [*self.all_token_ids]

    @property
    def block_hashes(self) -> list[bytes]:
        """The names of its whole blocks, as vLLM's requests have them."""
        adapter = self.lora_request and self.lora_request.lora_name
        images = [
            (each.mm_position.offset, each.mm_position.offset + each.mm_position.length, each.identifier)
            for each in self.mm_features
        ]
        return block_hashes(self.all_token_ids, self.hash_tokens, self.cache_salt, adapter, images)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def image(self, at: int) -> str:
        for each in self.mm_features:
            if 0 <= at - each.mm_position.offset < each.mm_position.length:
                return str(each.identifier)
        return ""


@attrs.frozen
class Part:
    """One request's part of a step: the blocks that it had then, and how much it computes, guessed tokens included."""

    request: Request
    tables: list[list[int]]
    count: int
    guesses: int
    life: Life
    first: bool
    """Whether the workers are told of all its blocks, those that the device's cache had included."""


@attrs.define(eq=False)
class Step:
    """One step. ``sampled``: what came of it, once the workers have run it; ``over``: the loads that have ended."""

    parts: list[Part]
    plan: Plan
    new_blocks: list[int]
    freed: list[int] = attrs.field(factory=list)
    sampled: list[list[int]] | None = None
    over: list[tuple[set[str], set[str]]] = attrs.field(factory=list)


class HeldCopier:
    """Copies in order, when it is told to or somebody waits for them; some fail."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.queue: deque[tuple[int, Any, Any]] = deque()
        MADE.append(self)

    def run(self, number: int, work: Any, tell: Any) -> None:
        self.queue.append((number, work, tell))

    def one(self, fails: bool = False) -> None:
        _, work, tell = self.queue.popleft()
        if not fails:
            work()
        tell(None if fails else 0.0)

    def over(self, number: int) -> bool:
        return all(number != each for each, _, _ in self.queue)

    def wait(self, numbers: Iterable[int]) -> None:
        wanted = {*numbers}
        while any(each in wanted for each, _, _ in self.queue):
            self.one()

    def close(self) -> None:
        while self.queue:
            self.one()


MADE: list[HeldCopier] = []
"""The copiers of the traffic that runs."""


# ---------------------------------------------------------------- the engine


class Traffic:
    """vLLM's scheduler and workers, as far as blocks are concerned, and the connector's two sides."""

    def __init__(self, setup: Setup, folder: Path, seed: object, device: str = "cpu") -> None:
        self.setup = setup
        self.device = device
        self.rng = random.Random(f"{seed}")
        self.groups: list[Group] = groups_of(config(*setup.specs))
        more: dict[str, Any] = {}
        if setup.store:
            more = {"store": str(folder / "store"), "store_capacity": "1MiB", "staging": "4KiB"}
            more["fetch"] = self.rng.choice(["wait", "best_effort", "timeout"])
        self.options = Options.of({"blocks": setup.slots, **more})
        self.count: Counter[str] = Counter()
        self.weights = 0
        self.folder = folder
        self.start()

    def start(self) -> None:
        """Make the engine, with nothing on the device and in the host's memory."""
        setup, folder = self.setup, self.folder
        MADE.clear()
        self.workers = []
        for rank in range(setup.ranks):
            region = Region(str(folder), "engine", self.groups, setup.slots, setup.ranks, rank)
            self.workers.append(WorkerSide(self.groups, region, Figures(), True))
        self.region = Region(str(folder), "engine", self.groups, setup.slots, setup.ranks, None)
        identity = Identity(model="m", weights=f"w{self.weights}")
        self.books = Books(self.groups, self.options, setup.ranks, self.region, identity, True)
        events = self.make_events()
        self.side = SchedulerSide(self.groups, self.books, self.region, Figures(), setup.guesses > 0, events)
        self.router = HostRouter(self.groups)
        self.page = self.books.page
        self.memory: list[dict[str, torch.Tensor]] = []
        held = mock.patch("prefixloom_vllm.worker.Copier", HeldCopier)
        with held if self.device == "cpu" else contextlib.nullcontext():
            for worker in self.workers:
                layers = {
                    name: torch.zeros((setup.blocks, size), dtype=torch.uint8, device=self.device)
                    for group in self.groups
                    for name, size in zip(group.layer_names, group.layer_bytes, strict=True)
                }
                self.memory.append(layers)
                worker.register(layers, setup.blocks)
        self.free: deque[int] = deque(range(1, setup.blocks))
        self.references: Counter[int] = Counter()
        self.cached: dict[tuple[int, bytes], int] = {}  # by group and the name of the block's last token
        self.cached_as: dict[int, tuple[int, bytes]] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.steps: deque[Step] = deque()
        self.texts: list[Request] = []
        self.made = 0
        self.ended: Counter[str] = Counter()  # loads, by how many ranks have ended them
        self.wrong: set[str] = set()  # that failed on a rank
        self.leaving: list[Request] = []  # ended, and a load of them goes on

    def make_events(self) -> HostEvents:
        cache, made = self.books.cache, form(self.groups)
        if self.setup.journal:
            usual = cache.journal
            cache.journal = lambda: usual(self.setup.journal)  # type: ignore[method-assign, assignment]
        if self.setup.errors:
            made = attrs.evolve(
                made, stored=self.shaky(made.stored), removed=self.shaky(made.removed),
                written=self.shaky(made.written), extra_keys=self.shaky(made.extra_keys),
            )  # fmt: skip
        return HostEvents(self.groups, cache, made)

    def shaky(self, call: Any) -> Any:
        """Return a call that sometimes fails."""

        def called(*arguments: Any, **named: Any) -> Any:
            if self.rng.random() < self.setup.errors:
                self.count["errors of events"] += 1
                raise ValueError("an error that was thrown for the test")
            return call(*arguments, **named)

        return called

    # ------------------------------------------------------------ blocks
    def take(self, count: int) -> list[int] | None:
        if len(self.free) < count:
            return None
        blocks = [self.free.popleft() for _ in range(count)]
        for block in blocks:
            self.forget(block)
            self.references[block] = 1
        return blocks

    def forget(self, block: int) -> None:
        key = self.cached_as.pop(block, None)
        if key is not None and self.cached.get(key) == block:
            del self.cached[key]

    def drop(self, blocks: Iterable[int]) -> None:
        """Give up blocks, but for those that a step under way may still write: these when that step is over."""
        if self.steps:
            self.steps[-1].freed.extend(block for block in blocks if block)
        else:
            self.unshare(block for block in blocks if block)

    def unshare(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]
                self.free.append(block)

    def share(self, block: int) -> None:
        if block not in self.references:
            self.free.remove(block)
        self.references[block] += 1

    def release(self, request: Request) -> None:
        self.drop(block for table in request.tables for block in reversed(table))
        request.tables = []

    # ------------------------------------------------------------ names
    def name(self, request: Request, upto: int, life: Life | None = None) -> list[bytes]:
        """Return the names of a request's tokens up to there: those that are new get the weights of now."""
        names = (life or request.life).names
        adapter = request.lora_request and request.lora_request.lora_name
        before = names[-1] if names else follow(b"", request.cache_salt, adapter)
        for at in range(len(names), upto):
            before = follow(before, request.truth[at], request.image(at), self.weights)
            names.append(before)
        return names

    def register(self, request: Request, upto: int) -> None:
        """Give the device's cache the whole blocks up to ``upto``, whose tokens are known."""
        names = self.name(request, upto)
        for group, table in zip(self.groups, request.tables, strict=True):
            for at in range(upto // group.tokens):
                exact = not group.is_state or request.life.done == (at + 1) * group.tokens
                if at < len(table) and table[at] and exact and table[at] not in self.cached_as:
                    key = group.index, names[(at + 1) * group.tokens - 1]
                    if key not in self.cached:
                        self.cached[key] = table[at]
                        self.cached_as[table[at]] = key

    def needed(self, group: Group, boundary: int) -> set[int]:
        """Return the positions of the blocks that resuming at ``boundary`` needs."""
        if group.is_state:
            return {boundary // group.tokens - 1}
        tokens = group.tokens
        return {at for low, high in group.reach.needs(boundary) for at in range(low // tokens, -(-high // tokens))}

    def local_hit(self, request: Request) -> int:
        """Return the deepest boundary at which the device's cache has all that is needed."""
        names = self.name(request, request.num_tokens, Life())
        boundary = (request.num_tokens - 1) // self.page * self.page
        while boundary and not all(
            (group.index, names[(at + 1) * group.tokens - 1]) in self.cached
            for group in self.groups
            for at in self.needed(group, boundary)
        ):
            boundary -= self.page
        return 0 if request.skip_reading_prefix_cache else boundary

    # ------------------------------------------------------------ what comes in
    def add(self) -> None:
        rng = self.rng
        base: list[int] = []
        old = rng.choice(self.texts) if self.texts and rng.random() < 0.75 else None
        if old is not None:
            base = old.all_token_ids[: rng.randrange(len(old.all_token_ids) // 2, len(old.all_token_ids) + 1)]
        tokens = [*base, *(rng.randrange(9) for _ in range(rng.randrange(1, 30)))]
        fields: dict[str, Any] = {}
        if old is not None and rng.random() < 0.8:
            fields = {"cache_salt": old.cache_salt, "mm_features": old.mm_features, "lora_request": old.lora_request}
        elif rng.random() < 0.2:
            fields["cache_salt"] = rng.choice(["x", "y"])
        elif rng.random() < 0.2:
            place = SimpleNamespace(offset=rng.randrange(10), length=rng.randrange(1, 9))
            fields["mm_features"] = [SimpleNamespace(identifier=rng.choice("ab"), mm_position=place)]
        elif rng.random() < 0.2:
            fields["lora_request"] = adapter_of(rng.choice("mn"))
        odd = rng.random()
        if odd < 0.03:
            fields["prompt_embeds"] = object()
        elif odd < 0.06:
            fields["skip_reading_prefix_cache"] = True
        ended = [each.request_id for each in self.texts if each.state == "over" and each not in self.leaving]
        known = {each.request_id for each in (*self.waiting, *self.running, *self.leaving)}
        ended = [each for each in ended if each not in known]
        self.made += 1
        number = rng.choice(ended) if ended and rng.random() < 0.1 else f"r{self.made}"
        request = Request(number, tokens[:110], len(tokens[:110]) + rng.randrange(1, 20), **fields)
        self.texts = [*self.texts[-12:], request]
        self.waiting.append(request)

    # ------------------------------------------------------------ scheduling
    def schedule(self) -> None:
        """Make a step, as vLLM's ``schedule`` does."""
        parts: dict[str, Part] = {}
        offers: dict[str, list[tuple[int, int, int]]] = {}
        new: list[int] = []
        budget = self.rng.choice([8, 24, 24, 48])
        preempted = False
        for request in [*self.running]:
            if request not in self.running:  # it was preempted for another one
                continue
            lacking = request.num_tokens + request.placeholders - request.num_computed_tokens
            if request.state != "running" or budget <= 0 or self.rng.random() < 0.1:
                continue
            if request.placeholders and request.num_tokens + request.placeholders >= request.length:
                continue
            guesses = 0
            if lacking == 1:
                guesses = min(self.setup.guesses * (self.rng.random() < 0.7), budget - 1)
            part = None
            while part is None and request in self.running:
                part = self.part(request, min(lacking + guesses, budget), guesses, new, offers)
                if part is None:
                    victim = next((each for each in self.running[::-1] if each.request_id not in parts), None)
                    if victim is None or self.rng.random() < 0.05:
                        break
                    self.preempt(victim)
                    preempted = True
            if part is not None:
                parts[request.request_id] = part
                budget -= part.count
        while self.waiting and not preempted and budget > 0 and len(self.running) < 5:
            request = next((each for each in self.waiting if not each.loads or each.state == "loaded"), None)
            if request is None or not self.admit(request, budget, parts, new, offers):
                break
            budget -= parts[request.request_id].count if request.request_id in parts else 0
        state = SimpleNamespace(boundary_state_offloads=offers, resolve_block_ids=self.resolve(parts))
        told = [*new, *(block for part in parts.values() if part.first for table in part.tables for block in table)]
        plan = self.side.plan({name: part.count for name, part in parts.items()}, state, told)
        self.side.check()
        for part in parts.values():
            part.request.num_computed_tokens += part.count
            part.request.steps += 1
            if part.request.num_computed_tokens >= part.request.num_tokens + part.request.placeholders:
                part.request.placeholders += 1 + part.guesses
        self.steps.append(Step([*parts.values()], plan, new))

    def resolve(self, parts: dict[str, Part]) -> Any:
        return lambda name: tuple(parts[name].tables)

    def admit(self, request: Request, budget: int, parts: Any, new: list[int], offers: Any) -> bool:
        """Return whether a waiting request goes on, and the next one may be looked at."""
        if request.state == "loaded":
            request.state = "waiting"
            if request.failed:
                self.release(request)
                request.num_computed_tokens, request.life = 0, Life()
        if request.steps and request.num_preemptions:
            return False  # what a step before the preemption sampled is not known yet
        if not request.num_computed_tokens:
            local = self.local_hit(request)
            external = self.side.hit(request, local)
            self.side.check()
            if external is None:
                self.count["asked again"] += 1
                return False
            if request.skip_reading_prefix_cache or request.prompt_embeds is not None:
                assert not external
            assert not (external and request.failed), "a load that failed is tried again"
            total = local + external
            tables = self.allocate(request, local, total)
            if tables is None:
                return False
            request.tables = tables
            request.offered = request.num_computed_tokens = total
            request.life = Life(total)
            self.name(request, total)
            if external:
                given = [
                    [SimpleNamespace(block_id=block, is_null=not block) for block in table] for table in request.tables
                ]
                self.side.allocated(request, given, external)
                self.side.check()
                request.loads, request.state = total, "loading"
                self.count["loads"] += 1
                return True
            self.side.allocated(request, [], 0)
        lacking = request.num_tokens - request.num_computed_tokens
        part = self.part(request, min(lacking, budget), 0, new, offers, first=True)
        if part is None:
            if not request.num_preemptions and request.num_computed_tokens and not request.loads:
                self.release(request)  # as if it had not been looked at
                request.num_computed_tokens, request.life = 0, Life()
            return False
        request.loads = 0
        self.waiting.remove(request)
        self.running.append(request)
        request.state = "running"
        parts[request.request_id] = part
        return True

    def allocate(self, request: Request, local: int, total: int) -> list[list[int]] | None:
        """Return blocks for a request that resumes at ``total``, of which the device has all up to ``local``."""
        names = self.name(request, total, Life())
        wanted: list[tuple[int, int]] = []
        shared: list[tuple[int, int, int]] = []
        for group in self.groups:
            needed = self.needed(group, total) if total else set()
            for at in sorted(needed):
                block = self.cached.get((group.index, names[(at + 1) * group.tokens - 1]))
                if (at + 1) * group.tokens <= local and block is not None:
                    shared.append((group.index, at, block))
                else:
                    assert (at + 1) * group.tokens > local, "the device lost what it said that it has"
                    wanted.append((group.index, at))
        for _, _, block in shared:
            self.share(block)
        fresh = self.take(len(wanted))
        if fresh is None:
            self.drop(block for _, _, block in shared)
            return None
        tables = [[0] * (total // group.tokens) for group in self.groups]
        for index, at, block in shared:
            tables[index][at] = block
        for (index, at), block in zip(wanted, fresh, strict=True):
            tables[index][at] = block
        return tables

    def part(
        self, request: Request, count: int, guesses: int, new: list[int], offers: Any, first: bool = False
    ) -> Part | None:
        """Return blocks for ``count`` more tokens; None: there are too few."""
        begin = request.num_computed_tokens
        end = begin + count
        states = [group for group in self.groups if group.is_state]
        if states and end < request.num_tokens:  # chunks end where a state is kept
            grain = max(group.tokens for group in states)
            end = max(end // grain * grain, min(end, (begin // grain + 1) * grain))
        if end <= begin:
            return None
        processed = begin - request.placeholders if not first else begin
        wanted = []
        for group, table in zip(self.groups, request.tables, strict=True):
            lowest = min(self.needed(group, max(processed, 1)) or {processed // group.tokens})
            gone = [at for at in range(min(lowest, len(table))) if table[at]]
            if not group.reach.closed_upward:
                if group.is_state:
                    keep = {(begin - 1) // group.tokens, (max(1, processed) - 1) // group.tokens, len(table) - 1}
                    gone = [at for at in gone if at not in keep]
                self.drop(table[at] for at in gone)
                for at in gone:
                    table[at] = 0
            last = -(-end // group.tokens)
            if group.is_state:
                table.extend([0] * (last - len(table)))
                if not table[last - 1]:
                    wanted.append((group.index, last - 1))
            else:
                wanted += [(group.index, at) for at in range(len(table), last)]
                table.extend([0] * (last - len(table)))
        blocks = self.take(len(wanted))
        if blocks is None:
            for index, _ in reversed(wanted):
                if self.groups[index].is_state:
                    continue
                request.tables[index].pop()
            return None
        for (index, at), block in zip(wanted, blocks, strict=True):
            request.tables[index][at] = block
        new += blocks
        known = min(end, request.num_tokens)
        for group in states:
            for boundary in range((request.offered // group.tokens + 1) * group.tokens, known + 1, group.tokens):
                block = request.tables[group.index][boundary // group.tokens - 1]
                exact = boundary in (end, begin) and (boundary == end or boundary <= begin)
                if block and exact:
                    offers.setdefault(request.request_id, []).append((group.index, block, boundary))
        request.offered = max(request.offered, known)
        return Part(request, [[*table] for table in request.tables], end - begin, guesses, request.life, first)

    def preempt(self, request: Request) -> None:
        self.count["preempted"] += 1
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.release(request)
        request.state = "waiting"
        request.num_computed_tokens = request.placeholders = request.offered = 0
        request.num_preemptions += 1
        request.life = Life()

    # ------------------------------------------------------------ a step of the workers
    def execute(self, step: Step) -> None:
        """Let the workers run a step."""
        for worker in self.workers:
            worker.before(step.plan)
        for block in step.new_blocks:
            for layers in self.memory:
                for layer in layers.values():
                    layer[block] = 0xEE
        step.sampled = [self.forward(part) for part in step.parts]
        for worker in self.workers:
            worker.load(step.plan)
            worker.store(step.plan)
            step.over.append(worker.loaded())

    def work(self) -> None:
        """Take in what came of the oldest step."""
        step = self.steps[0]
        if step.sampled is None:
            self.execute(step)
        assert step.sampled is not None
        self.steps.popleft()
        self.unshare(step.freed)
        self.update(step, step.sampled)
        for ended, failed in step.over:
            self.ended.update(ended)
            self.wrong |= failed
        for name in [name for name, count in self.ended.items() if count == self.setup.ranks]:
            del self.ended[name]
            self.loaded(name, name in self.wrong)
            self.wrong.discard(name)
        self.side.settle()
        self.side.check()

    def forward(self, part: Part) -> list[int]:
        """Compute a part of a step on the device, checking what it reads. Return the tokens that it sampled."""
        request, life, rng = part.request, part.life, self.rng
        begin = life.done
        self.check_content(request, part.tables, begin, life)
        out: list[int] = []
        end = begin + part.count
        if life is not request.life:
            end = min(end, len(request.truth))  # what it samples is dropped
        for at in range(begin, end):
            if at >= len(request.truth):  # a guess
                if rng.random() < 0.5:
                    self.garbage(part.tables, at, end)
                    end = at
                    break
                out.append(rng.randrange(9))
                request.truth.append(out[-1])
        self.write(request, part.tables, begin, end, life)
        life.done = end
        if end == len(request.truth) and life is request.life:
            out.append(rng.randrange(9))
            request.truth.append(out[-1])
        return out

    def check_content(self, request: Request, tables: list[list[int]], at: int, life: Life) -> None:
        """Check that the blocks have what resuming at ``at`` needs."""
        names = self.name(request, at, life)
        for group, table in zip(self.groups, tables, strict=True):
            if not at:
                continue
            if group.is_state:
                self.same(group, table[(at - 1) // group.tokens], [names[at - 1]], 0, request)
                continue
            for low, high in group.reach.needs(at):
                for page in range(low // group.tokens, -(-high // group.tokens)):
                    first = max(low, page * group.tokens)
                    mine = names[first : min(high, (page + 1) * group.tokens)]
                    self.same(group, table[page], mine, first % group.tokens, request)

    def same(self, group: Group, block: int, names: list[bytes], first: int, request: Request) -> None:
        assert block, f"{request.request_id} lacks a block of {group.name}"
        for rank, layers in enumerate(self.memory):
            for name, size in zip(group.layer_names, group.layer_bytes, strict=True):
                width = size if group.is_state else WIDTH
                wanted = b"".join(content(each, name, rank, width) for each in names)
                found = bytes(layers[name][block, first * width : first * width + len(wanted)].tolist())
                assert found == wanted, (
                    f"{request.request_id}: block {block} of {group.name} has {found.hex()}, not {wanted.hex()}"
                )

    def write(self, request: Request, tables: list[list[int]], begin: int, end: int, life: Life) -> None:
        names = self.name(request, end, life)
        if self.device != "cpu" and self.rng.random() < 0.3:
            torch.cuda._sleep(int(CYCLES * self.rng.random()))
        for group, table in zip(self.groups, tables, strict=True):
            for rank, layers in enumerate(self.memory):
                for name, size in zip(group.layer_names, group.layer_bytes, strict=True):
                    if group.is_state:
                        if end > begin:
                            data = content(names[end - 1], name, rank, size)
                            layers[name][table[(end - 1) // group.tokens]] = self.on_device(data)
                        continue
                    for at in range(begin, end):
                        data = content(names[at], name, rank, WIDTH)
                        place = at % group.tokens * WIDTH
                        row = layers[name][table[at // group.tokens]]
                        row[place : place + WIDTH] = self.on_device(data)

    def on_device(self, data: bytes) -> torch.Tensor:
        """Bytes, on their way to a GPU behind what it has to do."""
        made = torch.tensor([*data], dtype=torch.uint8)
        return made if self.device == "cpu" else made.pin_memory().to(self.device, non_blocking=True)

    def garbage(self, tables: list[list[int]], begin: int, end: int) -> None:
        """Write what a guess that is refused leaves."""
        for group, table in zip(self.groups, tables, strict=True):
            for layers in self.memory:
                for name in group.layer_names:
                    for at in range(begin, end):
                        place = at % group.tokens * WIDTH
                        layers[name][table[at // group.tokens], place : place + WIDTH] = 0xAA

    def update(self, step: Step, sampled: list[list[int]]) -> None:
        """Let the scheduler take in the output of a step."""
        for part, tokens in zip(step.parts, sampled, strict=True):
            request = part.request
            request.steps -= 1
            if request.state == "over":
                continue
            if request.life is not part.life:  # it was preempted since, and what it sampled is dropped
                del request.truth[request.num_tokens :]
                continue
            if not tokens:
                continue
            refused = 1 + part.guesses - len(tokens)
            request.num_computed_tokens -= refused
            request.placeholders -= 1 + part.guesses
            request.all_token_ids.extend(tokens)
            self.register(request, min(request.num_computed_tokens, request.num_tokens - 1, request.life.done))
            if request.num_tokens >= request.length:
                self.running.remove(request)
                self.end(request)

    def loaded(self, name: str, failed: bool) -> None:
        for request in self.leaving:
            if request.request_id == name:
                self.leaving.remove(request)
                self.release(request)
                return
        (request,) = [each for each in self.waiting if each.request_id == name and each.state == "loading"]
        request.state = "loaded"
        request.failed = failed
        if failed:
            self.count["failed loads"] += 1
            return
        self.count["loaded tokens"] += request.loads
        self.check_content(request, request.tables, request.loads, request.life)
        self.register(request, request.loads)

    def end(self, request: Request) -> None:
        """As vLLM's ``_free_request``."""
        loading = request.state == "loading"
        request.state = "over"
        self.side.finished(request)
        self.side.check()
        self.count["ended"] += 1
        if loading:
            self.leaving.append(request)
        else:
            self.release(request)

    # ------------------------------------------------------------ what happens
    def abort(self) -> None:
        if not (everybody := [*self.running, *self.waiting]):
            return
        request = self.rng.choice(everybody)
        (self.running if request in self.running else self.waiting).remove(request)
        self.count["aborted"] += 1
        self.end(request)

    def reset(self) -> None:
        """Change the weights. Some running requests go on with what they have: nothing of it may be kept."""
        while self.steps:
            self.work()
        for request in [*self.running]:
            if self.rng.random() < 0.5:
                self.preempt(request)
        for block in [*self.cached_as]:
            self.forget(block)
        self.weights += 1
        self.side.reset()
        self.side.check()
        for request in [each for each in self.waiting if each.num_computed_tokens]:
            self.waiting.remove(request)  # it loads, or has loaded, what is of before
            self.end(request)
        self.count["resets"] += 1

    def copies(self) -> None:
        """Make some copies, of which some fail."""
        for copier in MADE:
            for _ in range(self.rng.randrange(3)):
                if copier.queue:
                    fails = self.rng.random() < 0.08
                    self.count[f"{copier.name} that fail"] += fails
                    copier.one(fails)

    def tick(self) -> None:
        chosen = self.rng.random()
        if chosen < 0.15 and len(self.waiting) < 6:
            self.add()
        elif chosen < 0.35:
            self.copies()
        elif chosen < 0.36:
            self.abort()
        elif chosen < 0.365:
            self.reset()
        elif chosen < 0.375 and self.running:
            self.preempt(self.rng.choice(self.running))
        else:
            self.schedule()
            if self.rng.random() < 0.5 and self.steps[0].sampled is None:  # its copies may end before it is taken in
                self.execute(self.steps[0])
                self.copies()
            while len(self.steps) >= self.setup.ahead:
                self.work()
        if self.setup.store:
            self.books.poll()
        if self.rng.random() < 0.6:
            self.count["events"] += self.router.apply(self.side.take_events())
            if self.rng.random() < 0.08:
                self.check_events()

    def check_events(self) -> None:
        """Check that a router has what the oracle says, and promises no prompt less than the host can bring."""
        right = expected(self.books.cache, self.groups)
        assert self.setup.errors or not self.side.events.failures
        for group in self.groups:
            blocks = self.router.blocks[group.index]
            if self.setup.errors:  # pages may have lost their names, but nothing is announced that is not there
                assert blocks.items() <= right[group.index].items()
                continue
            assert blocks == right[group.index], (group.name, blocks.keys() ^ right[group.index].keys())
            if group.reach.closed_upward:
                for request in self.texts[-6:]:
                    count = request.num_tokens
                    spans = [(lo, min(hi, count), key) for lo, hi, key in spans_of(request) if lo < count]
                    plan = self.books.match(request.all_token_ids, namespace_of(request), spans)
                    said = self.router.tokens(group, request.block_hashes, hash_tokens(self.groups))
                    assert said >= plan.ready, (said, plan.ready)
                    self.count["asked of the router"] += 1
                    self.count["a router says more"] += said > plan.ready + self.page
        self.count["checks of events"] += 1

    def drain(self) -> None:
        """Let all that is under way end, and check that nothing is lost on either side."""
        patience = time.monotonic() + 60
        while self.waiting or self.running or self.leaving or self.steps:
            if self.rng.random() < 0.02:
                self.abort()
            self.schedule()
            while self.steps:
                self.work()
            self.copies()
            assert time.monotonic() < patience, "requests do not end"
        for worker in self.workers:
            worker.close()
        self.side.settle()
        self.side.check()
        self.router.apply(self.side.take_events())
        self.check_events()
        assert not self.side.tracked and not self.references, (self.side.tracked, self.references)
        figures = self.side.figures.total
        assert self.device == "cpu" or not (figures["failed_stores"] or figures["failed_loads"]), figures
        assert len(self.free) == self.setup.blocks - 1
        self.books.forget()
        self.router.apply(self.side.take_events())
        assert not any(self.router.blocks.values()), "of a host that was emptied, something is still announced"
        assert len(self.books.free) == self.books.slots, "slots are lost"

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
            worker.region.close()
        self.books.close(0.5)
        self.region.close()


def run(name: str, seed: object, ticks: int, folder: Path, device: str = "cpu") -> Counter[str]:
    """Random traffic on one setup; how often each thing happened."""
    with (
        mock.patch("prefixloom_vllm.region.RING", RING),
        mock.patch("prefixloom_vllm.scheduler.RING", RING),
        mock.patch("prefixloom_resumable.announcements.ANEW_SHARE", 1e12),  # everything again at any time
    ):
        return drive(Traffic(SETUPS[name], folder, f"{name} {seed}", device), ticks)


def drive(traffic: Traffic, ticks: int) -> Counter[str]:
    try:
        for _ in range(ticks):
            traffic.tick()
        traffic.drain()
    finally:
        traffic.close()
    figures = traffic.side.figures.total
    return traffic.count + Counter({name: int(count) for name, count in figures.items()})


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ticks", type=int, default=600)
    parser.add_argument("--setups", default="all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(None if arguments is None else [*arguments])
    torch.set_num_threads(1)

    def chosen() -> Iterator[str]:
        return (name for name in SETUPS if options.setups in ("all", name))

    total: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.seeds):
        for name in chosen():
            with tempfile.TemporaryDirectory(dir=None if options.device == "cpu" else "/dev/shm") as folder:
                try:
                    total += run(name, seed, options.ticks, Path(folder), options.device)
                except BaseException:
                    print(f"FAILED {name}, seed {seed}", flush=True)
                    raise
    print(", ".join(f"{name} {count}" for name, count in sorted(total.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
