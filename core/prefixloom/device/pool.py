"""Stages of a slot, which debug mode follows: the tree takes only what all of its writers have been enqueued for.

Fences: up to which step something comes after. What runs, and what is in flight, is ``flight``'s to know.

Pool: the slots of one component on one device, and who owns them.

A pool hands out page numbers (state slots for boundary components) and knows the tensors behind them. It knows no tree
and no sequence. A slot has one owner at a time: the free list, a sequence's holding, a node's cell, or a ``Span``.

A slot that is given back while steps run may still be read or written by one of them. It *retires*: it is nobody's and
keeps the number of the newest step of that moment, its fence. When the steps up to its fence are over it is free.
Whoever takes it sooner gets the fence with it, and is ordered after those steps.
"""

from __future__ import annotations

import warnings
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

from ..contract.manifest import Layout, Manifest
from ..errors import CompositionError, InvariantError, ProtocolError
from . import layouts
from .handles import Handle, site


class Stage(IntEnum):
    """A slot's way. A failed step takes it from Writing back to Reserved; a handed-over one is Published for good."""

    FREE = 0
    RESERVED = 1  # somebody's, without content
    WRITING = 2  # a step that is open writes it
    SEALED = 3  # all that writes it has been enqueued: the content is what its owner's tokens say
    PUBLISHED = 4  # the tree's
    RETIRED = 5  # nobody's, and a step in flight may still touch it


BEFORE: dict[Stage, tuple[Stage, ...]] = {
    Stage.RESERVED: (Stage.FREE, Stage.RETIRED, Stage.WRITING),
    Stage.WRITING: (Stage.RESERVED, Stage.WRITING, Stage.SEALED),
    Stage.SEALED: (Stage.RESERVED, Stage.WRITING, Stage.SEALED),
    Stage.PUBLISHED: (Stage.SEALED, Stage.PUBLISHED),
}
"""From which stages a slot may come to each."""


class Fence:
    """``stamp``: the number of the newest step that runs, 0 while none does. ``retiring``: whether slots wait.

    ``claimed``: slots were taken that waited, and their new owner has yet to be told up to which step.
    """

    __slots__ = ("claimed", "retiring", "stamp")

    def __init__(self) -> None:
        self.stamp = self.claimed = 0
        self.retiring = False

    def reused(self, pool: Pool, data: bytes) -> None:
        """Slots go to another owner before the steps that they retired from are over."""


ABSENT = NO_SLOT = -1

ABSENT_BYTES = b"\xff\xff\xff\xff"

ID_BYTES = 4

MOST_PAGES = 2**31 - 1


def present(data: bytes) -> int:
    """How many page numbers of ``data`` are not *absent*; their top bit is clear, so no match is unaligned."""
    return len(data) // ID_BYTES - data.count(ABSENT_BYTES)


WINDOW = 1024
"""So many of the free pages at most are brought in order at a time."""


