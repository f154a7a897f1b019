"""The KL check: mixed traffic in float32 through a cache that is too small for it, against runs without a cache.

    python -m tests.random.kl --requests 200 --models all

Conversations with one system prompt, turns that extend each other, branches, aborts, prompts in chunks of random
lengths, three requests decoded together; ``threeway`` over a host tier as well. For every token that was computed: the
divergence of what the model says next from what it says without a cache, in one pass over the whole. At the end a
control: the same of a hit of which one page or state of one layer was zeroed.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from prefixloom import TierManifest
from prefixloom_engine.threeway import SIZES
from prefixloom_hicache import HostTier
from tests.support.divergence import Compared, divergence
from tests.support.engines import cache_for, forward, model, nothing_left

SYSTEM, TURNS, REPLY, TOGETHER = 192, 4, 6, 3
ABORTED = 7
"""Every so many requests one is given up when it has been computed."""
CAPACITY = {"full": 960, "swa": 960, "mamba": 18}
HOST = {"full": 4096, "swa": 4096, "mamba": 64}


class ServedThreeWay:
    """The built-in model over a cache with a host tier, driven as ``hf_models.Served`` is."""

    vocabulary = SIZES["tiny"].vocabulary

    def __init__(self, device: str = "cpu") -> None:
        self.model = model("float32", device=device)
        tier = HostTier(TierManifest(capacity=HOST, write="back"))
        self.cache = cache_for(self.model, CAPACITY, plugins=[tier], debug=False, max_rewind=0)

    def compute(self, sequence: Any, tokens: Sequence[int], cuts: Iterable[int]) -> Tensor:
        return forward(self.model, self.cache, sequence, list(cuts))

    def step(self, sequences: Sequence[Any], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        ends = [each.committed + len(new) for each, new in zip(sequences, tokens, strict=True)]
        return [forward(self.model, self.cache, each, [end]) for each, end in zip(sequences, ends, strict=True)]

    def plain(self, tokens: Sequence[int], cuts: Iterable[int]) -> Tensor:
        cache = cache_for(self.model, {"full": 1024, "swa": 1024, "mamba": 10}, debug=False)
        with cache.open(tokens) as sequence:
            return forward(self.model, cache, sequence, list(cuts))

    def settled(self) -> None:
        nothing_left(self.cache)


def served_by(name: str, device: str = "cpu") -> Any:
    if name == "threeway":
        return ServedThreeWay(device)
    from tests.support.hf_models import VOCABULARY, Served

    served = Served(name, dtype="float32", capacity=1024, max_running=TOGETHER + 1, debug=False)
    served.vocabulary = VOCABULARY
    return served


@attrs.define
class Result(Compared):
    asked: int = 0
    aborted: int = 0
    restored: int = 0


class Talks:
    """Conversations with one system prompt; half-way one of three goes on from within its neighbour's."""

    def __init__(self, count: int, rng: random.Random, vocabulary: int) -> None:
        self.rng, self.vocabulary = rng, vocabulary
        system = self._tokens(SYSTEM)
        self.said = [list(system) for _ in range(count)]

    def ask(self, number: int, turn: int) -> list[int]:
        """The next prompt of a conversation."""
        if number % 3 == 2 and turn == TURNS // 2:
            other = self.said[number - 1]
            self.said[number] = other[: self.rng.randrange(SYSTEM, len(other) + 1)]
        self.said[number] += self._tokens(self.rng.randint(24, 64))
        return list(self.said[number])

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocabulary) for _ in range(count)]


