"""One tree with very many leaves, and very long prompts.

Leaves have 96 tokens and stand behind 16 tokens that all share, so a million ``leaves`` are 96M cached tokens. The
pools lie on the meta device, and a page has 16 tokens. Figures are thread CPU time, with the garbage collector off. For
each composition:

- the match of a leaf, in turn with the same match in a tree of a thousand leaves. Once the same leaf again and again,
  and once another leaf each time, which shows the cost of memory access;
- each call of requests under eviction pressure: the median, the 99th percentile and the worst. Each figure is the least
  of three runs, because other programs on the machine can only add time;
- the garbage that a collection finds afterwards (none: no call makes cyclic garbage), and the time of a full
  collection;
- chunks and turns behind cached prompts of ``lengths`` tokens.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from bench.engines.ours import Prefixloom
from bench.runner.figures import Rows
from prefixloom import Sequence, Tokens, encode

PAGE, LEAF, FEW = 16, 96, 1000
SYSTEM = encode(range(16))
clock = time.thread_time_ns


def leaf(number: int, salt: int = 0) -> Tokens:
    """Return the tokens of a leaf. Its second page differs from that of every other leaf."""
    head = (number & 0xFFFF) | salt << 16, number >> 16
    return SYSTEM.extended(head).extended(text(number, LEAF - 2))


def text(seed: int, count: int) -> Tokens:
    """Return tokens below 2^16."""
    return encode(array("H", random.Random(seed).randbytes(2 * count)))


class FilledTree:
    """A cache whose tree has this many leaves, and no room for more."""

    def __init__(self, comps: str, leaves: int) -> None:
        self.leaves = leaves
        self.driver = Prefixloom(comps, PAGE, 16 + leaves * LEAF + 64 * PAGE, leaves + 8, 1024)
        for number in range(leaves):
            request(self.driver, leaf(number))


def request(driver: Prefixloom, tokens: Tokens, spent: dict[str, list[float]] | None = None) -> None:
    """Serve a prompt. The microseconds of each call are added to ``spent``."""
    found: list[Sequence] = []
    calls: dict[str, Callable[[], Any]] = {
        "match": lambda: driver.cache.match(tokens),
        "open": lambda: found.append(driver.cache.open(tokens)),
        "grow": lambda: found[0].grow(found[0].named - found[0].reserved),
        "compute": lambda: driver.compute(found[0]),
        "publish": lambda: found[0].publish(),
        "close": lambda: found[0].close(),
    }
    for name, call in calls.items():
        before = clock()
        call()
        after = clock()
        if spent is not None:
            spent.setdefault(name, []).append((after - before) / 1e3)


def matches(few: FilledTree, many: FilledTree, rounds: int) -> Rows:
    """Return medians of matches in both trees, in turn: of the same leaf, and of a random leaf each time."""
    found: Rows = {}
    rng = random.Random(1)
    for kind in ("the same leaf", "another each time"):
        spent: dict[int, list[float]] = {few.leaves: [], many.leaves: []}
        for _ in range(rounds):
            for tree in (few, many):
                prompt = leaf(FEW // 2 if kind == "the same leaf" else rng.randrange(tree.leaves))
                before = clock()
                plan = tree.driver.cache.match(prompt)
                spent[tree.leaves].append((clock() - before) / 1e3)
                assert plan.ready == 16 + LEAF
        for leaves, times in spent.items():
            found[f"match of {kind}, {leaves:,} leaves, us"] = [statistics.median(times)]
    return found


def calls(tree: FilledTree, requests: int) -> Rows:
    """Return each call of new requests in a full tree, and evictions of one leaf."""
    runs = []
    for run in range(3):
        spent: dict[str, list[float]] = {"evict one leaf": []}
        for number in range(requests):
            request(tree.driver, leaf(number, salt=run + 1), spent)
            before = clock()
            tree.driver.cache.evict(LEAF)
            spent["evict one leaf"].append((clock() - before) / 1e3)
        figures = {}
        for name, times in spent.items():
            figures[f"{name}, us"] = statistics.median(times)
            figures[f"{name}, 99%, us"] = statistics.quantiles(times, n=100)[98]
            figures[f"{name}, worst, us"] = max(times)
        runs.append(figures)
    return {row: [min(run[row] for run in runs)] for row in runs[0]}


def collections(tree: FilledTree, requests: int) -> Rows:
    """Return the garbage that requests leave, and the time of a full collection, also after ``gc.freeze``."""
    gc.collect()
    for number in range(requests):
        request(tree.driver, leaf(number, salt=9))
    objects = len(gc.get_objects())
    before = clock()
    garbage = gc.collect()
    full = (clock() - before) / 1e6
    gc.freeze()
    before = clock()
    gc.collect()
    frozen = (clock() - before) / 1e6
    gc.unfreeze()
    return {
        "garbage of requests, objects": [garbage], "objects": [objects], "full collection, ms": [full],
        "full collection when frozen, ms": [frozen],
    }  # fmt: skip


def long_prompts(comps: str, lengths: Iterable[int], chunk: int = 2048) -> Rows:
    """Return chunks of a prompt, and turns of 512 new tokens behind it, by the cached length."""
    found: Rows = {}
    for length in lengths:
        driver = Prefixloom(comps, PAGE, length + 256 * chunk, length // chunk + 256, 1024)
        prompt = text(length, length + 64 * chunk)
        spent: list[float] = []
        with driver.cache.open(prompt) as sequence:
            while sequence.reserved < sequence.named:
                before = clock()
                sequence.grow(min(chunk, sequence.named - sequence.reserved))
                driver.compute(sequence)
                sequence.publish()
                spent.append((clock() - before) / 1e3)
        turns: dict[str, list[float]] = {"chunk of 2k": spent[-64:]}
        for number in range(15):
            request(driver, prompt.part(0, length).extended(text(number, 512)), turns)
        found[f"behind {length:,}: worst chunk, us"] = [max(spent[-64:])]
        found |= {f"behind {length:,}: {name}, us": [statistics.median(times)] for name, times in turns.items()}
    return found


def scale(comps: str = "FSM", leaves: int = 20_000, requests: int = 300, lengths: Iterable[int] = ()) -> Rows:
    found: Rows = {}
    for letters in comps.split(","):
        few, many = FilledTree(letters, FEW), FilledTree(letters, leaves)
        rows = matches(few, many, 500) | calls(many, requests) | collections(many, requests)
        del few, many
        gc.collect()
        found |= {f"{letters} {row}": each for row, each in (rows | long_prompts(letters, lengths)).items()}
    return found
