"""Codecs: storing the content of cached slots in a smaller form, with a bounded error.

A ``Coder`` is made from a manifest with ``stored_as``. Its ``stored`` is the manifest of the stored form, from which a
pool can be made. ``encode`` and ``decode`` convert slots between the tensors of the two forms, each layer of a slot by
itself: all temporaries together take about six times as much. Nothing is read back from a device. A codec knows no
pool, no tree and no owner of a slot.

A *row* is the last dimension of a buffer's shape. The codec's dtype says how a row is stored:

- ``int8``: the row's largest absolute value, in the buffer's own dtype, and each value as a number of 127ths of it,
  rounded half to even. So the largest value is exact, no code is beyond 127, and zeros are zeros (a negative zero
  becomes a positive one). A row with an infinity or a NaN comes back as NaNs.
- ``bfloat16``, ``float16``, ``float32``: each value is rounded. A finite value that is too large becomes the largest
  one of its sign; infinities do not change, and every NaN becomes the same NaN.

A buffer that holds no floating point numbers, or would not become smaller, is stored unchanged.

**The law.** If the largest absolute value m of a row is a normal number in both dtypes (or 0), every value of the row
comes back within m * ``bound``. A codec's ``tolerance`` must not be less than ``bound``. A second round trip changes
nothing: ``encode(decode(e))`` is e, bit by bit, for every e that ``encode`` made. So content that is passed on through
many sequences does not drift.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ..contract.manifest import Buffer, Manifest
from ..errors import CompositionError, InputError
from .kernels import check_slots

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HALF_EPS: Mapping[str, float] = {
    "bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53,
}  # fmt: skip
"""The largest error of rounding to a dtype, relative to the value."""

STORED = ("int8", "bfloat16", "float16", "float32")

ARITHMETIC = 2.0**-22
"""The error that float32 arithmetic may add; a float64 that becomes 16 bits through float32 adds half an eps."""


@attrs.frozen
class _Coding:
    """How one buffer is stored: as ``stored``, with a buffer of the ``largest`` value of each row for int8 codes."""

    live: Buffer
    stored: Buffer
    largest: Buffer | None = None

    @property
    def kept(self) -> bool:
        return self.live.dtype == self.stored.dtype

    @property
    def bound(self) -> float:
        if self.kept:
            return 0.0
        if self.largest is not None:
            return 1 / 254 + HALF_EPS[self.live.dtype] + ARITHMETIC
        return HALF_EPS[self.stored.dtype] + (0.0 if self.stored.dtype == "float32" else HALF_EPS["float32"])


def _coding(buffer: Buffer, dtype: str, names: set[str]) -> _Coding:
    kept = _Coding(buffer, buffer)
    if buffer.dtype not in HALF_EPS or not buffer.shape:
        return kept
    stored = attrs.evolve(buffer, dtype=dtype)
    largest = None
    if dtype == "int8":
        name = f"{buffer.name}_largest"
        while name in names:
            name += "_"
        largest = attrs.evolve(buffer, name=name, shape=buffer.shape[:-1])
    size = stored.entry_bytes + (largest.entry_bytes if largest is not None else 0)
    return _Coding(buffer, stored, largest) if size < buffer.entry_bytes else kept


class Coder:
    """The conversion between the buffers of a manifest (``live``) and their stored form (``stored``).

    The buffers of ``stored`` have the names of those of ``live``; a buffer that is coded as int8 has a second one
    beside it for the rows' largest values. ``bound`` is the largest error, relative to the largest value of a row.
    """

    __slots__ = ("_codings", "bound", "live", "stored")

    def __init__(self, manifest: Manifest) -> None:
        codec = manifest.stored_as
        if codec is None:
            raise CompositionError("this manifest has no stored_as")
        if codec.dtype not in STORED:
            raise CompositionError(f"stored_as: content rests as one of {', '.join(STORED)}, not as {codec.dtype!r}")
        names = {buffer.name for buffer in manifest.buffers}
        self._codings = [_coding(buffer, codec.dtype, names) for buffer in manifest.buffers]
        self.live = manifest
        self.stored: Manifest = attrs.evolve(manifest, buffers=_stored_buffers(self._codings), stored_as=None)
        self.bound = max(coding.bound for coding in self._codings)
        for coding in self._codings:
            if coding.bound > codec.tolerance:
                raise CompositionError(
                    f"buffer {coding.live.name!r} of {coding.live.dtype} comes back from {codec.dtype} within "
                    f"{coding.bound:.3g} of a row's largest value, which stored_as does not tolerate: it says "
                    f"{codec.tolerance:.3g}. Tolerate so much, or choose another dtype"
                )

    @property
    def changes(self) -> bool:
        """Whether any buffer is stored in another form."""
        return not all(coding.kept for coding in self._codings)

    def encode(
        self, live: Mapping[str, Tensor], slots: Sequence[int], stored: Mapping[str, Tensor], into: Sequence[int]
    ) -> None:
        """Write the content of the live ``slots`` to the stored slots ``into``, which are distinct."""
        for coding in self._codings:
            source, target = live[coding.live.name], stored[coding.stored.name]
            for layer, s, t in _places(source, slots, target, into):
                values = source[layer, s]
                if coding.largest is not None:
                    largest, values = _to_codes(values)
                    stored[coding.largest.name][layer, t].copy_(largest)
                elif not coding.kept:
                    values = _cast(values, target.dtype)
                target[layer, t].copy_(values)

    def decode(
        self, stored: Mapping[str, Tensor], slots: Sequence[int], live: Mapping[str, Tensor], into: Sequence[int]
    ) -> None:
        """Write the content of the stored ``slots`` to the live slots ``into``, which are distinct."""
        for coding in self._codings:
            source, target = stored[coding.stored.name], live[coding.live.name]
            for layer, s, t in _places(source, slots, target, into):
                values = source[layer, s]
                if coding.largest is not None:
                    values = _from_codes(stored[coding.largest.name][layer, s], values)
                elif not coding.kept:
                    values = _plain(values.to(target.dtype))
                target[layer, t].copy_(values)


def _stored_buffers(codings: Sequence[_Coding]) -> Iterator[Buffer]:
    for coding in codings:
        yield coding.stored
        if coding.largest is not None:
            yield coding.largest


def _places(
    source: Tensor, slots: Sequence[int], target: Tensor, into: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield each layer with each pair of slots, after a check that there are such; of the meta device none."""
    if len(slots) != len(into) or len(set(into)) != len(into):
        raise InputError(f"as many different slots are needed as there are sources: got {len(slots)} and {list(into)}")
    if not len(slots) or source.device.type == "meta":
        return
    if len(source) != len(target):
        raise InputError(f"{len(source)} layers cannot become {len(target)}")
    check_slots([source], slots)
    check_slots([target], into)
    for layer in range(len(source)):
        for pair in zip(slots, into, strict=True):
            yield layer, *pair


