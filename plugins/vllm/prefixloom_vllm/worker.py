"""The worker's side: the copies between vLLM's memory and the shared region.

Copies run beside the model: in a thread, and on a CUDA device on a stream of its own as well, which begins behind what
the layers have enqueued. There the memory is page-locked, and all layers of one shape are copied at once. Loads and
stores have a thread each, so that a load does not wait for what is being stored. A thread says in the region's
table that a copy is over once its bytes are there.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from prefixloom import CompositionError, move_slots

from .figures import Figures
from .groups import Group
from .region import Region
from .scheduler import Copy, Plan

log = logging.getLogger("vllm.prefixloom")


class WorkerSide:
    """The connector in a worker's process."""

    def __init__(
        self, groups: Sequence[Group], region: Region, figures: Figures, debug: bool, at_once: bool = False
    ) -> None:
        """``at_once``: a step ends with its stores, since the next one may write to their blocks before ``before``."""
        self.at_once = at_once
        self.groups = {group.index: group for group in groups}
        self.region = region
        self.figures = figures
        self.debug = debug
        self.device: dict[int, list[torch.Tensor]] = {}
        """By group, the memory of each layer, as (1, blocks, bytes)."""
        self.host: dict[int, list[torch.Tensor]] = {}
        """The same in the region, as (1, slots, bytes)."""
        self._loader: Copier | None = None
        self._storer: Copier | None = None
        self._loads: dict[int, Copy] = {}

    # ------------------------------------------------------------ memory
    def register(self, kv_caches: Mapping[str, torch.Tensor], blocks: int) -> None:
        """Take the memory that vLLM has made."""
        rank = self.region.rank
        assert rank is not None
        for group in self.groups.values():
            self.device[group.index] = [
                blocks_of(name, kv_caches[name], blocks, size)[None]
                for name, size in zip(group.layer_names, group.layer_bytes, strict=True)
            ]
            self.host[group.index] = [layer[None] for layer in self.region.layers(group.index, rank)]
        device = next(iter(self.device.values()))[0].device
        if device.type not in ("cpu", "cuda"):
            raise CompositionError(f"vLLM's memory is on {device}: this connector knows CPUs and CUDA devices")
        if device.type == "cuda":
            self.region.page_lock()
        self._loader = Copier("loads", device)
        self._storer = Copier("stores", device)

    # ------------------------------------------------------------ steps
    def before(self, plan: Plan) -> None:
        """Finish, before anything of a step, the copies whose blocks the step writes."""
        if plan.wait_for and self._storer is not None:
            self._storer.wait(plan.wait_for)

    def load(self, plan: Plan) -> None:
        """Begin what the step loads."""
        assert self._loader is not None or not plan.loads
        for copy in plan.loads:
            self._loads[copy.number] = copy
            self._run(self._loader, copy, to_host=False)

    def store(self, plan: Plan) -> None:
        """Begin the stores of a step, whose layers are enqueued."""
        for copy in plan.stores:
            self._run(self._storer, copy, to_host=True)
        if self.at_once and self._storer is not None:
            self._storer.wait([copy.number for copy in plan.stores])

    def loaded(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads are over, and of these the ones whose loads failed."""
        over, failed = set(), set()
        assert self._loader is not None or not self._loads
        for number in [number for number in self._loads if self._loader and self._loader.over(number)]:
            copy = self._loads.pop(number)
            over.add(copy.request)
            if not self.region.mine(number):
                failed.add(copy.request)
        return over, failed

    def _run(self, copier: Copier | None, copy: Copy, to_host: bool) -> None:
        assert copier is not None
        if self.debug:
            self._check(copy)
        copier.run(copy.number, partial(self._copy, copy, to_host), partial(self._over, copy, to_host))

    def _copy(self, copy: Copy, to_host: bool) -> None:
        """Enqueue one copy, on the stream that is current."""
        for index, (blocks, slots) in copy.pairs.items():
            device, host = self.device[index], self.host[index]
            if to_host:
                move_slots(device, blocks, host, slots)
            else:
                move_slots(host, slots, device, blocks)

    def _over(self, copy: Copy, to_host: bool, seconds: float | None) -> None:
        """Count a copy that is over, and tell the scheduler. ``seconds``: how long it took; None: it failed."""
        if seconds is not None:
            size = sum(len(slots) * self.groups[index].bytes for index, (_, slots) in copy.pairs.items())
            kind = "stored" if to_host else "loaded"
            self.figures.add(**{f"{kind}_bytes": size, f"{kind}_seconds": seconds})
        self.region.finish(copy.number, seconds is not None)

    def _check(self, copy: Copy) -> None:
        """Check that a copy names blocks and slots that exist, each once."""
        for index, (blocks, slots) in copy.pairs.items():
            most = self.device[index][0].shape[1], self.host[index][0].shape[1]
            for numbers, end, what in ((blocks, most[0], "blocks"), (slots, most[1], "slots")):
                if len({*numbers}) != len(numbers) or not all(0 <= number < end for number in numbers):
                    raise AssertionError(f"copy {copy.number} of group {index} has {what} {numbers}, of {end}")

    def close(self) -> None:
        """Finish the copies under way."""
        for copier in (self._loader, self._storer):
            if copier is not None:
                copier.close()
        self.device.clear()
        self.host.clear()
        self._loader = self._storer = None


class Copier:
    """A thread that makes copies, in order. On a CUDA device they run on a stream, behind what was enqueued before."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._open: set[int] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"prefixloom {name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread in torch, where Python ends, ends the process by an abort

    def run(self, number: int, work: Callable[[], None], tell: Callable[[float | None], None]) -> None:
        """Make a copy, and tell how many seconds it took, or None if it failed."""
        behind = None
        if self._stream is not None:
            behind = torch.cuda.Event()  # type: ignore[no-untyped-call]
            behind.record(torch.cuda.current_stream(self._device))
        with self._changed:
            self._open.add(number)
        self._queue.put((number, work, tell, behind))

    def _work(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
        while (item := self._queue.get()) is not None:
            number, work, tell, behind = item
            seconds = None
            try:
                seconds = self._timed(work, behind)
            except Exception:
                log.exception("copy %d failed", number)
            try:
                tell(seconds)
            except Exception:
                log.exception("copy %d is over, and that could not be told", number)
            with self._changed:
                self._open.discard(number)
                self._changed.notify_all()

    def _timed(self, work: Callable[[], None], behind: Any) -> float:
        """Do the work to its end, and return the seconds of the work, without the wait for what came before."""
        if self._stream is None:
            start = time.monotonic()
            work()
            return time.monotonic() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._stream.wait_event(behind)
        try:
            with torch.cuda.stream(self._stream):
                begin.record()
                work()
                end.record()
        finally:
            self._stream.synchronize()  # what was enqueued before an error writes, too
        return float(begin.elapsed_time(end)) / 1e3

    def over(self, number: int) -> bool:
        with self._changed:
            return number not in self._open

    def wait(self, numbers: Iterable[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._open.isdisjoint(numbers))

    def close(self) -> None:
        atexit.unregister(self.close)
        self._queue.put(None)
        self._thread.join()


def blocks_of(name: str, cache: torch.Tensor, blocks: int, size: int) -> torch.Tensor:
    """Return a layer's memory as (blocks, bytes), whatever its type and shape."""
    if cache.shape[0] % blocks:
        raise CompositionError(f"layer {name!r} has {cache.shape[0]} blocks, and vLLM said {blocks}")
    one = cache.view(blocks, -1, *cache.shape[1:])[0] if cache.shape[0] != blocks else cache[0]
    width = cache.element_size()
    extent = 1 + sum((length - 1) * stride for length, stride in zip(one.shape, one.stride(), strict=True))
    if extent != one.numel():
        raise CompositionError(
            f"a block of layer {name!r} does not lie in one piece (shape {tuple(one.shape)}, strides {one.stride()}): "
            f"set VLLM_KV_CACHE_LAYOUT to a layout in which it does, such as LBHNC"
        )
    if one.numel() * width != size:
        raise CompositionError(f"a block of layer {name!r} has {one.numel() * width} bytes, and its spec says {size}")
    stride = cache.stride(0) * (cache.shape[0] // blocks) * width
    raw = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return raw.set_(cache.untyped_storage(), cache.storage_offset() * width, (blocks, size), (stride, 1))
