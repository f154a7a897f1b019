"""The KL check: mixed traffic in float32 through a cache that is too small for it, against runs without a cache.

    python -m tests.random.kl_hf --requests 200 --models all

Conversations with one system prompt, turns that extend each other, branches, aborts, three requests decoded together.
For every token that was computed: the divergence of what the model says next from what it says without a cache, in one
pass over the whole. At the end a control: the same of a hit of which one page or state was zeroed.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import attrs
import torch

from tests.support.divergence import Compared, divergence
from tests.support.hf_models import MATRIX, VOCABULARY, Served, distance

SYSTEM = 192
TURNS = 4
REPLY = 6
TOGETHER = 3
ABORTED = 7
"""Every so many requests one is given up when it has been computed."""


@attrs.define
class Result(Compared):
    asked: int = 0
    aborted: int = 0


class Talks:
    """Conversations with one system prompt; half-way one of three goes on from within its neighbour's."""

    def __init__(self, count: int, rng: random.Random) -> None:
        self.rng = rng
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
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]


class Traffic:
    """``requests`` of mixed traffic through one model."""

    def __init__(self, name: str, seed: int = 1) -> None:
        self.served = Served(name, dtype="float32", capacity=1024, max_running=TOGETHER + 1, debug=False)
        self.rng = random.Random(f"{name} {seed}")
        self.result = Result()

    def run(self, requests: int) -> Result:
        told = self.result
        while told.requests < requests:
            talks = Talks(2 * TOGETHER, self.rng)
            for turn in range(TURNS):
                order = self.rng.sample(range(2 * TOGETHER), 2 * TOGETHER)
                for at in range(0, len(order), TOGETHER):
                    if told.requests < requests:
                        self._together(talks, turn, order[at : at + TOGETHER])
        stats = self.served.cache.stats()
        told.hit, told.asked = stats.hit_tokens, stats.asked_tokens
        told.evicted = sum(figures.evicted for figures in stats.components.values())
        told.control = self._control()
        self.served.settled()
        return told

    def _together(self, talks: Talks, turn: int, numbers: list[int]) -> None:
        """Prefill each on its own, decode them all at once; some are given up half-way."""
        served, told = self.served, self.result
        texts = [talks.ask(number, turn) for number in numbers]
        sequences, rows = [], []
        for tokens in texts:
            sequences.append(served.cache.open(tokens, leave=1))
            rows.append(self._prefilled(sequences[-1], tokens))
        starts = [sequence.ready for sequence in sequences]
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

    def _prefilled(self, it: Any, tokens: list[int]) -> torch.Tensor:
        """In chunks that end where states are kept."""
        served, rows = self.served, []
        chunk = self.rng.choice((1, 2, 4)) * 64
        while it.committed < len(tokens):
            rows.append(served.compute(it, tokens, (it.next_stop(chunk),)))
            it.publish()
        return torch.cat(rows)

    def _control(self) -> float:
        """The least that a zeroed piece of a hit does, over all layers and buffers."""
        served, tokens = self.served, [3 + i * i % 91 for i in range(160)]
        served.cache.evict(1024)
        served.published(tokens, (128,))
        expected = served.plain(tokens, (160,))[128:]
        least = float("inf")
        for part in served.cache.composition.parts:
            for buffer in part.manifest.buffers:
                for row in range(len(buffer.layers)):
                    slot = served.cache.match(tokens, leave=1).pages(part.name)[-1]
                    content = served.cache.pool(part.name).buffers[buffer.name][row, slot]
                    kept = content.clone()
                    content.zero_()
                    with served.cache.open(tokens, leave=1) as sequence:
                        assert sequence.ready == 128
                        found = served.compute(sequence, tokens, (160,))
                        sequence.abort()
                    content.copy_(kept)
                    assert distance(found, expected) > 0
                    least = min(least, float(divergence(found, expected).max()))
        return least


def main() -> int:
    parser = argparse.ArgumentParser(description="The KL check of Hugging Face models over a cache.")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--models", nargs="+", default=["all"])
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    names = MATRIX if given.models == ["all"] else given.models
    torch.set_num_threads(1)
    bad = 0
    print(f"{'model':18} requests  tokens   hit  evicted  mean KL   most KL   control   same next")
    for name in names:
        told = Traffic(name, given.seed).run(given.requests)
        wrong = not told.sound()
        bad += wrong
        print(
            f"{name:18} {told.requests:8} {told.tokens:7} {told.hit / told.asked:5.0%} {told.evicted:8} "
            f"{told.mean:.2e}  {told.most:.2e}  {told.control:.2e}  {told.agreed / told.tokens:.2%}"
            f"{'  WRONG' if wrong else ''}",
            flush=True,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
