"""Layouts: how the content of a pool's slots lies in memory. The shapes of the buffers are the same in each layout.

"layer_first": each buffer is a contiguous tensor (layers, capacity, ...). "page_first": the content of a slot lies
together, buffer after buffer, those with wider elements first, each (layers, entries, *shape); the buffers are views of
that. Then a slot can be copied in one piece, but in one layer only a single slot is contiguous. A layout knows neither
what a slot is for nor where its memory comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..contract.manifest import DTYPE_BYTES, Buffer, Layout, Manifest

if TYPE_CHECKING:
    from torch import Tensor

    Zeros = Callable[[str, tuple[int, ...], str], Tensor]

ALIGNMENT = 8
"""A page-first slot begins at a multiple of so many bytes, so that elements of any dtype are aligned."""

WHOLE = ""
"""The name under which ``allocate`` asks for the memory of all buffers together."""


def shape(buffer: Buffer, unit: str, capacity: int, entries: int) -> tuple[int, ...]:
    """The shape of a buffer's tensor."""
    middle = () if unit == "boundary" else (entries,)
    return (len(buffer.layers), capacity, *middle, *buffer.shape)


def parts(manifest: Manifest, entries: int) -> Iterator[tuple[Buffer, int, int]]:
    """Yield each buffer with its offset and its size in the bytes of one slot."""
    start = 0
    for buffer in sorted(manifest.buffers, key=lambda b: -DTYPE_BYTES[b.dtype]):
        size = buffer.entry_bytes * entries
        yield buffer, start, size
        start += size


def slot_bytes(layout: Layout, manifest: Manifest, entries: int) -> int:
    """Bytes of a pool's memory that a slot takes, with the padding of a page-first slot."""
    size = manifest.slot_bytes * entries
    return size if layout == "layer_first" else -(-size // ALIGNMENT) * ALIGNMENT


def allocate(
    layout: Layout, manifest: Manifest, unit: str, capacity: int, entries: int, zeros: Zeros
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Allocate a pool's memory: its buffers by name, and blocks, contiguous tensors (n, capacity, ...) that together
    hold all content, for copies of whole slots.
    """
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
