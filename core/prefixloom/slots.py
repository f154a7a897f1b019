"""Slots: which of a pool's slots something is about, said once and for good.

What a node or a queue remembers of another tier are ``HostSlots`` or ``DeviceSlots``: numbers that nobody can change,
of one pool on one side. To move them, ``resolve`` makes a ``ResolvedTransfer``, whose indices are where a copy wants
them: a thing of its own, to be run and thrown away. It has no numbers to take out, so it cannot be stored in a node or
freed. Neither owns a slot. It must not know a tree, or who owns what.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, NoReturn

from .device.handles import Handle
from .device.host_pool import HostPool
from .device.kernels_move import Move
from .device.pool import ID_BYTES, Pool
from .errors import InputError, ProtocolError


class Slots:
    """Numbers of slots of one pool: a copy of what it was made of, and frozen. Take one of the two below."""

    __slots__ = ("data", "pool")

    pool: Pool
    data: bytes

    def __init__(self, pool: Pool, slots: Iterable[int]) -> None:
        if type(self) is Slots:
            raise ProtocolError("slots are of the host or of a device: make HostSlots or DeviceSlots")
        self._check_pool(pool)
        data = slots if isinstance(slots, bytes) else _numbers(slots)
        numbers = array("i", data)
        if numbers and not (min(numbers) >= 0 and max(numbers) < pool.capacity):
            bad = next(number for number in numbers if not 0 <= number < pool.capacity)
            raise InputError(f"slot {bad} does not exist: there are {pool.capacity} in pool {pool.name!r}")
        object.__setattr__(self, "pool", pool)
        object.__setattr__(self, "data", data)

    def _check_pool(self, pool: Pool) -> None:
        raise NotImplementedError

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(array("i", self.data))

    def __len__(self) -> int:
        return len(self.data) // ID_BYTES

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.pool is other.pool and self.data == other.data

    def __hash__(self) -> int:
        return hash((type(self), id(self.pool), self.data))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise ProtocolError(f"{type(self).__name__} cannot be changed: make others")

    def __delattr__(self, name: str) -> NoReturn:
        raise ProtocolError(f"{type(self).__name__} cannot be changed: make others")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.pool.name}: {list(self.ids)}>"


class HostSlots(Slots):
    """Slots of a host pool."""

    __slots__ = ()

    def _check_pool(self, pool: Pool) -> None:
        if not isinstance(pool, HostPool):
            raise ProtocolError(f"pool {pool.name!r} on {pool.device} is no host pool: its slots are DeviceSlots")
        _check_device(pool)


class DeviceSlots(Slots):
    """Slots of a pool on the device where the model computes, be it the CPU."""

    __slots__ = ()

    def _check_pool(self, pool: Pool) -> None:
        if isinstance(pool, HostPool):
            raise ProtocolError(f"pool {pool.name!r} is a host pool: its slots are HostSlots")
        _check_device(pool)


def _check_device(pool: Pool) -> None:
    """Whether the memory is where the pool says."""
    said = str(pool.device).partition(":")[0]
    elsewhere = sorted({str(tensor.device) for tensor in pool.buffers.values() if tensor.device.type != said})
    if elsewhere:
        raise ProtocolError(f"pool {pool.name!r} is on {pool.device}, and has memory on {', '.join(elsewhere)}")


def _numbers(slots: Iterable[int]) -> bytes:
    device: Any = getattr(slots, "device", None)
    if device is not None and str(device) != "cpu":
        raise ProtocolError(f"numbers of slots are kept on the CPU, and these are on {device}")
    if device is not None and hasattr(slots, "tolist"):
        slots = slots.tolist()
    try:
        return array("i", slots).tobytes()
    except (TypeError, OverflowError) as error:
        raise InputError(f"slots are whole numbers below 2**31: {error}") from error


class ResolvedTransfer(Handle):
    """Content that is to go from the slots of one side to those of the other; made by ``resolve``."""

    __slots__ = ("_move", "count")

    def __init__(self, move: Move, count: int) -> None:
        self._move = move
        self.count = count

    def run(self, layers: slice | None = None) -> None:
        """Move these layers of each buffer, on the current stream; all of them by default. It may be done again."""
        self._move.run(layers)


def resolve(source: Slots, target: Slots) -> ResolvedTransfer:
    """Check once that ``source`` can go to ``target``, and bring their numbers to where the copies want them."""
    sides = {type(source), type(target)}
    if sides != {HostSlots, DeviceSlots}:
        given = " to ".join(type(side).__name__ for side in (source, target))
        raise ProtocolError(f"a transfer is between HostSlots and DeviceSlots, not from {given}")
    if source.pool.buffers.keys() != target.pool.buffers.keys():
        raise ProtocolError(
            f"pool {source.pool.name!r} keeps {sorted(source.pool.buffers)}, and {target.pool.name!r} keeps "
            f"{sorted(target.pool.buffers)}: nothing can be moved between them"
        )
    names = list(source.pool.buffers)
    move = Move(
        [source.pool.buffers[name] for name in names], source.ids,
        [target.pool.buffers[name] for name in names], target.ids,
    )  # fmt: skip
    return ResolvedTransfer(move, len(source))


def move_between(source: Slots, target: Slots, layers: slice | None = None) -> None:
    """Move the content of ``source`` to ``target``."""
    resolve(source, target).run(layers)
