"""Moving slots: copy the content of many slots from the buffers of one pool to those of another, between a device and
the host.

Tensors have the shape (layers, capacity, ...), as a pool's buffers do. Only the part of one slot in one layer needs to
be contiguous: a pool may keep all layers of a slot together (page-first), and its buffers are then views. One side is
on CUDA and the other in pinned memory of the host, or both are on a CPU. Source and target share no memory, and no slot
is written twice, so the pairs of a call may be copied in any order. The copy is bitwise for any dtype.

On a CPU no temporary is larger than ``kernels.CHUNK``, beside the slots' numbers. On CUDA everything is enqueued on the
current stream and nothing waits: the caller keeps the memory of both pools until that stream has run the copies. These
functions know no pool, no component and no owner of a slot. Tensors on the meta device have no content: for them
nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from . import kernels

if TYPE_CHECKING:
    from torch import Tensor

    Pair = tuple[Tensor, Tensor]

STAGE = 1 << 25
"""The most bytes that are gathered at a time on a CUDA device without Triton."""


def move_slots(
    source: Sequence[Tensor],
    src: Sequence[int],
    target: Sequence[Tensor],
    dst: Sequence[int],
    layers: slice | None = None,
) -> None:
    """Copy slots from tensors to others: ``t[layers, d] = s[layers, p]`` for each pair (p, d) of slots and (s, t) of
    tensors.

    ``layers`` counts the tensors' own layers; all of them by default.
    """
    Move(source, src, target, dst).run(layers)


class Move:
    """A checked move, which can be run in parts (some layers at a time).

    It copies the slots' numbers, so the caller may change its own lists afterwards.
    """

    __slots__ = ("_dst", "_index", "_pairs", "_runs", "_src")

    def __init__(
        self, source: Sequence[Tensor], src: Sequence[int], target: Sequence[Tensor], dst: Sequence[int]
    ) -> None:
        self._src, self._dst = tuple(src), tuple(dst)
        if len(source) != len(target) or len(src) != len(dst):
            raise InputError(
                f"what is moved and where to differ in number: {len(source)} and {len(target)} tensors, {len(src)} "
                f"and {len(dst)} slots"
            )
        pairs = [(s, t) for s, t in zip(source, target, strict=True) if not (s.is_meta or t.is_meta)]
        self._pairs: list[Pair] = []
        if not pairs or not self._src:
            return
        for pair in pairs:
            _check(*pair)
        kernels.check_slots([s for s, _ in pairs], self._src)
        kernels.check_slots([t for _, t in pairs], self._dst)
        if len(set(self._dst)) != len(self._dst):
            raise InputError("a slot is to be written twice in one move: which of the two would stay is not said")
        self._pairs = [_words(*pair) for pair in pairs]
        self._runs = _runs(self._src, self._dst)
        self._index: Pair | None = None  # the slots' numbers of both sides as tensors, made on first use

    def run(self, layers: slice | None = None) -> None:
        """Move these layers, on the current stream of the device if there is one."""
        pairs = self._pairs if layers is None else [(s[layers], t[layers]) for s, t in self._pairs]
        pairs = [pair for pair in pairs if len(pair[0])]
        if not pairs:
            return
        devices = [tensor for tensor in pairs[0] if tensor.device.type != "cpu"]
        if devices:
            self._across(pairs, devices[0])
        else:
            self._here(pairs)

    def _indices(self, device: Tensor) -> Pair:
        if self._index is None:
            self._index = kernels.index_of(self._src, [device]), kernels.index_of(self._dst, [device])
        return self._index

    def _here(self, pairs: list[Pair]) -> None:
        """Copy on a CPU: with a call for each run where runs are long, else by index."""
        slots, runs = len(self._src), len(self._runs)
        for source, target in pairs:
            if runs < kernels.FEW or _slot_bytes(source) * slots >= kernels.DIRECT * runs:
                for s, d, count in self._runs:
                    target.narrow(1, d, count).copy_(source.narrow(1, s, count))
                continue
            for part in _pieces(source, target):
                _move_by_index(*part, *self._indices(source))

    def _across(self, pairs: list[Pair], device: Tensor) -> None:
        """Copy between CUDA and the host. Triton needs one launch for all pairs of a shape, and uses pinned memory in
        place.
        """
        triton: Any = kernels.triton_for([device])
        if triton is not None:
            triton.move(pairs, *self._indices(device))
            return
        for source, target in pairs:
            host = source if source.device.type == "cpu" else target
            if host.stride(0) == host.shape[2] and len(host) > 1:
                _move_staged(source, target, self._src, self._dst)
            else:
                _move_in_place(source, target, self._src, self._dst)


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


def _words(source: Tensor, target: Tensor) -> Pair:
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


def _runs(src: Sequence[int], dst: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs in which both slots go up by one: (first of ``src``, first of ``dst``, how many), whatever the given order.

    They are in the order of ``dst``: writing in order is faster than reading in order.
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


# ---------------------------------------------------------------- on a CPU


def _slot_bytes(tensor: Tensor) -> int:
    """Bytes of one slot in all layers together."""
    return tensor.shape[0] * tensor.shape[2] * tensor.element_size()


def _pieces(source: Tensor, target: Tensor) -> Iterator[Pair]:
    """Yield parts of both tensors in which one slot is at most a chunk: some layers, or some words of one layer."""
    size = source.element_size()
    words = max(1, min(source.shape[2], kernels.CHUNK // size))
    layers = max(1, kernels.CHUNK // (words * size))
    for low in range(0, len(source), layers):
        for start in range(0, source.shape[2], words):
            yield (
                source[low : low + layers, :, start : start + words],
                target[low : low + layers, :, start : start + words],
            )


def _move_by_index(source: Tensor, target: Tensor, src: Tensor, dst: Tensor) -> None:
    count = max(1, kernels.CHUNK // _slot_bytes(source))
    for s, d in zip(kernels.parts(src, count), kernels.parts(dst, count), strict=True):
        chosen = source.index_select(1, s) if source.is_contiguous() else source[:, s]  # or all of it is copied first
        target.index_copy_(1, d, chosen)


# ---------------------------------------------------------------- between CUDA and the host


def _move_in_place(source: Tensor, target: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy with a call for each layer and run. Both sides of a call are contiguous: otherwise torch would wait."""
    packed = source.stride(1) == target.stride(1) == source.shape[2]
    for s, d, count in _runs(src, dst) if packed else ((s, d, 1) for s, d in zip(src, dst, strict=True)):
        for to, of in zip(target.narrow(1, d, count), source.narrow(1, s, count), strict=True):
            to.copy_(of, non_blocking=True)


def _move_staged(source: Tensor, target: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy with a call for each slot, if the host keeps all layers of a slot together, through a staging tensor of the
    same layout on the device.
    """
    count = max(1, STAGE // _slot_bytes(source))
    for low in range(0, len(src), count):
        s, d = src[low : low + count], dst[low : low + count]
        if source.device.type == "cpu":
            stage = target.new_empty((len(s), len(source), source.shape[2]))
            for page, slot in zip(stage, s, strict=True):
                page.copy_(source.select(1, slot), non_blocking=True)
            target.index_copy_(1, kernels.index_of(d, [target]), stage.transpose(0, 1))
        else:
            stage = source.transpose(0, 1).index_select(0, kernels.index_of(s, [source]))
            for slot, page in zip(d, stage, strict=True):
                target.select(1, slot).copy_(page, non_blocking=True)
