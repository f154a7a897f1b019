"""Copying and clearing many slots in one call, against the obvious ways: ``python -m bench.workloads.slot_kernels``.

Each way moves slots of two tensors. The ways take turns. Times are medians of thread CPU time in microseconds, with one
torch thread.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch

from bench.workloads.internals import internal

copy_slots, clear_slots = internal("copy_slots"), internal("clear_slots")
CASES = {  # layers, slots in the pool, elements of a slot and layer (int8), slots to move
    "256 pages of 1 KiB x 4 layers": (4, 1024, 1024, 256),
    "4096 entries of 64 B x 4 layers": (4, 16384, 64, 4096),
    "64 pages of 8 KiB x 1 layer": (1, 256, 8192, 64),
    "64 states of 256 KiB x 2 layers": (2, 160, 262144, 64),
    "1 small slot": (1, 64, 256, 1),
}
Tensors = list[torch.Tensor]
Slots = list[int]


def loop(tensors: Tensors, src: Slots, dst: Slots) -> None:
    for tensor in tensors:
        for s, d in zip(src, dst, strict=True):
            tensor[:, d].copy_(tensor[:, s])


def foreach(tensors: Tensors, src: Slots, dst: Slots) -> None:
    torch._foreach_copy_([t[:, d] for t in tensors for d in dst], [t[:, s] for t in tensors for s in src])


def select(tensors: Tensors, src: Slots, dst: Slots) -> None:
    """This way makes a temporary tensor as large as everything that is moved."""
    at, to = torch.tensor(src), torch.tensor(dst)
    for tensor in tensors:
        tensor.index_copy_(1, to, tensor.index_select(1, at))


def clear_loop(tensors: Tensors, src: Slots, dst: Slots) -> None:
    for tensor in tensors:
        for d in dst:
            tensor[:, d].zero_()


def ours(tensors: Tensors, src: Slots, dst: Slots) -> None:
    copy_slots(tensors, src, dst)


def clear_ours(tensors: Tensors, src: Slots, dst: Slots) -> None:
    clear_slots(tensors, dst)


WAYS: list[Callable[[Tensors, Slots, Slots], None]] = [loop, foreach, select, ours, clear_loop, clear_ours]


def measure(rounds: int = 9) -> dict[str, dict[str, list[float]]]:
    """Microseconds of each way, by case."""
    torch.set_num_threads(1)
    rng = random.Random(1)
    found = {}
    for name, (layers, capacity, size, count) in CASES.items():
        tensors = [torch.zeros((layers, capacity, size), dtype=torch.int8) for _ in range(2)]
        picked = rng.sample(range(capacity), 2 * count)
        times: dict[str, list[float]] = {way.__name__: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                before = time.thread_time()
                way(tensors, picked[:count], picked[count:])
                times[way.__name__].append((time.thread_time() - before) * 1e6)
        found[name] = times
    return found


def main() -> None:
    print(f"{'':34}" + "".join(f"{way.__name__:>12}" for way in WAYS))
    for name, times in measure().items():
        print(f"{name:34}" + "".join(f"{statistics.median(each):12.0f}" for each in times.values()))


if __name__ == "__main__":
    main()
