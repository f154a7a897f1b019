"""The frozen values that pass between plugins and the core.

A plugin answers with these and never changes a node, a count or a shared object. Nothing here refers to a tree node or
to a pool: a value can be kept, compared and printed after the operation that made it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from ..errors import CompositionError
from .manifest import Manifest
from .reach import Interval, Reach

Tier = Literal["device", "host", "storage"]

Phase = Literal["backup", "load", "store", "prefetch", "hand_over"]


# Converters with a type of their own: a bare ``tuple`` would leave strict checkers without one.
def _names(values: Iterable[str]) -> frozenset[str]:
    return frozenset(values)


def _specs(values: Iterable[ComponentSpec]) -> tuple[ComponentSpec, ...]:
    specs = (values,) if isinstance(values, ComponentSpec | str) else tuple(values)
    for spec in specs:
        if not isinstance(spec, ComponentSpec):
            raise CompositionError(f'a profile lists ComponentSpecs, such as ComponentSpec("sink"); got {spec!r}')
    return specs


def _ops(values: Iterable[Op]) -> tuple[Op, ...]:
    out = tuple(values)
    for op in out:
        if not isinstance(op, Op):
            raise TypeError(f"ops must be Op values, got {op!r}")
    return out


def _intervals(values: Iterable[Interval]) -> tuple[Interval, ...]:
    out = tuple(values)
    for span in out:
        if not isinstance(span, tuple) or len(span) != 2 or not all(isinstance(at, int) for at in span):
            raise TypeError(f"token intervals are (start, end) pairs of whole numbers, got {span!r}")
    return out


def _kept(values: Iterable[Any] | None) -> tuple[Any, ...] | None:
    """Victims' indices, or intervals."""
    if values is None:
        return None
    out = tuple(values)
    return out if all(isinstance(value, int) for value in out) else _intervals(out)


def _count(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{attribute.name} must be a whole number from 0 up, got {value!r}")


def _one_of(*allowed: object) -> Callable[[object, attrs.Attribute[Any], object], None]:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value not in allowed:
            raise TypeError(f"{attribute.name} must be {' or '.join(map(repr, allowed))}, got {value!r}")

    return check


# ---------------------------------------------------------------- what a plugin offers (cold)


@attrs.frozen
class LayerFacts:
    """One layer of a model config: its number, its kind (an open string) and what the config says of it."""

    index: int
    kind: str
    options: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class ModelFacts:
    """A model config with its usual names normalised. ``raw`` is the config itself, for what is not normalised."""

    model_type: str
    layers: tuple[LayerFacts, ...]
    dtype: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    raw: Mapping[str, Any]

    def widths(self, layer: LayerFacts) -> tuple[int, int, int]:
        """(heads, K width, V width) of an attention layer: its own where it has any, else the model's."""
        if not self.num_attention_heads:
            raise CompositionError(f"layer {layer.index} has attention, and the config has no num_attention_heads")
        k_dim = int(layer.options.get("head_dim") or self.head_dim)
        v_dim = int(layer.options.get("v_head_dim") or self.raw.get("v_head_dim") or k_dim)
        return int(layer.options.get("num_key_value_heads") or self.num_key_value_heads), k_dim, v_dim

    def owning(self, layers: Sequence[LayerFacts]) -> dict[str, Any]:
        """Options that an attention component over ``layers`` takes: who owns entries, who reads whose, the dtype."""
        shared = {layer.index: int(layer.options["kv_owner"]) for layer in layers if "kv_owner" in layer.options}
        owners = tuple(layer.index for layer in layers if layer.index not in shared)
        return {"layers": owners, "dtype": self.dtype, "shared": shared}


@attrs.frozen
class ComponentSpec:
    """One component of a profile: which plugin, under which name, with which options."""

    kind: str
    name: str = attrs.field(default="")
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.kind)


@attrs.frozen
class Profile:
    """A set of components for a model, and what they share. ``warnings`` are logged when a cache is composed of it."""

    components: tuple[ComponentSpec, ...] = attrs.field(converter=_specs)
    page_size: int | None = None
    max_rewind: int = 0
    name: str = "custom"
    warnings: tuple[str, ...] = ()


FromLayers = Mapping[str, Any] | Sequence[tuple[str, Mapping[str, Any]]]
"""Options of one component; or of several, each with what its name adds to the kind ("" for nothing)."""


