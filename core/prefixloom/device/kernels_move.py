"""Moving slots: copy the content of many slots from the buffers of one pool to those of another, between a device and
the host.

Tensors have the shape (layers, capacity, ...), as a pool's buffers do. Only the part of one slot in one layer needs to
be contiguous: a pool may keep all layers of a slot together (page-first), and its buffers are then views. One side is
on CUDA and the other in pinned memory of the host, or both are on a CPU. Source and target share no memory, and no slot
is written twice, so the pairs of a call may be copied in any order. The copy is bitwise for any dtype.

Nothing takes a temporary that grows with the data. On CUDA everything is enqueued on the current stream and nothing
waits: the caller keeps the memory of both pools until that stream has run the copies. These functions know no pool, no
component and no owner of a slot. Tensors on the meta device have no content: for them nothing is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InputError
from . import kernels

if TYPE_CHECKING:
    from torch import Tensor


def move_slots(source: Sequence[Tensor], src: Sequence[int], target: Sequence[Tensor], dst: Sequence[int]) -> None:
    """Copy slots from tensors to others: ``t[:, d] = s[:, p]`` for each pair (p, d) of slots and (s, t) of tensors."""
    if len(source) != len(target) or len(src) != len(dst):
        raise InputError(
            f"what is moved and where to differ in number: {len(source)} and {len(target)} tensors, {len(src)} and "
            f"{len(dst)} slots"
        )
    pairs = [(s, t) for s, t in zip(source, target, strict=True) if not (s.is_meta or t.is_meta)]
    if not pairs or not len(src):
        return
    for pair in pairs:
        _check(*pair)
    kernels.check_slots([s for s, _ in pairs], src)
    kernels.check_slots([t for _, t in pairs], dst)
    if len(set(dst)) != len(dst):
        raise InputError("a slot is to be written twice in one move: which of the two would stay is not said")
    pairs = [kernels.words(*pair) for pair in pairs]
    device = next((tensor for tensor in pairs[0] if tensor.device.type != "cpu"), pairs[0][0])
    triton = kernels.triton_for(device)
    if triton is not None:  # one launch for all pairs of a shape, which reads and writes pinned memory in place
        triton.move(pairs, kernels.index_of(src, [device]), kernels.index_of(dst, [device]))
        return
    runs = _runs(src, dst)
    for s, t in pairs:
        for p, d, count in runs:
            t.narrow(1, d, count).copy_(s.narrow(1, p, count))


# ---------------------------------------------------------------- checks and runs


def _check(source: Tensor, target: Tensor) -> None:
    """Check that slots of ``source`` can be moved to slots of ``target``."""
    if source.dtype != target.dtype or source.dim() < 2 or _slot_shape(source) != _slot_shape(target):
        raise InputError(
            f"slots of {source.dtype} {_slot_shape(source)} cannot be moved into slots of {target.dtype} "
            f"{_slot_shape(target)} (layers first)"
        )
    for tensor in (source, target):
        if not tensor[0, 0].is_contiguous():
            raise InputError(f"what a slot has in a layer must be contiguous; strides are {tensor.stride()}")
    if source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
        raise InputError("a move is between two memories: within one, use copy_slots")
    devices = {source.device.type, target.device.type}
    if devices not in ({"cpu"}, {"cpu", "cuda"}):
        raise InputError(f"a move is between the host and a device, not from {source.device} to {target.device}")
    for tensor in (source, target):
        if devices == {"cpu", "cuda"} and tensor.device.type == "cpu" and not tensor.is_pinned():
            raise InputError("the host's memory must be pinned: a copy with any other waits for the device")


def _slot_shape(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.shape[0], *tensor.shape[2:])


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
