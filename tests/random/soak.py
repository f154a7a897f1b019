"""Mixed traffic through the engine for long, with pools too small for it: nothing leaks, and answers stay right.

Conversations of several turns below a few system prompts, some of which branch off others; guesses, drawn tokens,
priorities, stops; clients that go away; forward passes that fail, and copies to and from the host, which leave rubbish
behind. The pools hold 30% of what the live conversations
come to. Debug mode checks the cache's books after every operation, and the race detector every access.

With ``--two`` prompts are computed by a process of its own, which is killed now and then and started again.

``python -m tests.random.soak --requests 10240 --seed 1 [--two]``
"""

from __future__ import annotations

import argparse
import logging
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from typing import Any
from unittest import mock

import attrs
import torch

import prefixloom.tiers.host_copies
from prefixloom import Cache, TierManifest, compose
from prefixloom_engine import Answer, Batch, Engine, Request, ThreeWay
from prefixloom_engine.disaggregation import DecodeEngine, PrefillServer
from prefixloom_engine.threeway import BoundThreeWay, Sizes
from prefixloom_hicache import HostTier
from tests.support.engines import nothing_left
from tests.support.places import ROOT

SIZES = Sizes(
    ("linear_attention", "sliding_attention", "full_attention"), 32, 2, 1, 16, 64, 128, 24, 2, 8, mixing=0.5
)  # fmt: skip
LIVE, LONGEST, SHARE = 48, 420, 0.3
HOST = {"full": 8000, "swa": 8000, "mamba": 200}
"""What the tier below the device holds: less than what the conversations come to, so that it evicts as well."""
NOBODY = "tcp://127.0.0.1:9"
MOST = {"turn": 60, "answer": 56}


class Injected(RuntimeError):
    """A forward pass that fails, or a copy."""


@attrs.define(eq=False)
class Conversation:
    history: list[int]
    asked: Answer | None = None
    dies_after: int = -1
    """Steps until its client goes away; -1: never."""


def made(seed: int, debug: bool = True, host: str = "", overlap: bool = True) -> tuple[ThreeWay, Cache]:
    """``host``: when a tier below the device copies what it is to keep; there is none without."""
    model = ThreeWay(SIZES, dtype="float64", seed=seed)
    tokens = int(SHARE * LIVE * LONGEST * 2 / 3)
    capacity = {"full": tokens, "swa": tokens, "mamba": 220}
    manifest = TierManifest(capacity=HOST, write=host or "back", overlap=overlap)  # type: ignore[arg-type]
    tier = [HostTier(manifest)] if host else []
    return model, compose(model.config, plugins=tier, capacity=capacity, max_rewind=3, debug=debug)


class Soak:
    def __init__(
        self, seed: int, *, failing: float = 0.002, overlap: bool = True, prefill: str = "", host: str = ""
    ) -> None:
        self.rng = random.Random(seed)
        self.model, self.cache = made(seed, host=host, overlap=overlap)
        self.engine = Engine(self.model, self.cache, chunk=256, max_running=28, overlap=overlap, policy="lpm")
        self.front = DecodeEngine(self.engine, prefill or NOBODY, least=16 if prefill else 1 << 30)
        self.engine._forward.runner = Failing(self.engine._forward.runner, random.Random(seed), failing)
        self.copies = FailingCopies(random.Random(seed), 20 * failing)
        self.systems = [self.said(length) for length in (100, 150, 64, 200)]
        self.live = [Conversation(self.beginning()) for _ in range(LIVE)]
        self.done: list[Answer] = []
        self.counts: Counter[str] = Counter()

    def said(self, count: int) -> list[int]:
        return [self.rng.randrange(SIZES.vocabulary) for _ in range(count)]

    def beginning(self) -> list[int]:
        return [*self.rng.choice(self.systems), *self.said(self.rng.randrange(1, 20))]

    # ------------------------------------------------------------ traffic
    def run(self, requests: int, minutes: float = 1e9) -> None:
        """Ask so many, or as many as there is time for."""
        with mock.patch.object(prefixloom.tiers.host_copies, "copy_between", self.copies):
            self._run(requests, minutes)

    def _run(self, requests: int, minutes: float) -> None:
        asked, ends_at = 0, time.monotonic() + 60 * minutes
        while asked < requests or any(talk.asked for talk in self.live):
            if time.monotonic() > ends_at:
                requests = asked
            idle = [talk for talk in self.live if talk.asked is None]
            while idle and asked < requests and len(self.live) - len(idle) < 44:
                talk = idle.pop(self.rng.randrange(len(idle)))
                self.ask(talk)
                asked += 1
                if asked % 1000 == 0:
                    print(f"{asked} asked", file=sys.stderr, flush=True)
            self.front.step()
            self.between()
            for talk in self.live:
                self.after(talk)
        self.counts["requests"] = asked
        self.engine.drain()
        self.front.close()
        nothing_left(self.cache)

    def ask(self, talk: Conversation) -> None:
        rng = self.rng
        if len(talk.history) > LONGEST - MOST["turn"] - MOST["answer"]:
            talk.history = self.beginning()
            self.counts["begun anew"] += 1
        elif rng.random() < 0.1:
            other = rng.choice(self.live).history
            talk.history = other[: rng.randrange(1, len(other) + 1)]
            self.counts["branched"] += 1
        talk.history = [*talk.history, *self.said(rng.randrange(1, MOST["turn"]))]
        request = Request(
            talk.history,
            rng.randrange(1, MOST["answer"]),
            speculate=rng.choice((0, 0, 1, 3)),
            temperature=rng.choice((0.0, 0.0, 0.0, 0.7)),
            seed=rng.randrange(100),
            priority=rng.randrange(3),
            stops=self.said(2) if rng.random() < 0.2 else (),
            namespace=rng.choice(("", "", "", "tenant")),
        )
        talk.asked = self.front.add(request)
        if rng.random() < 0.05:
            talk.dies_after = rng.randrange(20)

    def after(self, talk: Conversation) -> None:
        answer = talk.asked
        if answer is None:
            return
        if talk.dies_after == 0:
            self.front.abort(answer)
        talk.dies_after -= 1
        if not answer.done:
            return
        self.counts[answer.reason] += 1
        if answer.error is not None and not isinstance(answer.error, Injected):  # three such in a row end a request
            raise answer.error
        if answer.reason in ("length", "stop"):
            self.done.append(answer)
            talk.history = [*talk.history, *answer.tokens]
        talk.asked, talk.dies_after = None, -1

    def between(self) -> None:
        """After each step."""

    # ------------------------------------------------------------ truth
    def check(self, count: int) -> int:
        """How many of a sample of answers differ from those without a cache."""
        wrong = 0
        for answer in self.rng.sample(self.done, min(count, len(self.done))):
            cache = compose(self.model.config, capacity={"full": 512, "swa": 512, "mamba": 10})
            with Engine(self.model, cache, overlap=False, chunk=1024) as engine:
                (right,) = engine.generate([attrs.evolve(answer.request, speculate=0)])
            wrong += right.tokens != answer.tokens
        return wrong

    def told(self) -> dict[str, Any]:
        stats = self.cache.stats()
        return {
            **self.counts,
            **{f"engine {name}": value for name, value in attrs.asdict(self.engine.counts).items()},
            **{f"{name} evicted": part.evicted for name, part in stats.components.items()},
            "hit rate": f"{(stats.hit_tokens + self.engine.counts.restored) / stats.asked_tokens:.0%}",
            "copies that failed": self.copies.failed,
            **({} if stats.tier is None else {"below the device": str(stats.tier)}),
        }


