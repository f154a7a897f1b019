"""Kernels: copy, clear and select the content of many slots of many buffers at once.

Tensors have the shape (layers, capacity, ...) and are contiguous, as a pool's buffers are; all are on one device. On a
CPU, something else may lie between two slots. A slot is an index into the second dimension. On CUDA one launch does all
buffers of a shape (``kernels_triton``). Elsewhere each slot is copied by a call: an operation copies few slots within a
pool, a state for each sequence of a step (# 0089). On CUDA nothing is ever read back, so the scheduling thread may call
these functions with a CUDA stream current. On a CPU the work runs in the thread that calls them.

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
    """Return the tensors that have content; each is checked to be contiguous, on a CPU in each slot."""
    live = [tensor for tensor in tensors if tensor.device.type != "meta"]
    for tensor in live:
        if not tensor.is_contiguous() and (tensor.device.type != "cpu" or not tensor[0, 0].is_contiguous()):
            raise InputError(
                f"a buffer must be contiguous; its strides are {tensor.stride()} for {tuple(tensor.shape)}"
            )
    return live


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
