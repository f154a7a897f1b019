"""Random traffic through engines over a tier and a store, while whatever can go wrong between the tiers does.

Everything is drawn from a seed: the pools, the tier's policies, its store, which copies and forward passes fail, how
slow they are, who flushes, evicts, drops a namespace, retracts or aborts meanwhile, and whether prompts are computed
by another engine that is replaced now and then. Some answers are continued in a next turn. Every answer must be that of
a run without a cache, also of requests that are asked again when nothing fails any more, and of a second cache that has
the store alone; and nothing must be left.

``python -m tests.random.engine_traffic --seeds 200 [--first 1]``
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache as remembered
from typing import Any
from unittest import mock

import attrs
import torch

import prefixloom.tiers.host_copies
from prefixloom import Cache, TierManifest
from prefixloom.testing.inside.backdoor import tier_lanes, transfer_streams
from prefixloom_engine import Answer, Batch, Engine, Request, ThreeWay
from prefixloom_engine.disaggregation import DecodeEngine, PrefillServer
from prefixloom_engine.serving.admission import POLICIES
from prefixloom_hicache import GuardLimits, HostTier, MemoryBackend
from tests.support.engines import cache_for, model, nothing_left, plain, prompt
from tests.support.planned_steps import watched

LONGEST = 20_000
"""Steps after which a run hangs."""
POOLS = (
    {"full": 480, "swa": 480, "mamba": 20},
    {"full": 700, "swa": 600, "mamba": 28},
    {"full": 4096, "swa": 4096, "mamba": 64},
)
HOSTS = ({"full": 8192, "swa": 8192, "mamba": 256}, {"full": 640, "swa": 500, "mamba": 12})
MOST_REQUESTS, LONGEST_PROMPT = 30, 330
"""Of one run, with those that continue others; and what fits the smallest pools beside an answer."""
RATES = ((0.3, 0.03), (0.6, 0.0), (0.1, 0.0), (0.0, 0.1), (0.1, 0.02), (0.02, 0.02), (0.0, 0.0))
"""How many copies fail, and how many forward passes."""


@remembered
def drafting() -> ThreeWay:
    return ThreeWay("tiny", dtype="float64", draft=True)


class Injected(RuntimeError):
    """A forward pass that fails, or a copy."""


class Failing:
    """A runner whose passes fail now and then, after they have written what they write."""

    drafter = None

    def __init__(self, honest: Any, rng: random.Random, rate: float) -> None:
        self.honest, self.groups = honest, honest.groups
        self.rng, self.rate = rng, rate

    def forward(self, batch: Batch) -> torch.Tensor:
        logits: torch.Tensor = self.honest.forward(batch)
        if self.rng.random() < self.rate:
            raise Injected("a kernel failed")
        return logits


class FailingCopies:
    """Copies between the device and the host that fail now and then, and leave rubbish where they were to write."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        self.honest = prefixloom.tiers.host_copies.copy_between
        self.rng, self.rate, self.failed = rng, rate, 0

    def __call__(self, source: Any, src: Any, target: Any, dst: Any, *more: Any) -> None:
        self.honest(source, src, target, dst, *more)
        if self.rng.random() < self.rate:
            self.failed += 1
            for buffer in target.buffers.values():
                buffer[:, list(dst)] = 7
            raise Injected("a copy failed")


