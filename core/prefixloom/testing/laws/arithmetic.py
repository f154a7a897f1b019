"""The law of layers that are watched: what is stored is all that going on needs."""

from __future__ import annotations

import torch

from ..kit.case import ComponentCase, LawBroken, NotApplicable, Wasteful
from ..kit.watching import LENGTH, Layers, watch

ROUNDINGS = 256
"""By how many units of the last place outputs may differ that were computed in passes of other lengths."""
LATE = (64, 128, 256, 512)
"""The lengths beyond which layers are run as well, since what they keep may change there."""
APART = 0.1
"""By which part of the largest output they may differ at most, where a unit of 16 bits or less is large."""


def law_layers_go_on_from_what_is_stored(case: ComponentCase) -> None:
    """Layers that go on at a boundary, from nothing but what is cached for it, give the outputs of one pass.

    Clauses: M1, M2, M4, P3.
    """
    layers = watch(case)
    if layers is None:
        raise NotApplicable("nobody gave its layers (Truth.layers), so what they compute is not known")
    step = max(case.manifest.grid, layers.group)
    cuts = range(step, LENGTH, step)
    late = (-(-(length + 1) // step) * step for length in LATE)
    for cut in [*(cuts if len(cuts) < 12 else sorted({*cuts[:4], *cuts[4::4]})), *late]:
        whole, gone_on = layers.gone_on(cut, case.reach.needs(cut))
        scale = float(whole.abs().max()) or 1.0
        apart = float((whole.double() - gone_on.double()).abs().max()) / scale
        unit = _unit(layers, whole.dtype)
        if not apart <= min(ROUNDINGS * unit, max(APART, 2 * unit)):
            raise LawBroken(
                f"layers that go on at {cut}, from what resuming there needs, differ by {apart:.2g} of their largest "
                f"output from one pass: something that they read is not stored, or is stored in too few bits"
            )
    for name, few in layers.narrower().items():
        raise Wasteful(
            f"every value that the layers write to {name!r} is exact in {few}, and the manifest says "
            f"{next(buffer.dtype for buffer in case.manifest.buffers if buffer.name == name)}: an entry is larger than "
            f"it must be"
        )


def _unit(layers: Layers, outputs: torch.dtype) -> float:
    """Return the relative distance of two neighbouring numbers: of outputs or, where pages hold fewer bits, of these.

    A state is read and written again at each token, so that it must be as fine as the outputs.
    """
    kinds = [outputs]
    if not layers.has_states:
        kinds += [getattr(torch, buffer.dtype) for buffer in layers.manifest.buffers]
    return max(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point)
