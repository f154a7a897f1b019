"""The content of one pool as numbers of prefixes, read and written behind the cache's back, byte by byte.

A number is stored as a pattern that differs in every element of every buffer and layer, so that swapped content is
noticed. The pattern is finite in every dtype. Zeros are the number 0. Slots that were freed are overwritten with
``POISON``.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...contract.manifest import Buffer, Manifest

POISON = -7
STRANGE = -8
"""The number that is read where the content is not one that a test wrote."""


SIZES = {"float64": 60, "float32": 60, "bfloat16": 60, "float16": 6}
"""How many times the values of a pattern are doubled or halved at most, so that what clamps content is noticed."""


RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of an element: the dtype as which content is compared, since NaN does not equal itself."""


class PatternBook:
    """The content of an entry for each number, and the number of each content."""

    def __init__(self, buffers: tuple[Buffer, ...]) -> None:
        self._buffers = buffers
        self._known: dict[bytes, int] = {}
        self._parts: dict[int, list[bytes]] = {}
        for number in (0, POISON):
            self.of(number)

    def of(self, number: int) -> list[bytes]:
        """Return what an entry holds for a number, by buffer and layer."""
        known = self._parts.get(number)
        if known is None:
            generator = torch.Generator().manual_seed(number + 1000)
            known = [_some(buffer, number, generator) for buffer in self._buffers for _ in buffer.layers]
            self._parts[number] = known
            self._known.setdefault(b"".join(known), number)
        return known

    def number(self, content: bytes) -> int:
        return self._known.get(content, STRANGE)

    @property
    def size(self) -> int:
        """How many bytes of content it has."""
        return len(self._parts) * sum(map(len, self.of(0)))


class Memory:
    """The slots of one pool.

    ``entries``: how many entries a page has; 1 for states. ``patterns`` may be those of another pool with the same
    buffers.
    """

    def __init__(self, pool: Any, manifest: Manifest, entries: int, patterns: PatternBook | None = None) -> None:
        self._tensors = [pool.buffers[buffer.name] for buffer in manifest.buffers]  # keeps the memory
        self._buffers = manifest.buffers
        self.entries = entries
        self.capacity = int(pool.capacity)
        self._blocks: list[tuple[memoryview, int, int]] = []  # of a layer: its memory, from slot to slot, an entry
        for tensor, buffer in zip(self._tensors, manifest.buffers, strict=True):
            entry = math.prod(buffer.shape) * tensor.element_size()
            pitch = tensor.stride(1) * tensor.element_size()
            size = pitch * (self.capacity - 1) + entry * entries
            for layer in tensor:
                raw = (ctypes.c_ubyte * size).from_address(layer.data_ptr())
                self._blocks.append((memoryview(raw).cast("B"), pitch, entry))
        self._raw = [tensor.view(RAW[tensor.element_size()]) for tensor in self._tensors]
        self._patterns = patterns or PatternBook(manifest.buffers)
        self.free: set[int] = set()
        """The slots that were free at the last ``poison``."""

    def read(self, slot: int, entry: int) -> int:
        """Return the number that one entry of a slot stands for."""
        content = b"".join(
            view[slot * pitch + entry * size : slot * pitch + (entry + 1) * size] for view, pitch, size in self._blocks
        )
        return self._patterns.number(content)

    def write(self, slot: int, entry: int, number: int) -> None:
        for (view, pitch, size), part in zip(self._blocks, self._patterns.of(number), strict=True):
            view[slot * pitch + entry * size : slot * pitch + (entry + 1) * size] = part

    def same(self, number: int, other: int) -> bool:
        """Return whether two numbers have one pattern. In small entries two different numbers can have the same."""
        return number == other or (other != STRANGE and self._patterns.of(number) == self._patterns.of(other))

    def numbers(self, slot: int) -> list[int]:
        """Return the numbers of all entries of a slot."""
        return [self.read(slot, entry) for entry in range(self.entries)]

    def agree(self, found: Sequence[int], wanted: Sequence[int]) -> bool:
        return len(found) == len(wanted) and all(map(self.same, found, wanted))

    def near(self, slot: int, entry: int, number: int, tolerance: float) -> bool:
        """Return whether an entry stands for a number within the error that a codec may introduce.

        Floating-point values may differ by ``tolerance`` times the largest value of their row. Other values must be
        equal.
        """
        blocks = iter(zip(self._blocks, self._patterns.of(number), strict=True))
        for buffer in self._buffers:
            for _ in buffer.layers:
                (view, pitch, size), wanted = next(blocks)
                found = bytes(view[slot * pitch + entry * size : slot * pitch + (entry + 1) * size])
                if found != wanted and not _within(buffer, found, wanted, tolerance):
                    return False
        return True

    def poison(self, free: Iterable[int]) -> None:
        """Overwrite the slots that became free, so that reading them before they are written is noticed."""
        now = set(free)
        for slot in now - self.free:
            for entry in range(self.entries):
                self.write(slot, entry, POISON)
        self.free = now

    def snapshot(self) -> list[torch.Tensor]:
        """Return a copy of the content, to be compared with what it is later."""
        return [tensor.clone() for tensor in self._raw]

    def changed(self, since: list[torch.Tensor], but: Iterable[int] = ()) -> list[int]:
        """Return the slots, except ``but``, whose content differs from a snapshot."""
        found: set[int] = set()
        for now, then in zip(self._raw, since, strict=True):
            if not torch.equal(now, then):
                differs = (now != then).transpose(0, 1).flatten(1).any(1)
                found.update(differs.nonzero().flatten().tolist())
        return sorted(found.difference(but))


