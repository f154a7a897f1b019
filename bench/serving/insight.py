"""What it costs to know why prompts miss: the same conversations with a history that accounts for each request, and
without.

``python -m bench.serving.insight [--size medium] [--users 16] [--turns 4] [--rounds 5]``

Two engines over one model serve the same conversations, in a pool that holds about half of them. In every round
each serves all of them once, from a flushed cache, and the other begins the next round. Figures are the CPU time of the
process, medians over the rounds: a turn, and a step that only decodes. Their difference is often within the noise.
So in one more round the time is taken that passes inside of what is done for the history alone: ``Cache.account``,
``History.poll``, and what lanes record.

``--only trace`` measures what a trace (``prefixloom serve --trace``) costs in such turns, in two parts: the CPU time of
the engine's thread in the calls of the trace, measured call by call, and that of the trace's own thread, which makes
all bytes at the end here, as a busy machine would count its waking.

``--only recording`` measures what a recording (``prefixloom serve --record``) costs: the difference of turns, and the
time inside of hashing and writing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

from bench.workloads.internals import internal
from prefixloom import Cache, History, compose
from prefixloom.lab import record
from prefixloom.lab.recordings.recording import EntryWriter, NamedSoFar
from prefixloom_engine import Engine, Observer, Request, ThreeWay, Trace
from prefixloom_engine.threeway import SIZES
from prefixloom_engine.threeway.text import BYTE_VOCABULARY

FIRST, MORE, ANSWER = 320, 48, 16
"""Tokens of a first prompt, of what each turn adds, and of an answer."""


def serve(engine: Engine, users: int, turns: int) -> float:
    """CPU seconds of a turn."""
    engine.cache.flush()
    prompts = [[(user * 7 + at * at) % 251 for at in range(FIRST)] for user in range(users)]
    begun = time.process_time()
    for turn in range(turns):
        for user, prompt in enumerate(prompts):
            (answer,) = engine.generate([Request(prompt, ANSWER, stops=())])
            prompt += [*answer.tokens, *((user + turn + at) % 251 for at in range(MORE))]
    return (time.process_time() - begun) / (users * turns)


def decode(engine: Engine) -> float:
    """CPU seconds of a step that decodes eight rows."""
    engine.cache.flush()
    answers = [engine.add(Request([row] * 64, 200, stops=())) for row in range(8)]
    while not all(answer.tokens for answer in answers):
        engine.step()
    begun = time.process_time()
    for _ in range(100):
        engine.step()
    seconds = (time.process_time() - begun) / 100
    for answer in answers:
        engine.abort(answer)
    engine.drain()
    return seconds


class Spent:
    """The seconds of this thread inside of some functions, those that they call counted once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def patch(self, kind: Any, name: str) -> None:
        """Take the time of each call of a method, from now on."""
        before = getattr(kind, name)

        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return before(*args, **options)
            self._inside, begun = True, time.thread_time()
            try:
                return before(*args, **options)
            finally:
                self.seconds += time.thread_time() - begun
                self._inside = False

        setattr(kind, name, timed)


class TimedTrace(Trace):
    """A trace that sums up the CPU seconds of its calls, with those of measuring them."""

    spent = 0.0

    def __init__(self, path: Path) -> None:
        super().__init__(path, seconds=1e6)
        for name in vars(Observer):
            if not name.startswith("_"):
                setattr(self, name, self._timed(getattr(self, name)))

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            begun = time.thread_time()
            call(*arguments)
            self.spent += time.thread_time() - begun

        return timed


