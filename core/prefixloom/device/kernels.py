"""Kernels: copy, clear and select the content of many slots of many buffers at once.

Tensors have the shape (layers, capacity, ...) and are contiguous, as a pool's buffers are; all are on one device. On a
CPU, something else may lie between two slots. A slot is an index into the second dimension. On CUDA with Triton, one
launch does all buffers of a shape (``kernels_triton``). Elsewhere each slot is copied by a call: an operation copies
few slots within a pool, a state for each sequence of a step (# 0089). On CUDA nothing is ever read back, so the
scheduling thread may call these functions with a CUDA stream current. On a CPU the work runs in the thread that calls
them.

These functions know no pool, no component and no owner of a slot. Tensors on the meta device have no content: for them
nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def copy_slots(tensors: Iterable[Tensor], src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy slots within each tensor: as ``t[:, d] = t[:, s]`` pair by pair, in order. It is bitwise for any dtype."""
    tensors = _live(tensors)
    pairs = list(zip(src, dst, strict=True))
    if not tensors or not pairs:
        return
    check_slots(tensors, src, dst)
    triton = triton_for(tensors)
    if triton is not None:
        for low, high in _waves([(s,) for s in src], dst):
            triton.copy(tensors, index_of(src[low:high], tensors), index_of(dst[low:high], tensors))
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
    triton = triton_for(tensors)
    if triton is not None:
        triton.clear(tensors, index_of(dst, tensors))
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
    check_slots(tensors, [slot for row in choices for slot in row], dst)
    width = len(choices[0])
    table = index_of([slot for row in choices for slot in row], tensors).view(-1, width)
    chosen = table.gather(1, selector.reshape(-1, 1).long()).view(-1)
    if tensors[0].device.type == "cpu":
        copy_slots(tensors, chosen.tolist(), dst)
        return
    _select(tensors, choices, chosen, dst, triton_for(tensors))


# ---------------------------------------------------------------- checks


def _live(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that have content; each is checked to be contiguous, on a CPU in each slot."""
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
    if len(set(dst)) == len(dst) and set(dst).isdisjoint(chain.from_iterable(reads)):
        yield 0, len(dst)
        return
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


# ---------------------------------------------------------------- on which device


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def triton_for(tensors: list[Tensor]) -> Any:
    """The module of the Triton kernels if these tensors are on CUDA and Triton is installed, else None."""
    if tensors[0].device.type != "cuda" or not _has_triton():
        return None
    from . import kernels_triton

    return kernels_triton


def index_of(slots: Sequence[int], tensors: list[Tensor]) -> Tensor:
    """The slots' numbers as a tensor on the device, copied from pinned memory: any other copy would wait."""
    import torch

    device = tensors[0].device
    if device.type != "cuda":
        return torch.tensor(list(slots), dtype=torch.int64, device=device)
    return torch.tensor(list(slots), dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def _select(
    tensors: list[Tensor], choices: Sequence[Sequence[int]], chosen: Tensor, dst: Sequence[int], triton: Any
) -> None:
    """Copy the ``chosen`` slots, one of each row of ``choices``; only the device knows which."""
    import torch

    index = index_of(dst, tensors)
    if triton is not None:
        for low, high in _waves(choices, dst):
            triton.copy(tensors, chosen[low:high], index[low:high])
        return
    for tensor in tensors:
        content = tensor.view(*tensor.shape[:2], -1).view(torch.uint8)  # torch cannot index every dtype
        for at in range(len(dst)):
            content.index_copy_(1, index[at : at + 1], content.index_select(1, chosen[at : at + 1]))
