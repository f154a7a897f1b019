"""The KL check of ``ThreeWay`` in float32: mixed traffic through a small cache over a host tier, against none at all.

    python -m tests.random.kl_threeway --requests 200

Conversations below one system prompt, turns that extend each other, branches, aborts, chunks of random lengths, tokens
decoded one by one. For every token that was computed: the divergence of what the model says next from what it says in
one pass over the whole, without a cache. At the end a control: the same of a hit of which one component was zeroed.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import attrs
import torch
from torch import Tensor

from prefixloom import TierManifest
from prefixloom_engine.threeway import SIZES
from prefixloom_hicache import HostTier
from tests.support.divergence import Compared, divergence
from tests.support.engines import cache_for, forward, model, nothing_left

TALKS, SYSTEM, LONGEST, ABORTED, REPLY = 6, 192, 620, 7, 5
CAPACITY = {"full": 960, "swa": 960, "mamba": 14}
HOST = {"full": 4096, "swa": 4096, "mamba": 64}


@attrs.define
class Result(Compared):
    restored: int = 0


class Traffic:
    def __init__(self, seed: int = 1, device: str = "cpu") -> None:
        self.rng = random.Random(seed)
        self.model = model("float32", device=device)
        tier = HostTier(TierManifest(capacity=HOST, write="back"))
        self.cache = cache_for(self.model, CAPACITY, plugins=[tier], debug=False)
        self.system = self.said(SYSTEM)
        self.talks = [list(self.system) for _ in range(TALKS)]
        self.result = Result()

    def said(self, count: int) -> list[int]:
        return [self.rng.randrange(SIZES["tiny"].vocabulary) for _ in range(count)]

    def run(self, requests: int) -> Result:
        told = self.result
        while told.requests < requests:
            self.serve(self.rng.randrange(TALKS))
            told.requests += 1
        told.evicted = sum(part.evicted for part in self.cache.stats().components.values())
        told.control = min(self.control(part.name) for part in self.cache.composition.parts)
        nothing_left(self.cache)
        return told

    def serve(self, number: int) -> None:
        """The next turn of a conversation: prefilled in chunks, some tokens decoded, and closed or given up."""
        rng, told = self.rng, self.result
        if rng.random() < 0.15:
            other = rng.choice(self.talks)
            self.talks[number] = other[: rng.randrange(SYSTEM, len(other) + 1)]
        tokens = [*self.talks[number], *self.said(rng.randint(24, 90))]
        if len(tokens) > LONGEST:
            tokens = [*self.system, *self.said(40)]
        sequence = self.cache.open(tokens, leave=1)
        here = sequence.ready
        told.restored += sequence.restore().ready - here
        start, told.hit = sequence.ready, told.hit + sequence.ready
        chunk = rng.choice((64, 128, 256))
        rows = []
        while sequence.committed < len(tokens):
            rows.append(forward(self.model, self.cache, sequence, [sequence.next_stop(chunk)]))
            sequence.publish()
        for _ in range(REPLY):
            tokens.append(int(rows[-1][-1].argmax()))
            sequence.append(tokens[-1:])
            rows.append(forward(self.model, self.cache, sequence, [len(tokens)]))
        told.compare(torch.cat(rows), self.plain(tokens)[start:])
        if (told.requests + 1) % ABORTED:
            sequence.close()
        else:
            sequence.abort()
        self.talks[number] = tokens

    def plain(self, tokens: list[int]) -> Tensor:
        cache = cache_for(self.model, {"full": 1024, "swa": 1024, "mamba": 10}, debug=False)
        with cache.open(tokens) as sequence:
            return forward(self.model, cache, sequence, [len(tokens)])

    def control(self, component: str) -> float:
        """What it does when all that a hit has of a component is zeroed."""
        tokens = [*self.system, *self.said(60)]
        with self.cache.open(tokens, leave=1) as sequence:
            sequence.restore()
            forward(self.model, self.cache, sequence, [SYSTEM, len(tokens)])
        slots = [slot for slot in self.cache.match(tokens, leave=1).pages(component) if slot >= 0]
        buffers: list[Any] = list(self.cache.pool(component).buffers.values())
        kept = [buffer[:, slots].clone() for buffer in buffers]
        for buffer in buffers:
            buffer[:, slots] = 0
        with self.cache.open(tokens, leave=1) as sequence:
            ready = sequence.ready
            found = forward(self.model, self.cache, sequence, [len(tokens)])
            sequence.abort()
        for buffer, content in zip(buffers, kept, strict=True):
            buffer[:, slots] = content
        return float(divergence(found, self.plain(tokens)[ready:]).max())


def main() -> int:
    parser = argparse.ArgumentParser(description="The KL check of ThreeWay over a cache with a host tier.")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where the model and its cache are (default: cpu)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    told = Traffic(given.seed, given.device).run(given.requests)
    for name, value in attrs.asdict(told).items():
        print(f"{name}: {value}")
    return 0 if told.sound() else 1


if __name__ == "__main__":
    sys.exit(main())