def trace_costs(model: ThreeWay, capacity: dict[str, int], users: int, turns: int, rounds: int) -> None:
    """Print what a trace costs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace")
        trace = TimedTrace(path)
        sides = {
            name: Engine(model, compose(model.config, capacity=capacity), overlap=False, observers=observers)
            for name, observers in (("without", ()), ("with", (trace,)))
        }
        took: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):  # the first one warms up
            if number == 1:
                before, trace.spent = sides["with"].counts.steps, 0.0
            for name in sorted(sides, reverse=bool(number % 2)):
                found = serve(sides[name], users, turns)
                if number:
                    took[name].append(found)
        steps = sides["with"].counts.steps
        for engine in sides.values():
            engine.close()
        calls, begun = trace.spent / (steps - before), time.process_time()
        trace.close()
        writing, size = (time.process_time() - begun) / steps, path.stat().st_size / steps
    turn, with_ = (statistics.median(took[name]) for name in ("without", "with"))
    each = (steps - before) / (rounds * users * turns)
    print(f"{model.parameters / 1e6:.1f}M parameters; a turn: {1e3 * turn:.3f} ms, {each:.1f} steps; "
          f"with a trace {1e3 * with_:.3f} ms: {100 * (with_ / turn - 1):+.2f} %")  # fmt: skip
    print(f"calls of the trace: {1e6 * calls:.1f} us a step, {100 * calls * each / turn:.2f} % of a turn")
    print(f"the trace's thread: {1e6 * writing:.1f} us a step, {100 * writing * each / turn:.2f} % of a turn")
    print(f"the file: {size:.0f} bytes a step; left out: {trace.dropped}")


def recording_costs(model: ThreeWay, capacity: dict[str, int], users: int, turns: int, rounds: int) -> None:
    """Print what a recording costs: the time inside of what is done for it alone, beside that of a turn."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "calls")
        plain = Engine(model, compose(model.config, capacity=capacity), max_running=8, overlap=False)
        recorded = record(compose(model.config, capacity=capacity), path)
        sides = {"without": plain, "with": Engine(model, recorded, max_running=8, overlap=False)}
        took: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):  # the first one warms up
            for name in sorted(sides, reverse=bool(number % 2)):
                found = serve(sides[name], users, turns)
                if number:
                    took[name].append(found)
        spent = Spent()
        for kind, name in ((EntryWriter, "write"), (NamedSoFar, "add")):
            spent.patch(kind, name)
        before = path.stat().st_size
        turn = serve(sides["with"], users, turns)
        for engine in sides.values():
            engine.close()
        recorded.finish()
        each, size = spent.seconds / (users * turns), (path.stat().st_size - before) / (users * turns)
    without, with_ = (statistics.median(took[name]) for name in ("without", "with"))
    print(f"turn: {1e3 * without:.3f} ms, recorded {1e3 * with_:.3f} ms: {100 * (with_ / without - 1):+.2f} %")
    print(f"turn: {1e6 * each:.0f} us to hash and to write, {100 * each / turn:.2f} %; {size:.0f} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="medium", choices=sorted(SIZES))
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("history", "trace", "recording"), default="history")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = ThreeWay(attrs.evolve(SIZES[args.size], vocabulary=BYTE_VOCABULARY))
    length = FIRST + args.turns * (MORE + ANSWER)
    capacity = {"full": length * args.users // 2, "swa": length * args.users // 2, "mamba": 8 * args.users}
    if args.only == "trace":
        trace_costs(model, capacity, args.users, args.turns, args.rounds)
        return 0
    if args.only == "recording":
        recording_costs(model, capacity, args.users, args.turns, args.rounds)
        return 0
    sides = {}
    for name in ("without", "with"):
        sides[name] = Engine(model, compose(model.config, capacity=capacity), max_running=8, overlap=False)
    sides["with"].account()
    took: dict[str, dict[str, list[float]]] = {name: {"turn": [], "decode": []} for name in sides}
    for number in range(args.rounds + 1):  # the first one warms up
        for name in sorted(sides, reverse=bool(number % 2)):
            turn, step = serve(sides[name], args.users, args.turns), decode(sides[name])
            if number:
                took[name]["turn"].append(turn)
                took[name]["decode"].append(step)
    history = sides["with"].cache.history()
    print(f"{model.parameters / 1e6:.1f}M parameters; missed: {dict(sorted(history.missed_tokens.items()))}")
    for what in ("turn", "decode"):
        without, with_ = (statistics.median(took[name][what]) for name in ("without", "with"))
        spread = [f"{1e3 * min(took[name][what]):.3f} to {1e3 * max(took[name][what]):.3f}" for name in took]
        print(f"{what}: {1e3 * without:.3f} ms ({spread[0]}), with a history {1e3 * with_:.3f} ms ({spread[1]}): "
              f"{100 * (with_ / without - 1):+.2f} %")  # fmt: skip
    spent = Spent()
    for kind, name in ((Cache, "account"), (History, "poll"), (internal("Recorder"), "changed")):
        spent.patch(kind, name)
    turn = serve(sides["with"], args.users, args.turns)
    each = spent.seconds / (args.users * args.turns)
    print(f"turn: {1e6 * each:.0f} us for the history, {100 * each / turn:.2f} % of {1e3 * turn:.3f} ms")
    spent.seconds = 0.0
    step = decode(sides["with"])
    print(f"decode: {1e6 * spent.seconds / 200:.1f} us for the history, {100 * spent.seconds / 200 / step:.2f} %")
    for engine in sides.values():
        engine.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
