"""Eviction policies on a trace of blocks, beside LRU and the offline optimum: the token hit rate of each.

A block of the trace is one token here, and one page, in a cache with full attention alone: a miss-ratio curve of a long
trace takes seconds. Whole blocks only, one request after the other, published every 2,048 tokens of the trace. A prompt
of more blocks than the pool has is cut there. ``part`` (0.5, 1) takes the second half of the trace. Without a trace,
traces are made, which no policy was tuned to. Beside LRU and the bound stands how much of the gap each policy closes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path as File

import attrs

from bench.runner.figures import Rows
from prefixloom import Buffer, Component, Manifest, Path, Traffic, compose
from prefixloom.lab import BlockPrompt, LabRequest, Replay, SyntheticTrace, read_trace
from prefixloom.lab.bounds import chained, optimum
from prefixloom_policies import adaptive
from prefixloom_policies.cells import Prints

CHUNK, NEW = 2048, adaptive.NEW
Prompts = list[list[int]]


@attrs.frozen
class BlockTrace:
    """``paths``: the whole blocks of each prompt. ``tokens``: of all prompts, partial blocks included."""

    paths: list[list[int]]
    tokens: int
    block: int

    @classmethod
    def read(cls, file: File, block: int, part: tuple[float, float] = (0.0, 1.0)) -> BlockTrace:
        prompts = [each.prompt for each in read_trace(file, block=block)]
        prompts = prompts[int(part[0] * len(prompts)) : int(part[1] * len(prompts))]
        paths = [each.ids[: each.count // block] for each in prompts if isinstance(each, BlockPrompt)]
        return cls(chained(paths), sum(each.count for each in prompts), block)

    def hit_rate(self, policy: str, capacity: int) -> float:
        """Return the part of all tokens that a cache of ``capacity`` blocks hits. A token is a block here."""
        Prints.stride, adaptive.NEW = 1, tuple(each // self.block for each in NEW)
        kv = Component("kv", Manifest([Buffer("data", (1,), "int64")]), Path())
        cache = compose(None, plugins=[kv], page_size=1, capacity=capacity, device="meta", policy=policy, debug=False)
        asked = (LabRequest(0.0, BlockPrompt(path[:capacity], 1, len(path[:capacity]))) for path in self.paths)
        outcome = Replay(cache, chunk=max(CHUNK // self.block, 1), closely=0, leave=0).run(asked)
        return outcome.hit * self.block / self.tokens

    def bound(self, capacity: int) -> float:
        return sum(optimum(self.paths, capacity)) * self.block / self.tokens


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


def policies(
    trace: str | None = None, block: int = 512, capacity: Sequence[int] = (1000, 3000), policy: str = "adaptive",
    part: tuple[float, float] = (0.0, 1.0),
) -> Rows:  # fmt: skip
    """Return the hit rates of LRU, of the bound and of each policy at each capacity, in percent of all tokens."""
    found: Rows = {}
    given = [(File(trace).name, BlockTrace.read(File(trace), block, part), capacity)] if trace else MadeTraces()
    for name, blocks_, capacities in given:
        for count in capacities:
            where = f"{name}, {count} blocks"
            best, least = blocks_.bound(count), blocks_.hit_rate("lru", count)
            found |= {f"{where}, lru, %": [100 * least], f"{where}, bound, %": [100 * best]}
            for each in policy.split(","):
                rate = blocks_.hit_rate(each, count)
                found[f"{where}, {each}, %"] = [100 * rate]
                found[f"{where}, {each}, % of the gap"] = [100 * (rate - least) / (best - least or 1)]
            print(*(f"{row} {figure:.2f}" for row, (figure,) in found.items() if row.startswith(where)), sep="; ")
    return found
