"""One tree of very many leaves, and very long prompts: ``python bench/scale.py [--leaves 1000000] [--comps F FSM]``.

Leaves of 96 tokens behind 16 that all share, so that a million of them are 96M cached tokens; pools on the meta device,
pages of 16. Thread CPU time in microseconds with the collector off. What is told, for each composition:

- the match of a leaf, against the same match in a tree of a thousand leaves, in turn in one process: of one leaf again
  and again, and of another one each time, which is what memory costs;
- each call of requests under eviction pressure: the median, the 99th percentile, and the worst (each the least of three
  runs, as other work on the machine only adds);
- what a collection finds after them (nothing: no call makes cyclic garbage), and what a full one takes;
- chunks and turns at the end of prompts of a thousand, 128 thousand and a million tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from peers.drive_prefixloom import Prefixloom

from prefixloom import Sequence, Tokens, encode

PAGE, LEAF, FEW = 16, 96, 1000
SYSTEM = encode(range(16))
clock = time.thread_time_ns


def leaf(number: int, salt: int = 0) -> Tokens:
    """Its second page tells it from all others."""
    own = random.Random(number).randbytes(4 * (LEAF - 2))
    head = (number & 0xFFFF) | salt << 16, number >> 16
    return encode(SYSTEM + b"".join(part.to_bytes(4, "little") for part in head) + _tokens(own))


def text(seed: int, count: int) -> Tokens:
    return encode(_tokens(random.Random(seed).randbytes(4 * count)))


def _tokens(raw: bytes) -> bytes:
    """Little-endian numbers below 2^24."""
    made = bytearray(raw)
    made[3::4] = bytes(len(raw) // 4)
    return bytes(made)


class Tree:
    """A cache whose tree has this many leaves, and no room for more."""

    def __init__(self, comps: str, leaves: int) -> None:
        self.leaves = leaves
        self.driver = Prefixloom(comps, PAGE, 16 + leaves * LEAF + 64 * PAGE, leaves + 8, 1024)
        for number in range(leaves):
            self.request(leaf(number))

    def request(self, tokens: Tokens, spent: dict[str, list[float]] | None = None) -> None:
        found: list[Sequence] = []
        calls: dict[str, Callable[[], Any]] = {
            "match": lambda: self.driver.cache.match(tokens),
            "open": lambda: found.append(self.driver.cache.open(tokens)),
            "grow": lambda: found[0].grow(found[0].named - found[0].reserved),
            "compute": lambda: self.driver.compute(found[0]),
            "publish": lambda: found[0].publish(),
            "close": lambda: found[0].close(),
        }
        for name, call in calls.items():
            before = clock()
            call()
            after = clock()
            if spent is not None:
                spent.setdefault(name, []).append((after - before) / 1e3)


def matches(few: Tree, many: Tree, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of both trees' matches, in turn; of the same leaf, and of a random one each time."""
    told = {}
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
        told[kind] = {name: statistics.median(times) for name, times in spent.items()}
        told[kind]["ratio"] = told[kind]["many"] / told[kind]["few"]
    return told


def calls(tree: Tree, requests: int) -> dict[str, dict[str, float]]:
    """Each call of new requests into a full tree, and evictions of one leaf."""
    runs = []
    for run in range(3):
        spent: dict[str, list[float]] = {"evict one leaf": []}
        for number in range(requests):
            tree.request(leaf(number, salt=run + 1), spent)
            before = clock()
            tree.driver.cache.evict(LEAF)
            spent["evict one leaf"].append((clock() - before) / 1e3)
        runs.append({name: figures(times) for name, times in spent.items()})
    return {name: {figure: min(run[name][figure] for run in runs) for figure in runs[0][name]} for name in runs[0]}


def figures(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "99%": statistics.quantiles(times, n=100)[98], "worst": max(times)}


def collections(tree: Tree, requests: int) -> dict[str, float]:
    """What requests leave to the collector, and what a full collection takes, also of a tree that was frozen."""
    gc.collect()
    for number in range(requests):
        tree.request(leaf(number, salt=9))
    objects = len(gc.get_objects())
    before = clock()
    garbage = gc.collect()
    told = {"garbage": garbage, "objects": objects, "full_ms": (clock() - before) / 1e6}
    gc.freeze()
    before = clock()
    gc.collect()
    told["frozen_ms"] = (clock() - before) / 1e6
    gc.unfreeze()
    return told


def long_prompts(comps: str, lengths: list[int], chunk: int = 2048) -> dict[str, dict[str, float]]:
    """Chunks of a prompt and turns of 512 new tokens behind it, by the length that is cached already."""
    told = {}
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
        tree = Tree.__new__(Tree)
        tree.driver = driver
        for number in range(15):
            tree.request(encode(prompt[: 4 * length] + text(number, 512)), turns)
        told[f"{length:,}"] = {
            "chunk of 2k": statistics.median(spent[-64:]),
            "worst chunk": max(spent[-64:]),
            **{name: statistics.median(times) for name, times in turns.items()},
        }
    return told


def measure(comps: str, leaves: int, requests: int, lengths: list[int]) -> dict[str, Any]:
    few, many = Tree(comps, FEW), Tree(comps, leaves)
    told: dict[str, Any] = {"match": matches(few, many, requests), "calls": calls(many, requests)}
    told["collector"] = collections(many, requests)
    del few, many
    gc.collect()
    return told | {"long prompts": long_prompts(comps, lengths)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--comps", nargs="*", default=["F", "FSM"])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 131_072, 1_048_576])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    gc.disable()
    told = {comps: measure(comps, given.leaves, given.requests, given.lengths) for comps in given.comps}
    if given.json:
        print(json.dumps(told, indent=2))
        return
    for comps, parts in told.items():
        print(f"{comps}, {given.leaves:,} leaves, {given.leaves * LEAF / 1e6:.0f}M tokens; us")
        for part, rows in parts.items():
            print(f"  {part}")
            for name, row in rows.items():
                cells = row.items() if isinstance(row, dict) else [("", row)]
                print(f"    {name:20}", *(f"{cell} {value:.2f} " for cell, value in cells))


if __name__ == "__main__":
    main()
