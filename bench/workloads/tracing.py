"""What a trace costs: the same turns of the reference engine, with a trace and without, by turns in one process.

``python -m bench.workloads.tracing [--size small] [--rounds 20]``

A turn goes on with a conversation whose beginning is cached: some prefill, and then decode steps. One thread computes
and plans (``overlap=False``, one thread of torch), so its CPU time is the turn's. What a trace costs is told in three
ways: the CPU time of the trace's own thread; that of the engine's thread in the calls of the trace, measured call by
call; and the ratio of whole turns, which on a busy machine says little more than its quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from prefixloom import compose
from prefixloom_engine import Engine, Observer, Request, ThreeWay, Trace
from prefixloom_engine.threeway import SIZES

CALLS = {name for name in vars(Observer) if not name.startswith("_")}
FIRST, MORE, ANSWER, TURNS = 256, 64, 32, 3
"""Tokens of a conversation's first prompt, of each next one, and of each answer; and how many turns are timed."""


def conversation(engine: Engine, number: int) -> float:
    """CPU seconds of this thread for the turns of a new conversation after its first one."""
    tokens = [(number * 7919 + at * 31) % engine.model.vocabulary for at in range(FIRST)]
    spent = 0.0
    for turn in range(TURNS + 1):
        begun = time.thread_time()
        (answer,) = engine.generate([Request(tokens, ANSWER, stops=[])])
        if turn:
            spent += time.thread_time() - begun
        tokens = [*tokens, *answer.tokens, *((number + at) % engine.model.vocabulary for at in range(MORE))]
    return spent / TURNS


class TimedTrace(Trace):
    """A trace that sums up the CPU seconds of its calls, with those of measuring them."""

    spent = 0.0

    def __init__(self, path: Path) -> None:
        super().__init__(path, seconds=1e6)  # it writes at the end: a busy machine would count its waking
        for name in CALLS:
            setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            begun = time.thread_time()
            call(*arguments)
            self.spent += time.thread_time() - begun

        return timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", help=f"of the built-in model: {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = ThreeWay(args.size)

    def engine(*observers: Trace) -> Engine:
        cache = compose(model.config, capacity={"full": 4096, "swa": 4096, "mamba": 64})
        return Engine(model, cache, overlap=False, observers=observers)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace")
        trace = TimedTrace(path)
        engines = {"without": engine(), "with": engine(trace)}
        for number in range(2):
            for each in engines.values():
                conversation(each, number)
        found: dict[str, list[float]] = {"without": [], "with": []}
        before, trace.spent = engines["with"].counts.steps, 0.0
        for number in range(2, args.rounds + 2):
            for name in ("without", "with") if number % 2 else ("with", "without"):
                found[name].append(conversation(engines[name], number))
        turns = args.rounds * (TURNS + 1)
        calls = trace.spent / turns
        for each in engines.values():
            each.close()
        written = time.process_time()
        trace.close()
        steps = engines["with"].counts.steps
        writing = (time.process_time() - written) / steps  # of one step
        size = path.stat().st_size / steps
        steps -= before
    ratios = [on / off for on, off in zip(found["with"], found["without"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    off = statistics.median(found["without"])
    results = {
        "ms of a turn without": off * 1e3,
        "ms of a turn with": statistics.median(found["with"]) * 1e3,
        "steps of a turn": steps / turns,
        "us of the trace's thread for a step": writing * 1e6,
        "us of its calls for a step": calls / (steps / turns) * 1e6,
        "% of a turn in the trace's thread": writing * steps / turns / off * 100,
        "% of a turn in its calls": calls / off * 100,
        "% more in the engine's thread": (middle - 1) * 100,
        "its quartiles": [(low - 1) * 100, (high - 1) * 100],
        "bytes of a step": size,
    }
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        for name, value in results.items():
            figures = value if isinstance(value, list) else [value]
            print(f"{name:38} {'  '.join(f'{figure:8.2f}' for figure in figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