class Pool:
    """Page-granular slots. ``take`` and ``give`` are the core's; engines read ``buffers``, others use ``mint``.

    ``buffers[name]`` has the shape (layers, capacity, entries of a page, *shape), without the entries for state slots.
    In the layout "page_first" it is a view, contiguous within a slot of a layer only. ``blocks`` are all that slots
    hold, in contiguous tensors (n, capacity, ...): what is done to whole slots is done to those.
    """

    __slots__ = (
        "_free", "_ordered", "_view", "at_hand", "blocks", "buffers", "capacity", "device", "dropped", "entries",
        "fence", "layout", "manifest", "minted", "name", "orderly", "resets", "retired", "retiring", "unit",
    )  # fmt: skip

    def __init__(
        self, name: str, manifest: Manifest, unit: str, capacity: int, entries: int, device: str,
        allocate: bool = True, layout: Layout = "layer_first",
    ) -> None:  # fmt: skip
        self.name = name
        self.manifest = manifest
        self.unit = unit
        self.capacity = capacity
        self.entries = entries
        self.device = device
        self.layout = layout
        if capacity > MOST_PAGES:
            raise CompositionError(f"pool {name!r} would have {capacity} pages, and {MOST_PAGES} are the most")
        self._free = array("i", range(capacity))  # the first ``at_hand`` are free at once; its length never changes
        self._view = memoryview(self._free).cast("B")  # to give back into: of bytes an array would be made first
        self.at_hand = capacity
        self._ordered = 0  # how many were free when ``take`` last saw to their order
        self.orderly = False  # whether pages that lie side by side are to be handed out together
        self.fence = Fence()
        self.retired: deque[tuple[int, bytes]] = deque()  # (fence, slots), the oldest first
        self.retiring = 0
        self.resets = 0
        self.minted = 0  # pages in live spans
        self.dropped: list[Any] | None = None  # where a span that is dropped without being freed goes to be recovered
        self.buffers, self.blocks = self._allocate() if allocate else ({}, [])

    def _allocate(self) -> tuple[dict[str, Any], list[Any]]:
        with warnings.catch_warnings():
            # torch says so once, wherever it is asked first; nothing here needs numpy.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            try:
                return layouts.allocate(self.layout, self.manifest, self.unit, self.capacity, self.entries, self._zeros)
            except (RuntimeError, OverflowError, MemoryError) as error:
                size = layouts.slot_bytes(self.layout, self.manifest, self.entries) * self.capacity
                raise CompositionError(
                    f"pool {self.name!r} of {size / 2**30:.1f} GiB cannot be had on device {self.device!r}. Give it "
                    f"less memory or capacity"
                ) from error

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: str) -> Any:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    @property
    def free(self) -> int:
        """Slots that are nobody's, those included that wait for a step to end."""
        return self.at_hand + self.retiring

    @property
    def slot_bytes(self) -> int:
        """Bytes of one page or state slot."""
        return self.manifest.slot_bytes * self.entries

    def take(self, count: int) -> array[int]:
        """``count`` pages of those that are nobody's; the caller has made sure of them and becomes their owner.

        If ``fence.claimed`` says so afterwards, steps in flight may still touch some of them.
        """
        if count > self.at_hand:
            self._claim(count)
        return self.take_at_hand(count)

    def take_at_hand(self, count: int) -> array[int]:
        """``take`` of pages that are free at once."""
        if self.orderly:
            self._order(count)
        last = self.at_hand
        first = last - count
        self.at_hand = first
        return self._free[first:last]

    def _order(self, count: int) -> None:
        """Without this, what was freed in pieces is handed out in smaller ones, in the end page by page."""
        last = self.at_hand
        if last > self._ordered:
            first = max(0, last - WINDOW)
            self._free[first:last] = array("i", sorted(self._free[first:last]))
        self._ordered = last - count

    def take_one(self) -> int:
        """``take`` of a single slot."""
        if not self.at_hand:
            self._claim(1)
        last = self.at_hand - 1
        self.at_hand = last
        return self._free[last]

    def give(self, data: bytes) -> None:
        """No longer the caller's. ``data`` holds page numbers, none of them absent; the caller owned them."""
        if self.fence.stamp:
            self._retire(data)
        else:
            first = self.at_hand * ID_BYTES
            last = first + len(data)
            self._view[first:last] = data
            self.at_hand = last // ID_BYTES

    def give_slots(self, slots: list[int]) -> None:
        """``give`` of state slots."""
        ids = array("i", slots)
        if self.fence.stamp:
            self._retire(ids.tobytes())
        elif slots:  # what others see into takes no empty slice
            first = self.at_hand
            self.at_hand = last = first + len(slots)
            self._free[first:last] = ids

    def _retire(self, data: bytes) -> None:
        self.retired.append((self.fence.stamp, data))
        self.retiring += len(data) // ID_BYTES
        self.fence.retiring = True

    def settle(self, over: int) -> None:
        """The steps up to number ``over`` have ended: what waited for them is free."""
        retired = self.retired
        while retired and retired[0][0] <= over:
            self._free_again(retired.popleft()[1])

    def _free_again(self, data: bytes) -> None:
        """It does not retire any more."""
        first = self.at_hand * ID_BYTES
        last = first + len(data)
        self._view[first:last] = data
        self.at_hand = last // ID_BYTES
        self.retiring -= len(data) // ID_BYTES

    def _claim(self, count: int) -> None:
        """Make ``count`` slots free at once, as many of those that retire as it takes. Their fence is ``claimed``."""
        while self.at_hand < count and self.retired:
            fence, data = self.retired.popleft()
            size = (count - self.at_hand) * ID_BYTES
            if len(data) > size:
                self.retired.appendleft((fence, data[size:]))
                data = data[:size]
            self._free_again(data)
            self.fence.claimed = max(self.fence.claimed, fence)
            self.fence.reused(self, data)

    def reset(self) -> None:
        """Nothing is owned any more, whoever held it."""
        self._free[:] = array("i", range(self.capacity))
        self.at_hand = self.capacity
        self.retired.clear()
        self.retiring = 0
        if self.fence.stamp:
            self.at_hand = 0
            self._retire(self._free.tobytes())
        self.minted = 0
        self.resets += 1

    def enter(self, slots: Iterable[int], stage: Stage) -> None:
        """These slots come to ``stage``. Kept in debug mode only."""

    def stage_of(self, slot: int) -> Stage:
        """In debug mode."""
        raise NotImplementedError

    def free_ids(self) -> Sequence[int]:
        """The slots that are nobody's."""
        ids = self._free[: self.at_hand]
        for _, data in self.retired:
            ids.frombytes(data)
        return ids

    def mint(self, count: int) -> Span:
        """An owned span of ``count`` pages, for whoever is neither a sequence nor the tree."""
        if count.__class__ is not int or not 0 <= count <= self.at_hand:
            waiting = f", and {self.retiring} that wait for steps to be over (cache.poll() sees to that)"
            raise ProtocolError(
                f"pool {self.name!r} has {self.at_hand} free pages{waiting if self.retiring else ''}; {count} were "
                f"asked for"
            )
        self.minted += count
        return Span(self, self.take(count).tobytes() if count else b"")

    # What follows touches content: it belongs on a stream.
    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Content of ``src`` slots to ``dst`` slots, in every buffer and layer. On the meta device there is none."""
        if self.device != "meta":
            from .kernels import copy_slots

            copy_slots(self.blocks, src, dst)

    def select(self, choices: Sequence[Sequence[int]], selector: Any, dst: Sequence[int]) -> None:
        """Content of slot ``choices[i][selector[i]]`` to slot ``dst[i]``; ``selector`` is a tensor on the device."""
        if self.device != "meta":
            from .kernels import select_slots

            select_slots(self.blocks, choices, selector, dst)

    def clear(self, dst: Sequence[int]) -> None:
        """Zeros in ``dst`` slots, in every buffer and layer."""
        if self.device != "meta":
            from .kernels import clear_slots

            clear_slots(self.blocks, dst)


class DebugPool(Pool):
    """A pool that knows the stage of every slot, and how often it was recycled."""

    __slots__ = ("generation", "stage")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stage = bytearray(self.capacity)
        self.generation = array("q", bytes(8 * self.capacity))

    def enter(self, slots: Iterable[int], stage: Stage) -> None:
        """InvariantError if ``stage`` is not their next."""
        for slot in slots:
            now = Stage(self.stage[slot])
            if now not in BEFORE[stage]:
                raise InvariantError(f"pool {self.name!r}: slot {slot} is {now.name}, and was to become {stage.name}")
            self.stage[slot] = stage

    def stage_of(self, slot: int) -> Stage:
        return Stage(self.stage[slot])

    def take(self, count: int) -> array[int]:
        if not 0 < count <= self.free:
            raise InvariantError(f"pool {self.name!r}: {count} pages taken with {self.free} free")
        return super().take(count)

    def take_at_hand(self, count: int) -> array[int]:
        if not 0 < count <= self.at_hand:
            raise InvariantError(f"pool {self.name!r}: {count} pages taken with {self.at_hand} at hand")
        ids = super().take_at_hand(count)
        for slot in ids:
            if self.stage[slot] not in (Stage.FREE, Stage.RETIRED):
                raise InvariantError(f"pool {self.name!r}: slot {slot} was on the free list while owned")
            self.stage[slot] = Stage.RESERVED
        return ids

    def take_one(self) -> int:
        return self.take(1)[0]

    def _returned(self, slot: int) -> None:
        if not 0 <= slot < self.capacity or self.stage[slot] in (Stage.FREE, Stage.RETIRED):
            raise InvariantError(f"pool {self.name!r}: slot {slot} given back twice, or never handed out")
        self.stage[slot] = Stage.RETIRED if self.fence.stamp else Stage.FREE
        self.generation[slot] += 1

    def give(self, data: bytes) -> None:
        for slot in array("i", data):
            self._returned(slot)
        super().give(data)

    def give_slots(self, slots: list[int]) -> None:
        for slot in slots:
            self._returned(slot)
        super().give_slots(slots)

    def settle(self, over: int) -> None:
        super().settle(over)
        for slot in self._free[: self.at_hand]:
            self.stage[slot] = Stage.FREE

    def reset(self) -> None:
        for slot in range(self.capacity):
            if self.stage[slot] not in (Stage.FREE, Stage.RETIRED):
                self._returned(slot)
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