class Traffic:
    """Mixed traffic through one model."""

    def __init__(self, name: str, seed: int = 1, device: str = "cpu") -> None:
        self.served = served_by(name, device)
        self.cache = self.served.cache
        self.rng = random.Random(f"{name} {seed}")
        self.result = Result()

    def run(self, requests: int) -> Result:
        told = self.result
        while told.requests < requests:
            talks = Talks(2 * TOGETHER, self.rng, self.served.vocabulary)
            for turn in range(TURNS):
                order = self.rng.sample(range(2 * TOGETHER), 2 * TOGETHER)
                for at in range(0, len(order), TOGETHER):
                    if told.requests < requests:
                        self._together(talks, turn, order[at : at + TOGETHER])
        stats = self.cache.stats()
        told.hit, told.asked = stats.hit_tokens, stats.asked_tokens
        told.evicted = sum(figures.evicted for figures in stats.components.values())
        told.control = self._control()
        self.served.settled()
        return told

    def _together(self, talks: Talks, turn: int, numbers: list[int]) -> None:
        """Prefill each on its own, decode them all at once; some are given up half-way."""
        served, told = self.served, self.result
        texts = [talks.ask(number, turn) for number in numbers]
        sequences, rows, starts = [], [], []
        for tokens in texts:
            sequence = self.cache.open(tokens, leave=1)
            here = sequence.ready
            told.restored += sequence.restore().ready - here
            sequences.append(sequence)
            starts.append(sequence.ready)
            rows.append(self._prefilled(sequence, tokens))
        for _ in range(REPLY):
            chosen = [int(row[-1].argmax()) for row in rows]
            for tokens, sequence, token in zip(texts, sequences, chosen, strict=True):
                tokens.append(token)
                sequence.append([token])
            more = served.step(sequences, [[token] for token in chosen])
            rows = [torch.cat((row, new)) for row, new in zip(rows, more, strict=True)]
        for number, sequence, tokens, row, start in zip(numbers, sequences, texts, rows, starts, strict=True):
            told.compare(row, served.plain(tokens, (len(tokens),))[start:])
            told.requests += 1
            if told.requests % ABORTED == 0:
                told.aborted += 1
                sequence.abort()
            else:
                sequence.close()
            talks.said[number] += tokens[-REPLY:]

    def _prefilled(self, it: Any, tokens: list[int]) -> Tensor:
        """In chunks that end where states are kept."""
        rows, chunk = [], self.rng.choice((1, 2, 4)) * 64
        while it.committed < len(tokens):
            rows.append(self.served.compute(it, tokens, (it.next_stop(chunk),)))
            it.publish()
        return torch.cat(rows)

    def _control(self) -> float:
        """The least that a zeroed piece of a hit does, over all layers and buffers."""
        served, cache, tokens = self.served, self.cache, [3 + i * i % 91 for i in range(160)]
        cache.evict(1024)
        with cache.open(tokens) as sequence:
            served.compute(sequence, tokens, (128,))
            sequence.publish()
            sequence.abort()
        expected = served.plain(tokens, (160,))[128:]

        def moved(content: Tensor) -> float:
            kept = content.clone()
            content.zero_()
            with cache.open(tokens, leave=1) as sequence:
                assert sequence.ready == 128
                found = served.compute(sequence, tokens, (160,))
                sequence.abort()
            content.copy_(kept)
            return float(divergence(found, expected).max())

        pieces: list[Callable[[], float]] = []
        for part in cache.composition.parts:
            slot = cache.match(tokens, leave=1).pages(part.name)[-1]
            for content in cache.pool(part.name).buffers.values():
                pieces += [lambda one=content[row, slot]: moved(one) for row in range(len(content))]
        return min(piece() for piece in pieces)


def main() -> int:
    from tests.support.hf_models import MATRIX

    parser = argparse.ArgumentParser(description="The KL check of models over a cache.")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--models", nargs="+", default=["all"], help="threeway, or names of the matrix of hf_models")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where threeway and its cache are (default: cpu)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    print(f"{'model':18} requests  tokens   hit  evicted  mean KL   most KL   control   same next")
    for name in ("threeway", *MATRIX) if given.models == ["all"] else given.models:
        told = Traffic(name, given.seed, given.device).run(given.requests)
        bad += not told.sound()
        print(
            f"{name:18} {told.requests:8} {told.tokens:7} {told.hit / told.asked:5.0%} {told.evicted:8} "
            f"{told.mean:.2e}  {told.most:.2e}  {told.control:.2e}  {told.agreed / told.tokens:.2%}"
            f"{'' if told.sound() else '  WRONG'}",
            flush=True,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
