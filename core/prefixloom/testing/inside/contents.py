"""The content of one pool as numbers of prefixes, for the oracle: written by its forward pass and read back.

Where an entry is one 64-bit number, the number is stored as it is, which is fast (``Numbers``). For any other buffers
``Patterns`` uses ``Memory``, where a number is a pattern over all elements. Small entries cannot always tell two
patterns apart.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

from ...contract.manifest import Manifest
from .memory import POISON, Memory


class Contents(Protocol):
    """What the oracle needs of the slots of one pool. ``free``: the slots that were free at the last ``poison``."""

    free: set[int]

    def read(self, slot: int) -> list[int]: ...

    def write(self, slot: int, entry: int, value: int) -> None: ...

    def poison(self, free: set[int]) -> None:
        """Overwrite the slots that became free, so that reading them before they are written is noticed."""

    def same(self, found: Sequence[int], wanted: Sequence[int]) -> bool: ...


class Numbers:
    """The slots of a pool with a single buffer of one 64-bit number per entry."""

    def __init__(self, tensor: Any, entries: int) -> None:
        self.tensor = tensor  # keeps the memory
        self.entries = entries
        self.flat = (ctypes.c_int64 * tensor.numel()).from_address(tensor.data_ptr())
        self.free: set[int] = set()

    def read(self, slot: int) -> list[int]:
        found: list[int] = self.flat[slot * self.entries : (slot + 1) * self.entries]
        return found

    def write(self, slot: int, entry: int, value: int) -> None:
        self.flat[slot * self.entries + entry] = value

    def poison(self, free: set[int]) -> None:
        for slot in free - self.free:
            for entry in range(self.entries):
                self.flat[slot * self.entries + entry] = POISON
        self.free = free

    def same(self, found: Sequence[int], wanted: Sequence[int]) -> bool:
        return list(found) == list(wanted)


class Patterns:
    """The slots of a pool with any buffers."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.free: set[int] = set()

    def read(self, slot: int) -> list[int]:
        return [self.memory.read(slot, entry) for entry in range(self.memory.entries)]

    def write(self, slot: int, entry: int, value: int) -> None:
        self.memory.write(slot, entry, value)

    def poison(self, free: set[int]) -> None:
        self.memory.poison(free)
        self.free = free

    def same(self, found: Sequence[int], wanted: Sequence[int]) -> bool:
        return len(found) == len(wanted) and all(map(self.memory.same, found, wanted))


def contents_of(pool: Any, manifest: Manifest, entries: int) -> Contents:
    """Return access to the slots of a pool. ``entries``: how many entries a page has; 1 for states."""
    (first, *others) = manifest.buffers
    if not others and first.dtype == "int64" and first.shape == () and len(first.layers) == 1:
        return Numbers(pool.buffers[first.name], entries)
    return Patterns(Memory(pool, manifest, entries))
