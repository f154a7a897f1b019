"""Pages between a pool and a host pool on a CPU, against ``copy_`` of as many bytes in one piece.

Pages of 16 tokens x 32 layers x 1 KiB: ``python bench/host_tier.py``. Every figure is a share of ``copy_``'s speed,
both measured in the same run in turn; the median, and in brackets the quartiles. One torch thread. "rows" is what a
loop in C reaches (``index_select``) that copies the pieces of the scattered slots, 16 KiB each, into one piece.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

from prefixloom import Buffer, Manifest
from prefixloom.pool import Pool
from prefixloom.pool_host import LAYOUTS, HostPool
from prefixloom.slots import DeviceSlots, HostSlots, move_between

LAYERS, TOKENS, ENTRY = 32, 16, 1024
PAGES, CAPACITY = 64, 256
MANIFEST = Manifest([Buffer("kv", (ENTRY // 2,), "bfloat16", layers=tuple(range(LAYERS)))])


def ways(slots: dict[str, tuple[list[int], list[int]]]) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each moves the same bytes."""
    device = Pool("kv", MANIFEST, "page", CAPACITY, TOKENS, "cpu")
    whole = torch.ones(2, PAGES * device.slot_bytes, dtype=torch.uint8)
    found: dict[str, Callable[[], object]] = {"copy_": lambda: whole[0].copy_(whole[1])}
    kv = device.buffers["kv"].view(torch.uint8)
    kv.fill_(1)
    rows = kv.view(LAYERS * CAPACITY, -1)
    taken = torch.tensor([layer * CAPACITY + slot for slot in slots["scattered"][0] for layer in range(LAYERS)])
    found["rows, scattered"] = lambda: torch.index_select(rows, 0, taken, out=whole[0].view(len(taken), -1))
    for layout in LAYOUTS:
        host = HostPool("kv", MANIFEST, "page", CAPACITY, TOKENS, layout=layout)
        host.buffers["kv"].view(torch.uint8).fill_(2)
        for kind, (here, there) in slots.items():
            near, far = DeviceSlots(device, here), HostSlots(host, there)
            found[f"{layout}, {kind}: to the host"] = lambda n=near, f=far: move_between(n, f)  # type: ignore[misc]
            found[f"{layout}, {kind}: back"] = lambda n=near, f=far: move_between(f, n)  # type: ignore[misc]
    return found


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each way, by clock."""
    torch.set_num_threads(1)
    rng = random.Random(1)
    slots = {
        "scattered": (rng.sample(range(CAPACITY), PAGES), rng.sample(range(CAPACITY), PAGES)),
        "in runs of 8": tuple(
            [run * 8 + k for run in rng.sample(range(CAPACITY // 8), PAGES // 8) for k in range(8)] for _ in range(2)
        ),
    }
    timed = ways(slots)  # type: ignore[arg-type]
    clocks = {"thread CPU time": time.thread_time, "wall": time.perf_counter}
    spent: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in timed} for clock in clocks}
    for _ in range(rounds):
        for name, way in timed.items():
            begun = [clock() for clock in clocks.values()]
            way()
            for (clock, read), start in zip(clocks.items(), begun, strict=True):
                spent[clock][name].append(read() - start)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    spent = measure(parser.parse_args().rounds)
    size = PAGES * LAYERS * TOKENS * ENTRY
    for clock, all_of in spent.items():
        base = all_of["copy_"]
        print(f"{clock}: copy_ of {size >> 20} MiB {size / statistics.median(base) / 1e9:.1f} GB/s")
        for name, times in all_of.items():
            if name != "copy_":
                low, middle, high = statistics.quantiles([b / t for b, t in zip(base, times, strict=True)])
                print(f"  {name:40} {middle:.2f} ({low:.2f}-{high:.2f})")


if __name__ == "__main__":
    main()