class Driven:
    """An engine with what clients ask: itself, or one that has prompts computed by a prefill server.

    ``serve``: makes the engine of such a server; None: there is none
    """

    def __init__(self, engine: Engine, serve: Callable[[], Engine] | None) -> None:
        self.engine, self._serve = engine, serve
        self.server: PrefillServer | None = None
        self.front: Any = engine if serve is None else DecodeEngine(engine, [], least=16)
        self.replace_server()

    def replace_server(self) -> None:
        """End the prefill server, whatever it owes, and let another one take its place."""
        if self._serve is not None:
            if self.server is not None:
                self.server.close()
            self.server = PrefillServer(self._serve())
            self.front.set_peers([self.server.address])

    def step(self) -> None:
        if self.server is not None:
            self.server.serve_once()
        self.front.step()

    def answer(self, request: Request) -> Answer:
        answer: Answer = self.front.add(request)
        while not answer.done:
            self.step()
        return answer

    @property
    def handed_over(self) -> int:
        """How many prompts the prefill server has computed."""
        return 0 if self.server is None else int(self.front.handed_over)

    def close(self) -> None:
        try:
            self.front.close()
        finally:
            if self.server is not None:
                self.server.close()


@attrs.frozen
class Setting:
    """What stays as it is during one run."""

    draft: bool
    pools: dict[str, int]
    host: dict[str, int]
    write: str
    overlap: bool
    gates: int
    store: bool
    keep: str
    fetch: str
    layout: str
    rates: tuple[float, float]
    pause: float
    flushes: bool
    engines: int
    debug: bool
    apart: bool


def drawn(rng: random.Random) -> Setting:
    draft = rng.random() < 0.25
    pools, host = rng.choice(POOLS), rng.choice(HOSTS)
    return Setting(
        draft,
        {**pools, "draft": pools["full"]} if draft else pools,
        {**host, "draft": host["full"]} if draft else host,
        write=rng.choice(("back", "through", "selective")),
        overlap=rng.random() < 0.75,
        gates=rng.choice((1, 1, 3)),
        store=rng.random() < 0.5,
        keep=rng.choice(("back", "through", "selective")),
        fetch=rng.choice(("wait", "best_effort")),
        layout=rng.choice(("layer_first", "page_first")),
        rates=rng.choice(RATES),
        pause=rng.choice((0.0, 0.002, 0.006)),
        flushes=rng.random() < 0.5,
        engines=rng.choice((1, 1, 2)) if pools["full"] > 4000 else 1,
        debug=rng.random() < 0.8,
        apart=rng.random() < 0.4,
    )


class Slow:
    """Something that is called a little later, as long as it may fail."""

    def __init__(self, failing: Any, rng: random.Random, pause: float) -> None:
        self.failing, self.rng, self.pause = failing, rng, pause

    def __call__(self, *given: Any) -> None:
        if self.failing.rate:
            time.sleep(self.rng.random() * self.pause)
        self.failing(*given)


