"""The reference engine on ``ThreeWay`` with 80M parameters: what a hit saves, what the cache costs, what overlap gains.

``python -m bench.workloads.engine [--size large] [--threads 2] [--rounds 3] [--only overlap] [--json]``

All figures are ratios within one run. "Outside of the forward" is everything else that the engine and the cache do for
a step: planning, slots, page tables, ops on states, publication, sampling, handling the results.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from prefixloom import Cache, compose
from prefixloom_engine import Engine, Request, ThreeWay
from prefixloom_engine.forward.passes import usable

LENGTH, CACHED, CHUNK = 2048, 1920, 512


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="large")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["prefill", "decode", "chunk", "overlap", "checks"], help="measure only this")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = ThreeWay(args.size)
    figures: dict[str, Callable[[], Any]] = {
        "prefill": lambda: prefill(model, args.rounds),
        "decode": lambda: {str(rows): decode(model, rows) for rows in (1, 8)},
        "chunk": lambda: chunks(model),
        "overlap": lambda: overlap(model, args.rounds),
        "checks": lambda: checks(model),
    }
    results: dict[str, Any] = {"parameters": model.parameters, "threads": args.threads}
    results |= {name: figure() for name, figure in figures.items() if args.only in (None, name)}
    print(json.dumps(results, indent=2) if args.json else text(results))
    return 0


def cache_for(model: ThreeWay, rows: int = 1) -> Cache:
    tokens = (LENGTH + 512) * (rows + 1)
    return compose(model.config, capacity={"full": tokens, "swa": tokens, "mamba": 64}, debug=False)


def prompt(seed: int, length: int, vocabulary: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocabulary) for _ in range(length)]


def timed(engine: Engine, request: Request) -> tuple[float, float, int]:
    """Seconds until the request is answered, seconds in forward passes, and the number of steps."""
    steps, forward, started = engine.counts.steps, engine.forward_seconds, time.perf_counter()
    engine.generate([request])
    return time.perf_counter() - started, engine.forward_seconds - forward, engine.counts.steps - steps


def prefill(model: ThreeWay, rounds: int) -> dict[str, float]:
    """The time to the first token of 2048 tokens: with 1920 of them cached, and with none."""
    cold, warm = [], []
    for number in range(rounds):
        cache = cache_for(model)
        with Engine(model, cache, chunk=CHUNK, overlap=False) as engine:
            shared = prompt(number, CACHED, model.vocabulary)
            tails = [prompt(1000 + 2 * number + i, LENGTH - CACHED, model.vocabulary) for i in range(2)]
            engine.generate([Request(shared, 1)])
            seconds, _, _ = timed(engine, Request([*shared, *tails[0]], 1))
            warm.append(seconds)
            seconds, _, _ = timed(engine, Request([*shared, *tails[0]], 1, namespace="cold"))
            cold.append(seconds)
    return {"cold_s": min(cold), "warm_s": min(warm), "faster": min(cold) / min(warm)}


def decode(model: ThreeWay, rows: int, tokens: int = 48) -> dict[str, float]:
    """Decode steps of ``rows`` requests, each behind 512 tokens."""
    cache = cache_for(model, rows)
    with Engine(model, cache, chunk=CHUNK * rows, max_running=rows, overlap=False) as engine:
        answers = [engine.add(Request(prompt(row, 512, model.vocabulary), tokens)) for row in range(rows)]
        while any(not answer.tokens for answer in answers):
            engine.step()
        return outside(engine, 40)


def chunks(model: ThreeWay) -> dict[str, float]:
    """Chunks of 512 tokens in a long prompt."""
    cache = cache_for(model)
    with Engine(model, cache, chunk=CHUNK, overlap=False) as engine:
        engine.add(Request(prompt(1, 4 * CHUNK, model.vocabulary), 1))
        return outside(engine, 4)


def outside(engine: Engine, steps: int) -> dict[str, float]:
    """The median time of a step, and the share of it that is not the forward pass."""
    parts, whole = [], []
    for _ in range(steps):
        forward, started = engine.forward_seconds, time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        whole.append(seconds)
        parts.append(1 - (engine.forward_seconds - forward) / seconds)
    return {"step_ms": 1000 * statistics.median(whole), "outside": statistics.median(parts)}


def checks(model: ThreeWay) -> dict[str, float]:
    """What it costs to see that the model is the same and its logits finite: shares of a decode step and of a turn.

    A turn is a prompt of which 128 tokens are not cached, and an answer of 32.
    """
    step = decode(model, 1)["step_ms"]
    cache = cache_for(model)
    with Engine(model, cache, chunk=CHUNK, overlap=False) as engine:
        said = prompt(1, 512, model.vocabulary)
        engine.generate([Request(said, 1)])
        seconds, _, _ = timed(engine, Request([*said, *prompt(2, 128, model.vocabulary)], 32))
    logits = torch.randn(1, 1, model.vocabulary)
    highest = logits.max(-1).values
    finite = median_ms(lambda: usable(highest))
    return {
        "of_a_step": (median_ms(model.changed) + finite) / step,
        "of_a_turn": (median_ms(lambda: model.identity) + 33 * (median_ms(model.changed) + finite)) / (1000 * seconds),
    }


def median_ms(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(200):
        started = time.perf_counter()
        call()
        found.append(1000 * (time.perf_counter() - started))
    return statistics.median(found)


def overlap(model: ThreeWay, rounds: int) -> dict[str, float]:
    """Eight conversations, prefill and decode mixed, in turn with the scheduler one step ahead and without.

    Each engine first answers eight other requests, because the first passes of a new thread fault its memory in.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * rounds):
        ahead = bool((number + number // 2) % 2)
        with Engine(model, cache_for(model, 4), chunk=CHUNK, max_running=8, overlap=ahead) as engine:
            for seed, tokens in ((1000, 4), (0, 32)):
                requests = [Request(prompt(seed + i, 128 + 32 * i, model.vocabulary), tokens) for i in range(8)]
                started = time.perf_counter()
                engine.generate(requests)
                last = time.perf_counter() - started
            seconds[ahead].append(last)
    faster = [off / on for on, off in zip(seconds[True], seconds[False], strict=True)]
    on, off = (statistics.median(seconds[ahead]) for ahead in (True, False))
    return {"on_s": on, "off_s": off, "faster": statistics.median(faster), "least": min(faster), "most": max(faster)}


def text(results: dict[str, Any]) -> str:
    lines = [f"ThreeWay, {results['parameters'] / 1e6:.1f}M parameters, float32, {results['threads']} threads"]
    if each := results.get("prefill"):
        lines.append(
            f"prefill of {LENGTH} tokens, {CACHED} cached:   {each['faster']:.1f} times as fast as cold "
            f"({each['warm_s']:.3f} s against {each['cold_s']:.3f} s)"
        )
    for rows, each in results.get("decode", {}).items():
        lines.append(
            f"outside of a decode step's forward, {rows} rows: {each['outside']:.2%} of {each['step_ms']:.1f} ms"
        )
    if each := results.get("chunk"):
        lines.append(f"outside of a {CHUNK}-token chunk's forward: {each['outside']:.2%} of {each['step_ms']:.1f} ms")
    if each := results.get("overlap"):
        lines.append(
            f"overlap on against off: {each['faster']:.3f} times as fast ({each['least']:.3f} to {each['most']:.3f}; "
            f"{each['on_s']:.2f} s, {each['off_s']:.2f} s)"
        )
    if each := results.get("checks"):
        lines.append(
            f"checks of the model and its logits: {each['of_a_step']:.3%} of a decode step, "
            f"{each['of_a_turn']:.3%} of a turn"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
