"""The traffic of ``overlap``, with and without tiers, on a GPU: steps, copies down and copies up run on CUDA streams.

Layers are kernels that read and write slots. Nobody waits for them while the traffic runs: what they find wrong they
count on the device, and that is read when nothing runs any more. Streams are delayed by kernels that do nothing.

``python -m tests.random.overlap_cuda --steps 10000 --seed 1``, on a machine with a GPU
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence as Many
from typing import Any

import torch
from torch import Tensor

from prefixloom.device.streams import CudaStream, Stream
from tests.random.overlap import WINDOW, Injected, Job, Request, Tiered, Traffic, main

CYCLES = 40_000_000
"""The longest delay of a stream, in cycles of the GPU: about 20 ms, in which several steps are launched behind it. Less
shows nothing: a GPU that waits for its host runs all in order, even where nobody waits for an event."""


def on_device(numbers: Many[Any]) -> Tensor:
    """The numbers, on their way to the GPU behind what the current stream has to do."""
    return torch.tensor(numbers, dtype=torch.int64).pin_memory().to("cuda", non_blocking=True)


class OnGpu(Traffic):
    """Traffic whose device side is work on CUDA streams."""

    device = "cuda"

    def make_streams(self, slow: random.Random, delay: float) -> list[Stream]:
        self.slow = slow
        self.wrong: dict[Request, list[Tensor]] = {}
        """By request, how much was wrong of what its layers read, counted on the GPU; each is kept until it is read."""
        return [CudaStream(torch.cuda.Stream()) for _ in range(2)]  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------ the device's side
    def layers(self, batch: list[Job], tables: dict[str, Any], rows: dict[str, Any], fail: bool) -> None:
        if self.slow.random() < 0.3:
            torch.cuda._sleep(int(CYCLES * self.slow.random()))
        super().layers(batch, tables, rows, fail)

    def checked(self, request: Request, letter: str, parts: list[Any], row: list[int]) -> Any:
        table = torch.cat([part.to(self.device, non_blocking=True).long() for part in parts])
        self.expect(request, table[: len(row)], on_device(row))
        return table

    def expect(self, request: Request, found: Tensor, wanted: Tensor) -> None:
        self.wrong.setdefault(request, []).append((found != wanted).sum())

    def recur(
        self, request: Request, letter: str, hashes: list[int], data: Any, table: Any, start: int, end: int, fail: bool
    ) -> None:
        self.expect(request, data[table[:1], 0].long(), on_device(hashes[start : start + 1]))
        if end == start:
            return
        data[table[:1]] = on_device([[5 if fail else hashes[end]]]).to(data.dtype).expand(1, data.shape[1])
        if end - start < len(table):
            steps = on_device(hashes[start + 1 : end + 1]).to(data.dtype)
            data[table[1 : 1 + end - start]] = steps[:, None].expand(-1, data.shape[1])

    def attend(
        self, request: Request, hashes: list[int], letter: str, data: Any, table: Any, start: int, end: int, fail: bool
    ) -> None:
        page = self.page
        low = max(0, start - WINDOW + 1) if letter == "S" else 0
        if start > low:
            pages = table[low // page : -(-start // page)]
            self.expect(request, pages.clamp(max=0), torch.zeros_like(pages))  # none is absent
            there = data[pages.clamp(min=0), :, 0].reshape(-1)
            first = low // page * page
            self.expect(request, there[low - first : start - first], on_device(hashes[low + 1 : start + 1]))
        stop = (start + end) // 2 if fail else end
        if stop > start:
            at = torch.arange(start, stop, device=self.device)
            data[table[at // page], at % page] = on_device([[h] for h in hashes[start + 1 : stop + 1]])

    # ------------------------------------------------------------ the scheduler's side
    def step(self, batch: list[Request]) -> None:
        """A layer that cannot be launched fails at once, in the block of its step."""
        try:
            super().step(batch)
        except Injected:
            for request in batch:
                if request in self.running:
                    self.end(request, abort=True)

    def alone(self, request: Request) -> None:
        try:
            super().alone(request)
        except Injected:
            self.end(request, abort=True)

    def check(self) -> None:
        for request in self.ended + self.running:
            wrong = sum(each.item() for each in self.wrong.pop(request, ()))
            if wrong:
                request.errors.append(f"{wrong} of what its layers read")
        super().check()


class TieredOnGpu(OnGpu, Tiered):
    """The same over a host tier in pinned memory."""


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU")
    main(OnGpu, TieredOnGpu, both=True)