class Traffic:
    """One run. ``wrong`` says what went wrong in it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.setting = drawn(self.rng)
        self.model = drafting() if self.setting.draft else model()
        self.store = MemoryBackend(capacity=1 << 26) if self.setting.store else None
        self.wrong: list[str] = []
        self.seen: set[Answer] = set()
        self.counts: Counter[str] = Counter()
        chance = random.Random(seed + 1)
        self.copies = FailingCopies(chance, self.setting.rates[0])
        self.slowly = Slow(self.copies, chance, self.setting.pause)
        self.passes: list[Failing] = []
        tenants = random.Random(seed + 2)
        self.shares = tenants.choice((None, {}, {"a": 3.0, "tenant": 0.5}))
        self.requests = [attrs.evolve(each, tenant=tenants.choice("aab")) for each in self.asked()]

    def composed(self) -> tuple[Cache, HostTier]:
        setting = self.setting
        manifest = TierManifest(
            capacity=setting.host, write=setting.write, overlap=setting.overlap, gates=setting.gates  # type: ignore[arg-type]
        )  # fmt: skip
        if self.store is None:
            tier = HostTier(manifest)
        else:
            tier = HostTier(
                manifest, identity={"model": "T", "weights": "1"}, fetch=setting.fetch, fetch_at_least=16,
                keep=setting.keep, limits=GuardLimits(60.0),
            )  # fmt: skip
        cache = cache_for(
            self.model,
            setting.pools,
            plugins=[tier],
            debug=setting.debug,
            layout=setting.layout,
            shares=self.shares,
            policy="lru" if self.shares is None else "priority",
        )
        if self.store is not None:
            tier.attach(self.store)
            cache.poll()
        return cache, tier

    def asked(self) -> list[Request]:
        """Requests that share beginnings, some of them more than once."""
        rng = self.rng
        systems = [prompt(seed, length) for seed, length in ((0, 96), (1, 150), (2, 40))]
        found = []
        for _ in range(rng.randrange(6, 14)):
            system = rng.choice(systems) if rng.random() < 0.75 else []
            found.append(
                Request(
                    system[: rng.choice((len(system), len(system) // 2))]
                    + prompt(100 + rng.randrange(12), rng.randrange(1, 130)),
                    rng.randrange(1, 14),
                    speculate=rng.choice((0, 0, 2, 3)),
                    namespace=rng.choice(("", "", "tenant")),
                    priority=rng.randrange(3),
                    temperature=rng.choice((0.0, 0.0, 0.0, 0.7)),
                    seed=rng.randrange(100),
                    stops=[rng.randrange(512) for _ in range(rng.choice((0, 0, 0, 20)))],
                )
            )
        return found + [rng.choice(found) for _ in range(rng.randrange(12))]

    # ------------------------------------------------------------ the run
    def run(self) -> list[str]:
        cache, tier = self.composed()
        with mock.patch.object(prefixloom.tiers.host_copies, "copy_between", self.slowly):
            engines = [self.engine(cache) for _ in range(self.setting.engines)]
            with ExitStack() as stack:
                for each in engines:
                    stack.callback(each.close)
                self.mixed(cache, engines)
                for each in engines:
                    each.engine.drain()
                self.calm(cache)
                self.again(engines[0], "asked again")
            for each in engines:
                self.counts["handed over"] += each.handed_over
                if each.server is not None:
                    nothing_left(each.server.cache)
        self.ended(cache, tier)
        if self.store is not None:
            cache, tier = self.composed()
            with Engine(self.model, cache) as engine:
                self.again(Driven(engine, None), "from the store")
            self.counts["runs that fetched"] += bool(engine.counts.restored)
            self.ended(cache, tier)
        self.counts["failures"] += self.copies.failed
        return self.wrong

    def engine(self, cache: Cache) -> Driven:
        rng = self.rng
        engine = Engine(
            self.model,
            cache,
            chunk=rng.choice((64, 256, 512)),
            max_running=rng.choice((3, 8, 16)),
            overlap=rng.random() < 0.7,
            policy=rng.choice(list(POLICIES)),
            shares=self.shares or {},
        )
        if not self.setting.draft:  # whose runner has more than a forward pass
            engine._forward.runner = Failing(engine._forward.runner, rng, self.setting.rates[1])
            self.passes.append(engine._forward.runner)
        return Driven(watched(engine), self.prefilling if self.setting.apart else None)

    def prefilling(self) -> Engine:
        return Engine(self.model, cache_for(self.model, self.setting.pools, debug=self.setting.debug), chunk=64)

    def mixed(self, cache: Cache, engines: list[Driven]) -> None:
        """All are asked, while others do to the cache what they may do at any time."""
        rng = self.rng
        left, answers = list(self.requests), []
        for _ in range(LONGEST):
            if left and rng.random() < 0.4:
                engine = rng.choice(engines)
                answers.append((engine.front.add(left.pop()), engine))
            for engine in engines:
                engine.step()
            left += self.continued([answer for answer, _ in answers])
            if not left and all(answer.done for answer, _ in answers):
                break
            self.meddle(cache, engines, answers)
        else:
            self.wrong.append("hangs")
        for answer, _ in answers:
            if isinstance(answer.error, Injected):  # it failed a few times in a row
                self.counts["given up"] += 1
            elif answer.reason != "aborted":
                self.check(answer, "mixed")

    def continued(self, answers: list[Answer]) -> list[Request]:
        """The next turns of some conversations whose last answers have ended."""
        found = []
        for answer in answers:
            if answer not in self.seen and answer.reason in ("length", "stop"):
                self.seen.add(answer)
                text = [
                    *answer.request.tokens,
                    *answer.tokens,
                    *prompt(self.rng.randrange(99), self.rng.randrange(1, 60)),
                ]
                if len(self.requests) < MOST_REQUESTS and len(text) < LONGEST_PROMPT and self.rng.random() < 0.5:
                    found.append(attrs.evolve(answer.request, tokens=text))
                    self.requests.append(found[-1])
        return found

    def meddle(self, cache: Cache, engines: list[Driven], answers: list[tuple[Answer, Driven]]) -> None:
        rng = self.rng
        what = rng.random()
        if what < 0.05:
            cache.poll()
        elif what < 0.07 and self.setting.flushes:
            cache.flush()
        elif what < 0.08 and self.setting.flushes:
            cache.drop_namespace(rng.choice(("", "tenant")))
        elif what < 0.10:
            cache.evict({part.name: rng.randrange(part.capacity) for part in cache.composition.parts})
        elif what < 0.105 and answers:
            answer, engine = rng.choice(answers)
            rng.choice((engine.front.abort, engine.front.finish))(answer)
        elif what < 0.13:
            scheduler = rng.choice(engines).engine._scheduler
            if scheduler.running:
                scheduler.retract(rng.choice(scheduler.running))
        elif what < 0.15:
            time.sleep(0.004)
        elif what < 0.16:
            rng.choice(engines).replace_server()

    def calm(self, cache: Cache) -> None:
        """Nothing fails any more, but perhaps what an eviction still sends down."""
        for each in self.passes:
            each.rate = 0.0
        if self.rng.random() < 0.7:
            self.copies.rate = 0.0
        if self.rng.random() < 0.5:
            cache.evict({part.name: part.capacity for part in cache.composition.parts})
        self.copies.rate = 0.0

    def again(self, engine: Driven, when: str) -> None:
        for request in self.requests:
            self.check(engine.answer(request), when)

    # ------------------------------------------------------------ truth
    def check(self, answer: Answer, when: str) -> None:
        self.counts["answers"] += 1
        if answer.error is not None:
            self.wrong.append(f"{when}: {answer.error!r}")
        elif answer.tokens != plain(model(), [answer.request])[0][: self.length(answer)]:
            self.wrong.append(f"{when}: wrong tokens, {answer.hit} hit and {answer.restored} restored")

    def length(self, answer: Answer) -> int:
        """How many tokens an answer must have: those that it has, if it was finished early."""
        return len(answer.tokens) if answer.reason == "stop" else answer.request.max_tokens

    def ended(self, cache: Cache, tier: HostTier) -> None:
        """Nothing is left, neither here nor below."""
        if self.store is not None:
            tier.detach()
        for stream in transfer_streams(cache).values():
            stream.record().synchronize(20)
        cache.poll()
        nothing_left(cache)
        deadline = time.monotonic() + 20
        while any(lane.leased for lane in tier_lanes(cache)) and time.monotonic() < deadline:
            time.sleep(0.002)  # a write that ran when the store was detached keeps its pages until it has read them
            cache.poll()
        for lane in tier_lanes(cache):
            if lane.leased or lane.in_tree + lane.pool.free != lane.pool.capacity:
                self.wrong.append(f"the host's {lane.name}: {lane.leased} leased, {lane.in_tree} in the tree")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("prefixloom").setLevel(logging.CRITICAL)
    counts: Counter[str] = Counter()
    for seed in range(args.first, args.first + args.seeds):
        traffic = Traffic(seed)
        wrong = traffic.run()
        counts += traffic.counts
        for each in wrong[:3]:
            counts["wrong"] += 1
            print(f"seed {seed}: {each}; {traffic.setting}", flush=True)
    print(f"{args.seeds} runs: {dict(counts)}")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
