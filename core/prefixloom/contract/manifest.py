"""Manifest: what a component stores, and the facts from which the core derives everything else.

The default of every fact is right for plain attention. A manifest is plain data: it knows no device, no capacity and no
page count, so it can be compared, printed and made part of a storage fingerprint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Literal

import attrs

from ..errors import CompositionError
from .admission import AdmissionPolicy
from .checks import at_least, items, of_type, one_of, typed

Unit = Literal["page", "boundary"]

Layout = Literal["layer_first", "page_first"]

LAYOUTS: tuple[Layout, ...] = ("layer_first", "page_first")

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

SCALE = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_memory(memory: int | str, name: str = "memory") -> int:
    """Return a number of bytes, given as a number or as a text such as "20GiB", "512 MiB" or "20GB".

    ``name``: what errors call it.
    """
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", memory, re.IGNORECASE)
        if match is None or (match[3] and not match[2]):
            raise CompositionError(f'{name}={memory!r} is no size. Write bytes, or a text such as "20GiB" or "512MiB"')
        base = 1024 if match[3] else 1000
        memory = int(float(match[1]) * base ** SCALE[match[2].upper()])
    if not isinstance(memory, int) or isinstance(memory, bool):
        raise CompositionError(f'{name} must be bytes or a text such as "20GiB", got {memory!r}')
    if memory < 1:
        raise CompositionError(f"{name} must be positive, got {memory} bytes")
    return memory


def _dtype_name(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CompositionError(f"a buffer's dtype must be one of {', '.join(DTYPE_BYTES)}; got {dtype!r}")
    return name


# Typed converters: with a bare ``tuple``, strict type checkers would see no type for the argument.
def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return items(values, int, "shape and layers")


def _buffers(values: Iterable[Buffer]) -> tuple[Buffer, ...]:
    return items(values, Buffer, "the buffers of a manifest")


@attrs.frozen
class Buffer:
    """One tensor of a slot. ``shape`` is that of one entry in one layer.

    ``layers`` are the numbers of the model's layers that own an entry. ``shared`` maps further layers to the owner
    whose entry they read (KV sharing); a shared layer takes no memory.
    """

    name: str
    shape: tuple[int, ...] = attrs.field(converter=_ints)
    dtype: str = attrs.field(default="bfloat16", converter=_dtype_name)
    layers: tuple[int, ...] = attrs.field(default=(0,), converter=_ints)
    shared: Mapping[int, int] = attrs.field(
        factory=dict, validator=typed(Mapping), eq=lambda m: tuple(sorted(m.items()))
    )

    def __attrs_post_init__(self) -> None:
        if not of_type(self.name, str, "a buffer's name").isidentifier():
            raise CompositionError(f"a buffer's name must be an identifier, got {self.name!r}")
        if any(d < 1 for d in self.shape):
            raise CompositionError(f"buffer {self.name!r}: every extent must be at least 1, got {self.shape}")
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise CompositionError(f"buffer {self.name!r}: layers must be distinct and at least one, got {self.layers}")
        for layer, owner in self.shared.items():
            if owner not in self.layers or layer in self.layers:
                raise CompositionError(
                    f"buffer {self.name!r}: layer {layer} cannot share layer {owner}'s entries: the owner must be one "
                    f"of {self.layers} and the sharer none of them"
                )

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry over all owning layers."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype] * len(self.layers)


@attrs.frozen
class Codec:
    """The form in which cached content is stored: its dtype, and the largest error that a round trip may cause."""

    dtype: str = attrs.field(converter=_dtype_name)
    tolerance: float = attrs.field(default=0.0, validator=typed(Real))


@attrs.frozen
class Manifest:
    """What a component stores. The unit (page or boundary) follows from its reach; docs/hooks.md has each fact (M1)."""

    buffers: tuple[Buffer, ...] = attrs.field(converter=_buffers)
    tokens_per_slot: int = attrs.field(default=1, validator=at_least(1))
    page_size: int | None = attrs.field(default=None, validator=at_least(1))
    grid: int = attrs.field(default=1, validator=at_least(1))
    lookahead: int = attrs.field(default=0, validator=at_least(0))
    max_rewind: int | None = attrs.field(default=None, validator=at_least(0))
    checkpoint_every: int = attrs.field(default=0, validator=at_least(0))
    placement: Literal["sharded", "replicated"] = attrs.field(
        default="sharded", validator=one_of("sharded", "replicated")
    )
    stored_as: Codec | None = attrs.field(default=None, validator=attrs.validators.optional(typed(Codec)))
    admission: str | AdmissionPolicy | None = None
    version: int = attrs.field(default=1, validator=at_least(0))

    def __attrs_post_init__(self) -> None:
        names = [buffer.name for buffer in self.buffers]
        if not names:
            raise CompositionError("a manifest needs at least one buffer")
        if len(set(names)) != len(names):
            raise CompositionError(f"buffer names must differ, got {names}")
        if not isinstance(self.admission, str | AdmissionPolicy | None):
            raise CompositionError(
                f"admission must be the name of a policy or an AdmissionPolicy, got {self.admission!r}"
            )

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot entry over all buffers and layers."""
        return sum(buffer.entry_bytes for buffer in self.buffers)


@attrs.frozen
class TierManifest:
    """A tier below the device. A component with it has no data of its own; docs/engine.md has each field."""

    capacity: int | Mapping[str, int] | None = None
    memory: int | str | None = None
    write: Literal["through", "selective", "back"] = attrs.field(
        default="through", validator=one_of("through", "selective", "back")
    )
    hits: int = attrs.field(default=2, validator=at_least(1))
    load_at_least: int = attrs.field(default=1, validator=at_least(1))
    layout: Layout = attrs.field(default="layer_first", validator=one_of(*LAYOUTS))
    gates: int = attrs.field(default=1, validator=at_least(1))
    overlap: bool = False

    def __attrs_post_init__(self) -> None:
        if (self.capacity is None) == (self.memory is None):
            raise CompositionError(
                'say how large the tier is: capacity=<tokens>, a mapping by component, or memory="200GiB"; one of them'
            )
