"""The kernel for Triton: one launch copies slots of all buffers of a shape. ``kernels`` calls it.

The kernel gets the addresses of its buffers in a table on the device. Tensors have the shape (layers, capacity, words),
of the widest words that divide their addresses and strides. The pairs of slots of a launch are copied in any order; the
caller makes sure that no pair touches what another one writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BLOCK = 1024
"""Words that one program moves."""

PROGRAMS = 32
"""Programs of a launch that copies between the host and the device. So few fill the bus already, and they leave most of
the device to a model that computes meanwhile.
"""

WORDS = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.uint8: tl.int8}


def clear(targets: Sequence[Tensor], dst: Tensor) -> None:
    """Fill ``t[:, d]`` with zeros for all d of ``dst``: copy the only slot of a source without content."""
    sizes = [target.shape[2] * target.element_size() for target in targets]
    zeros = torch.zeros(max(sizes), dtype=torch.uint8, device=dst.device)
    pairs = [
        (zeros[:size].view(target.dtype).expand(len(target), 1, -1), target)
        for target, size in zip(targets, sizes, strict=True)
    ]
    move(pairs, torch.zeros_like(dst), dst, within=True)


def move(pairs: Sequence[tuple[Tensor, Tensor]], src: Tensor, dst: Tensor, within: bool = False) -> None:
    """Copy ``t[:, d] = s[:, p]`` for all pairs (p, d) of slots at once, in all pairs (s, t) of tensors.

    ``src`` and ``dst`` are int64 on the device. A launch serves all pairs of tensors of the same shape and strides.
    ``within``: both tensors are on the device; else one is in pinned memory of the host.
    """
    groups: dict[tuple[object, ...], list[tuple[Tensor, Tensor]]] = {}
    for source, target in pairs:
        shape = (source.dtype, source.shape[0], source.shape[2], source.stride()[:2], target.stride()[:2])
        groups.setdefault(shape, []).append((source, target))
    for group in groups.values():
        source, target = group[0]
        layers, _, length = target.shape
        numbers = torch.tensor(
            [[tensor.data_ptr() for tensor in side] for side in zip(*group, strict=True)],
            dtype=torch.int64,
            pin_memory=src.is_cuda,
        )
        addresses = numbers.to(src.device, non_blocking=True)
        chunks = triton.cdiv(length, BLOCK)
        blocks = len(group) * src.numel() * layers * chunks
        grid = (blocks if within else min(blocks, PROGRAMS),)
        strides = (*source.stride()[:2], *target.stride()[:2])
        with torch.cuda.device(src.get_device()):
            _move[grid](
                *addresses, src, dst, src.numel(), layers, *strides, length, chunks, blocks,
                WORD=WORDS[source.dtype], BLOCK=BLOCK,
            )  # fmt: skip


# The kernel annotates constants only: Triton would look for the names of other annotations on the device.


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
