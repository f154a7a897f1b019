"""What reaches that are put together, or written in plain Python, cost beside built-in ones of the same shape.

For each pair (``only``: those whose names contain it) there are two caches, each with one component, in pages of 16.
Both do the same work, in turn, and each is as often first as the other. Figures are ratios of medians of thread CPU
time:

- ``turn``: a turn of conversations whose prompts have 1,500 tokens in the mean: open, grow, append, fill, commit and
  close. The pool holds three tenths of all tokens. It is full after the first third of the turns, which is not counted.
  ``in steps``: the same, computed in a step.
- ``hot turn``: a turn of one conversation behind 1,500 tokens that are cached, with room to spare.
- ``decode``: one token more, of a sequence of 1,500 to 2,000 tokens: grow, append, step. In the full pool, it gives
  back at once what it does not need any more.
- ``chunk``: 256 tokens of a prompt of 4,096: grow, step, publish. The first prompt is not counted.
- ``evict``: ten leaves of 64 tokens behind a shared prompt of 512.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.runner.figures import Rows
from bench.workloads.conversations import conversations as served
from prefixloom import Buffer, Chunk, Component, Manifest, Path, Reach, Sequence, Sinks, Tail, Tokens, Window, compose
from prefixloom import encode as encoded

PAGE = 16
WIDTH = 128
NEVER = float("inf")
Intervals = tuple[tuple[int, int], ...]
Times = tuple[list[float], list[float]]
"""Microseconds of the reach in question, and of the one beside it."""


class PlainWindow(Reach):
    """``Window(WIDTH)`` in plain Python."""

    def needs(self, n: int) -> Intervals:
        return ((max(0, n - WIDTH + 1), n),) if n else ()

    def until(self, p: int) -> float:
        return p + WIDTH - 1


class PlainConvexWindow(PlainWindow):
    """The same window, which says that it is convex."""

    convex = True


class PlainPath(Reach):
    """``Path()`` in plain Python, which does not say that it is closed upward."""

    def needs(self, n: int) -> Intervals:
        return ((0, n),) if n else ()


class PlainSinks(Reach):
    """``Sinks(4) | Window(WIDTH)`` in plain Python."""

    def needs(self, n: int) -> Intervals:
        return ((0, min(4, n)), (max(0, n - WIDTH + 1), n)) if n else ()

    def until(self, p: int) -> float:
        return NEVER if p < 4 else p + WIDTH - 1


class Landmarks(Reach):
    """One position in 64 (23 of them in 1,500 tokens), and a window."""

    def needs(self, n: int) -> Intervals:
        return (*((p, p + 1) for p in range(0, n, 64)), (max(0, n - WIDTH + 1), n)) if n else ()

    def until(self, p: int) -> float:
        return NEVER if p % 64 == 0 else p + WIDTH - 1


PAIRS: dict[str, tuple[Reach, Reach]] = {
    "Sinks | Window, beside Window": (Sinks(4) | Window(WIDTH), Window(WIDTH)),
    "Window | Chunk, beside Window": (Window(WIDTH) | Chunk(WIDTH), Window(WIDTH)),
    "Window | Tail | Chunk, beside Window": (Window(WIDTH) | Tail(64, 32) | Chunk(32), Window(WIDTH)),
    "Sinks | Chunk, beside Chunk": (Sinks(4) | Chunk(WIDTH), Chunk(WIDTH)),
    "plain window, beside Window": (PlainWindow(), Window(WIDTH)),
    "plain convex window, beside Window": (PlainConvexWindow(), Window(WIDTH)),
    "plain path, beside Path": (PlainPath(), Path()),
    "plain sinks and window, beside Sinks | Window": (PlainSinks(), Sinks(4) | Window(WIDTH)),
    "landmarks and window, beside Window": (Landmarks(), Window(WIDTH)),
}
"""By name: a reach, and the built-in one of the same shape."""


class Side:
    """A cache with one component of ``reach``."""

    def __init__(self, reach: Reach, tokens: int) -> None:
        kept = Component("kept", Manifest([Buffer("k", (1, 1))]), reach)
        capacity = -(-tokens // PAGE) * PAGE
        self.cache = compose(
            None, plugins=[kept], page_size=PAGE, capacity={"kept": capacity}, device="meta", debug=False
        )

    def compute(self, sequence: Sequence) -> None:
        with self.cache.step((sequence,)) as step:
            step.run_ops()

    def turn(self, prompt: Tokens, answer: Tokens, whole: int, in_step: bool = False) -> None:
        """Serve a turn of a conversation; ``whole`` tokens are known after it."""
        sequence = self.cache.open(prompt)
        sequence.grow(whole // PAGE * PAGE - sequence.reserved)
        sequence.append(answer)
        if in_step:
            self.compute(sequence)
        else:
            sequence.fill()
            sequence.commit()
        sequence.close()

    def serve(self, tokens: list[int], chunk: int = 1 << 30) -> None:
        """Compute and publish a prompt in chunks."""
        with self.cache.open(encoded(tokens)) as sequence:
            while sequence.reserved < sequence.named:
                self.chunk(sequence, min(chunk, sequence.named - sequence.reserved))

    def chunk(self, sequence: Sequence, count: int) -> None:
        sequence.grow(count)
        self.compute(sequence)
        sequence.publish()

    def decode(self, sequence: Sequence) -> None:
        sequence.grow(1)
        sequence.append((1,))
        self.compute(sequence)


def in_turn(calls: Iterator[tuple[Callable[[], Any], Callable[[], Any]]]) -> Times:
    """Return the times of two calls that do the same, again and again. Each is as often first as the other."""
    clock = time.thread_time_ns
    spent: Times = [], []
    for number, pair in enumerate(calls):
        for which in (0, 1) if number % 2 else (1, 0):
            before = clock()
            pair[which]()
            spent[which].append((clock() - before) / 1e3)
    return spent


# ---------------------------------------------------------------- what is measured


def turns(reaches: tuple[Reach, Reach], count: int, in_step: bool = False) -> Times:
    turns_, total = served(count, 4)
    one, other = (Side(reach, total * 3 // 10) for reach in reaches)

    def calls() -> Iterator[Any]:
        for prompt, whole in turns_:
            given = encoded(prompt), encoded(whole).part(len(prompt)), len(whole), in_step
            yield partial(one.turn, *given), partial(other.turn, *given)

    ours, theirs = in_turn(calls())
    return ours[len(ours) // 3 :], theirs[len(theirs) // 3 :]


def hot_turns(reaches: tuple[Reach, Reach], count: int) -> Times:
    length, asked, answered = 1500, 96, 96
    one, other = (Side(reach, 2 * length + 2 * count * (asked + answered)) for reach in reaches)
    history = list(range(length))
    for side in (one, other):
        for at in range(256, length + 1, 192):
            side.serve(history[:at])

    def calls() -> Iterator[Any]:
        for number in range(count):
            prompt = encoded([*history, *range(1000 * number, 1000 * number + asked)])
            given = prompt, encoded(range(answered)), length + asked + answered
            yield partial(one.turn, *given), partial(other.turn, *given)

    return in_turn(calls())


def decoding(reaches: tuple[Reach, Reach], count: int, full: bool = False) -> Times:
    length = 1500
    needed = 2 * (length + count)
    one, other = (Side(reach, 16 * needed) for reach in reaches)
    prompt = list(range(length))
    sequences = []
    for side in (one, other):
        side.serve(prompt, 256)
        sequence = side.cache.open(encoded([*prompt, 1]))
        side.chunk(sequence, sequence.named - sequence.reserved)
        sequences.append(sequence)
        if full:
            sequences.append(side.cache.open(()))
            sequences[-1].grow(15 * needed)
    first, second = sequences[0], sequences[len(sequences) // 2]
    spent = in_turn((lambda: one.decode(first), lambda: other.decode(second)) for _ in range(count))
    for sequence in sequences:
        sequence.abort()
    return spent


def chunks(reaches: tuple[Reach, Reach], count: int) -> Times:
    length, chunk = 4096, 256
    one, other = (Side(reach, 2 * length) for reach in reaches)
    spent: Times = [], []
    for number in range(1 + count * chunk // length):
        tokens = encoded(range(number, number + length))
        first, second = (side.cache.open(tokens) for side in (one, other))
        works = partial(one.chunk, first, chunk), partial(other.chunk, second, chunk)
        times = in_turn(works for _ in range(length // chunk))
        first.close()
        second.close()
        if number:  # the first prompt asks the reach what is remembered from then on
            for all_of_it, each in zip(spent, times, strict=True):
                all_of_it += each
    return spent


def evictions(reaches: tuple[Reach, Reach], count: int) -> Times:
    leaf, shared = 64, list(range(512))
    leaves = 10 * count + 20
    one, other = (Side(reach, leaves * leaf + 4096) for reach in reaches)
    for side in (one, other):
        for number in range(leaves):
            side.serve([*shared, *range(1000 + number * leaf, 1000 + (number + 1) * leaf)])
        side.cache.evict(10 * leaf)  # the first one also frees what windows kept of the shared prompt for no boundary
    return in_turn((lambda: one.cache.evict(10 * leaf), lambda: other.cache.evict(10 * leaf)) for _ in range(count))


def reaches(conversations: int = 30, only: str = "") -> Rows:
    """Return by pair and work how many times the other reach's median it takes."""
    count = conversations
    found: Rows = {}
    for name, pair in PAIRS.items():
        if only not in name:
            continue
        works: dict[str, Times] = {
            "turn": turns(pair, count),
            "turn in steps": turns(pair, count, in_step=True),
            "hot turn": hot_turns(pair, 2 * count),
            "decode": decoding(pair, 4 * count),
            "decode, full pool": decoding(pair, 4 * count, full=True),
            "chunk": chunks(pair, 2 * count),
            "evict": evictions(pair, count),
        }
        for work, (one, other) in works.items():
            found[f"{name}: {work}, times"] = [statistics.median(one) / statistics.median(other)]
    return found
