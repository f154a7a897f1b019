"""What reaches that are put together, or written in plain Python, cost beside built-in ones of the same shape.

For each pair (``only``: those whose names contain it) there are two caches, each with one component, in pages of 16.
Both do the same work, in turn, and each is as often first as the other. Figures are ratios of medians of thread CPU
time:

- ``turn``: a turn of conversations whose prompts have 1,500 tokens in the mean: open, grow, append, compute and close.
  The pool holds three tenths of all tokens. It is full after the first third of the turns, which is not counted.
  ``in steps``: the same, computed in a step.
- ``hot turn``: a turn of one conversation behind 1,500 tokens that are cached, with room to spare.
- ``decode``: one token more, of a sequence of 1,500 to 2,000 tokens, in a full pool: grow, append, step.
- ``chunk``: 256 tokens of a prompt of 4,096: grow, step, publish. The first prompt is not counted.
- ``evict``: ten leaves of 64 tokens behind a shared prompt of 512.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from bench.engines.ours import InSteps, Prefixloom
from bench.runner.figures import Rows
from bench.workloads.chat_turn import phases
from bench.workloads.conversations import conversations as served
from prefixloom import Buffer, Chunk, Component, Manifest, Path, Reach, Sequence, Sinks, Tail, Tokens, Window, compose
from prefixloom import encode as encoded

PAGE, WIDTH, NEVER = 16, 128, float("inf")
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


def driver_of(reach: Reach, tokens: int, steps: bool = True) -> Prefixloom:
    """Return our driver over a cache with one component of ``reach``."""
    driver = object.__new__(InSteps if steps else Prefixloom)
    driver.page, driver.lead = PAGE, "kept"
    kept = Component("kept", Manifest([Buffer("k", (1, 1))]), reach)
    driver.cache = compose(
        None, plugins=[kept], page_size=PAGE, capacity={"kept": -(-tokens // PAGE) * PAGE}, device="meta", debug=False
    )
    return driver


def in_turn(calls: Iterator[tuple[Callable[[], Any], Callable[[], Any]]]) -> Times:
    """Return the times of two calls that do the same, again and again. Each is as often first as the other."""
    spent: Times = [], []
    for number, pair in enumerate(calls):
        for which in (0, 1) if number % 2 else (1, 0):
            before = time.thread_time_ns()
            pair[which]()
            spent[which].append((time.thread_time_ns() - before) / 1e3)
    return spent


def serve(driver: Prefixloom, prompt: Tokens, whole: Tokens) -> None:
    for call in phases(driver, prompt, whole):
        call()


def chunked(driver: Prefixloom, tokens: Tokens, chunk: int = 1 << 30) -> Sequence:
    """Compute and publish a prompt in chunks, and return its sequence."""
    sequence = driver.open(tokens)
    while sequence.reserved < sequence.named:
        driver.chunk(sequence, min(sequence.reserved + chunk, sequence.named), None)
    return sequence


# ---------------------------------------------------------------- what is measured


def turns(reaches: tuple[Reach, Reach], count: int, steps: bool) -> Times:
    asked, total = served(count, 4)
    drivers = [driver_of(reach, total * 3 // 10, steps) for reach in reaches]
    texts = ((encoded(prompt), encoded(whole)) for prompt, whole in asked)
    ours, theirs = in_turn(tuple(partial(serve, each, *text) for each in drivers) for text in texts)  # type: ignore[misc]
    return ours[len(ours) // 3 :], theirs[len(theirs) // 3 :]


def hot_turns(reaches: tuple[Reach, Reach], count: int) -> Times:
    length, more = 1500, 192
    drivers = [driver_of(reach, 2 * length + 2 * count * more, False) for reach in reaches]
    history = encoded(range(length))
    for driver in drivers:
        for at in range(256, length + 1, 192):
            chunked(driver, history.part(0, at)).close()
    wholes = (history.extended(range(1000 * number, 1000 * number + more)) for number in range(count))
    return in_turn(
        tuple(partial(serve, each, whole.part(0, length + more // 2), whole) for each in drivers)  # type: ignore[misc]
        for whole in wholes
    )


def decoding(reaches: tuple[Reach, Reach], count: int) -> Times:
    """Decode in a full pool: the sequence gives back at once what it does not need any more."""
    needed = 2 * (1500 + count)
    drivers = [driver_of(reach, 16 * needed) for reach in reaches]
    sequences = [chunked(driver, encoded(range(1501)), 256) for driver in drivers]
    others = [driver.open(encoded(())) for driver in drivers]
    for other in others:
        other.grow(15 * needed)

    def decode(driver: Prefixloom, sequence: Sequence) -> None:
        sequence.grow(1)
        sequence.append((1,))
        driver.compute(sequence)

    pair = tuple(partial(decode, *each) for each in zip(drivers, sequences, strict=True))
    spent = in_turn(pair for _ in range(count))  # type: ignore[misc]
    for sequence in (*sequences, *others):
        sequence.abort()
    return spent


def chunks(reaches: tuple[Reach, Reach], count: int) -> Times:
    length, chunk = 4096, 256
    drivers = [driver_of(reach, 2 * length) for reach in reaches]
    spent: Times = [], []
    for number in range(1 + count * chunk // length):
        sequences = [driver.open(encoded(range(number, number + length))) for driver in drivers]
        times = in_turn(
            tuple(partial(*each, end, None) for each in zip((one.chunk for one in drivers), sequences, strict=True))  # type: ignore[misc]
            for end in range(chunk, length + 1, chunk)
        )
        for sequence in sequences:
            sequence.close()
        if number:  # the first prompt asks the reach what is remembered from then on
            for all_of_it, each in zip(spent, times, strict=True):
                all_of_it += each
    return spent


def evictions(reaches: tuple[Reach, Reach], count: int) -> Times:
    leaf, shared, leaves = 64, encoded(range(512)), 10 * count + 20
    drivers = [driver_of(reach, leaves * leaf + 4096) for reach in reaches]
    for driver in drivers:
        for start in range(1000, 1000 + leaves * leaf, leaf):
            chunked(driver, shared.extended(range(start, start + leaf))).close()
        driver.evict(10 * leaf)  # the first one also frees what windows kept of the shared prompt for no boundary
    return in_turn(tuple(partial(each.evict, 10 * leaf) for each in drivers) for _ in range(count))  # type: ignore[misc]


def reaches(conversations: int = 30, only: str = "") -> Rows:
    """Return by pair and work how many times the other reach's median it takes."""
    found: Rows = {}
    for name, pair in PAIRS.items():
        if only not in name:
            continue
        works: dict[str, Times] = {
            "turn": turns(pair, conversations, False),
            "turn in steps": turns(pair, conversations, True),
            "hot turn": hot_turns(pair, 2 * conversations),
            "decode": decoding(pair, 4 * conversations),
            "chunk": chunks(pair, 2 * conversations),
            "evict": evictions(pair, conversations),
        }
        for work, (one, other) in works.items():
            found[f"{name}: {work}, times"] = [statistics.median(one) / statistics.median(other)]
    return found
