"""Pages between a pool and a host pool on a CPU, against ``copy_`` of as many bytes in one piece.

Pages of 16 tokens x 32 layers x 1 KiB: ``python bench/host_tier.py``. Every figure is a share of ``copy_``'s speed,
both measured in the same run in turn; the median, and in brackets the quartiles. One torch thread. *Chat*: the slots
that a tier copies, as its pools hand them out, while conversations take turns over pools too small for all of them;
*scattered*: drawn at random. "rows" is what a loop in C reaches (``index_select``) that copies the pieces of the
scattered slots, 16 KiB each, into one piece.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from chat_turn import trace
from tier_costs import Tiered

import prefixloom.tier
from prefixloom import Buffer, Manifest, encode
from prefixloom.pool import Pool
from prefixloom.pool_host import LAYOUTS, HostPool
from prefixloom.slots import DeviceSlots, HostSlots, resolve

LAYERS, TOKENS, ENTRY = 32, 16, 1024
PAGES, CAPACITY = 64, 256
CONVERSATIONS, COPIES = 6, 5
MANIFEST = Manifest([Buffer("kv", (ENTRY // 2,), "bfloat16", layers=tuple(range(LAYERS)))])
SLOT_BYTES = LAYERS * TOKENS * ENTRY
DOWN, UP = "to the host", "back"
Batch = tuple[list[int], list[int]]
"""Slots of the device and of the host, pair by pair."""


def chat(comps: str) -> dict[str, list[Batch]]:
    """The last copies each way, of pages of full attention, of a chat over these components."""
    seen: dict[str, list[Batch]] = {DOWN: [], UP: []}

    def record(source: Pool, src: Any, target: Pool, dst: Any, *_: object) -> None:
        if "full" in (source.name, target.name):
            down = isinstance(target, HostPool)
            seen[DOWN if down else UP].append((list(src), list(dst)) if down else (list(dst), list(src)))

    turns, total = trace(CONVERSATIONS, 10)
    driver = Tiered(comps, TOKENS, total * 3 // 10, 3 * CONVERSATIONS, 1024, "back")
    kept, prefixloom.tier.copy_between = prefixloom.tier.copy_between, record
    try:
        for prompt, whole in turns:
            sequence = driver.cache.open(encode(prompt))
            sequence.restore()
            sequence.grow(len(whole) // TOKENS * TOKENS - sequence.reserved)
            sequence.append(encode(whole).part(len(prompt)))
            driver.compute(sequence)
            sequence.close()
            driver.cache.poll()
    finally:
        prefixloom.tier.copy_between = kept
    return {way: batches[-COPIES:] for way, batches in seen.items()}


def kinds() -> dict[str, dict[str, list[Batch]]]:
    rng = random.Random(1)
    scattered = [(rng.sample(range(CAPACITY), PAGES), rng.sample(range(CAPACITY), PAGES))]
    runs = [[run * 8 + k for run in rng.sample(range(CAPACITY // 8), PAGES // 8) for k in range(8)] for _ in range(2)]
    in_runs = [(runs[0], runs[1])]
    return {
        "chat F": chat("F"),
        "chat FSM": chat("FSM"),
        "in runs of 8": {DOWN: in_runs, UP: in_runs},
        "scattered": {DOWN: scattered, UP: scattered},
    }


def ways() -> dict[str, tuple[Callable[[], object], int]]:
    """What is timed, by name, with how many bytes it moves."""
    found: dict[str, tuple[Callable[[], object], int]] = {}
    cases = kinds()
    whole = torch.ones(2, PAGES * SLOT_BYTES, dtype=torch.uint8)
    found["copy_"] = lambda: whole[0].copy_(whole[1]), whole[0].numel()
    every = [batch for case in cases.values() for batches in case.values() for batch in batches]
    near, far = (max(max(batch[side]) for batch in every) + 1 for side in (0, 1))
    device = Pool("kv", MANIFEST, "page", near, TOKENS, "cpu")
    kv = device.buffers["kv"].view(torch.uint8).fill_(1)
    rows = kv.view(LAYERS * near, -1)
    taken = torch.tensor([layer * near + slot for slot in cases["scattered"][DOWN][0][0] for layer in range(LAYERS)])
    found["rows, scattered"] = (
        lambda: torch.index_select(rows, 0, taken, out=whole[0].view(len(taken), -1)), whole[0].numel(),
    )  # fmt: skip
    for layout in LAYOUTS:
        host = HostPool("kv", MANIFEST, "page", far, TOKENS, layout=layout)
        host.buffers["kv"].view(torch.uint8).fill_(2)
        for kind, case in cases.items():
            for way, batches in case.items():
                size = SLOT_BYTES * sum(len(here) for here, _ in batches)
                found[f"{layout}, {kind}: {way}"] = partial(move, device, host, batches, way), size
    return found


def move(device: Pool, host: HostPool, batches: list[Batch], way: str) -> None:
    for here, there in batches:
        near, far = DeviceSlots(device, here), HostSlots(host, there)
        (resolve(near, far) if way == DOWN else resolve(far, near)).run()


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds per byte of each way, by clock."""
    torch.set_num_threads(1)
    timed = ways()
    clocks = {"thread CPU time": time.thread_time, "wall": time.perf_counter}
    spent: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in timed} for clock in clocks}
    for _ in range(rounds):
        for name, (way, size) in timed.items():
            begun = [clock() for clock in clocks.values()]
            way()
            for (clock, read), start in zip(clocks.items(), begun, strict=True):
                spent[clock][name].append((read() - start) / size)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    spent = measure(parser.parse_args().rounds)
    for clock, all_of in spent.items():
        base = all_of["copy_"]
        print(f"{clock}: copy_ of {PAGES * SLOT_BYTES >> 20} MiB {1 / statistics.median(base) / 1e9:.1f} GB/s")
        for name, times in all_of.items():
            if name != "copy_":
                low, middle, high = statistics.quantiles([b / t for b, t in zip(base, times, strict=True)])
                print(f"  {name:40} {middle:.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
