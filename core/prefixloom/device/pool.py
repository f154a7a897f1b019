"""Pool: the slots of one component on one device, and who owns them.

A pool hands out page numbers (state slots for boundary components) and knows the tensors behind them. It knows no tree
and no sequence, and not what is in flight (``flight``). A slot has one owner at a time: the free list, a sequence's
holding, a node's cell, or a ``PageSpan``.

A slot that is given back while steps run may still be read or written by one of them. It *retires*: it has no owner,
and keeps the number of the newest step of that moment, its fence. When the steps up to its fence are over, it is free.
An owner that takes it sooner gets the fence with it, and is ordered after those steps.

The slots of a pool may be *lent*: they belong to an engine that hands them out itself. Each is outside of the pool
until the engine hands it in (``receive``), and again once the engine has it back (``hand_back``).

In debug mode a pool also follows the *stage* of each slot: the tree takes a slot only when all work that writes it has
been enqueued.
"""

from __future__ import annotations

import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import compress, repeat
from typing import TYPE_CHECKING, Any

from ..contract.manifest import Layout, Manifest
from ..errors import CompositionError, InvariantError, ProtocolError
from . import layouts
from .handles import Dropped, Handle, call_site, dropped_without_release
from .kernels import clear_slots, copy_slots, select_slots

if TYPE_CHECKING:
    from torch import Tensor


# ---------------------------------------------------------------- stages


class Stage(IntEnum):
    """The stages of a slot's life. A failed step takes a slot from WRITING back to RESERVED."""

    FREE = 0  # it has no owner; a step in flight may still touch it
    RESERVED = 1  # it has an owner, but no content
    WRITING = 2  # an open step writes it
    SEALED = 3  # all work that writes it has been enqueued: its content belongs to its owner's tokens
    PUBLISHED = 4  # the tree owns it


BEFORE: dict[Stage, tuple[Stage, ...]] = {
    Stage.RESERVED: (Stage.FREE, Stage.WRITING),
    Stage.WRITING: (Stage.RESERVED, Stage.WRITING, Stage.SEALED),
    Stage.SEALED: (Stage.RESERVED, Stage.WRITING, Stage.SEALED),
    Stage.PUBLISHED: (Stage.SEALED, Stage.PUBLISHED),
}
"""The stages from which a slot may enter each stage."""

# ---------------------------------------------------------------- fences


class Fence:
    """The order between a pool's slots and the steps that run.

    ``stamp``        the number of the newest step that runs; 0: none runs
    ``retiring``     whether slots wait for steps to be over
    ``taken_early``  the newest step that may still touch slots which were taken before it was over; their new owner has
                     to be ordered after it. 0: there are no such slots
    ``on_reuse``     called with a pool and slots that go to a new owner before the work that may touch them is over
    """

    __slots__ = ("on_reuse", "retiring", "stamp", "taken_early")

    def __init__(self) -> None:
        self.stamp = self.taken_early = 0
        self.retiring = False
        self.on_reuse: Callable[[Pool, bytes], None] = ignore


def ignore(*_: object) -> None:
    """Do nothing: the default of callbacks."""


# ---------------------------------------------------------------- page numbers

ABSENT = NO_SLOT = -1

ABSENT_BYTES = b"\xff\xff\xff\xff"

ID_BYTES = 4

MOST_PAGES = 2**31 - 1


def present(data: bytes) -> int:
    """Return how many page numbers in ``data`` are not *absent*."""
    # The top bit of a page number is clear, so the bytes of an absent one are found at aligned places only.
    return len(data) // ID_BYTES - data.count(ABSENT_BYTES)


def bounds(slots: array[int]) -> tuple[int, int]:
    """Return the smallest and the largest of some slots."""
    import torch

    least, most = torch.frombuffer(slots, dtype=torch.int32).aminmax()
    return int(least), int(most)


# ---------------------------------------------------------------- pools

WINDOW = 1024
"""The most free pages that are sorted at a time."""


