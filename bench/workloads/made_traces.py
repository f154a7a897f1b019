"""The policy ``adaptive`` beside LRU and the offline optimum, on traces that are made: what no real trace has tuned.

python -m bench.workloads.made_traces

Popular prompts, popular prompts with scans between, a loop, chats whose next turn follows recency alone, and synthetic
traffic as ``prefixloom plan`` makes it. All sizes are in blocks of 64 tokens, of 16 for the synthetic traffic.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from bench.workloads.policies import BlockTrace
from prefixloom import Traffic
from prefixloom.lab import SyntheticTrace
from prefixloom.lab.bounds import chained
from prefixloom_policies.cells import Prints

Prompts = list[list[int]]


class MadeTraces:
    """Traces by name, with the capacities at which they are served. Equal seeds make equal traces."""

    def __init__(self, seed: int = 7) -> None:
        self._chance = random.Random(seed)
        self._unused = itertools.count()

    def __iter__(self) -> Iterator[tuple[str, BlockTrace, Sequence[int]]]:
        chance = self._chance
        prompts = [self._new(chance.randrange(4, 60)) for _ in range(3000)]
        weights = [1 / (rank + 1) ** 0.9 for rank in range(len(prompts))]
        popular = chance.choices(prompts, weights, k=5000)
        yield "popular", blocks(popular), (2000, 20000)
        scans = [each if chance.random() < 0.6 else self._new(30) for each in popular]
        yield "popular and scans", blocks(scans), (2000, 20000)
        yield "loop", blocks([self._new(16) for _ in range(100)] * 30), (400, 1200)
        for recency in (0.6, 1.0):
            yield f"chats by recency {recency}", blocks(self._chats(recency)), (1000, 4000, 16000)
        for prompt, users, think in ((4096, 100, 30.0), (8192, 300, 120.0)):
            traffic = Traffic(32, prompt, 512, 0.2)
            made = SyntheticTrace(traffic, users=users, requests=3000, think=think, seed=5)
            rows = [list(request.prompt.chain("", 16)[1]) for request in made]
            yield f"traffic of {users} users", blocks(rows, 16), (4000, 16000, 60000)

    def _new(self, count: int) -> list[int]:
        return list(itertools.islice(self._unused, count))

    def _chats(self, recency: float) -> Prompts:
        chance = self._chance
        said: Prompts = []
        prompts = []
        for _ in range(4000):
            if len(said) < 30 or chance.random() < 0.2:
                said.append(self._new(chance.randrange(4, 80)))
            at = int(len(said) - chance.paretovariate(recency)) % len(said)
            said[at] = said[at] + self._new(chance.randrange(1, 20))
            prompts.append(said[at])
        return prompts


def blocks(prompts: Prompts, block: int = 64) -> BlockTrace:
    return BlockTrace(chained(prompts), sum(map(len, prompts)) * block, block)


def main() -> None:
    Prints.stride = Prints.head = 1  # a token is a block, so that each one counts
    for name, trace, capacities in MadeTraces():
        for capacity in capacities:
            least, rate, best = (
                trace.hit_rate("lru", capacity),
                trace.hit_rate("adaptive", capacity),
                trace.bound(capacity),
            )
            print(f"{name:20} {capacity:6} blocks: lru {least:.4f}, adaptive {rate:.4f}, bound {best:.4f}", flush=True)


if __name__ == "__main__":
    main()
