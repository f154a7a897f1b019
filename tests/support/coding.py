"""Coders of small manifests, and the tensors that a pool would make for them."""

from __future__ import annotations

import torch
from torch import Tensor

from prefixloom import Buffer, Codec, Manifest
from prefixloom.device.codecs import Coder


def coder(rests: str, *buffers: Buffer, tolerance: float = 1.0) -> Coder:
    return Coder(Manifest(buffers, stored_as=Codec(rests, tolerance)))


def tensors(manifest: Manifest, capacity: int, entries: int | None = None, fill: int = 1) -> dict[str, Tensor]:
    """As a pool would make them: with entries for pages, without for states."""
    middle = () if entries is None else (entries,)
    return {
        b.name: torch.full((len(b.layers), capacity, *middle, *b.shape), fill).to(getattr(torch, b.dtype))
        for b in manifest.buffers
    }
