"""Mixed traffic through the engine for long, with pools too small for it: nothing leaks, and answers stay right.

Conversations of several turns below a few system prompts, some of which branch off others; guesses, drawn tokens,
priorities, stops; clients that go away; forward passes that fail. The pools hold 30% of what the live conversations
come to. Debug mode checks the cache's books after every operation, and the race detector every access.

``python tests/soak.py --requests 10240 --seed 1``
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from typing import Any

import attrs
import torch

from engines import nothing_left
from prefixloom import compose
from prefixloom_engine import Answer, Batch, Engine, Request, ThreeWay
from prefixloom_engine.threeway import BoundThreeWay
from prefixloom_engine.threeway_layers import Sizes

SIZES = Sizes(
    ("linear_attention", "sliding_attention", "full_attention"), 32, 2, 1, 16, 64, 128, 24, 2, 8, mixing=0.5
)  # fmt: skip
LIVE, LONGEST, SHARE = 48, 420, 0.3
MOST = {"turn": 60, "answer": 56}


class Injected(RuntimeError):
    """A forward pass that fails."""


@attrs.define(eq=False)
class Conversation:
    history: list[int]
    answer: Answer | None = None
    dies_after: int = -1
    """Steps until its client goes away; -1: never."""


class Soak:
    def __init__(self, seed: int, *, failing: float = 0.002, overlap: bool = True, policy: str = "lpm") -> None:
        self.rng = random.Random(seed)
        self.model = ThreeWay(SIZES, dtype="float64", seed=seed)
        need = LIVE * LONGEST * 2 // 3
        tokens = int(SHARE * need)
        self.cache = compose(
            self.model.config, capacity={"full": tokens, "swa": tokens, "mamba": 220}, max_rewind=3, debug=True
        )
        self.engine = Engine(self.model, self.cache, chunk=256, max_running=28, overlap=overlap, policy=policy)
        self.engine._forward.runner = Failing(self.engine._forward.runner, random.Random(seed), failing)
        self.systems = [self.said(length) for length in (100, 150, 64, 200)]
        self.live = [Conversation(self.beginning()) for _ in range(LIVE)]
        self.done: list[Answer] = []
        self.counts: Counter[str] = Counter()

    def said(self, count: int) -> list[int]:
        return [self.rng.randrange(SIZES.vocabulary) for _ in range(count)]

    def beginning(self) -> list[int]:
        return [*self.rng.choice(self.systems), *self.said(self.rng.randrange(1, 20))]

    # ------------------------------------------------------------ traffic
    def run(self, requests: int) -> None:
        asked = 0
        while asked < requests or any(talk.answer for talk in self.live):
            idle = [talk for talk in self.live if talk.answer is None]
            while idle and asked < requests and len(self.live) - len(idle) < 44:
                talk = idle.pop(self.rng.randrange(len(idle)))
                self.ask(talk)
                asked += 1
            self.engine.step()
            for talk in self.live:
                self.after(talk)
        self.engine.drain()
        self.engine.close()
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
        talk.answer = self.engine.add(request)
        if rng.random() < 0.05:
            talk.dies_after = rng.randrange(20)

    def after(self, talk: Conversation) -> None:
        answer = talk.answer
        if answer is None:
            return
        if talk.dies_after == 0:
            self.engine.abort(answer)
        talk.dies_after -= 1
        if not answer.done:
            return
        self.counts[answer.reason] += 1
        if answer.error is not None:
            raise answer.error
        if answer.reason != "aborted":
            self.done.append(answer)
            talk.history = [*talk.history, *answer.tokens]
        talk.answer, talk.dies_after = None, -1

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
            "hit rate": f"{stats.hit_tokens / stats.asked_tokens:.0%}",
        }


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_240)
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-overlap", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("prefixloom").setLevel(logging.ERROR)
    begun = time.monotonic()
    soak = Soak(args.seed, overlap=not args.no_overlap)
    soak.run(args.requests)
    wrong = soak.check(args.sample)
    print(f"{args.requests} requests in {time.monotonic() - begun:.0f} s; of {args.sample} answers {wrong} are wrong")
    for name, value in soak.told().items():
        print(f"  {name}: {value}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
