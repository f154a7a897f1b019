"""Manifest: what a component stores, and the facts from which the core derives everything else.

Every fact has the default that is right for plain attention. A manifest is plain data: it knows no device, no capacity
and no page count, so that it can be compared, printed and folded into a storage fingerprint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import attrs

from ..errors import CompositionError
from .admission import AdmissionPolicy

Unit = Literal["page", "boundary"]

Layout = Literal["layer_first", "page_first"]

LAYOUTS: tuple[Layout, ...] = ("layer_first", "page_first")

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def _dtype_name(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CompositionError(f"a buffer's dtype must be one of {', '.join(DTYPE_BYTES)}; got {dtype!r}")
    return name


def _whole(low: int) -> Callable[[object, attrs.Attribute[int], int], None]:
    def check(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise CompositionError(f"{attribute.name} must be a whole number of at least {low}, got {value!r}")

    return check


# Converters with a type of their own: a bare ``tuple`` would leave strict checkers without one.
def _ints(values: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(values, Iterable):
        raise CompositionError(f"shape and layers are sequences of whole numbers: write [{values!r}]")
    return tuple(values)


def _names(values: Iterable[str]) -> frozenset[str]:
    return frozenset(values)


def _buffers(values: Iterable[Buffer]) -> tuple[Buffer, ...]:
    if isinstance(values, Buffer):
        raise CompositionError("a manifest takes a sequence of buffers: write [Buffer(...)]")
    return tuple(values)


@attrs.frozen
class Buffer:
    """One tensor of a slot: ``shape`` of one entry in one layer.

    ``layers`` are the model's layer numbers that own an entry; ``shared`` maps further layers to the owner whose
    entry they read (KV sharing), and takes no memory.
    """

    name: str
    shape: tuple[int, ...] = attrs.field(converter=_ints)
    dtype: str = attrs.field(default="bfloat16", converter=_dtype_name)
    layers: tuple[int, ...] = attrs.field(default=(0,), converter=_ints)
    shared: Mapping[int, int] = attrs.field(factory=dict, eq=lambda m: tuple(sorted(m.items())))

    def __attrs_post_init__(self) -> None:
        if not self.name.isidentifier():
            raise CompositionError(f"a buffer's name must be an identifier, got {self.name!r}")
        if any(not isinstance(d, int) or d < 1 for d in self.shape):
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
    """How content rests in the tree and in lower tiers: another dtype, and how far a round trip may be off."""

    dtype: str = attrs.field(converter=_dtype_name)
    tolerance: float = 0.0


@attrs.frozen
class Manifest:
    """What a component stores. ``unit`` comes from its reach; the rest is said here.

    ``tokens_per_slot``  tokens that one slot entry stands for (compressed KV); 1 for plain attention
    ``page_size``        tokens of a page, where the component must have its own; None: the composition's
    ``grid``             boundaries at which content is exact or can be checkpointed
    ``lookahead``        tokens past b on which the content of [.., b) depends
    ``shareable``        False: never in the tree, but pooled, rewound and handed over
    ``attach``           "share": a match reads in place; "copy": a match copies, and pins the source until it has run
    ``max_rewind``       tokens that can be taken back; None: as many as are not yet published
    ``checkpoint_every`` boundary components: keep a checkpoint every so many tokens while running; 0: only the state
                         at the end
    ``states_per_path``  boundary components: at most so many cached states on a path from the root; None: any number
    ``placement``        "sharded" or "replicated" over tensor and context parallel ranks
    ``stored_as``        a codec for what rests in the tree or in lower tiers
    ``replay``           resume this many tokens earlier to rebuild, instead of having a reach
    ``requires``         names that another component of the composition must have or provide
    ``provides``         capabilities that this component adds, beside its name
    ``version``          of what is written into a slot: another one is not read back from a store
    ``admission``        boundary components: which states the tree takes, by a policy's name or as one; None: as the
                         composition says
    """

    buffers: tuple[Buffer, ...] = attrs.field(converter=_buffers)
    tokens_per_slot: int = attrs.field(default=1, validator=_whole(1))
    page_size: int | None = None
    grid: int = attrs.field(default=1, validator=_whole(1))
    lookahead: int = attrs.field(default=0, validator=_whole(0))
    shareable: bool = True
    attach: Literal["share", "copy"] | None = None
    max_rewind: int | None = None
    checkpoint_every: int = attrs.field(default=0, validator=_whole(0))
    states_per_path: int | None = None
    placement: Literal["sharded", "replicated"] = "sharded"
    stored_as: Codec | None = None
    replay: int = attrs.field(default=0, validator=_whole(0))
    requires: frozenset[str] = attrs.field(factory=frozenset, converter=_names)
    provides: frozenset[str] = attrs.field(factory=frozenset, converter=_names)
    admission: str | AdmissionPolicy | None = None
    version: int = attrs.field(default=1, validator=_whole(0))

    def __attrs_post_init__(self) -> None:
        names = [buffer.name for buffer in self.buffers]
        if not names:
            raise CompositionError("a manifest needs at least one buffer")
        if len(set(names)) != len(names):
            raise CompositionError(f"buffer names must differ, got {names}")
        if self.attach not in (None, "share", "copy"):
            raise CompositionError(f"attach must be 'share' or 'copy', got {self.attach!r}")
        if self.placement not in ("sharded", "replicated"):
            raise CompositionError(f"placement must be 'sharded' or 'replicated', got {self.placement!r}")
        if self.admission is not None and not isinstance(self.admission, str | AdmissionPolicy):
            raise CompositionError(
                f"admission must be the name of a policy or an AdmissionPolicy, got {self.admission!r}"
            )
        for name in ("page_size", "max_rewind", "states_per_path"):
            value = getattr(self, name)
            if value is not None:
                _whole(0 if name == "max_rewind" else 1)(self, getattr(attrs.fields(Manifest), name), value)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot entry over all buffers and layers."""
        return sum(buffer.entry_bytes for buffer in self.buffers)


