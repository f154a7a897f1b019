"""Composition: the plain data of what a cache is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

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


@attrs.frozen
class Part:
    """One component of a composition, with the numbers that follow from its manifest and reach.

    ``page_tokens`` is the number of tokens of one pool page, 0 for state slots. ``capacity`` counts pool pages or state
    slots. ``admission`` says which of its states the tree takes; it is None for pages.
    """

    name: str
    component: Any
    manifest: Manifest
    reach: Reach
    unit: Unit
    page_tokens: int
    capacity: int
    hooks: Hooks
    origin: str = ""
    admission: AdmissionPolicy | None = None
    running: int = 0
    """The part of the capacity that only running states use, where cached states are stored in another form."""

    def __str__(self) -> str:
        return f"component {self.name!r} ({self.origin})"


@attrs.frozen
class Composition:
    """The plan of a cache. ``page`` is the tokens of one tree page; every boundary is a multiple of it.

    ``sizing`` explains in words why the pools have their sizes. ``warnings`` are known problems of the model. ``lent``:
    an engine hands out the slots of the pools, and lends them.
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
    sizing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tier: TierPart | None = None
    lent: bool = False


@attrs.frozen
class TierPart:
    """The tier of a composition. ``capacity`` counts pages or states by component; components that the tier does not
    hold are left out.
    """

    name: str
    component: Any
    manifest: TierManifest
    capacity: Mapping[str, int]
    hooks: Hooks
    origin: str = ""
    sizing: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"tier {self.name!r} ({self.origin})"


@attrs.frozen
class Hooks:
    """One component's hooks, in the order of ``ComponentSpecs``. None: not overridden, the derived default holds."""

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
