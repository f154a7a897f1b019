"""Composition: the plain data of what a cache is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import pluggy

from ..compose.registry import Registry, default_registry
from .admission import AdmissionPolicy
from .hookspecs import HOT_HOOKS
from .manifest import Layout, Manifest, TierManifest, Unit
from .policy import EvictionPolicy
from .reach import Reach
from .values import (
    AnchorView,
    Claim,
    NodeView,
    Op,
    Outcome,
    Phase,
    Receipt,
    SplitRule,
    Tier,
    Touch,
    Transfer,
    TransferPlan,
    WalkView,
)

Attach = Literal["share", "copy"]


@attrs.frozen
class Part:
    """One component of a composition, with what follows from its manifest and reach.

    ``page_tokens`` is the tokens of one pool page, 0 for state slots; ``capacity`` counts pool pages or state slots.
    ``admission`` says which of its states the tree takes; None for pages.
    """

    name: str
    component: Any
    manifest: Manifest
    reach: Reach
    unit: Unit
    page_tokens: int
    capacity: int
    attach: Attach
    hooks: Hooks
    origin: str = ""
    admission: AdmissionPolicy | None = None
    running: int = 0
    """Of the capacity, the slots that only running states use, where cached ones rest in another form."""


@attrs.frozen
class Composition:
    """What a cache is made of. ``page`` is the tokens of one page of the tree; every boundary lies on it.

    ``manager`` holds the component instances; with ``tracing`` the hooks go through it, for monitoring. ``sizing`` says
    in words why the pools are as large as they are, ``warnings`` what is known to be wrong with the model elsewhere.
    ``registry`` is what is installed, where components and adapters of models were and are looked up.
    """

    name: str
    parts: tuple[Part, ...]
    page: int
    lookahead: int
    max_rewind: int
    device: str
    layout: Layout
    policy: EvictionPolicy
    debug: bool
    tracing: bool
    manager: pluggy.PluginManager = attrs.field(eq=False, repr=False)
    sizing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tier: TierPart | None = None
    registry: Registry = attrs.field(factory=default_registry, eq=False, repr=False)


@attrs.frozen
class TierPart:
    """``capacity`` counts pages or states by component; those that share nothing are not there."""

    name: str
    component: Any
    manifest: TierManifest
    capacity: Mapping[str, int]
    hooks: Hooks
    origin: str = ""
    sizing: tuple[str, ...] = ()


@attrs.frozen
class Hooks:
    """One component's overrides, in the order of ``ComponentSpecs``. None: the derived default, at no cost."""

    create_match_validator: Callable[[tuple[Tier, ...]], Callable[[WalkView], int] | None] | None = None
    finalize_match_result: Callable[[WalkView], Claim | None] | None = None
    commit_insert: Callable[[WalkView], Claim | None] | None = None
    redistribute_on_node_split: Callable[[NodeView, NodeView], SplitRule | None] | None = None
    acquire_component_lock: Callable[[AnchorView, Tier], Receipt | None] | None = None
    release_component_lock: Callable[[Receipt], Touch | None] | None = None
    evict_component: Callable[[tuple[NodeView, ...], Tier], Claim | None] | None = None
    build_hicache_transfers: Callable[[TransferPlan, Phase], tuple[Transfer, ...] | None] | None = None
    commit_hicache_transfer: Callable[[TransferPlan, Phase, Outcome], Claim | None] | None = None
    deferred_forward_ops: Callable[[tuple[WalkView, ...]], tuple[Op, ...] | None] | None = None
    run_forward_op: Callable[[Op, Any], None] | None = None

    @property
    def overridden(self) -> tuple[str, ...]:
        """The names of the hooks that the component overrides."""
        return tuple(name for name in HOT_HOOKS if getattr(self, name) is not None)
