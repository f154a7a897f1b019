"""Host pool: a component's slots in the host's memory, and the bytes of each slot as one record.

Its buffers have the same shapes as those of any pool, in either layout. A record has the same bytes in both layouts,
those of a page-first slot without padding, so what one layout wrote the other can read. A host pool knows no tree, no
store, and not what is copied where.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..contract.manifest import Layout, Manifest
from ..errors import CompositionError, InputError
from .layouts import WHOLE, parts
from .pool import DebugPool, Pool

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Buffer


class HostPool(Pool):
    """A pool in the host's memory. With ``pin``, a CUDA device can copy from and to it without waiting."""

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        unit: str,
        capacity: int,
        entries: int,
        *,
        layout: Layout = "layer_first",
        pin: bool = False,
        allocate: bool = True,
    ) -> None:
        self.pin = pin
        self._bytes: dict[str, memoryview] = {}  # the memory of each allocated tensor, by its name
        super().__init__(name, manifest, unit, capacity, entries, "cpu", allocate, layout)

    # ------------------------------------------------------------ memory

    def _allocate(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        size, free = self.pitch * self.capacity, available()
        if free is not None and size > free:
            raise CompositionError(
                f"pool {self.name!r} of {size / 2**30:.1f} GiB cannot be had {self._where()}, of which "
                f"{free / 2**30:.1f} GiB are free: give it less memory"
            )
        return super()._allocate()

    def _where(self) -> str:
        return "in pinned memory (which takes CUDA, or else pin=False)" if self.pin else "in the host's memory"

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        import torch

        made = torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=self.pin)
        made.view(-1).view(torch.uint8).zero_()
        self._bytes[name] = _bytes_of(made)
        return made

    # ------------------------------------------------------------ records

    def _pieces(self, slot: int) -> Iterator[tuple[memoryview, int, int]]:
        """Yield the pieces of memory that hold a slot: (memory, its offset in the record, its size)."""
        if slot.__class__ is not int or not 0 <= slot < self.capacity:
            raise InputError(f"slot {slot} does not exist: there are {self.capacity} in pool {self.name!r}")
        if self.layout == "page_first":
            yield self._bytes[WHOLE][slot * self.pitch :][: self.slot_bytes], 0, self.slot_bytes
            return
        for buffer, start, size in parts(self.manifest, self.entries):
            whole = self._bytes[buffer.name]
            size //= len(buffer.layers)
            for layer in range(len(buffer.layers)):
                at = (layer * self.capacity + slot) * size
                yield whole[at : at + size], start + layer * size, size

    def read_into(self, slot: int, buffer: Buffer) -> None:
        """Copy the slot's bytes into ``buffer``, which has the size of a record."""
        view = self._record(buffer)
        for piece, start, size in self._pieces(slot):
            view[start : start + size] = piece

    def write_from(self, slot: int, payload: Buffer) -> None:
        """Overwrite the slot with the bytes of a record."""
        view = self._record(payload)
        for piece, start, size in self._pieces(slot):
            piece[:] = view[start : start + size]

    def _record(self, content: Buffer) -> memoryview:
        view = memoryview(content).cast("B")
        if len(view) != self.slot_bytes:
            raise InputError(f"a record of pool {self.name!r} has {self.slot_bytes} bytes, and {len(view)} were given")
        return view


def in_one_piece(source: Pool, target: Pool) -> bool:
    """Return whether slots of both pools have the same bytes in the same order and without gaps."""
    if source.layout != "page_first" or target.layout != "page_first":
        return False
    return (source.unit, source.entries, source.manifest.buffers) == (
        target.unit, target.entries, target.manifest.buffers
    )  # fmt: skip


class DebugHostPool(HostPool, DebugPool):
    """A host pool that knows the stage of every slot, for debug mode."""


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which stays alive as long as any view of the memory."""
    memory = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


# ---------------------------------------------------------------- how much memory the host has


def available(root: str = "/") -> int | None:
    """Return the bytes that can be allocated without making the system kill a process: the least that the machine and
    our control group have left. None if neither is known.
    """
    limits = [*_machine(root), *_control_group(root)]
    return max(0, min(limits)) if limits else None


def _machine(root: str) -> Iterator[int]:
    for line in _lines(os.path.join(root, "proc/meminfo")):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _control_group(root: str) -> Iterator[int]:
    """Yield the bytes left below the control group's limit, counting file caches that the kernel would drop first."""
    folder = os.path.join(root, "sys/fs/cgroup")
    limit, used = (next(_numbers(os.path.join(folder, f"memory.{name}")), None) for name in ("max", "current"))
    if limit is None or used is None:
        return
    cached = [int(line.split()[1]) for line in _lines(f"{folder}/memory.stat") if line.startswith("inactive_file ")]
    yield limit - used + sum(cached)


def _numbers(path: str) -> Iterator[int]:
    return (int(line) for line in _lines(path) if line.strip().isdigit())


def _lines(path: str) -> Iterable[str]:
    try:
        with open(path, encoding="ascii") as file:
            return file.readlines()
    except (OSError, UnicodeDecodeError):
        return ()
