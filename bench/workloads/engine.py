"""The reference engine on ``ThreeWay`` with 80M parameters: what a hit saves, what the cache costs, what overlap gains.

``parts``: any of prefill, decode, chunk, overlap and checks. All figures are ratios within one run. "Outside of the
forward" is everything else that the engine and the cache do for a step: planning, slots, page tables, ops on states,
publication, sampling, handling the results.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.runner.figures import Rows, in_turn
from prefixloom import Cache, compose
from prefixloom_engine import Engine, Request, ThreeWay
from prefixloom_engine.forward.passes import usable

LENGTH, CACHED, CHUNK = 2048, 1920, 512


def cache_for(model: ThreeWay, rows: int = 1) -> Cache:
    tokens = (LENGTH + 512) * (rows + 1)
    return compose(model.config, capacity={"full": tokens, "swa": tokens, "mamba": 64}, debug=False)


def prompt(seed: int, length: int, vocabulary: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(length)]


def timed(engine: Engine, request: Request) -> float:
    """Return the seconds until the request is answered."""
    started = time.perf_counter()
    engine.generate([request])
    return time.perf_counter() - started


def prefill(model: ThreeWay, rounds: int) -> Rows:
    """Return how many times as fast the first token of 2048 tokens comes if 1920 of them are cached."""
    cold, warm = [], []
    for number in range(rounds):
        with Engine(model, cache_for(model), chunk=CHUNK, overlap=False) as engine:
            shared = prompt(number, CACHED, model.vocabulary)
            tail = prompt(1000 + 2 * number, LENGTH - CACHED, model.vocabulary)
            engine.generate([Request(shared, 1)])
            warm.append(timed(engine, Request([*shared, *tail], 1)))
            cold.append(timed(engine, Request([*shared, *tail], 1, namespace="cold")))
    return {"prefill with a hit, times as fast": [min(cold) / min(warm)]}


def decode(model: ThreeWay, rows: int, tokens: int = 48) -> tuple[float, float]:
    """Return the milliseconds of a decode step of ``rows`` requests behind 512 tokens each, and the share outside."""
    cache = cache_for(model, rows)
    with Engine(model, cache, chunk=CHUNK * rows, max_running=rows, overlap=False) as engine:
        answers = [engine.add(Request(prompt(row, 512, model.vocabulary), tokens)) for row in range(rows)]
        while any(not answer.tokens for answer in answers):
            engine.step()
        return outside(engine, 40)


def outside(engine: Engine, steps: int) -> tuple[float, float]:
    """Return the median milliseconds of a step, and the share of it that is not the forward pass."""
    parts, whole = [], []
    for _ in range(steps):
        forward, started = engine.forward_seconds, time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        whole.append(seconds)
        parts.append(1 - (engine.forward_seconds - forward) / seconds)
    return 1000 * statistics.median(whole), statistics.median(parts)


def decoding(model: ThreeWay, rounds: int) -> Rows:
    found: Rows = {}
    for rows in (1, 8):
        step, part = decode(model, rows)
        found[f"decode step of {rows}, ms"], found[f"outside of the forward, decode of {rows}, %"] = (
            [step],
            [100 * part],
        )
    return found


def chunks(model: ThreeWay, rounds: int) -> Rows:
    with Engine(model, cache_for(model), chunk=CHUNK, overlap=False) as engine:
        engine.add(Request(prompt(1, 4 * CHUNK, model.vocabulary), 1))
        return {"outside of the forward, chunk, %": [100 * outside(engine, 4)[1]]}


def checks(model: ThreeWay, rounds: int) -> Rows:
    """Return what it costs to see that the model is the same and its logits finite: of a decode step and of a turn.

    A turn is a prompt of which 128 tokens are not cached, and an answer of 32.
    """
    step, _ = decode(model, 1)
    with Engine(model, cache_for(model), chunk=CHUNK, overlap=False) as engine:
        said = prompt(1, 512, model.vocabulary)
        engine.generate([Request(said, 1)])
        seconds = timed(engine, Request([*said, *prompt(2, 128, model.vocabulary)], 32))
    highest = torch.randn(1, 1, model.vocabulary).max(-1).values
    each = median_ms(model.changed) + median_ms(lambda: usable(highest))
    turn = median_ms(lambda: model.identity) + 33 * each
    return {"checks, % of a step": [100 * each / step], "checks, % of a turn": [turn / (10 * seconds)]}


def median_ms(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(200):
        started = time.perf_counter()
        call()
        found.append(1000 * (time.perf_counter() - started))
    return statistics.median(found)


def overlap(model: ThreeWay, rounds: int) -> Rows:
    """Return how many times as fast eight conversations are with the scheduler one step ahead, in turn.

    Each engine first answers eight other requests, because the first passes of a new thread fault its memory in.
    """

    def seconds(ahead: bool) -> float:
        with Engine(model, cache_for(model, 4), chunk=CHUNK, max_running=8, overlap=ahead) as engine:
            for seed, tokens in ((1000, 4), (0, 32)):
                requests = [Request(prompt(seed + i, 128 + 32 * i, model.vocabulary), tokens) for i in range(8)]
                started = time.perf_counter()
                engine.generate(requests)
                last = time.perf_counter() - started
        return last

    took = in_turn({"on": lambda: seconds(True), "off": lambda: seconds(False)}, rounds, 0)
    return {"overlap, times as fast": [off / on for on, off in zip(took["on"], took["off"], strict=True)]}


PARTS: dict[str, Callable[[ThreeWay, int], Rows]] = {
    "prefill": prefill, "decode": decoding, "chunk": chunks, "overlap": overlap, "checks": checks,
}  # fmt: skip


def engine(size: str = "large", threads: int = 1, turns: int = 1, parts: str = "prefill,decode,chunk") -> Rows:
    torch.set_num_threads(threads)
    model = ThreeWay(size)
    found: Rows = {}
    for part in parts.split(","):
        found |= PARTS[part](model, turns)
    return found
