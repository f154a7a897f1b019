"""Pool: the slots of one component on one device, and who owns them.

A pool hands out page numbers (state slots for boundary components) and knows the tensors behind them. It knows no tree
and no sequence. A slot has one owner at a time: the free list, a sequence's holding, a node's cell, or a ``Span``.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence
from typing import Any

from .errors import CompositionError, InvariantError, ProtocolError
from .handles import Handle
from .manifest import Manifest
from .where import site

ABSENT = -1
ABSENT_BYTES = b"\xff\xff\xff\xff"
ID_BYTES = 4
MOST_PAGES = 2**31 - 1


def present(data: bytes) -> int:
    """How many page numbers of ``data`` are not *absent*; their top bit is clear, so no match is unaligned."""
    return len(data) // ID_BYTES - data.count(ABSENT_BYTES)


class Pool:
    """Page-granular slots. ``take`` and ``give`` are the core's; engines read ``buffers``, others use ``mint``.

    ``buffers[name]`` has the shape (layers, capacity, entries of a page, *shape), without the entries for state slots.
    """

    __slots__ = (
        "_free",
        "buffers",
        "capacity",
        "device",
        "dropped",
        "entries",
        "manifest",
        "minted",
        "name",
        "resets",
        "unit",
    )

    def __init__(
        self, name: str, manifest: Manifest, unit: str, capacity: int, entries: int, device: str, allocate: bool = True
    ) -> None:
        self.name = name
        self.manifest = manifest
        self.unit = unit
        self.capacity = capacity
        self.entries = entries
        self.device = device
        if capacity > MOST_PAGES:
            raise CompositionError(f"pool {name!r} would have {capacity} pages, and {MOST_PAGES} are the most")
        self._free = array("i", range(capacity))
        self.resets = 0
        self.minted = 0  # pages in live spans
        self.dropped: list[Any] | None = None  # where a span that is dropped without being freed goes to be recovered
        self.buffers: dict[str, Any] = self._allocate() if allocate else {}

    def _allocate(self) -> dict[str, Any]:
        with warnings.catch_warnings():
            # torch says so once, wherever it is asked first; nothing here needs numpy.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            import torch

            middle = () if self.unit == "boundary" else (self.entries,)
            try:
                return {
                    b.name: torch.zeros(
                        (len(b.layers), self.capacity, *middle, *b.shape),
                        dtype=getattr(torch, b.dtype),
                        device=self.device,
                    )
                    for b in self.manifest.buffers
                }
            except (RuntimeError, OverflowError, MemoryError) as error:
                size = self.slot_bytes * self.capacity
                raise CompositionError(
                    f"pool {self.name!r} of {size / 2**30:.1f} GiB cannot be had on device {self.device!r}. Give it "
                    f"less memory or capacity"
                ) from error

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one page or state slot."""
        return self.manifest.slot_bytes * self.entries

    def take(self, count: int) -> array[int]:
        """``count`` pages off the free list; the caller has made sure that they are there and becomes their owner."""
        free = self._free
        ids = free[-count:]
        del free[-count:]
        return ids

    def take_one(self) -> int:
        """``take`` of a single slot."""
        return self._free.pop()

    def give(self, data: bytes) -> None:
        """Back to the free list. ``data`` holds page numbers, none of them absent; the caller owned them."""
        self._free.frombytes(data)

    def give_one(self, slot: int) -> None:
        self._free.append(slot)

    def reset(self) -> None:
        """Everything is free again, whoever held it."""
        self._free = array("i", range(self.capacity))
        self.minted = 0
        self.resets += 1

    def free_ids(self) -> Sequence[int]:
        return self._free

    def mint(self, count: int) -> Span:
        """An owned span of ``count`` pages, for whoever is neither a sequence nor the tree."""
        if count.__class__ is not int or not 0 <= count <= len(self._free):
            raise ProtocolError(f"pool {self.name!r} has {len(self._free)} free pages; {count} were asked for")
        self.minted += count
        return Span(self, self.take(count).tobytes() if count else b"")

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Content of ``src`` slots to ``dst`` slots, in every buffer and layer. On the meta device there is none."""
        if self.device == "meta":
            return
        for tensor in self.buffers.values():
            for s, d in zip(src, dst, strict=True):
                tensor[:, d].copy_(tensor[:, s])

    def clear(self, dst: Sequence[int]) -> None:
        """Zeros in ``dst`` slots, in every buffer and layer."""
        if self.device == "meta":
            return
        for tensor in self.buffers.values():
            for d in dst:
                tensor[:, d].zero_()


class DebugPool(Pool):
    """A pool that remembers of every slot whether it is free, and how often it was recycled."""

    __slots__ = ("generation", "used")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.used = bytearray(self.capacity)
        self.generation = array("q", bytes(8 * self.capacity))

    def take(self, count: int) -> array[int]:
        if not 0 < count <= len(self._free):
            raise InvariantError(f"pool {self.name!r}: {count} pages taken with {len(self._free)} free")
        ids = super().take(count)
        for slot in ids:
            if self.used[slot]:
                raise InvariantError(f"pool {self.name!r}: slot {slot} was on the free list while owned")
            self.used[slot] = 1
        return ids

    def take_one(self) -> int:
        return self.take(1)[0]

    def _returned(self, slot: int) -> None:
        if not 0 <= slot < self.capacity or not self.used[slot]:
            raise InvariantError(f"pool {self.name!r}: slot {slot} given back twice, or never handed out")
        self.used[slot] = 0
        self.generation[slot] += 1

    def give(self, data: bytes) -> None:
        for slot in array("i", data):
            self._returned(slot)
        super().give(data)

    def give_one(self, slot: int) -> None:
        self._returned(slot)
        super().give_one(slot)

    def reset(self) -> None:
        for slot in range(self.capacity):
            self.generation[slot] += self.used[slot]
            self.used[slot] = 0
        super().reset()


class Span(Handle):
    """An owned run of pages that moves: after ``move``, ``split`` or ``free`` the old handle is poisoned."""

    __slots__ = ("_data", "_generations", "_resets", "_where", "pool")

    def __init__(self, pool: Pool, data: bytes) -> None:
        self.pool = pool
        self._data: bytes | None = data
        self._resets = pool.resets
        self._generations = self._now()
        self._where = site() if isinstance(pool, DebugPool) else None

    def _now(self) -> tuple[int, ...]:
        if not isinstance(self.pool, DebugPool):
            return ()
        return tuple(self.pool.generation[slot] for slot in array("i", self._data or b""))

    def _own(self) -> bytes:
        data = self._data
        if data is None:
            raise ProtocolError(f"a span of pool {self.pool.name!r} was used after it moved or was freed")
        if self._resets != self.pool.resets:
            raise ProtocolError(f"a span of pool {self.pool.name!r} was minted before the cache was flushed")
        if self._generations != self._now():
            raise InvariantError(f"a span of pool {self.pool.name!r} outlived its slots: they were recycled")
        return data

    def __len__(self) -> int:
        return len(self._own()) // ID_BYTES

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(array("i", self._own()))

    @property
    def alive(self) -> bool:
        return self._data is not None

    def move(self) -> Span:
        """The same pages under a new handle; this one is poisoned."""
        moved = Span(self.pool, self._own())
        self._data = None
        return moved

    def split(self, count: int) -> tuple[Span, Span]:
        """The first ``count`` pages and the rest, each under its own handle; this one is poisoned."""
        data = self._own()
        if count.__class__ is not int or not 0 <= count <= len(data) // ID_BYTES:
            raise ProtocolError(f"a span of {len(data) // ID_BYTES} pages cannot be split at {count}")
        self._data = None
        return Span(self.pool, data[: count * ID_BYTES]), Span(self.pool, data[count * ID_BYTES :])

    def free(self) -> None:
        """Back to the pool that minted it; this handle is poisoned."""
        data = self._own()
        self._data = None
        self.pool.minted -= len(data) // ID_BYTES
        self.pool.give(data)

    def __del__(self) -> None:
        if self._data and self._resets == self.pool.resets and self.pool.dropped is not None:
            self.pool.dropped.append(self)

    def __repr__(self) -> str:
        return f"<Span of {self.pool.name}: {len(self._data or b'') // ID_BYTES} pages>"
