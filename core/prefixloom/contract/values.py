"""Values: the frozen objects that plugins and the core exchange.

A plugin answers with values and never changes a node, a count or a shared object. No value refers to a tree node or to
a pool, so it can be kept, compared and printed after the operation that made it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from ..errors import CompositionError
from ..keys.tokens import Span
from .checks import at_least, function, items, one_of, typed
from .manifest import Manifest
from .reach import Interval, Reach

Tier = Literal["device", "host", "storage"]

Phase = Literal["backup", "load", "store", "prefetch", "hand_over"]


# Typed converters: with a bare ``tuple``, strict type checkers would see no type for the argument.
def _kinds(values: Iterable[str]) -> frozenset[str]:
    return frozenset(items(values, str, "layer_kinds"))


def _warnings(values: Iterable[str]) -> tuple[str, ...]:
    return items(values, str, "the warnings of a profile")


def _specs(values: Iterable[ComponentSpec]) -> tuple[ComponentSpec, ...]:
    return items(values, ComponentSpec, "the components of a profile")


def _ops(values: Iterable[Op]) -> tuple[Op, ...]:
    return items(values, Op, "ops", TypeError)


def _intervals(values: Iterable[Interval]) -> tuple[Interval, ...]:
    spans = tuple(values)
    for span in spans:
        if not isinstance(span, tuple) or len(span) != 2 or not all(isinstance(at, int) for at in span):
            raise TypeError(f"token intervals are (start, end) pairs of whole numbers, got {span!r}")
    return spans


def _kept(values: Iterable[Any] | None) -> tuple[Any, ...] | None:
    kept = None if values is None else tuple(values)
    return kept if kept is None or all(isinstance(value, int) for value in kept) else _intervals(kept)


_number = at_least(0, error=TypeError)


# ---------------------------------------------------------------- what a plugin offers (cold)


@attrs.frozen
class LayerFacts:
    """One layer of a model config (docs/engine.md)."""

    index: int
    kind: str
    options: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class ModelFacts:
    """A model config under normalised names (docs/engine.md)."""

    model_type: str
    layers: tuple[LayerFacts, ...]
    dtype: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    raw: Mapping[str, Any]
    warnings: tuple[str, ...] = ()

    def widths(self, layer: LayerFacts) -> tuple[int, int, int]:
        """Return (heads, K width, V width) of an attention layer: its own values if it has any, else the model's."""
        if not self.num_attention_heads:
            raise CompositionError(f"layer {layer.index} has attention, and the config has no num_attention_heads")
        k_dim = int(layer.options.get("head_dim") or self.head_dim)
        v_dim = int(layer.options.get("v_head_dim") or self.raw.get("v_head_dim") or k_dim)
        return int(layer.options.get("num_key_value_heads") or self.num_key_value_heads), k_dim, v_dim

    def owning(self, layers: Sequence[LayerFacts]) -> dict[str, Any]:
        """Return options of an attention component: the layers that own entries, those that share them, the dtype."""
        shared = {layer.index: int(layer.options["kv_owner"]) for layer in layers if "kv_owner" in layer.options}
        owners = tuple(layer.index for layer in layers if layer.index not in shared)
        return {"layers": owners, "dtype": self.dtype, "shared": shared}


@attrs.frozen
class ComponentSpec:
    """One component of a profile: the kind of component, its name, and the options to make it with."""

    kind: str = attrs.field(validator=typed(str))
    name: str = attrs.field(default="", validator=typed(str))
    options: Mapping[str, Any] = attrs.field(factory=dict, validator=typed(Mapping))

    def __attrs_post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.kind)


@attrs.frozen
class Profile:
    """The components for a model, and their common settings. ``warnings`` are logged when a cache is composed of it."""

    components: tuple[ComponentSpec, ...] = attrs.field(converter=_specs)
    page_size: int | None = None
    max_rewind: int = 0
    name: str = "custom"
    warnings: tuple[str, ...] = attrs.field(default=(), converter=_warnings)


FromLayers = Mapping[str, Any] | Sequence[tuple[str, Mapping[str, Any]]]
"""Options of one component; or of several, each with the suffix of its name ("" for none)."""


@attrs.frozen
class ComponentType:
    """The answer to ``prefixloom_component``: how to make instances of one kind of component.

    ``make(name=..., **options)`` returns a new instance. ``layer_kinds`` are the kinds of model layers that it serves.
    ``from_layers(facts, layers)`` is called once with all layers of these kinds that a model config has. It returns the
    options of the one component that serves them; or, if they need several components (for windows of different sizes,
    say), a list of (name suffix, options), one per component. ``caveats(facts, layers)`` returns warnings.
    """

    kind: str = attrs.field(validator=typed(str))
    make: Callable[..., Any] = attrs.field(validator=function)
    summary: str = ""
    layer_kinds: frozenset[str] = attrs.field(factory=frozenset, converter=_kinds)
    from_layers: Callable[[ModelFacts, tuple[LayerFacts, ...]], FromLayers] | None = attrs.field(
        default=None, validator=function
    )
    caveats: Callable[[ModelFacts, tuple[LayerFacts, ...]], Iterable[str]] | None = attrs.field(
        default=None, validator=function
    )

    def __attrs_post_init__(self) -> None:
        if self.layer_kinds and self.from_layers is None:
            raise CompositionError(f"component type {self.kind!r} names layer_kinds but has no from_layers")
        try:
            takes = inspect.signature(self.make).parameters.values()
        except (TypeError, ValueError):  # it has no signature in Python
            return
        if not any(each.name == "name" or each.kind is each.VAR_KEYWORD for each in takes):
            raise CompositionError(
                f"component type {self.kind!r}: it is made by make(name=..., **options), and "
                f"{getattr(self.make, '__name__', self.make)} takes no name. Give it a parameter `name`, which becomes "
                f"the component's name"
            )


