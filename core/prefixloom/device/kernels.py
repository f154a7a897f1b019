"""Kernels: copy, clear and select the content of many slots of many buffers at once.

Tensors have the shape (layers, capacity, ...) and are contiguous, as a pool's buffers are; all are on one device. On a
CPU, something else may lie between two slots. A slot is an index into the second dimension. No temporary grows with
the data: at most ``CHUNK`` bytes are gathered at a time, beside the slots' numbers. On CUDA with Triton, one launch
does all buffers of a shape (``kernels_triton``), and nothing is ever read back, so the scheduling thread may call these
functions with a CUDA stream current. On a CPU the work runs in the thread that calls them.

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

CHUNK = 1 << 20
"""The largest size of a temporary in bytes."""

DIRECT = 1 << 16
"""Slots of at least so many bytes in a tensor are copied with a call each; smaller ones by index, many in one call,"""

FEW = 16
"""unless there are fewer slots than this: an index costs as much as so many calls."""


def copy_slots(tensors: Iterable[Tensor], src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy slots within each tensor: as ``t[:, d] = t[:, s]`` pair by pair, in order. It is bitwise for any dtype."""
    tensors = _live(tensors)
    pairs = list(zip(src, dst, strict=True))
    if not tensors or not pairs:
        return
    check_slots(tensors, src, dst)
    triton = triton_for(tensors)
    many, few = _parted(tensors, len(dst), triton)
    for tensor in few:
        for s, d in pairs:
            tensor.select(1, d).copy_(tensor.select(1, s))
    if many:
        for low, high in _waves([(s,) for s in src], dst):
            _move(many, index_of(src[low:high], many), dst[low:high], triton)


def clear_slots(tensors: Iterable[Tensor], dst: Sequence[int]) -> None:
    """Fill these slots of each tensor with zeros."""
    tensors = _live(tensors)
    if not tensors or not len(dst):
        return
    check_slots(tensors, dst)
    triton = triton_for(tensors)
    many, few = _parted(tensors, len(dst), triton)
    for tensor in few:
        for d in dst:
            tensor.select(1, d).zero_()
    if not many:
        return
    index = index_of(dst, many)
    if triton is not None:
        triton.clear(many, index)
        return
    for tensor in many:
        rows = _rows(tensor)
        for part in parts(index, max(1, CHUNK // (8 * len(tensor)))):
            rows.index_fill_(0, row_numbers(tensor, part), 0)


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


# ---------------------------------------------------------------- moving rows


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def triton_for(tensors: list[Tensor]) -> Any:
    """The module of the Triton kernels if these tensors are on CUDA and Triton is installed, else None."""
    if tensors[0].device.type != "cuda" or not _has_triton():
        return None
    from . import kernels_triton

    return kernels_triton


def _parted(tensors: list[Tensor], slots: int, triton: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Divide tensors into those that are copied by index, many slots in one call, and those with a call per slot."""
    many: list[Tensor] = []
    few: list[Tensor] = []
    for tensor in tensors:
        small = tensor.is_contiguous() and len(tensor) * _width(tensor) < DIRECT and slots >= FEW
        (many if triton is not None or small else few).append(tensor)
    return many, few


def _width(tensor: Tensor) -> int:
    """Bytes of one slot in one layer."""
    layers, capacity = tensor.shape[:2]
    return tensor.numel() // (layers * capacity) * tensor.element_size()


def index_of(slots: Sequence[int], tensors: list[Tensor]) -> Tensor:
    """The slots' numbers as a tensor on the device, copied from pinned memory: any other copy would wait."""
    import torch

    device = tensors[0].device
    if device.type != "cuda":
        return torch.tensor(list(slots), dtype=torch.int64, device=device)
    return torch.tensor(list(slots), dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def _rows(tensor: Tensor) -> Tensor:
    """View a tensor of any dtype as rows of ints, one row for each layer and slot."""
    import torch

    size = tensor.element_size()
    rows = tensor.view(tensor.shape[0] * tensor.shape[1], -1)
    if rows.shape[1] * size % 8 == 0 and tensor.storage_offset() * size % 8 == 0:
        size = 8
    return rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def row_numbers(tensor: Tensor, slots: Tensor) -> Tensor:
    """The numbers of the slots' rows in all layers."""
    import torch

    layers, capacity = tensor.shape[:2]
    return (torch.arange(0, layers * capacity, capacity, device=slots.device)[:, None] + slots).view(-1)


def parts(index: Tensor, count: int) -> Iterator[Tensor]:
    """Yield consecutive parts of an index, of at most ``count`` numbers each."""
    for low in range(0, index.numel(), count):
        yield index[low : low + count]


def _slots_of_a_chunk(tensor: Tensor) -> int:
    """The number of slots whose rows, and whose numbers, are at most a chunk."""
    return max(1, CHUNK // (len(tensor) * max(8, _width(tensor))))


def _select(
    tensors: list[Tensor], choices: Sequence[Sequence[int]], chosen: Tensor, dst: Sequence[int], triton: Any
) -> None:
    """Copy the ``chosen`` slots, one of each row of ``choices``; only the device knows which."""
    for low, high in _waves(choices, dst):
        _move(tensors, chosen[low:high], dst[low:high], triton)


def _move(tensors: list[Tensor], src: Tensor, dst: Sequence[int], triton: Any) -> None:
    """Copy the pairs of one wave, in which no pair touches what another one writes."""
    index = index_of(dst, tensors)
    if triton is not None:
        triton.copy(tensors, src, index)
        return
    for tensor in tensors:
        rows = _rows(tensor)
        count = _slots_of_a_chunk(tensor)
        for s, d in zip(parts(src, count), parts(index, count), strict=True):
            _move_rows(rows, row_numbers(tensor, s), row_numbers(tensor, d))


def _move_rows(rows: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy rows by index, in pieces of at most a chunk: some rows, or a part of one."""
    columns = max(1, min(rows.shape[1], CHUNK // rows.element_size()))
    count = max(1, CHUNK // (columns * rows.element_size()))
    for s, d in zip(parts(src, count), parts(dst, count), strict=True):
        for low in range(0, rows.shape[1], columns):
            piece = rows[:, low : low + columns]
            piece.index_copy_(0, d, piece.index_select(0, s))
