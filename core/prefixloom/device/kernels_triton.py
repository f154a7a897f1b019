"""The batch kernels for Triton: one launch for all buffers of a shape. ``kernels`` decides when they are used.

A kernel gets the addresses of its buffers in a table on the device, and copies the widest words that divide all of its
addresses and strides. The pairs of a launch are copied in any order; the caller makes sure that no pair touches what
another one writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024
"""Words that one program moves."""

PROGRAMS = 32
"""Programs of a launch that copies between the host and the device. So few fill the bus already, and they leave most of
the device to a model that computes meanwhile.
"""

WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def copy(tensors: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy slots: ``t[:, d] = t[:, s]`` for all pairs at once. ``src`` and ``dst`` are int64 on the tensors' device."""
    _launch(_copy, tensors, (src.contiguous(), dst.contiguous()))


def clear(tensors: list[Tensor], dst: Tensor) -> None:
    """Fill ``t[:, d]`` with zeros for all d of ``dst``."""
    _launch(_clear, tensors, (dst.contiguous(),))


def _launch(kernel: Any, tensors: list[Tensor], slots: tuple[Tensor, ...]) -> None:
    groups: dict[tuple[int, int, int, int], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(_geometry(tensor), []).append(tensor)
    count = slots[0].numel()
    for (layers, layer_bytes, slot_bytes, word), group in groups.items():
        words = slot_bytes // word
        chunks = triton.cdiv(words, BLOCK)
        on_cuda = group[0].is_cuda
        numbers = torch.tensor([tensor.data_ptr() for tensor in group], dtype=torch.int64, pin_memory=on_cuda)
        addresses = numbers.to(group[0].device, non_blocking=True)
        grid = (len(group) * count * layers * chunks,)
        with torch.cuda.device(group[0].get_device()):
            kernel[grid](
                addresses, *slots, count, layers, layer_bytes // word, words, chunks, WORD=WORDS[word], BLOCK=BLOCK
            )


def _geometry(tensor: Tensor) -> tuple[int, int, int, int]:
    """(layers, bytes of a layer, bytes of a slot in a layer, bytes of the widest word) of a contiguous tensor."""
    layers, capacity = tensor.shape[:2]
    slot_bytes = tensor[0, 0].numel() * tensor.element_size()
    word = next(size for size in WORDS if slot_bytes % size == 0 and tensor.data_ptr() % size == 0)
    return layers, capacity * slot_bytes, slot_bytes, word


# The kernels annotate constants only: Triton would look for the names of other annotations on the device.


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _copy(  # type: ignore[no-untyped-def]
    addresses,
    src,
    dst,
    count,
    layers,
    layer_words,
    words,
    chunks,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    chunk = program % chunks
    layer = program // chunks % layers
    pair = program // (chunks * layers) % count
    tensor = program // (chunks * layers * count)
    base = tl.load(addresses + tensor).to(tl.pointer_type(WORD)) + layer.to(tl.int64) * layer_words
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    data = tl.load(base + tl.load(src + pair) * words + at, mask=at < words)
    tl.store(base + tl.load(dst + pair) * words + at, data, mask=at < words)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _clear(  # type: ignore[no-untyped-def]
    addresses,
    dst,
    count,
    layers,
    layer_words,
    words,
    chunks,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    chunk = program % chunks
    layer = program // chunks % layers
    slot = program // (chunks * layers) % count
    tensor = program // (chunks * layers * count)
    base = tl.load(addresses + tensor).to(tl.pointer_type(WORD)) + layer.to(tl.int64) * layer_words
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    tl.store(base + tl.load(dst + slot) * words + at, tl.zeros([BLOCK], WORD), mask=at < words)


def move(pairs: list[tuple[Tensor, Tensor]], src: Tensor, dst: Tensor) -> None:
    """Copy between a device and the host: ``t[:, d] = s[:, p]`` for all slots at once, in all pairs (s, t) of tensors.

    One tensor of a pair is in pinned memory of the host. Tensors have the shape (layers, capacity, words); a launch
    serves all pairs of the same shape and strides.
    """
    groups: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
    for source, target in pairs:
        shape = (source.dtype, source.shape[0], source.shape[2], source.stride()[:2], target.stride()[:2])
        groups.setdefault(shape, []).append((source, target))
    for (_, layers, words, near, far), group in groups.items():
        on_cuda = src.is_cuda
        numbers = torch.tensor(
            [[tensor.data_ptr() for tensor in side] for side in zip(*group, strict=True)],
            dtype=torch.int64,
            pin_memory=on_cuda,
        )
        addresses = numbers.to(src.device, non_blocking=True)
        chunks = triton.cdiv(words, BLOCK)
        blocks = len(group) * src.numel() * layers * chunks
        grid = (min(blocks, PROGRAMS),)
        word = WORDS[group[0][0].element_size()]
        with torch.cuda.device(src.get_device()):
            _move[grid](
                *addresses, src, dst, src.numel(), layers, *near, *far, words, chunks, blocks, WORD=word, BLOCK=BLOCK
            )


@triton.jit(do_not_specialize=["count", "blocks"])  # type: ignore[untyped-decorator,unused-ignore]
def _move(  # type: ignore[no-untyped-def]
    sources,
    targets,
    src,
    dst,
    count,
    layers,
    source_layer,
    source_slot,
    target_layer,
    target_slot,
    words,
    chunks,
    blocks,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    while block < blocks:
        chunk = block % chunks
        layer = (block // chunks % layers).to(tl.int64)
        pair = block // (chunks * layers) % count
        tensor = block // (chunks * layers * count)
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        read = tl.load(sources + tensor).to(tl.pointer_type(WORD)) + tl.load(src + pair) * source_slot
        to = tl.load(targets + tensor).to(tl.pointer_type(WORD)) + tl.load(dst + pair) * target_slot
        data = tl.load(read + layer * source_layer + at, mask=at < words)
        tl.store(to + layer * target_layer + at, data, mask=at < words)
        block += tl.num_programs(0)
