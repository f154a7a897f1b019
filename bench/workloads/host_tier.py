"""Copies of pages between a device pool and a host pool on a CPU, against ``copy_`` of as many bytes in one piece.

A page has 16 tokens x 32 layers x 1 KiB. Every figure is a share of the speed of ``copy_``, which is measured in the
same run, in turn, as the median of so many ``times``. Clocks are of the thread's CPU time. Torch has one thread. The
layouts are those of the device's pool and of the host's pool.

- *chat*: the slots that a tier copies while conversations take turns in pools that are too small for all of them;
- *in the long run*: the same after ten such chats, one after another;
- *in runs of 8*, *scattered*: slots drawn at random, in runs or one by one;
- *rows*: the speed of a C loop (``index_select``) that copies the scattered slots' pieces of 16 KiB into one piece.

The first rows show the mean length of runs: pages whose slots are consecutive on both sides.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from bench.runner.figures import Rows
from bench.workloads.conversations import conversations as served
from bench.workloads.internals import internal, replaced
from bench.workloads.tier_costs import WithTier
from prefixloom import Buffer, Manifest, encode

LAYOUTS = internal("LAYOUTS")
Pool, HostPool, copy_between = internal("Pool"), internal("HostPool"), internal("copy_between")
LAYERS, TOKENS, ENTRY = 32, 16, 1024
PAGES, CAPACITY = 64, 256
COPIES, CHATS = 5, 10
MANIFEST = Manifest([Buffer("kv", (ENTRY // 2,), "bfloat16", layers=tuple(range(LAYERS)))])
SLOT_BYTES = LAYERS * TOKENS * ENTRY
DOWN, UP = "to the host", "back"
Batch = tuple[list[int], list[int]]
"""The slots of one copy: those of the device, and those of the host, in the same order."""


def chats(comps: str, count: int) -> Iterator[dict[str, list[Batch]]]:
    """Yield after each chat over these components the last copies, each way, of pages of full attention."""
    seen: dict[str, list[Batch]] = {DOWN: [], UP: []}

    def record(source: Any, src: Any, target: Any, dst: Any, *_: object) -> None:
        if "full" in (source.name, target.name):
            down = isinstance(target, HostPool)
            seen[DOWN if down else UP].append((list(src), list(dst)) if down else (list(dst), list(src)))

    turns, total = served(count, 10)
    driver = WithTier(comps, TOKENS, total * 3 // 10, 3 * count, 1024, "back")
    with replaced("copy_between", record):
        for number in range(CHATS):
            for prompt, whole in turns:
                sequence = driver.cache.open(encode([150_000 + number, *prompt]))
                sequence.restore()
                sequence.grow(len(whole) // TOKENS * TOKENS - sequence.reserved)
                sequence.append(encode(whole).part(len(prompt)))
                driver.compute(sequence)
                sequence.close()
                driver.cache.poll()
            yield {way: batches[-COPIES:] for way, batches in seen.items()}


def batches_by_kind(count: int) -> dict[str, dict[str, list[Batch]]]:
    """Return by kind of slots and way the batches to copy."""
    rng = random.Random(1)
    scattered = [(rng.sample(range(CAPACITY), PAGES), rng.sample(range(CAPACITY), PAGES))]
    runs = [[run * 8 + k for run in rng.sample(range(CAPACITY // 8), PAGES // 8) for k in range(8)] for _ in range(2)]
    in_runs = [(runs[0], runs[1])]
    first, *_, last = chats("F", count)
    first_of_all, *_, last_of_all = chats("FSM", count)
    return {
        "chat F": first,
        "chat FSM": first_of_all,
        "chat F in the long run": last,
        "chat FSM in the long run": last_of_all,
        "in runs of 8": {DOWN: in_runs, UP: in_runs},
        "scattered": {DOWN: scattered, UP: scattered},
    }


def ways(cases: dict[str, dict[str, list[Batch]]]) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the copies to time, by name, each with the number of bytes that it moves."""
    found: dict[str, tuple[Callable[[], object], int]] = {}
    whole = torch.ones(2, PAGES * SLOT_BYTES, dtype=torch.uint8)
    found["copy_"] = lambda: whole[0].copy_(whole[1]), whole[0].numel()
    every = [batch for case in cases.values() for batches in case.values() for batch in batches]
    near, far = (max(max(batch[side]) for batch in every) + 1 for side in (0, 1))
    rows = torch.ones(LAYERS * near, TOKENS * ENTRY, dtype=torch.uint8)
    taken = torch.tensor([layer * near + slot for slot in cases["scattered"][DOWN][0][0] for layer in range(LAYERS)])
    found["rows, scattered"] = (
        lambda: torch.index_select(rows, 0, taken, out=whole[0].view(len(taken), -1)), whole[0].numel(),
    )  # fmt: skip
    for ours, below in (LAYOUTS[:1] * 2, LAYOUTS, LAYOUTS[1:] * 2):
        device = Pool("kv", MANIFEST, "page", near, TOKENS, "cpu", layout=ours)
        host = HostPool("kv", MANIFEST, "page", far, TOKENS, layout=below)
        for content, pool in enumerate((device, host), 1):
            pool.blocks[0].view(torch.uint8).fill_(content)
        for kind, case in cases.items():
            for way, batches in case.items():
                size = SLOT_BYTES * sum(len(here) for here, _ in batches)
                found[f"{ours} and {below}, {kind}: {way}"] = partial(move, device, host, batches, way), size
    return found


def _runs(here: list[int], there: list[int]) -> int:
    """Return the number of runs: pages whose slots are consecutive on both sides."""
    pairs = sorted(zip(here, there, strict=True))
    return 1 + sum((b[0] - a[0], b[1] - a[1]) != (1, 1) for a, b in pairwise(pairs))


def move(device: Any, host: Any, batches: list[Batch], way: str) -> None:
    for here, there in batches:
        if way == DOWN:
            copy_between(device, here, host, there)
        else:
            copy_between(host, there, device, here)


def host_tier(times: int = 6, conversations: int = 6) -> Rows:
    torch.set_num_threads(1)
    cases = batches_by_kind(conversations)
    found: Rows = {}
    for kind, case in cases.items():
        batches = [batch for some in case.values() for batch in some]
        pages, runs = sum(len(here) for here, _ in batches), sum(_runs(*batch) for batch in batches)
        found[f"{kind}, pages in a run"] = [pages / runs]
    timed = ways(cases)
    spent: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(times):
        for name, (way, size) in timed.items():
            before = time.thread_time()
            way()
            spent[name].append((time.thread_time() - before) / size)
    whole = spent.pop("copy_")
    found["copy_, GB/s"] = [1 / statistics.median(whole) / 1e9]
    for name, each in spent.items():
        found[f"{name}, of copy_"] = [statistics.median(base / one for base, one in zip(whole, each, strict=True))]
    return found