class Pool:
    """The page or state slots of one component. ``take`` and ``give`` are for the core; engines read ``buffers``; all
    others get slots with ``mint``.

    ``buffers[name]`` has the shape (layers, capacity, entries of a page, *shape), without the entries for state slots.
    In the layout "page_first" it is a view, in which only one slot of one layer is contiguous. Where somebody else has
    the memory, it may be a tuple with a tensor for each layer. ``blocks`` are contiguous tensors (n, capacity, ...)
    with the content of all slots, for work on whole slots.
    """

    __slots__ = (
        "_free", "_inside", "_ordered", "_view", "at_hand", "blocks", "buffers", "capacity", "device",
        "dropped", "entries", "fence", "layout", "manifest", "minted", "name", "orderly", "outside", "resets",
        "retired", "retiring", "unit",
    )  # fmt: skip

    def __init__(
        self, name: str, manifest: Manifest, unit: str, capacity: int, entries: int, device: str,
        allocate: bool = True, layout: Layout = "layer_first", lent: bool = False, tensors: Any = None,
    ) -> None:  # fmt: skip
        """Make a pool. ``lent``: an engine hands out the slots. ``tensors``: memory of another owner, by buffer."""
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
        self._view = memoryview(self._free).cast("B")  # writes given bytes without making an array first
        self.at_hand = 0 if lent else capacity
        self.outside = capacity - self.at_hand
        """The number of slots that the engine has which lends them."""
        self._inside = bytearray(capacity) if lent else None  # by slot, 1: it is in the pool. None: all are, for good
        self._ordered = 0  # how many were free when they were last sorted
        self.orderly = False  # whether neighbouring pages are handed out together
        self.fence = Fence()
        self.retired: deque[tuple[int, bytes]] = deque()  # (fence, slots), the oldest first
        self.retiring = 0
        self.resets = 0
        self.minted = 0  # pages in live spans
        self.dropped: Dropped | None = None  # takes back spans that are dropped without being freed
        self.buffers: dict[str, Any]
        self.blocks: list[Tensor]
        if tensors is not None:
            self.buffers, self.blocks = layouts.from_tensors(manifest, unit, capacity, entries, device, tensors)
        else:
            self.buffers, self.blocks = self._allocate() if allocate else ({}, [])

    def _allocate(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return buffers and blocks of new memory."""
        with warnings.catch_warnings():
            # torch warns once about missing numpy, at its first use; nothing here needs numpy.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            try:
                return layouts.allocate(self.layout, self.manifest, self.unit, self.capacity, self.entries, self._zeros)
            except (RuntimeError, OverflowError, MemoryError) as error:
                size = self.pitch * self.capacity / 2**30
                raise CompositionError(
                    f"pool {self.name!r} of {size:.1f} GiB cannot be had {self._where()}: give it less memory"
                ) from error

    def _where(self) -> str:
        """Say where the memory lies, for an error."""
        return f"on device {self.device!r}"

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    @property
    def free(self) -> int:
        """The number of slots without an owner, including those that wait for a step to end."""
        return self.at_hand + self.retiring

    @property
    def slot_bytes(self) -> int:
        """Bytes of one page or state slot."""
        return self.manifest.slot_bytes * self.entries

    @property
    def pitch(self) -> int:
        """Bytes of memory from the start of a slot to the start of the next."""
        return layouts.slot_bytes(self.layout, self.manifest, self.entries)

    def take(self, count: int) -> array[int]:
        """Take ``count`` free pages. The caller has checked that there are enough, and becomes their owner.

        If ``fence.taken_early`` is set afterwards, steps in flight may still touch some of them.
        """
        if count > self.at_hand:
            self._free_early(count)
        if self.orderly:
            self._order(count)
        last = self.at_hand
        first = last - count
        self.at_hand = first
        return self._free[first:last]

    def _order(self, count: int) -> None:
        """Sort the free pages that come next. Otherwise runs of pages would break into ever smaller ones."""
        last = self.at_hand
        if last > self._ordered:
            first = max(0, last - WINDOW)
            self._free[first:last] = array("i", sorted(self._free[first:last]))
        self._ordered = last - count

    def take_one(self) -> int:
        """``take`` a single slot."""
        if not self.at_hand:
            self._free_early(1)
        last = self.at_hand - 1
        self.at_hand = last
        return self._free[last]

    def give(self, data: bytes) -> None:
        """Give back pages that the caller owns. ``data`` holds their numbers, none of them absent."""
        if self.fence.stamp:
            self.retired.append((self.fence.stamp, data))
            self.retiring += len(data) // ID_BYTES
            self.fence.retiring = True
        else:
            self._add_free(data)

    def give_slots(self, slots: Iterable[int]) -> None:
        """``give`` back slots by their numbers."""
        self.give(array("i", slots).tobytes())

    def _add_free(self, data: bytes) -> None:
        first = self.at_hand * ID_BYTES
        last = first + len(data)
        self._view[first:last] = data
        self.at_hand = last // ID_BYTES

    def settle(self, over: int) -> None:
        """Free the slots that waited for steps up to number ``over``, which have ended."""
        retired = self.retired
        while retired and retired[0][0] <= over:
            self._free_again(retired.popleft()[1])

    def _free_again(self, data: bytes) -> None:
        """Move retired slots to the free list."""
        self._add_free(data)
        self.retiring -= len(data) // ID_BYTES

    def _free_early(self, count: int) -> None:
        """Free as many retired slots early as are missing to ``count``; note their fence in ``fence.taken_early``."""
        while self.at_hand < count and self.retired:
            fence, data = self.retired.popleft()
            size = (count - self.at_hand) * ID_BYTES
            if len(data) > size:
                self.retired.appendleft((fence, data[size:]))
                data = data[:size]
            self._free_again(data)
            self.fence.taken_early = max(self.fence.taken_early, fence)
            self.fence.on_reuse(self, data)

    # ---------------------------------------------------------------- lent slots
    def has(self, slot: int) -> bool:
        """Return whether a slot is in the pool, and not with the engine that lends slots."""
        return self._inside is None or bool(self._inside[slot])

    def may_come(self, slots: array[int]) -> bool:
        """Return whether all ``slots`` are outside, and none of them is named twice."""
        inside = self._inside
        if inside is None:
            return not slots
        return not any(map(inside.__getitem__, slots)) and len({*slots}) == len(slots)

    def receive(self, slots: array[int]) -> None:
        """Take in slots that the engine had. The caller has checked that they were outside, and becomes their owner."""
        self._mark(slots, 1)

    def _mark(self, slots: array[int], here: int) -> None:
        inside = self._inside
        assert inside is not None
        for slot in slots:
            inside[slot] = here
        self.outside += len(slots) if not here else -len(slots)

    def lend(self, slots: array[int]) -> None:
        """Take in slots without content, and free them at once, because no step of ours has seen them."""
        self.receive(slots)
        self._add_free(slots.tobytes())

    def given_since(self, at_hand: int) -> set[int]:
        """Return the slots freed since ``at_hand`` were free, if none was taken meanwhile, and all retired slots."""
        return {*self.free_ids()[at_hand:]}

    def hand_back(self) -> array[int]:
        """Give the engine the slots that nobody owns and no step may touch any more."""
        slots = self._free[: self.at_hand]
        self.at_hand = 0
        self._mark(slots, 0)
        return slots

    def reset(self) -> None:
        """Take all slots in the pool from their owners, whoever they are."""
        everything = array("i", compress(range(self.capacity), self._inside or repeat(1)))
        self.at_hand = self.retiring = self.minted = 0
        self.outside = self.capacity - len(everything)
        self.retired.clear()
        Pool.give(self, everything.tobytes())
        self.resets += 1

    def enter(self, slots: Iterable[int], stage: Stage) -> None:
        """Move slots to ``stage``. It has an effect in debug mode only."""

    def stage_of(self, slot: int) -> Stage:
        """Return the stage of a slot, which is known in debug mode only."""
        raise NotImplementedError

    def free_ids(self) -> Sequence[int]:
        """Return the slots without an owner."""
        ids = self._free[: self.at_hand]
        for _, data in self.retired:
            ids.frombytes(data)
        return ids

    def mint(self, count: int) -> PageSpan:
        """Take ``count`` pages as a span, for owners other than sequences and the tree."""
        if count.__class__ is not int or not 0 <= count <= self.at_hand:
            waiting = f", and {self.retiring} that wait for steps to be over (call cache.poll())"
            raise ProtocolError(
                f"pool {self.name!r} has {self.at_hand} free pages{waiting if self.retiring else ''}; {count} were "
                f"asked for"
            )
        self.minted += count
        return PageSpan(self, self.take(count).tobytes() if count else b"")

    # These touch the content of slots, so they are to be run on a stream. On the meta device there is no content.
    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy the content of ``src`` slots to ``dst`` slots, in every buffer and layer."""
        copy_slots(self.blocks, src, dst)

    def select(self, choices: Sequence[Sequence[int]], selector: Tensor, dst: Sequence[int]) -> None:
        """Copy the content of slot ``choices[i][selector[i]]`` to slot ``dst[i]``; ``selector`` is on the device."""
        select_slots(self.blocks, choices, selector, dst)

    def clear(self, dst: Sequence[int]) -> None:
        """Fill ``dst`` slots with zeros, in every buffer and layer."""
        clear_slots(self.blocks, dst)


class DebugPool(Pool):
    """A pool that knows the stage of every slot, for debug mode."""

    __slots__ = ("stage",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stage = bytearray(self.capacity)

    def enter(self, slots: Iterable[int], stage: Stage) -> None:
        """Move slots to ``stage``; raise ``InvariantError`` if one may not enter it from its stage."""
        before, stages = BEFORE[stage], self.stage
        for slot in slots:
            if stages[slot] not in before:
                now = Stage(stages[slot])
                raise InvariantError(f"pool {self.name!r}: slot {slot} is {now.name}, and was to become {stage.name}")
            stages[slot] = stage

    def stage_of(self, slot: int) -> Stage:
        return Stage(self.stage[slot])

    def take(self, count: int) -> array[int]:
        if not 0 < count <= self.free:
            raise InvariantError(f"pool {self.name!r}: {count} pages taken with {self.free} free")
        ids = super().take(count)
        for slot in ids:
            if self.stage[slot] != Stage.FREE:
                raise InvariantError(f"pool {self.name!r}: slot {slot} was on the free list while owned")
            self.stage[slot] = Stage.RESERVED
        return ids

    def take_one(self) -> int:
        return self.take(1)[0]

    def receive(self, slots: array[int]) -> None:
        for slot in slots:
            if self.has(slot):
                raise InvariantError(f"pool {self.name!r}: slot {slot} was handed in, and is here already")
            self.stage[slot] = Stage.RESERVED
        super().receive(slots)

    def lend(self, slots: array[int]) -> None:
        super().lend(slots)
        for slot in slots:
            self.stage[slot] = Stage.FREE

    def give(self, data: bytes) -> None:
        for slot in array("i", data):
            if not 0 <= slot < self.capacity or self.stage[slot] == Stage.FREE:
                raise InvariantError(f"pool {self.name!r}: slot {slot} given back twice, or never handed out")
            self.stage[slot] = Stage.FREE
        super().give(data)

    def reset(self) -> None:
        self.stage = bytearray(self.capacity)
        super().reset()


# ---------------------------------------------------------------- spans


class PageSpan(Handle):
    """A handle that owns pages. After ``free`` it cannot be used any more."""

    __slots__ = ("_data", "_resets", "_where", "pool")

    def __init__(self, pool: Pool, data: bytes) -> None:
        self.pool = pool
        self._data: bytes | None = data
        self._resets = pool.resets
        self._where = call_site() if isinstance(pool, DebugPool) else None

    def _own(self) -> bytes:
        """Return its page numbers, after a check that it still owns them."""
        if self._data is None:
            raise ProtocolError(f"a span of pool {self.pool.name!r} was used after it was freed")
        if self._resets != self.pool.resets:
            raise ProtocolError(f"a span of pool {self.pool.name!r} was minted before the cache was flushed")
        return self._data

    def __len__(self) -> int:
        return len(self._own()) // ID_BYTES

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(array("i", self._own()))

    def free(self) -> None:
        """Give the pages back to the pool. This handle cannot be used any more."""
        data = self._own()
        self._data = None
        self.pool.minted -= len(data) // ID_BYTES
        self.pool.give(data)

    def __del__(self) -> None:
        if not hasattr(self, "_where"):  # an interrupt came while it was made
            return
        if self._data and self._resets == self.pool.resets and self.pool.dropped is not None:
            self.pool.dropped.add(self, dropped_without_release(self._where), self.free)

    def __repr__(self) -> str:
        return f"<PageSpan of {self.pool.name}: {len(self._data or b'') // ID_BYTES} pages>"
