"""Hits of SGLang's own cache and of ours with its extra buffer of states, over many traffics and without a model.

Run in SGLang's environment: ``python -m tests.engines.order_sglang --seeds 12``. The traffics are those of ``run``,
through SGLang's scheduler calls, requests and pools, with pools of 704 tokens, pages of 64, and steps of 256 tokens
while a request decodes. Answers are random tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from typing import Any

from bench.engines.sglang import SGLangCache
from bench.engines.sglang_loop import Scheduling
from bench.engines.sglang_variants import OurCacheInSGLang
from prefixloom_sglang.cache import PrefixloomCache
from tests.engines.models import VOCABULARY
from tests.engines.traffic import FIRST_TOKEN, Traffic, Turn

PAGE, TOKENS, STATES, STEP = 64, 704, 60, 256
Waves = list[list[tuple[Turn, list[int]]]]


class Ours(OurCacheInSGLang):
    cache_class = PrefixloomCache


def waves(seed: int, requests: int) -> Waves:
    """Return all turns of a traffic, with their answers."""
    rng = random.Random(seed)
    traffic = Traffic(requests, seed)
    found: Waves = []
    for turns in traffic.waves():
        answers = [[rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(turn.answer_length)] for turn in turns]
        found.append(list(zip(turns, answers, strict=True)))
        for turn, answer in found[-1]:
            Traffic.answered(turn, answer)
    return found


def cached(base: type[Any], sent: Waves) -> list[int]:
    """Return by request how many of its tokens hit when it was admitted first."""
    kind = type("Buffered", (Scheduling, base), {"chunk": 256, "track_interval": STEP, "longest": 2048})
    made = kind("FM", PAGE, TOKENS, STATES, 1)
    hits = []
    for wave in sent:
        requests = [made.submit(turn.prompt, answer) for turn, answer in wave]
        while made.busy:
            made.iterate()
        hits += [made.hits[request] for request in requests]
    return hits


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.order_sglang", description=__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=120)
    told = parser.parse_args(arguments)
    sums = [0, 0]
    for seed in range(1, told.seeds + 1):
        sent = waves(seed, told.requests)
        own, ours = cached(SGLangCache, sent), cached(Ours, sent)
        sums = [sums[0] + sum(own), sums[1] + sum(ours)]
        pairs = list(zip(own, ours, strict=True))
        more, fewer = sum(b > a for a, b in pairs), sum(b < a for a, b in pairs)
        print(
            f"traffic {seed}: SGLang's own {sum(own)}, ours {sum(ours)}, {more} requests more and {fewer} less",
            flush=True,
        )
    print(f"together: SGLang's own {sums[0]}, ours {sums[1]}, {sums[1] / sums[0]:.3f}")
    return 0 if sums[1] >= 0.98 * sums[0] else 1


if __name__ == "__main__":
    sys.exit(main())