class PlainMemory(Memory):
    """The slots of a pool whose entries are one 64-bit number each, which is stored as it is: that is fast."""

    def __init__(self, pool: Any, manifest: Manifest, entries: int) -> None:
        (buffer,) = manifest.buffers
        self._tensor = pool.buffers[buffer.name]  # keeps the memory
        self._flat = (ctypes.c_int64 * self._tensor.numel()).from_address(self._tensor.data_ptr())
        self.entries = entries
        self.free = set()

    def read(self, slot: int, entry: int) -> int:
        return int(self._flat[slot * self.entries + entry])

    def write(self, slot: int, entry: int, number: int) -> None:
        self._flat[slot * self.entries + entry] = number

    def same(self, number: int, other: int) -> bool:
        return number == other

    def numbers(self, slot: int) -> list[int]:
        found: list[int] = self._flat[slot * self.entries : (slot + 1) * self.entries]
        return found

    def agree(self, found: Sequence[int], wanted: Sequence[int]) -> bool:
        return list(found) == list(wanted)


def memory_of(pool: Any, manifest: Manifest, entries: int) -> Memory:
    """Return access to the slots of a pool, the fastest that its buffers allow."""
    first, *others = manifest.buffers
    plain = not others and first.dtype == "int64" and first.shape == () and len(first.layers) == 1
    return (PlainMemory if plain else Memory)(pool, manifest, entries)


def _within(buffer: Buffer, found: bytes, wanted: bytes, tolerance: float) -> bool:
    dtype: torch.dtype = getattr(torch, buffer.dtype)
    if not dtype.is_floating_point or not buffer.shape:
        return False
    there, here = (
        torch.frombuffer(bytearray(data), dtype=dtype).view(buffer.shape).double() for data in (found, wanted)
    )
    return bool(((there - here).abs() <= here.abs().amax(-1, keepdim=True) * tolerance).all())


def _some(buffer: Buffer, number: int, generator: torch.Generator) -> bytes:
    """Return one layer's entry for a number: values that are exact in the dtype, of all sizes that layers may write."""
    dtype: torch.dtype = getattr(torch, buffer.dtype)
    if number == 0:
        return _bytes(torch.zeros(buffer.shape, dtype=dtype))
    wide = dtype in (torch.float32, torch.float64, torch.int32, torch.int64)
    bound = 1 << (22 if wide else 7)
    values = torch.randint(1 - bound, bound, buffer.shape, generator=generator)
    if dtype.is_floating_point:
        size = SIZES.get(buffer.dtype, 0)
        sizes = torch.randint(-size, size + 1, buffer.shape, generator=generator)
        return _bytes(torch.ldexp(values.double() / 64, sizes).to(dtype))
    return _bytes((values % 2 if dtype is torch.bool else values).to(dtype))


def _bytes(tensor: Any) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
