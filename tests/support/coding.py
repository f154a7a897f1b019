"""Coders of small manifests, the tensors that a pool would make for them, and what a round trip loses."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from prefixloom import Buffer, Codec, Manifest
from prefixloom.device import codecs
from prefixloom.device.codecs import Coder
from tests.support.content import bits


def coder(rests: str, *buffers: Buffer, tolerance: float = 1.0) -> Coder:
    return Coder(Manifest(buffers, stored_as=Codec(rests, tolerance)))


def tensors(manifest: Manifest, capacity: int, entries: int | None = None, fill: int = 1) -> dict[str, Tensor]:
    """As a pool would make them: with entries for pages, without for states."""
    middle = () if entries is None else (entries,)
    return {
        b.name: torch.full((len(b.layers), capacity, *middle, *b.shape), fill).to(getattr(torch, b.dtype))
        for b in manifest.buffers
    }


@attrs.frozen
class Measured:
    """The result of a round trip of some content.

    ``error``    the largest |decoded - live| of any row, relative to the row's largest |live|; infinite if a row of
                 zeros, an unchanged buffer, or a number that is not finite did not come back
    ``where``    buffer and (layer, slot, ...) of the row with that error
    ``repeats``  whether encoding the decoded content gave the same bits again
    """

    error: float
    where: str
    repeats: bool


def measure(it: Coder, live: Mapping[str, Tensor]) -> Measured:
    """Measure the round trip of all slots of these tensors."""
    slots = range(next(iter(live.values())).shape[1])
    first, again = (_empty(it, live) for _ in range(2))
    back = {name: torch.ones_like(tensor) for name, tensor in live.items()}
    it.encode(live, slots, first, slots)
    it.decode(first, slots, back, slots)
    it.encode(back, slots, again, slots)
    error, where = 0.0, "nowhere"
    for coding in it._codings:
        name = coding.live.name
        errors = _errors(coding, live[name], back[name])
        if (worst := float(errors.max())) > error:
            place = torch.unravel_index(errors.argmax(), errors.shape)
            error, where = worst, f"{name}[{', '.join(str(int(number)) for number in place)}]"
    repeats = all(torch.equal(bits(first[name]), bits(again[name])) for name in first)
    return Measured(error, where, repeats)


def _empty(it: Coder, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made = {}
    for coding in it._codings:
        tensor = live[coding.live.name]
        head = tensor.shape[: tensor.dim() - len(coding.live.shape)]
        for buffer in codecs._stored_buffers([coding]):
            shape = (*head, *buffer.shape)
            made[buffer.name] = torch.ones(shape, dtype=getattr(torch, buffer.dtype), device=tensor.device)
    return made


def _errors(coding: codecs._Coding, live: Tensor, back: Tensor) -> Tensor:
    """The error of each row, as ``Measured`` defines it."""
    if coding.kept:
        return torch.tensor([0.0 if torch.equal(bits(live), bits(back)) else math.inf])
    wanted, found = live.double(), back.double()
    largest = wanted.abs().amax(-1)
    off = (found - wanted).abs().amax(-1)
    errors = torch.where(largest > 0, off / largest, torch.where(off > 0, math.inf, 0.0))
    return torch.where(largest.isfinite(), errors, 0.0).where(largest.isfinite() == found.isfinite().all(-1), math.inf)
