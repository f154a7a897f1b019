"""The rows of the comparison: the same work on any side, as samples.

A function per group of rows takes ``make(tokens, states)``, which gives a fresh cache of a side, and runs the work
once. Names end with their unit. Times are thread CPU time, less what reading the clock takes.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from peers import Driver, load

Turn = tuple[list[int], list[int]]
Rows = dict[str, list[float]]
Make = Callable[[int, int], Driver]
clock = time.thread_time_ns
CALLS = ("open", "grow", "end")


@dataclass(frozen=True)
class Sizes:
    """How much work. The defaults are those of the tables."""

    conversations: int = 200
    hot: tuple[int, ...] = (1024, 131_072)
    hot_times: tuple[int, ...] = (60, 12)
    turns: int = 64
    per_turn: int = 512
    prompt: int = 65_536
    chunk: int = 2048
    leaves: int = 20_000
    evictions: int = 220
    scale: tuple[int, ...] = (1000, 10_000, 50_000)
    scale_times: tuple[int, ...] = (40, 40, 15)


TINY = Sizes(6, (128, 256), (3, 3), 4, 64, 1024, 128, 200, 8, (50, 100, 400), (5, 5, 5))
"""To see that all of it runs."""

LEAF = 64


def short(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count // 1000}k" if count % 1000 == 0 else str(count)


@cache
def reading() -> float:
    """What one reading of the clock adds to what lies between two, in microseconds."""
    found = []
    for _ in range(20_000):
        before = clock()
        found.append(clock() - before)
    return statistics.median(found) / 1e3


def since(before: int, after: int) -> float:
    return max(0.0, (after - before) / 1e3 - reading())


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1, 150_000) for _ in range(count)]


def cached(driver: Driver, prompt: list[int]) -> None:
    """A request without an answer, from its beginning to its end."""
    key = driver.key(prompt)
    request = driver.open(key)
    driver.grow(request, len(prompt) // driver.page * driver.page)
    driver.finish(request, None, key)
    driver.close(request)


@cache
def traffic(conversations: int) -> tuple[list[Turn], int]:
    from chat_turn import trace  # here, as it imports prefixloom, and whoever only names rows need not

    return trace(conversations, 10)


def _for_chats(make: Make, sizes: Sizes) -> tuple[Driver, list[Turn]]:
    """Room for three tenths of what all conversations come to."""
    turns, total = traffic(sizes.conversations)
    return make(total * 3 // 10, 3 * sizes.conversations), turns


def chat(make: Make, sizes: Sizes) -> Rows:
    """Conversations in random order under eviction pressure; keys are made before."""
    driver, turns = _for_chats(make, sizes)
    found: list[float] = []
    hits = 0
    for prompt, full in turns:
        key, whole, tail = driver.key(prompt), driver.key(full), driver.key(full[len(prompt) :])
        room = len(full) // driver.page * driver.page
        request = None  # the one before is freed outside of what is timed
        before = clock()
        request = driver.open(key)
        driver.grow(request, room)
        driver.finish(request, tail, whole)
        driver.close(request)
        found.append(since(before, clock()))
        hits += driver.hit(request)
    return {
        "chat turn, encoded keys, us": found,
        "chat turn, mean, us": [statistics.fmean(found)],
        "tokens that hit in the chat, thousands": [hits / 1e3],
    }


def lists(make: Make, sizes: Sizes) -> Rows:
    """The same with lists of tokens, which each side turns into what it takes: the prompt, and then the answer."""
    driver, turns = _for_chats(make, sizes)
    found: list[float] = []
    for prompt, full in turns:
        answer = full[len(prompt) :]
        room = len(full) // driver.page * driver.page
        request = key = tail = whole = None
        before = clock()
        key = driver.key(prompt)
        request = driver.open(key)
        driver.grow(request, room)
        tail = driver.key(answer)
        whole = driver.joined(key, tail)
        driver.finish(request, tail, whole)
        driver.close(request)
        found.append(since(before, clock()))
    return {"chat turn, token lists, us": found}


def worst(make: Make, sizes: Sizes) -> Rows:
    """The longest of each call in the trace of ``chat``; ``finish`` and ``close`` as one, since either may cache."""
    driver, turns = _for_chats(make, sizes)
    longest = dict.fromkeys(CALLS, 0.0)
    for prompt, full in turns:
        key, whole, tail = driver.key(prompt), driver.key(full), driver.key(full[len(prompt) :])
        room = len(full) // driver.page * driver.page
        request = None
        marks = [clock()]
        request = driver.open(key)
        marks.append(clock())
        driver.grow(request, room)
        marks.append(clock())
        driver.finish(request, tail, whole)
        driver.close(request)
        marks.append(clock())
        for name, before, after in zip(CALLS, marks, marks[1:], strict=False):
            longest[name] = max(longest[name], since(before, after))
    return {f"worst {name} in the chat, us": [most] for name, most in longest.items()}


def _match(driver: Driver, prompt: list[int], times: int) -> dict[str, list[float]]:
    """A prompt that is cached as a whole, and one more page; another copy of its key each time."""
    spent: dict[str, list[float]] = {"match": [], "numbers": [], "lock": []}
    for number in range(times + 3):
        key = driver.key([*prompt, *[7] * driver.page])
        found = pages = lock = None
        first = clock()
        found = driver.match(key)
        second = clock()
        pages = driver.pages(found)
        third = clock()
        lock = driver.lock(found)
        fourth = clock()
        driver.unlock(lock)
        fifth = clock()
        assert driver.matched(found) == len(prompt), f"{driver.matched(found)} of {len(prompt)} tokens hit"
        if number >= 3:
            spent["match"].append(since(first, second))
            spent["numbers"].append(since(first, second) + since(second, third))
            spent["lock"].append(since(third, fourth) + since(fourth, fifth))
    del pages
    return spent


def match(make: Make, sizes: Sizes) -> Rows:
    """A prompt in one node."""
    rows: Rows = {}
    for length, times in zip(sizes.hot, sizes.hot_times, strict=True):
        driver = make(length + 4096, 16)
        prompt = tokens(random.Random(2), length)
        cached(driver, prompt)
        spent = _match(driver, prompt, times)
        rows[f"hot match of {short(length)} tokens, us"] = spent["match"]
        rows[f"hot match of {short(length)} tokens, with page numbers, us"] = spent["numbers"]
    return rows


def deep(make: Make, sizes: Sizes) -> Rows:
    """A prompt in a node for each turn."""
    driver = make(sizes.turns * sizes.per_turn + 4096, 4 * sizes.turns)
    rng = random.Random(3)
    prompt: list[int] = []
    for _ in range(sizes.turns):
        prompt += tokens(rng, sizes.per_turn)
        cached(driver, prompt)
    spent = _match(driver, prompt, 40)
    return {
        f"match of {sizes.turns} turns x {sizes.per_turn}, us": spent["match"],
        f"match of {sizes.turns} turns x {sizes.per_turn}, with page numbers, us": spent["numbers"],
        "lock and unlock there, us": spent["lock"],
    }


def chunks(make: Make, sizes: Sizes) -> Rows:
    """A prompt that is computed and cached chunk by chunk."""
    prompt = tokens(random.Random(6), sizes.prompt)
    ends = range(sizes.chunk, sizes.prompt + 1, sizes.chunk)
    found: list[float] = []
    flat: list[float] = []
    for _ in range(3):
        driver = make(sizes.prompt + 8192, 256)
        keys = [driver.key(prompt[:end]) for end in ends]
        request = driver.open(keys[-1])
        spent = []
        for end, key in zip(ends, keys, strict=True):
            before = clock()
            driver.chunk(request, end, key)
            spent.append(since(before, clock()))
        driver.close(request)
        found += spent
        few = max(1, len(spent) // 4)
        flat.append(statistics.median(spent[-few:]) / statistics.median(spent[:few]))
    return {
        f"chunk of {short(sizes.chunk)} in a prefill of {short(sizes.prompt)}, us": found,
        "the last quarter of chunks over the first, times": flat,
    }


def _fill(driver: Driver, leaves: int, seed: int = 7) -> None:
    """So many leaves of 64 tokens behind 64 that all share."""
    rng = random.Random(seed)
    system = tokens(rng, LEAF)
    for number in range(leaves):
        cached(driver, [*system, 1 + number % 149_999, 1 + number // 149_999, *tokens(rng, LEAF - 2)])
    driver.filled()
    gc.collect()


def evict(make: Make, sizes: Sizes) -> Rows:
    """Ten leaves of many, in memory that has not been used before: else it depends on what was there."""
    return _apart(lambda: _evict(make, sizes))


def _evict(make: Make, sizes: Sizes) -> Rows:
    driver = make(LEAF + sizes.leaves * LEAF + 256, sizes.leaves + 64)
    _fill(driver, sizes.leaves)
    found = []
    for _ in range(sizes.evictions):
        before = clock()
        freed = driver.evict(10 * LEAF)
        found.append(since(before, clock()))
        assert freed >= 10 * LEAF, f"{freed} of {10 * LEAF} tokens were freed"
    return {f"evict 10 leaves of {short(sizes.leaves)}, us": found[sizes.evictions // 10 :]}


def leaves(make: Make, sizes: Sizes) -> Rows:
    """One leaf of few and of many, and what a leaf weighs: what a process grows by that has done nothing before."""
    return _apart(lambda: _leaves(make, sizes))


def _leaves(make: Make, sizes: Sizes) -> Rows:
    few, *_, many = sizes.scale
    _fill(make(1 << 16, 2000), min(500, few), seed=3)  # what is made once is made by now
    rows: Rows = {}
    for count, times in zip(sizes.scale[::-1], sizes.scale_times[::-1], strict=True):
        driver = make(LEAF + count * LEAF + 256, count + 64)
        gc.collect()
        before = _resident()
        _fill(driver, count)
        if count == many:
            rows[f"bytes per leaf of {LEAF} tokens"] = [(_resident() - before) / count]
        found = []
        for _ in range(times + 5):
            begun = clock()
            driver.evict(LEAF)
            found.append(since(begun, clock()))
        rows[f"evict one leaf of {short(count)}, us"] = found[5:]  # the first ones of a child copy its pages
        del driver
    most, least = (statistics.median(rows[f"evict one leaf of {short(count)}, us"]) for count in (many, few))
    rows["evict one leaf of the most over the fewest, times"] = [most / (least or 1)]
    return dict(reversed(rows.items()))


def _apart(work: Callable[[], Rows]) -> Rows:
    """In a child of this process, which leaves nothing behind here."""
    reading_end, writing_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of torch's, which the child does not need
        child = os.fork()
    if child == 0:
        try:
            told: Any = work()
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        with os.fdopen(writing_end, "w") as answer:
            json.dump(told, answer)
        os._exit(0)
    os.close(writing_end)
    with os.fdopen(reading_end) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    told = json.loads(text) if text else f"the child ended with {os.waitstatus_to_exitcode(status)}"
    if isinstance(told, str):
        raise RuntimeError(told)
    return dict(told)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


GROUPS: dict[str, Callable[[Make, Sizes], Rows]] = {
    each.__name__: each for each in (chat, lists, worst, match, deep, chunks, evict, leaves)
}


def measure(side: str, group: str, comps: str, page: int, sizes: dict[str, Any]) -> Rows:
    """What a side's process answers: a group of rows, once."""
    made = load(side)

    def make(room: int, states: int) -> Driver:
        return made(comps, page, room, states, 1024)

    return GROUPS[group](make, replace(Sizes(), **sizes))