class Component:
    """A base class for component plugins: a name, a manifest and a reach. Any object with the three will do."""

    def __init__(self, name: str, manifest: Manifest, reach: Reach) -> None:
        self.name = name
        self.manifest = manifest
        self.reach = reach

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self.reach!r}>"


# ---------------------------------------------------------------- what a plugin is shown (read-only; ``extra``: H12)


@attrs.frozen
class WalkView:
    """A match or a publication as a hook sees it.

    ``key_tokens``  number of tokens that the key can name
    ``walked``      number of tokens for which the key agrees with the tree
    ``start``       where the part in question begins: 0 for a match, the last published boundary for an insert
    ``at_branch``   whether prompts diverge at the boundary
    ``last``        whether the sequence ends with this publication
    """

    namespace: str
    boundary: int
    key_tokens: int
    walked: int
    start: int = 0
    at_branch: bool = False
    last: bool = False
    extra: tuple[Span, ...] = ()


@attrs.frozen
class NodeView:
    """A node as a hook sees it: its tokens [start, end), counted from the root, and what one component keeps there."""

    start: int
    end: int
    pages: int
    leases: int
    tier: Tier = "device"
    extra: tuple[Span, ...] = ()


@attrs.frozen
class AnchorView:
    """A boundary that a lease is about to cover."""

    namespace: str
    boundary: int
    extra: tuple[Span, ...] = ()


# ---------------------------------------------------------------- ops


@attrs.frozen
class Op:
    """Work on slots that the forward stream runs exactly once in a step, before the layers or ``after`` them.

    ``component`` is the one that answers with the op, ``sequence`` the number of a view in the batch. ``dst`` and
    ``src`` name places of this sequence, and the core turns them into slots when it runs the op: docs/hooks.md, H11.
    With a ``selector``, an int tensor that may lie on the device, each of ``src`` is a tuple of places to choose from.
    """

    kind: str
    component: str
    dst: tuple[Any, ...] = ()
    src: tuple[Any, ...] = ()
    data: Any = None
    selector: Any = attrs.field(default=None, eq=False, repr=False)
    after: bool = attrs.field(default=False)
    sequence: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.kind == "track":
            object.__setattr__(self, "after", True)


# ---------------------------------------------------------------- answers


@attrs.frozen
class Claim:
    """What a component asserts about an operation.

    ``need``    slots that it will take, added to the derived need
    ``ops``     ops to run before the layers, after the derived ones
    ``branch``  a boundary worth a checkpoint while recomputing; it is floored to the composition's grid
    ``keep``    commit_insert: token intervals of the published span to keep (None: all of it);
                evict_component: indices of the victims to hold back
    """

    need: int = attrs.field(default=0, validator=_number)
    ops: tuple[Op, ...] = attrs.field(default=(), converter=_ops)
    branch: int | None = attrs.field(default=None, validator=_number)
    keep: tuple[Any, ...] | None = attrs.field(default=None, converter=_kept)


@attrs.frozen
class Receipt:
    """The positions that a lease covers for a component, in addition to its reach. ``data`` comes back on release."""

    positions: tuple[Interval, ...] = attrs.field(default=(), converter=_intervals)
    data: Any = None


@attrs.frozen
class Touch:
    """The covered positions that become recent on release; None: the derived ones."""

    positions: tuple[Interval, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_intervals))


@attrs.frozen
class SplitRule:
    """How a boundary cell divides on a split: the child, which ends where the node ended, keeps or drops the state."""

    keep: Literal["child", "drop"] = attrs.field(default="child", validator=one_of("child", "drop", error=TypeError))


@attrs.frozen
class Transfer:
    """A piece to copy between tiers: token positions [start, end) of one component, or its state at ``end``."""

    component: str
    start: int
    end: int
    source: Tier
    target: Tier


@attrs.frozen
class TransferPlan:
    """The transfers of one operation between two tiers. ``boundary`` is the deepest end of any of them."""

    phase: Phase
    namespace: str
    boundary: int
    transfers: tuple[Transfer, ...]
    extra: tuple[Span, ...] = ()


@attrs.frozen
class Outcome:
    """How a transfer plan ended: ``ok`` if all of it was copied; else none of it counts, and ``error`` says why."""

    ok: bool
    error: str = ""
