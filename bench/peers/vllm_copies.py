"""The copies of vLLM's connector on a GPU: how fast they are, and what they cost a model that computes meanwhile.

The worker's side of the connector stores blocks to the host and loads them again, without vLLM. Beside it stands a copy
for each block and layer by torch, from pageable and from page-locked memory of the host. The model is a stand-in that
multiplies matrices on its own stream. It needs a machine with a GPU.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from bench.runner.figures import Rows
from prefixloom_vllm.figures import Figures
from prefixloom_vllm.groups import groups_of
from prefixloom_vllm.region import Region
from prefixloom_vllm.scheduler import Copy, Plan
from prefixloom_vllm.worker import WorkerSide
from tests.support.vllm_specs import config, spec

SHAPES = {
    "32 layers of 64 KiB": (32, 64 << 10),
    "48 layers of 16 KiB": (48, 16 << 10),
    "24 layers of 3 KiB": (24, 3 << 10),
}
"""Layers of a group, and the bytes of a block in one layer."""
BYTES = 256 << 20
"""How much one copy moves."""
SIZE = 4096
"""Rows of the matrices that the stand-in for a model multiplies."""


class CopyingWorker:
    """A worker of the connector with one group, on a GPU."""

    def __init__(self, folder: Path, layers: int, size: int) -> None:
        one = spec("FullAttentionSpec", unpadded_page_size_bytes=size)
        made = config(one)
        made.kv_cache_groups[0].layer_names = [f"{number}" for number in range(layers)]
        groups = groups_of(made)
        self.blocks = BYTES // (layers * size)
        self.region = Region(str(folder), "bench", groups, self.blocks, 1, 0)
        self.worker = WorkerSide(groups, self.region, Figures(), False)
        memory = {
            name: torch.zeros((2 * self.blocks, size), dtype=torch.uint8, device="cuda")
            for name in groups[0].layer_names
        }
        self.worker.register(memory, 2 * self.blocks)
        numbers = random.Random(1)
        self.pairs = (
            numbers.sample(range(2 * self.blocks), self.blocks),
            numbers.sample(range(self.blocks), self.blocks),
        )
        self.number = 0

    def copy(self, to_host: bool) -> None:
        """Copy as a step of vLLM does, to the end of the copy."""
        self.number += 1
        copy = Copy(self.number, "r", {0: self.pairs})
        if to_host:
            self.worker.store(Plan(stores=(copy,)))
            self.worker.before(Plan(wait_for=(self.number,)))
        else:
            self.worker.load(Plan(loads=(copy,)))
            while not self.worker.loaded()[0]:
                time.sleep(1e-4)
        if not self.region.mine(self.number):
            raise RuntimeError("the copy failed")

    def one_by_one(self, to_host: bool) -> None:
        """Copy the same blocks by a call for each block and layer."""
        for device, host in zip(self.worker.device[0], self.worker.host[0], strict=True):
            for block, slot in zip(*self.pairs, strict=True):
                one, other = (host[0, slot], device[0, block]) if to_host else (device[0, block], host[0, slot])
                one.copy_(other, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self.worker.close()
        self.region.close()


def median(call: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Return the seconds of a call, and the seconds of the process's time."""
    call()
    found = []
    for _ in range(rounds):
        start, spent = time.perf_counter(), time.process_time()
        call()
        found.append((time.perf_counter() - start, time.process_time() - spent))
    return statistics.median(each[0] for each in found), statistics.median(each[1] for each in found)


class Products:
    """Multiplies matrices, as long as it is told to."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.one = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.one)

    def seconds(self, times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            begin.record()
            for _ in range(times):
                torch.mm(self.one, self.one, out=self.out)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def slowed(side: CopyingWorker, model: Products, to_host: bool) -> float:
    """Return how many times longer the model takes while copies run one after the other."""
    alone = statistics.median(model.seconds(200) for _ in range(5))
    ended = threading.Event()

    def copies() -> None:
        while not ended.is_set():
            side.copy(to_host)

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(copies)
        time.sleep(0.02)
        beside = statistics.median(model.seconds(200) for _ in range(5))
        ended.set()
        running.result()
    return beside / alone


def measure(name: str, folder: Path, times: int) -> Rows:
    side, model = CopyingWorker(folder, *SHAPES[name]), Products()
    torch.cuda.synchronize()
    found: Rows = {}

    def row(what: str, to_host: bool, call: Callable[[], None]) -> None:
        took, spent = median(call, times)
        called = f"{name}, {'store' if to_host else 'load'}, {what}"
        found[f"{called}, GB/s"] = [BYTES / took / 1e9]
        found[f"{called}, ms of the process"] = [spent * 1e3]

    for to_host in (True, False):
        side.copy(to_host)
        found[f"{name}, {'store' if to_host else 'load'}, the model takes, times"] = [slowed(side, model, to_host)]
        row("connector", to_host, partial(side.copy, to_host))
        row("a call for each, page-locked", to_host, partial(side.one_by_one, to_host))
    side.region.page_unlock()
    for to_host in (True, False):
        row("a call for each, pageable", to_host, partial(side.one_by_one, to_host))
    side.close()
    return found


def vllm_copies(times: int = 9) -> Rows:
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    found: Rows = {}
    for name in SHAPES:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            found |= measure(name, Path(folder), times)
    return found
