"""Kernels: copy, clear and select the content of many slots of many buffers, within a pool or between two.

Tensors have the shape (layers, capacity, ...), as a pool's buffers do; a slot is an index into the second dimension.
What one slot has in one layer must be contiguous, and anything may lie between two slots. Copies are bitwise for any
dtype, and take no temporary that grows with the data.

On CUDA one launch on the current stream does all buffers of a shape (``kernels_triton``), and nothing is read back or
waited for: the caller keeps the memory until the stream has run the copies. On a CPU the work runs in the thread that
calls these functions, with a call for each slot or run of slots: an operation copies few slots within a pool, a state
for each sequence of a step (# 0089).

These functions know no pool, no component and no owner of a slot. Tensors on the meta device have no content: for them
nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from ..errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

Pair: TypeAlias = "tuple[Tensor, Tensor]"
"""A tensor to copy slots from, and one to copy them to."""


def copy_slots(tensors: Iterable[Tensor], src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy slots within each tensor: as ``t[:, d] = t[:, s]`` pair by pair, in order. It is bitwise for any dtype."""
    tensors = _live(tensors)
    pairs = list(zip(src, dst, strict=True))
    if not tensors or not pairs:
        return
    check_slots(tensors, src, dst)
    triton = triton_for(tensors[0])
    if triton is not None:
        _copy_in_waves(triton, tensors, [(s,) for s in src], index_of(src, tensors), dst)
        return
    for tensor in tensors:
        for s, d in pairs:
            tensor.select(1, d).copy_(tensor.select(1, s))


def clear_slots(tensors: Iterable[Tensor], dst: Sequence[int]) -> None:
    """Fill these slots of each tensor with zeros."""
    tensors = _live(tensors)
    if not tensors or not len(dst):
        return
    check_slots(tensors, dst)
    triton = triton_for(tensors[0])
    if triton is not None:
        triton.clear([words(tensor, tensor)[0] for tensor in tensors], index_of(dst, tensors))
        return
    for tensor in tensors:
        for d in dst:
            tensor.select(1, d).zero_()


def select_slots(
    tensors: Iterable[Tensor], choices: Sequence[Sequence[int]], selector: Tensor, dst: Sequence[int]
) -> None:
    """Copy selected slots within each tensor: ``t[:, dst[i]] = t[:, choices[i][selector[i]]]`` for each i, in order.

    All ``choices`` have the same length, and ``selector`` is a vector of ints on the tensors' device. On CUDA the host
    never reads it; on a CPU it is read once.
    """
    tensors = _live(tensors)
    if not len(choices) == len(dst) == selector.numel():
        raise InputError(f"{len(dst)} slots are to be filled: got {len(choices)} choices, {selector.numel()} selected")
    if not tensors or not len(dst):
        return
    every = [*chain.from_iterable(choices)]
    check_slots(tensors, every, dst)
    table = index_of(every, tensors).view(len(dst), -1)
    chosen = table.gather(1, selector.reshape(-1, 1).long()).view(-1)
    triton = triton_for(tensors[0])
    if triton is not None:
        _copy_in_waves(triton, tensors, choices, chosen, dst)
    else:
        copy_slots(tensors, chosen.tolist(), dst)


def move_slots(source: Sequence[Tensor], src: Sequence[int], target: Sequence[Tensor], dst: Sequence[int]) -> None:
    """Copy slots from tensors to others: ``t[:, d] = s[:, p]`` for each pair (p, d) of slots and (s, t) of tensors.

    One side is on CUDA and the other in pinned memory of the host, or both are on a CPU. They share no memory, and no
    slot is written twice, so the pairs may be copied in any order.
    """
    if len(source) != len(target) or len(src) != len(dst):
        raise InputError(
            f"what is moved and where to differ in number: {len(source)} and {len(target)} tensors, {len(src)} and "
            f"{len(dst)} slots"
        )
    pairs = [(s, t) for s, t in zip(source, target, strict=True) if not (s.is_meta or t.is_meta)]
    if not pairs or not len(src):
        return
    for pair in pairs:
        _check_pair(*pair)
    check_slots([s for s, _ in pairs], src)
    check_slots([t for _, t in pairs], dst)
    if len(set(dst)) != len(dst):
        raise InputError("a slot is to be written twice in one move: which of the two would stay is not said")
    pairs = [words(*pair) for pair in pairs]
    device = next((tensor for tensor in pairs[0] if tensor.device.type != "cpu"), pairs[0][0])
    triton = triton_for(device)
    if triton is not None:  # one launch for all pairs of a shape, which reads and writes pinned memory in place
        triton.move(pairs, index_of(src, [device]), index_of(dst, [device]))
        return
    runs = _runs(src, dst)
    for s, t in pairs:
        for p, d, count in runs:
            t.narrow(1, d, count).copy_(s.narrow(1, p, count))


