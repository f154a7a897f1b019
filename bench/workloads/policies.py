"""Eviction policies on a trace of blocks, beside LRU and the offline optimum: the token hit rate of each.

python -m bench.workloads.policies conversation_trace.jsonl.gz --block 512 --capacity 1000 3000 --policy adaptive arc

A block of the trace is one token here, and one page, in a cache with full attention alone: a miss-ratio curve of a long
trace takes seconds. Whole blocks only, one request after the other, published every 2,048 tokens of the trace. A prompt
of more blocks than the pool has is cut there. ``--part 0.5 1`` takes the second half of the trace.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path as File

import attrs

from prefixloom import Buffer, Component, EvictionPolicy, Manifest, Path, Queue, compose
from prefixloom.lab.bounds import chained, optimum
from prefixloom_policies.adaptive import AdaptiveQueue
from prefixloom_policies.cells import Prints
from prefixloom_policies.gdsf import KNEE, GreedyDualQueue
from prefixloom_policies.reuse import NEW, ReuseQueue
from prefixloom_policies.tail import ADDED, THRESHOLD, TailQueue

CHUNK = 2048


@attrs.frozen
class BlockTrace:
    """``paths``: the whole blocks of each prompt. ``tokens``: of all prompts, partial blocks included."""

    paths: list[list[int]]
    tokens: int
    block: int

    @classmethod
    def read(cls, file: File, block: int, part: tuple[float, float] = (0.0, 1.0)) -> BlockTrace:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            rows = [json.loads(line) for line in lines]
        rows = rows[int(part[0] * len(rows)) : int(part[1] * len(rows))]
        paths = [row["hash_ids"][: row["input_length"] // block] for row in rows]
        return cls(chained(paths), sum(row["input_length"] for row in rows), block)

    def scaled(self, policy: str) -> str | EvictionPolicy:
        """The policy with its figures in blocks, as tokens are blocks here."""
        block = self.block
        new = [each // block for each in NEW]
        makers: dict[str, Callable[[], Queue]] = {
            "reuse": lambda: ReuseQueue(8, new),
            "adaptive": lambda: AdaptiveQueue(8, new),
            "tlru": lambda: TailQueue(THRESHOLD // block, ADDED // block),
            "gdsf": lambda: GreedyDualQueue(KNEE // block),
        }
        return EvictionPolicy(f"{policy} by blocks", make=makers[policy]) if policy in makers else policy

    def hit_rate(self, policy: str, capacity: int) -> float:
        """The part of all tokens that a cache of ``capacity`` blocks hits."""
        kv = Component("kv", Manifest([Buffer("data", (1,), "int64")]), Path())
        cache = compose(
            None, plugins=[kv], page_size=1, capacity=capacity, device="meta", policy=self.scaled(policy), debug=False
        )
        chunk = max(CHUNK // self.block, 1)
        hit = 0
        for path in self.paths:
            with cache.open(array("i", path[:capacity])) as sequence:
                hit += sequence.ready
                left = min(len(path), capacity) - sequence.ready
                while left:
                    count = min(chunk - sequence.committed % chunk, left)
                    sequence.grow(count)
                    sequence.commit()
                    left -= count
                    if left:
                        sequence.publish()
        return hit * self.block / self.tokens

    def bound(self, capacity: int) -> float:
        return sum(optimum(self.paths, capacity)) * self.block / self.tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=File)
    parser.add_argument("--block", type=int, default=512, help="tokens of a block of the trace")
    parser.add_argument("--capacity", type=int, nargs="+", required=True, help="blocks of the pool")
    parser.add_argument("--policy", nargs="+", default=["adaptive"], help="beside lru")
    parser.add_argument("--part", type=float, nargs=2, default=(0.0, 1.0), metavar=("FROM", "TO"))
    options = parser.parse_args(arguments)
    trace = BlockTrace.read(options.trace, options.block, tuple(options.part))
    Prints.stride = Prints.head = 1  # a token is a block, so that each one counts
    for capacity in options.capacity:
        best, least = trace.bound(capacity), trace.hit_rate("lru", capacity)
        print(f"{options.trace.name} {capacity} blocks: lru {least:.4f}, bound {best:.4f}", flush=True)
        for policy in options.policy:
            begun = time.process_time()
            rate = trace.hit_rate(policy, capacity)
            closed = (rate - least) / (best - least) if best > least else 0.0
            spent = time.process_time() - begun
            print(f"  {policy:10} {rate:.4f}  {100 * closed:+6.1f}% of the gap  {spent:.1f} s", flush=True)


if __name__ == "__main__":
    main()