@attrs.frozen
class ComponentType:
    """What ``prefixloom_component`` returns: how to make instances of one kind of component.

    ``make(name=..., **options)`` returns a new instance. ``layer_kinds`` are the model layers it serves;
    ``from_layers(facts, layers)`` is asked once for all of them that a model config has, of whichever kind, and gives
    the options of the one component that serves them; or, where they differ in what one component has in common (a
    window, say), a list of (name suffix, options), one per component. ``caveats(facts, layers)`` gives warnings.
    """

    kind: str
    make: Callable[..., Any]
    summary: str = ""
    layer_kinds: frozenset[str] = attrs.field(factory=frozenset, converter=_names)
    from_layers: Callable[[ModelFacts, tuple[LayerFacts, ...]], FromLayers] | None = None
    caveats: Callable[[ModelFacts, tuple[LayerFacts, ...]], Iterable[str]] | None = None

    def __attrs_post_init__(self) -> None:
        if self.layer_kinds and self.from_layers is None:
            raise CompositionError(f"component type {self.kind!r} names layer_kinds but has no from_layers")


class Component:
    """A convenient base for component plugins: a name, a manifest and a reach. Any object with the three will do."""

    def __init__(self, name: str, manifest: Manifest, reach: Reach) -> None:
        self.name = name
        self.manifest = manifest
        self.reach = reach

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {self.reach!r}>"


# ---------------------------------------------------------------- what a plugin is shown (read-only)


@attrs.frozen
class WalkView:
    """A match or a publication as a hook sees it.

    ``boundary`` is what is being asked about; ``key_tokens`` how many tokens the key could name; ``walked`` how deep
    the keys agreed; ``start`` where the part in question begins (0 for a match, the last published boundary for an
    insert).
    """

    namespace: str
    boundary: int
    key_tokens: int
    walked: int
    start: int = 0
    at_branch: bool = False
    last: bool = False


@attrs.frozen
class NodeView:
    """A node as a hook sees it: the tokens [start, end) of its path, and what one component keeps there."""

    start: int
    end: int
    pages: int
    leases: int
    tier: Tier = "device"


@attrs.frozen
class AnchorView:
    """A boundary that is about to be covered by a lease."""

    namespace: str
    boundary: int


# ---------------------------------------------------------------- ops


@attrs.frozen
class Op:
    """Work on slots that the forward stream runs, exactly once, before the layers that read them.

    ``src`` and ``dst`` are slot numbers of the component's pool. The core runs ``copy`` and ``clear``, and ``track``, a
    copy after the layers; any other kind goes to the component's ``run_forward_op``, before the layers or ``after``
    them. With a ``selector``, an int tensor that may lie on the device, each of ``src`` is a tuple of slots, and the
    selector says which of them is copied.
    """

    kind: str
    component: str
    dst: tuple[int, ...] = ()
    src: tuple[Any, ...] = ()
    data: Any = None
    selector: Any = attrs.field(default=None, eq=False, repr=False)
    after: bool = attrs.field(default=False)

    def __attrs_post_init__(self) -> None:
        if self.kind == "track":
            object.__setattr__(self, "after", True)


# ---------------------------------------------------------------- answers


@attrs.frozen
class Claim:
    """What a component asserts about an operation.

    ``need``    slots it will take, added to the derived need
    ``ops``     ops to run before the layers, after the derived ones
    ``branch``  a boundary worth a checkpoint while recomputing; floored to the composition's grid
    ``reject``  True: not this boundary; the next candidate is tried
    ``keep``    commit_insert: token intervals of the published span to keep (None: all of it);
                evict_component: indices of the victims to hold back
    """

    need: int = attrs.field(default=0, validator=_count)
    ops: tuple[Op, ...] = attrs.field(default=(), converter=_ops)
    branch: int | None = attrs.field(default=None, validator=attrs.validators.optional(_count))
    reject: bool = False
    keep: tuple[Any, ...] | None = attrs.field(default=None, converter=_kept)


@attrs.frozen
class Receipt:
    """What a component wants covered by a lease: united with what its reach covers. ``data`` comes back on release."""

    positions: tuple[Interval, ...] = attrs.field(default=(), converter=_intervals)
    until: Literal["release", "copied"] = "release"
    data: Any = None


@attrs.frozen
class Touch:
    """Which covered positions become recent on release; None: the derived ones."""

    positions: tuple[Interval, ...] | None = attrs.field(default=None, converter=attrs.converters.optional(_intervals))


@attrs.frozen
class SplitRule:
    """How a boundary cell divides on a split: which half keeps the state ("child" ends where the old node ended)."""

    keep: Literal["child", "drop"] = attrs.field(default="child", validator=_one_of("child", "drop"))


@attrs.frozen
class Transfer:
    """A piece to move between tiers: token positions [start, end) of one component, or its state at ``end``."""

    component: str
    start: int
    end: int
    source: Tier
    target: Tier
    slots: tuple[int, ...] = ()


@attrs.frozen
class TransferPlan:
    """What is about to move between two tiers in one go. ``boundary`` is the deepest end of it on its path."""

    phase: Phase
    namespace: str
    boundary: int
    transfers: tuple[Transfer, ...]


@attrs.frozen
class Outcome:
    """How a transfer plan ended: all of it moved, or none of it counts."""

    ok: bool
    error: str = ""
