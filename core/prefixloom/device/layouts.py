"""Layouts: how the content of a pool's slots lies in memory. The shapes of the buffers are the same in each layout.

"layer_first": each buffer is a contiguous tensor (layers, capacity, ...). "page_first": the content of a slot lies
together, buffer after buffer, those with wider elements first, each (layers, entries, *shape); the buffers are views of
that. Then a slot can be copied in one piece, but in one layer only a single slot is contiguous. A layout knows neither
what a slot is for nor where its memory comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract.manifest import DTYPE_BYTES, Buffer, Layout, Manifest
from ..errors import CompositionError

if TYPE_CHECKING:
    from torch import Tensor

    Zeros = Callable[[str, tuple[int, ...], str], Tensor]

ALIGNMENT = 8
"""A page-first slot begins at a multiple of so many bytes, so that elements of any dtype are aligned."""

WHOLE = ""
"""The name under which ``allocate`` asks for the memory of all buffers together."""


def shape(buffer: Buffer, unit: str, capacity: int, entries: int) -> tuple[int, ...]:
    """Return the shape of a buffer's tensor."""
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
    """Return the bytes of a pool's memory that a slot takes, with the padding of a page-first slot."""
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


def from_tensors(
    manifest: Manifest, unit: str, capacity: int, entries: int, device: str, tensors: Any
) -> tuple[dict[str, Any], list[Tensor]]:
    """Take memory that somebody else has, in place of ``allocate``. CompositionError: it does not fit.

    ``tensors`` has for each buffer a tensor (layers, slots, ...), or one (slots, ...) for each layer. There may be more
    slots than ``capacity``. What one slot has in one layer must be contiguous.
    """
    if not isinstance(tensors, Mapping) or {*tensors} != {buffer.name for buffer in manifest.buffers}:
        raise CompositionError(
            f"its buffers are {', '.join(buffer.name for buffer in manifest.buffers)}, and tensors were given for "
            f"{', '.join(map(str, tensors)) if isinstance(tensors, Mapping) else repr(tensors)}"
        )
    buffers: dict[str, Any] = {}
    blocks = []
    for buffer in manifest.buffers:
        found = tensors[buffer.name]
        for fault in _faults(buffer, found, shape(buffer, unit, capacity, entries), device):
            raise CompositionError(f"buffer {buffer.name!r} {fault}")
        buffers[buffer.name] = tuple(found) if isinstance(found, Sequence) else found
        blocks += layers_of(found)
    return buffers, blocks


def _faults(buffer: Buffer, found: Any, wanted: tuple[int, ...], device: str) -> Iterator[str]:
    """Yield why a tensor, or one for each layer, cannot be the memory of a buffer that has the shape ``wanted``."""
    import torch

    is_one = isinstance(found, torch.Tensor) and found.dim() > 0
    if not is_one and not (isinstance(found, Sequence) and all(isinstance(each, torch.Tensor) for each in found)):
        yield f"takes a tensor (layers, slots, ...), or a list with one for each layer, got a {type(found).__name__}"
    if len(found) != wanted[0]:
        yield f"has {wanted[0]} layers, and {len(found)} were given"
    for layer in found:
        fits = layer.dim() > 0 and len(layer) >= wanted[1] and tuple(layer.shape[1:]) == wanted[2:]
        if not fits or layer.dtype != getattr(torch, buffer.dtype):
            yield (
                f"has layers of {buffer.dtype} {wanted[1:]}, or more slots, and one of {layer.dtype} "
                f"{tuple(layer.shape)} was given"
            )
        if torch.empty(0, device=device).device != layer.device:
            yield f"lies on {layer.device}, and the cache on {device}"
        if not layer[:1].is_contiguous() or layer.stride(0) < layer[0].numel():
            yield f"has strides of {layer.stride()}: what a slot has in a layer must be contiguous"


def layers_of(buffer: Any) -> list[Tensor]:
    """Return the layers of a pool's buffer, each as a tensor (1, capacity, ...)."""
    return [layer[None] for layer in buffer]