class TwoProcesses(Soak):
    """Prompts are computed by another process, which is killed now and then."""

    def __init__(self, seed: int, **options: Any) -> None:
        with socket.create_server(("127.0.0.1", 0)) as chosen:
            self.port = int(chosen.getsockname()[1])
        self.process: subprocess.Popen[str] | None = None
        self.seed, self.ends_at = seed, 0.0
        super().__init__(seed, prefill=f"tcp://127.0.0.1:{self.port}", **options)
        self.deaths = 0
        self.between()

    def between(self) -> None:
        if self.process is not None and time.monotonic() > self.ends_at:
            self.end()
            self.deaths += 1
        if self.process is None:
            command = [sys.executable, "-m", "tests.random.soak", "--serve", str(self.port), "--seed", str(self.seed)]
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            assert self.process.stdout is not None
            self.process.stdout.readline()
            self.ends_at = time.monotonic() + self.rng.uniform(5, 40)

    def end(self) -> None:
        process, self.process = self.process, None
        if process is not None and process.stdout is not None:
            process.kill()
            process.wait()
            process.stdout.close()

    def told(self) -> dict[str, Any]:
        front = self.front
        return {**super().told(), "handed over": front.handed_over, "lost": front.lost, "deaths": self.deaths}


def serve(port: int, seed: int) -> None:
    """The prefill process."""
    model, cache = made(seed, debug=False)
    server = PrefillServer(Engine(model, cache, chunk=256), f"tcp://127.0.0.1:{port}")
    print("ready", flush=True)
    server.run()


class Failing:
    """A runner whose forward passes fail now and then, after they have written."""

    def __init__(self, honest: Any, rng: random.Random, rate: float) -> None:
        self.honest: BoundThreeWay = honest
        self.groups = honest.groups
        self.rng, self.rate = rng, rate

    def forward(self, batch: Batch) -> torch.Tensor:
        logits = self.honest.forward(batch)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_240)
    parser.add_argument("--minutes", type=float, default=1e9, help="ask no more after so many")
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--two", action="store_true", help="with a prefill process that is killed now and then")
    parser.add_argument("--host", choices=("", "through", "selective", "back"), default="back", help="of the host tier")
    parser.add_argument("--serve", type=int, metavar="PORT", help="be that process")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("prefixloom").setLevel(logging.ERROR)
    if args.serve:
        serve(args.serve, args.seed)
        return 0
    begun = time.monotonic()
    soak = (TwoProcesses if args.two else Soak)(args.seed, overlap=not args.no_overlap, host=args.host)
    try:
        soak.run(args.requests, args.minutes)
    finally:
        if isinstance(soak, TwoProcesses):
            soak.end()
    wrong = soak.check(args.sample)
    print(
        f"{soak.counts['requests']} requests in {time.monotonic() - begun:.0f} s; "
        f"of {args.sample} answers {wrong} are wrong"
    )
    for name, value in soak.told().items():
        print(f"  {name}: {value}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
