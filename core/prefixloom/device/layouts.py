"""Layouts: how what a pool's slots hold lies in memory. The shapes of buffers are the same in each.

"layer_first": a tensor of its own for each buffer, (layers, capacity, ...), and contiguous. "page_first": all that a
slot has lies together, buffer after buffer, those of wider elements first, each (layers, entries, *shape); buffers are
views of that. Then a slot is one piece to be copied, but what is contiguous in a layer is a slot, not its neighbours.
It must not know what a slot is for, or where its memory comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..contract.manifest import DTYPE_BYTES, Buffer, Layout, Manifest

if TYPE_CHECKING:
    from torch import Tensor

    Zeros = Callable[[str, tuple[int, ...], str], Tensor]

ALIGNMENT = 8
"""Where a page-first slot may begin: any element of any dtype is then where it must be."""

WHOLE = ""
"""The name under which the memory of all buffers together is asked for."""


def shape(buffer: Buffer, unit: str, capacity: int, entries: int) -> tuple[int, ...]:
    middle = () if unit == "boundary" else (entries,)
    return (len(buffer.layers), capacity, *middle, *buffer.shape)


def parts(manifest: Manifest, entries: int) -> Iterator[tuple[Buffer, int, int]]:
    """Each buffer with where it begins in what one slot holds, and its bytes there."""
    start = 0
    for buffer in sorted(manifest.buffers, key=lambda b: -DTYPE_BYTES[b.dtype]):
        size = buffer.entry_bytes * entries
        yield buffer, start, size
        start += size


def slot_bytes(layout: Layout, manifest: Manifest, entries: int) -> int:
    """Bytes that a slot takes of a pool's memory: page-first, to where the next one may begin."""
    size = manifest.slot_bytes * entries
    return size if layout == "layer_first" else -(-size // ALIGNMENT) * ALIGNMENT


def allocate(
    layout: Layout, manifest: Manifest, unit: str, capacity: int, entries: int, zeros: Zeros
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Buffers by name; and blocks: contiguous tensors (n, capacity, ...) of all that slots hold, to be copied whole."""
    if layout == "layer_first":
        found = {b.name: zeros(b.name, shape(b, unit, capacity, entries), b.dtype) for b in manifest.buffers}
        return found, list(found.values())
    import torch

    whole = zeros(WHOLE, (capacity, slot_bytes(layout, manifest, entries)), "uint8")
    views = {}
    for buffer, start, size in parts(manifest, entries):
        layers, _, *rest = shape(buffer, unit, capacity, entries)
        part = whole[:, start : start + size].view(getattr(torch, buffer.dtype))
        views[buffer.name] = part.view(capacity, layers, *rest).transpose(0, 1)
    return {buffer.name: views[buffer.name] for buffer in manifest.buffers}, [whole[None]]
