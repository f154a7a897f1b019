"""What KV events cost: of a turn of the engine, and of a decode step in which nothing changes.

``python -m bench.serving.events [--size medium] [--conversations 6] [--turns 4] [--rounds 3]``

Conversations take turns through the reference engine, with a publisher of events and without, in alternating rounds.
What events cost is measured where it arises: the time in which lanes record changes, the time of ``poll``, and the CPU
time of the publisher's own thread. It is told as a share of the CPU time of the same turns. With a subscriber, so that
messages are really sent.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch

from bench.runner.figures import Rows
from bench.workloads.internals import internal
from prefixloom import Cache, compose
from prefixloom_engine import Engine, Observer, ThreeWay
from prefixloom_events import EventFollower, EventPublisher

PROMPT, ANSWER = 160, 32
"""Tokens that a turn adds, and tokens of its answer."""


class Timed(Observer):
    """A publisher whose ``poll`` is timed. ``idle``: the polls in which nothing had changed."""

    def __init__(self, publisher: EventPublisher) -> None:
        self.publisher = publisher
        self.seconds = 0.0
        self.polls: list[float] = []

    def stepped(self, *_: Any) -> None:
        begun = time.thread_time()
        self.publisher.poll()
        spent = time.thread_time() - begun
        self.seconds += spent
        self.polls.append(spent)


class Recording:
    """The time that lanes spend in recording changes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._changed = internal("Recorder").changed

    def __enter__(self) -> Recording:
        changed = self._changed

        def timed(recorder: Any, *told: Any) -> None:
            begun = time.thread_time()
            changed(recorder, *told)
            self.seconds += time.thread_time() - begun

        internal("Recorder").changed = timed
        return self

    def __exit__(self, *_: object) -> None:
        internal("Recorder").changed = self._changed


def turns(engine: Engine, conversations: int, count: int) -> float:
    """CPU seconds of a turn, of all threads of the process."""
    rng = random.Random(1)
    known = [[rng.randrange(200) for _ in range(PROMPT)] for _ in range(conversations)]
    begun = time.process_time()
    for _ in range(count):
        answers = engine.generate(known, max_tokens=ANSWER)
        for tokens, answer in zip(known, answers, strict=True):
            tokens += [*answer.tokens, *(rng.randrange(200) for _ in range(PROMPT))]
    return (time.process_time() - begun) / (conversations * count)


def cache_of(model: ThreeWay, conversations: int, count: int) -> Cache:
    tokens = conversations * count * (PROMPT + ANSWER) * 6 // 10  # so that some of it is evicted
    return compose(model.config, capacity={"full": tokens, "swa": tokens, "mamba": 12 * conversations})


def measure(size: str = "medium", conversations: int = 6, count: int = 4, rounds: int = 3) -> Rows:
    model = ThreeWay(size)
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for _ in range(rounds):
        with Engine(model, cache_of(model, conversations, count)) as engine:
            note("turn without events, ms", turns(engine, conversations, count) * 1e3)
        cache = cache_of(model, conversations, count)
        with EventPublisher(cache, "tcp://127.0.0.1:0") as publisher, Recording() as recording:
            timed = Timed(publisher)
            with (
                EventFollower(publisher.endpoint, publisher.replay_endpoint) as follower,
                Engine(model, cache, observers=[timed]) as engine,
            ):
                turn = turns(engine, conversations, count)
                publisher.flush()
                follower.poll(1)
                assert publisher.counts.restarts == 1 and publisher.failed is None
            each = 1e6 / (conversations * count)
            costs = {"recording": recording.seconds, "poll": timed.seconds}
            costs["the publisher's thread"] = publisher.counts.seconds
            note("turn with events, ms", turn * 1e3)
            for name, seconds in costs.items():
                note(f"{name}, us of a turn", seconds * each)
            note("events of a turn", publisher.counts.events / (conversations * count))
            note("bytes of a turn", publisher.counts.sent_bytes / (conversations * count))
            note("poll of a step, us", statistics.median(timed.polls) * 1e6)
            note("share of a turn, percent", sum(costs.values()) * each / 1e6 / turn * 100)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="medium")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, values in measure(given.size, given.conversations, given.turns, given.rounds).items():
        print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
