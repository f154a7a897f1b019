"""What it costs to watch a cache: the same conversations served with a watcher and without.

Kinds of watchers: ``history``, which accounts for why prompts miss; ``trace`` (``prefixloom serve --trace``);
``recording`` (``--record``); and ``events``, a publisher of KV events with a subscriber, so that messages are really
sent. Two engines over one model serve the same conversations, in a pool that holds about half of them. In every round
each serves all of them once, from a flushed cache, and the other begins the next round. Figures are the CPU time of the
process: a turn, and a step that decodes eight rows. Their difference is often within the noise. So in one more round
the time is taken that passes inside of what is done for the watcher alone, and that of its own thread.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from bench.runner.figures import Rows, Stopwatch, in_turn
from bench.workloads.internals import internal
from prefixloom import Cache, History, compose
from prefixloom.lab import record
from prefixloom.lab.recordings.recording import EntryWriter, NamedSoFar
from prefixloom_engine import Engine, Observer, Polled, Request, ThreeWay, Trace
from prefixloom_engine.threeway import SIZES
from prefixloom_engine.threeway.text import BYTE_VOCABULARY
from prefixloom_events import EventFollower, EventPublisher

FIRST, MORE, ANSWER = 320, 48, 16
"""Tokens of a first prompt, of what each turn adds, and of an answer."""
ROWS, STEPS = 8, 100
Methods = list[tuple[type, str]]


def serve(engine: Engine, users: int, turns: int) -> float:
    """Return the CPU seconds of a turn."""
    engine.cache.flush()
    prompts = [[(user * 7 + at * at) % 251 for at in range(FIRST)] for user in range(users)]
    begun = time.process_time()
    for turn in range(turns):
        for user, prompt in enumerate(prompts):
            (answer,) = engine.generate([Request(prompt, ANSWER, stops=())])
            prompt += [*answer.tokens, *((user + turn + at) % 251 for at in range(MORE))]
    return (time.process_time() - begun) / (users * turns)


def decode(engine: Engine) -> float:
    """Return the CPU seconds of a step that decodes eight rows."""
    engine.cache.flush()
    answers = [engine.add(Request([row] * 64, 2 * STEPS, stops=())) for row in range(ROWS)]
    while not all(answer.tokens for answer in answers):
        engine.step()
    begun = time.process_time()
    for _ in range(STEPS):
        engine.step()
    seconds = (time.process_time() - begun) / STEPS
    for answer in answers:
        engine.abort(answer)
    engine.drain()
    return seconds


@contextmanager
def timed(methods: Methods) -> Iterator[Stopwatch]:
    """Count the time inside of some methods, while the block runs."""
    watch = Stopwatch()
    before = [(kind, name, getattr(kind, name)) for kind, name in methods]
    for kind, name, call in before:
        setattr(kind, name, watch.around(call))
    try:
        yield watch
    finally:
        for kind, name, call in before:
            setattr(kind, name, call)


METHODS: dict[str, Callable[[], Methods]] = {
    "history": lambda: [(Cache, "account"), (History, "poll"), (internal("Recorder"), "changed")],
    "trace": lambda: [(Trace, name) for name in vars(Observer) if not name.startswith("_")],
    "recording": lambda: [(EntryWriter, "write"), (NamedSoFar, "take")],
    "events": lambda: [(EventPublisher, "poll"), (internal("Recorder"), "changed")],
}
"""By kind of watcher: the methods that are called for it alone."""


def watched(
    kind: str, cache: Cache, engine: Callable[..., Engine], stack: ExitStack
) -> tuple[Engine, Callable[[], float]]:
    """Return an engine that is watched, and a function that ends the watcher's thread and returns its seconds."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    if kind == "history":
        made = engine(cache)
        made.account()
        return made, float
    if kind == "recording":
        recorded = record(cache, folder / "calls")
        stack.callback(recorded.finish)
        return engine(recorded), float
    if kind == "trace":
        trace = Trace(folder / "trace", seconds=1e6)  # its thread makes all bytes at the end

        def writing() -> float:
            begun = time.process_time()
            trace.close()
            return time.process_time() - begun

        return engine(cache, observers=(trace,)), writing
    publisher = stack.enter_context(EventPublisher(cache, "tcp://127.0.0.1:0"))
    follower = stack.enter_context(EventFollower(publisher.endpoint, publisher.replay_endpoint))

    def publishing() -> float:
        publisher.flush()
        follower.poll(1)
        assert publisher.failed is None
        return publisher.counts.seconds

    return engine(cache, observers=(Polled(publisher.poll),)), publishing


def watching(
    kinds: str = "history,trace,recording,events", size: str = "medium", users: int = 16, turns: int = 4, times: int = 5
) -> Rows:
    """Return by kind what a turn and a decode step cost, and how much of that is the watcher's."""
    torch.set_num_threads(1)
    model = ThreeWay(attrs.evolve(SIZES[size], vocabulary=BYTE_VOCABULARY))
    length = FIRST + turns * (MORE + ANSWER)
    tokens = max(length * users // 2, ROWS * 2 * (64 + 2 * STEPS))
    capacity = {"full": tokens, "swa": tokens, "mamba": 8 * max(users, ROWS)}

    def engine(cache: Cache, **more: Any) -> Engine:
        return Engine(model, cache, max_running=ROWS, overlap=False, **more)

    found: Rows = {}
    for kind in kinds.split(","):
        with ExitStack() as stack:
            sides = {"without": engine(compose(model.config, capacity=capacity))}
            sides["with"], thread = watched(kind, compose(model.config, capacity=capacity), engine, stack)
            took = in_turn({name: partial(serve, each, users, turns) for name, each in sides.items()}, times)
            steps = in_turn({name: partial(decode, each) for name, each in sides.items()}, times)
            served = sides["with"].counts.steps
            for each in sides.values():
                each.close()
            of_thread = thread() / served
        with ExitStack() as stack, timed(METHODS[kind]()) as watch:
            made, thread = watched(kind, compose(model.config, capacity=capacity), engine, stack)
            before = watch.spent
            serve(made, users, turns)
            of_a_turn = (watch.spent - before) / (users * turns)
            before = watch.spent
            decode(made)
            of_a_step = (watch.spent - before) / (2 * STEPS)
            made.close()
            thread()
        turn = statistics.median(took["without"])
        rows = {
            "turn without, ms": 1e3 * turn, "turn with, ms": 1e3 * statistics.median(took["with"]),
            "decode step without, ms": 1e3 * statistics.median(steps["without"]),
            "decode step with, ms": 1e3 * statistics.median(steps["with"]),
            "inside, us of a turn": 1e6 * of_a_turn, "inside, % of a turn": 100 * of_a_turn / turn,
            "inside, us of a decode step": 1e6 * of_a_step, "its thread, us of a step": 1e6 * of_thread,
        }  # fmt: skip
        found |= {f"{kind}: {row}": [figure] for row, figure in rows.items()}
    return found