@attrs.frozen
class TierManifest:
    """What a tier below the device is: a component whose ``manifest`` is one of these adds no data of its own.

    ``capacity``     tokens of every component that it holds, or a mapping by component (tokens, or states)
    ``memory``       bytes, or a text such as "200GiB", in place of ``capacity``
    ``write``        "through": copied when it is published; "selective": after ``hits`` hits; "back": when the device
                     is about to lose it
    ``load_at_least`` tokens that a load must bring, or else they are computed
    ``layout``       "layer_first", or "page_first": all layers of a slot together. Pages that lie so on the device as
                     well (``compose(layout=...)``) are copied in one piece
    ``gates``        groups of layers that a load is copied in: the first layers of a step may run while the last are
                     on their way (``Step.gate``). Where copies run beside the scheduling thread
    ``overlap``      always copy beside the scheduling thread; False: in it while nothing else is running (on a CPU)
    """

    capacity: int | Mapping[str, int] | None = None
    memory: int | str | None = None
    write: Literal["through", "selective", "back"] = attrs.field(default="through")
    hits: int = attrs.field(default=2, validator=_whole(1))
    load_at_least: int = attrs.field(default=1, validator=_whole(1))
    layout: Layout = "layer_first"
    gates: int = attrs.field(default=1, validator=_whole(1))
    overlap: bool = False

    def __attrs_post_init__(self) -> None:
        for name, allowed in (("write", ("through", "selective", "back")), ("layout", LAYOUTS)):
            if getattr(self, name) not in allowed:
                raise CompositionError(f"{name} must be {' or '.join(map(repr, allowed))}, got {getattr(self, name)!r}")
        if (self.capacity is None) == (self.memory is None):
            raise CompositionError(
                'say how large the tier is: capacity=<tokens>, a mapping by component, or memory="200GiB"; one of them'
            )
