"""The rows of the comparison: the same work on any side, as samples.

Each function is a group of rows. It takes ``make(tokens, states)``, which makes a fresh cache of a side, and does the
work once. The name of a row ends with its unit. Times are thread CPU time, minus the time that reading the clock takes.
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

from bench.engines.driver import Driver
from bench.peers.sides import load
from bench.runner.figures import Rows
from bench.workloads.conversations import conversations

Make = Callable[[int, int], Driver]
clock = time.thread_time_ns
CALLS = ("open", "grow", "end")


@dataclass(frozen=True)
class WorkSizes:
    """The amount of work. The defaults are those of the tables in docs/performance.md."""

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


TINY = WorkSizes(6, (128, 256), (3, 3), 4, 64, 1024, 128, 200, 8, (50, 100, 400), (5, 5, 5))
"""Small sizes that only show that everything runs."""

LEAF = 64


def short(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else f"{count // 1000}k" if count % 1000 == 0 else str(count)


@cache
def reading() -> float:
    """Return the microseconds that one reading of the clock adds between two readings."""
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
    """Serve a request without an answer, from its beginning to its end."""
    key = driver.key(prompt)
    request = driver.open(key)
    driver.grow(request, len(prompt) // driver.page * driver.page)
    driver.finish(request, None, key)
    driver.close(request)


def _turns(make: Make, sizes: WorkSizes, encoded: bool) -> tuple[dict[str, list[float]], int]:
    """Serve conversations in random order, in a cache with room for three tenths of their tokens.

    Return the microseconds of each call by turn, and the tokens that hit. ``finish`` and ``close`` count as one call,
    because either may publish. ``encoded``: keys are made beforehand; else each side makes them of lists of tokens.
    """
    turns, total = conversations(sizes.conversations, 10)
    driver = make(total * 3 // 10, 3 * sizes.conversations)
    spent: dict[str, list[float]] = {name: [] for name in CALLS}
    hits = 0
    request = key = tail = whole = None
    for prompt, full in turns:
        answer, room = full[len(prompt) :], len(full) // driver.page * driver.page
        request = key = tail = whole = None  # free those of the turn before outside of the timed part
        if encoded:
            key, whole, tail = driver.key(prompt), driver.key(full), driver.key(answer)
        marks = [clock()]
        request = driver.open(key if encoded else (key := driver.key(prompt)))
        marks.append(clock())
        driver.grow(request, room)
        marks.append(clock())
        if not encoded:
            tail = driver.key(answer)
            whole = driver.joined(key, tail)
        driver.finish(request, tail, whole)
        driver.close(request)
        marks.append(clock())
        for name, before, after in zip(CALLS, marks, marks[1:], strict=False):
            spent[name].append(since(before, after))
        hits += driver.hit(request)
    return spent, hits


def chat(make: Make, sizes: WorkSizes) -> Rows:
    """Serve conversations under eviction pressure, with encoded keys. Also return the longest call of each kind."""
    spent, hits = _turns(make, sizes, encoded=True)
    found = list(map(sum, zip(*spent.values(), strict=True)))
    return {
        "chat turn, encoded keys, us": found,
        "chat turn, mean, us": [statistics.fmean(found)],
        "tokens that hit in the chat, thousands": [hits / 1e3],
        **{f"worst {name} in the chat, us": [max(times)] for name, times in spent.items()},
    }


def lists(make: Make, sizes: WorkSizes) -> Rows:
    """Serve lists of tokens. Each side converts the prompt, and later the answer, to its own form."""
    spent, _ = _turns(make, sizes, encoded=False)
    return {"chat turn, token lists, us": list(map(sum, zip(*spent.values(), strict=True)))}


def _match(driver: Driver, prompt: list[int], times: int) -> dict[str, list[float]]:
    """Match a prompt that is cached whole, followed by one more page. Each match gets a new copy of the key."""
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


def match(make: Make, sizes: WorkSizes) -> Rows:
    """Match a prompt that is one node of the tree."""
    rows: Rows = {}
    for length, times in zip(sizes.hot, sizes.hot_times, strict=True):
        driver = make(length + 4096, 16)
        prompt = tokens(random.Random(2), length)
        cached(driver, prompt)
        spent = _match(driver, prompt, times)
        rows[f"hot match of {short(length)} tokens, us"] = spent["match"]
        rows[f"hot match of {short(length)} tokens, with page numbers, us"] = spent["numbers"]
    return rows


def deep(make: Make, sizes: WorkSizes) -> Rows:
    """Match a prompt that has one node per turn."""
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


def chunks(make: Make, sizes: WorkSizes) -> Rows:
    """Compute and publish a prompt chunk by chunk."""
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
    """Fill the cache with ``leaves`` leaves of 64 tokens, all behind the same 64 tokens."""
    rng = random.Random(seed)
    system = tokens(rng, LEAF)
    for number in range(leaves):
        cached(driver, [*system, 1 + number % 149_999, 1 + number // 149_999, *tokens(rng, LEAF - 2)])
    driver.filled()
    gc.collect()


def evict(make: Make, sizes: WorkSizes) -> Rows:
    """Evict ten of many leaves. In unused memory, because the time depends on where objects lie."""
    return in_child(lambda: _evict(make, sizes))


def _evict(make: Make, sizes: WorkSizes) -> Rows:
    driver = make(LEAF + sizes.leaves * LEAF + 256, sizes.leaves + 64)
    _fill(driver, sizes.leaves)
    found = []
    for _ in range(sizes.evictions):
        before = clock()
        freed = driver.evict(10 * LEAF)
        found.append(since(before, clock()))
        assert freed >= 10 * LEAF, f"{freed} of {10 * LEAF} tokens were freed"
    return {f"evict 10 leaves of {short(sizes.leaves)}, us": found[sizes.evictions // 10 :]}


def leaves(make: Make, sizes: WorkSizes) -> Rows:
    """Evict one leaf of few and of many; and the bytes of a leaf: by how much an unused process grows."""
    return in_child(lambda: _leaves(make, sizes))


def _leaves(make: Make, sizes: WorkSizes) -> Rows:
    few, *_, many = sizes.scale
    _fill(make(1 << 16, 2000), min(500, few), seed=3)  # after this, everything that is made only once exists
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
            before = clock()
            driver.evict(LEAF)
            found.append(since(before, clock()))
        rows[f"evict one leaf of {short(count)}, us"] = found[
            5:
        ]  # the first evictions in a child process copy its memory pages
        del driver
    most, least = (statistics.median(rows[f"evict one leaf of {short(count)}, us"]) for count in (many, few))
    rows["evict one leaf of the most over the fewest, times"] = [most / (least or 1)]
    return dict(reversed(rows.items()))


def in_child(work: Callable[[], Rows]) -> Rows:
    """Do the work in a child process, so that it leaves nothing behind in this one."""
    reading_end, writing_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about torch's threads, which the child does not need
        child = os.fork()
    if child == 0:
        try:
            result: Any = work()
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        with os.fdopen(writing_end, "w") as answer:
            json.dump(result, answer)
        os._exit(0)
    os.close(writing_end)
    with os.fdopen(reading_end) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    result = json.loads(text) if text else f"the child ended with {os.waitstatus_to_exitcode(status)}"
    if isinstance(result, str):
        raise RuntimeError(result)
    return dict(result)


def _resident() -> int:
    """Return the bytes of memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


GROUPS: dict[str, Callable[[Make, WorkSizes], Rows]] = {
    each.__name__: each for each in (chat, lists, match, deep, chunks, evict, leaves)
}


def measure(side: str, group: str, comps: str, page: int, sizes: dict[str, Any]) -> Rows:
    """Do a group of rows once. This runs in the process of a side."""
    driver = load(side)

    def make(room: int, states: int) -> Driver:
        return driver(comps, page, room, states, 1024)

    return GROUPS[group](make, replace(WorkSizes(), **sizes))