def _copy_in_waves(
    triton: ModuleType, tensors: list[Tensor], reads: Sequence[Sequence[int]], src: Tensor, dst: Sequence[int]
) -> None:
    """Copy slots in order, with a launch for each run of pairs whose order does not matter.

    ``src`` is known to the device alone: each is one of the slots in its row of ``reads``.
    """
    pairs, index = [words(tensor, tensor) for tensor in tensors], index_of(dst, tensors)
    for low, high in _waves(reads, dst):
        triton.move(pairs, src[low:high], index[low:high], within=True)


# ---------------------------------------------------------------- checks


def _live(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that have content, after a check of how their slots lie."""
    live = [tensor for tensor in tensors if not tensor.is_meta]
    for tensor in live:
        if not tensor.is_contiguous() and not tensor[0, 0].is_contiguous():
            raise InputError(f"what a slot has in a layer must be contiguous; strides are {tensor.stride()}")
    return live


def _check_pair(source: Tensor, target: Tensor) -> None:
    """Check that slots of ``source`` can be moved to slots of ``target``."""
    if source.dtype != target.dtype or source.dim() < 2 or _slot_shape(source) != _slot_shape(target):
        raise InputError(
            f"slots of {source.dtype} {_slot_shape(source)} cannot be moved into slots of {target.dtype} "
            f"{_slot_shape(target)} (layers first)"
        )
    both = _live((source, target))
    if source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
        raise InputError("a move is between two memories: within one, use copy_slots")
    devices = {tensor.device.type for tensor in both}
    if devices not in ({"cpu"}, {"cpu", "cuda"}):
        raise InputError(f"a move is between the host and a device, not from {source.device} to {target.device}")
    if "cuda" in devices and not all(tensor.is_cuda or tensor.is_pinned() for tensor in both):
        raise InputError("the host's memory must be pinned: a copy with any other waits for the device")


def _slot_shape(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.shape[0], *tensor.shape[2:])


def check_slots(tensors: list[Tensor], *slots: Sequence[int]) -> None:
    """Check that every slot exists: -1 would be the last slot, and a number that is too large foreign memory."""
    capacity = min(tensor.shape[1] for tensor in tensors)
    low, high = min(map(min, slots)), max(map(max, slots))
    if low < 0 or high >= capacity:
        raise InputError(f"slot {low if low < 0 else high} does not exist: there are {capacity}")


def _waves(reads: Sequence[Sequence[int]], dst: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of pairs that can be copied in any order: no pair of a run touches what another one of it writes."""
    low = 0
    read: set[int] = set()
    written: set[int] = set()
    for number, (sources, d) in enumerate(zip(reads, dst, strict=True)):
        if d in written or d in read or not written.isdisjoint(sources):
            yield low, number
            low = number
            read, written = set(), set()
        read.update(sources)
        written.add(d)
    yield low, len(dst)


def _runs(src: Sequence[int], dst: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return runs in which both slots go up by one: (first of ``src``, first of ``dst``, how many).

    They are in the order of ``dst``, whatever the given order: writing in order is faster than reading in order.
    """
    found: list[tuple[int, int, int]] = []
    s = d = count = 0
    for q, p in sorted(zip(dst, src, strict=True)):
        if count and p == s + count and q == d + count:
            count += 1
            continue
        if count:
            found.append((s, d, count))
        s, d, count = p, q, 1
    found.append((s, d, count))
    return found


# ---------------------------------------------------------------- on the device


def triton_for(tensor: Tensor) -> ModuleType | None:
    """Return the module of the Triton kernels for a tensor on CUDA, for which torch brings Triton; else None."""
    if tensor.device.type != "cuda":
        return None
    from . import kernels_triton

    return kernels_triton


def index_of(slots: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
    """Return slots as a tensor on the device of ``tensors``, copied from pinned memory: any other copy would wait."""
    import torch

    near = tensors[0]
    numbers = torch.tensor(list(slots), dtype=torch.int64, pin_memory=near.is_cuda)
    return numbers.to(near.device, non_blocking=True)


def words(source: Tensor, target: Tensor) -> Pair:
    """View both tensors as (layers, capacity, words), with the widest ints that fit their shapes and addresses."""
    import torch

    both = [tensor.view(*tensor.shape[:2], -1) for tensor in (source, target)]
    word = next(word for word in (8, 4, 2, 1) if all(_divides(word, tensor) for tensor in both))
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    return both[0].view(ints), both[1].view(ints)


def _divides(word: int, tensor: Tensor) -> bool:
    size = tensor.element_size()
    places = (tensor.shape[2], tensor.stride(0), tensor.stride(1), tensor.storage_offset())
    return all(place * size % word == 0 for place in places)