# ---------------------------------------------------------------- converting rows


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    import torch

    top = torch.finfo(dtype).max
    return _plain(values.clamp(-top, top).where(~values.isinf(), values).to(dtype))


def _plain(values: Tensor) -> Tensor:
    """Make all NaNs the same one: which bits a conversion gives a NaN depends on its place in the vector."""
    return values.masked_fill_(values.isnan(), math.nan)


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    import torch

    return torch.promote_types(dtype, torch.float32)


def _steps(values: Tensor) -> Tensor:
    """Return 127 as a tensor on the device of the values: CUDA would multiply by the inverse of a host's number."""
    return values.new_ones(1).mul_(127)


def _to_codes(values: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    largest = values.abs().amax(-1)
    finite = largest.isfinite()
    exact = values.to(_arithmetic(values.dtype))
    unit = largest.where(largest > 0, 1).to(exact.dtype).unsqueeze(-1)
    codes = (exact / unit).mul_(127).round_().masked_fill_(~finite.unsqueeze(-1), 0)
    return largest.masked_fill_(~finite, math.nan), codes.to(torch.int8)


def _from_codes(largest: Tensor, codes: Tensor) -> Tensor:
    exact = codes.to(_arithmetic(largest.dtype))
    return _plain(exact.div_(_steps(exact)).mul_(largest.to(exact.dtype).unsqueeze(-1)).to(largest.dtype))
