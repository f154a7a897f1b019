"""One tree with very many leaves, and very long prompts.

``python -m bench.workloads.scale [--leaves 1000000] [--comps F FSM]``

Leaves have 96 tokens and stand behind 16 tokens that all share, so a million leaves are 96M cached tokens. The pools
lie on the meta device, and a page has 16 tokens. Figures are thread CPU time in microseconds, with the garbage
collector off. For each composition:

- the match of a leaf, in turn with the same match in a tree of a thousand leaves. Once the same leaf again and again,
  and once another leaf each time, which shows the cost of memory access;
- each call of requests under eviction pressure: the median, the 99th percentile and the worst. Each figure is the least
  of three runs, because other programs on the machine can only add time;
- the garbage that a collection finds afterwards (none: no call makes cyclic garbage), and the time of a full
  collection;
- chunks and turns behind cached prompts of a thousand, 128 thousand and a million tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

from bench.engines.ours import Prefixloom
from prefixloom import Sequence, Tokens, encode

PAGE, LEAF, FEW = 16, 96, 1000
SYSTEM = encode(range(16))
clock = time.thread_time_ns


def leaf(number: int, salt: int = 0) -> Tokens:
    """The tokens of a leaf. Its second page differs from that of every other leaf."""
    head = (number & 0xFFFF) | salt << 16, number >> 16
    return SYSTEM.extended(head).extended(text(number, LEAF - 2))


def text(seed: int, count: int) -> Tokens:
    """Tokens below 2^16, as they come."""
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


def matches(few: FilledTree, many: FilledTree, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of matches in both trees, in turn: of the same leaf, and of a random leaf each time."""
    found = {}
    rng = random.Random(1)
    for kind in ("the same leaf", "another each time"):
        spent: dict[str, list[float]] = {"few": [], "many": []}
        for _ in range(rounds):
            for name, tree in (("few", few), ("many", many)):
                prompt = leaf(FEW // 2 if kind == "the same leaf" else rng.randrange(tree.leaves))
                before = clock()
                plan = tree.driver.cache.match(prompt)
                spent[name].append((clock() - before) / 1e3)
                assert plan.ready == 16 + LEAF
        found[kind] = {name: statistics.median(times) for name, times in spent.items()}
        found[kind]["ratio"] = found[kind]["many"] / found[kind]["few"]
    return found


def calls(tree: FilledTree, requests: int) -> dict[str, dict[str, float]]:
    """Each call of new requests in a full tree, and evictions of one leaf."""
    runs = []
    for run in range(3):
        spent: dict[str, list[float]] = {"evict one leaf": []}
        for number in range(requests):
            request(tree.driver, leaf(number, salt=run + 1), spent)
            before = clock()
            tree.driver.cache.evict(LEAF)
            spent["evict one leaf"].append((clock() - before) / 1e3)
        runs.append({name: figures(times) for name, times in spent.items()})
    return {name: {figure: min(run[name][figure] for run in runs) for figure in runs[0][name]} for name in runs[0]}


def figures(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "99%": statistics.quantiles(times, n=100)[98], "worst": max(times)}


def collections(tree: FilledTree, requests: int) -> dict[str, float]:
    """The garbage that requests leave, and the time of a full collection, also after ``gc.freeze``."""
    gc.collect()
    for number in range(requests):
        request(tree.driver, leaf(number, salt=9))
    objects = len(gc.get_objects())
    before = clock()
    garbage = gc.collect()
    found = {"garbage": garbage, "objects": objects, "full_ms": (clock() - before) / 1e6}
    gc.freeze()
    before = clock()
    gc.collect()
    found["frozen_ms"] = (clock() - before) / 1e6
    gc.unfreeze()
    return found


def long_prompts(comps: str, lengths: list[int], chunk: int = 2048) -> dict[str, dict[str, float]]:
    """Chunks of a prompt, and turns of 512 new tokens behind it, by the cached length."""
    found = {}
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
        turns: dict[str, list[float]] = {}
        for number in range(15):
            request(driver, prompt.part(0, length).extended(text(number, 512)), turns)
        found[f"{length:,}"] = {
            "chunk of 2k": statistics.median(spent[-64:]),
            "worst chunk": max(spent[-64:]),
            **{name: statistics.median(times) for name, times in turns.items()},
        }
    return found


def measure(comps: str, leaves: int, requests: int, lengths: list[int]) -> dict[str, Any]:
    few, many = FilledTree(comps, FEW), FilledTree(comps, leaves)
    found: dict[str, Any] = {"match": matches(few, many, requests), "calls": calls(many, requests)}
    found["collector"] = collections(many, requests)
    del few, many
    gc.collect()
    return found | {"long prompts": long_prompts(comps, lengths)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--comps", nargs="*", default=["F", "FSM"])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 131_072, 1_048_576])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    gc.disable()
    found = {comps: measure(comps, given.leaves, given.requests, given.lengths) for comps in given.comps}
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for comps, parts in found.items():
        print(f"{comps}, {given.leaves:,} leaves, {given.leaves * LEAF / 1e6:.0f}M tokens; us")
        for part, rows in parts.items():
            print(f"  {part}")
            for name, row in rows.items():
                cells = row.items() if isinstance(row, dict) else [("", row)]
                print(f"    {name:20}", *(f"{cell} {value:.2f} " for cell, value in cells))


if __name__ == "__main__":
    main()
