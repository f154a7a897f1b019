"""Hook specifications, in the order of a cache's life.

The process-wide registry asks the *cold* hooks of a distribution once. The *hot* hooks belong to one composed cache,
and each of them is optional. No hook may change anything: it gets read-only views and returns one frozen value.

docs/hooks.md is the contract: when each hook is called, how its answer is folded, and what an exception does. A test
compares its headings with the signatures here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from ..storage import BackendType
    from .admission import AdmissionPolicy
    from .policy import EvictionPolicy
    from .values import (
        AnchorView,
        Claim,
        ComponentType,
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

PROJECT = "prefixloom"

API_VERSION = 1
"""The major version of the contract: the specifications here, and docs/hooks.md."""

FIRST_API = 1
"""The version that a plugin without ``prefixloom_api`` was built for. It always stays 1."""

hookspec = pluggy.HookspecMarker(PROJECT)

hookimpl = pluggy.HookimplMarker(PROJECT)


class RegistrySpecs:
    """Cold hooks: the offers of a distribution."""

    @hookspec
    def prefixloom_component(self) -> ComponentType:  # type: ignore[empty-body]
        """Offer one kind of component."""

    @hookspec
    def prefixloom_storage(self) -> BackendType:  # type: ignore[empty-body]
        """Offer a kind of store for the lowest tier."""

    @hookspec
    def prefixloom_policy(self) -> EvictionPolicy:  # type: ignore[empty-body]
        """Offer an eviction policy."""

    @hookspec
    def prefixloom_admission(self) -> AdmissionPolicy:  # type: ignore[empty-body]
        """Offer an admission policy for states."""

    @hookspec(firstresult=True)
    def prefixloom_session(
        self, cache: Any, model: Any, ids: Any, options: dict[str, Any]
    ) -> AbstractContextManager[Any] | None:
        """Return a session in which a model's own code runs over ``cache``, or None if this plugin does not know it."""

    @hookspec(firstresult=True)
    def prefixloom_truth(self, options: dict[str, Any]) -> Any:
        """Return what the layers of a component really do: a ``prefixloom.testing.Truth``."""


class ComponentSpecs:
    """Hot hooks: what one component of a composed cache does differently. All are optional."""

    @hookspec
    def create_match_validator(self, tiers: tuple[Tier, ...]) -> Callable[[WalkView], int] | None:
        """Return a function that lowers the boundaries at which a prompt may resume, or None."""

    @hookspec
    def finalize_match_result(self, walk: WalkView) -> Claim | None:
        """Return what a match at ``walk.boundary`` needs beside the reach."""

    @hookspec
    def commit_insert(self, walk: WalkView) -> Claim | None:
        """Return what to keep of the span ``[walk.start, walk.boundary)`` that a sequence publishes."""

    @hookspec
    def redistribute_on_node_split(self, parent: NodeView, child: NodeView) -> SplitRule | None:
        """Return which half keeps the state of a node that is split."""

    @hookspec
    def acquire_component_lock(self, anchor: AnchorView, tier: Tier) -> Receipt | None:
        """Return what a lease at ``anchor`` covers in addition to the reach."""

    @hookspec
    def release_component_lock(self, receipt: Receipt) -> Touch | None:
        """Return which covered positions become recent when a lease is released."""

    @hookspec
    def evict_component(self, node: tuple[NodeView, ...], tier: Tier) -> Claim | None:
        """Return which victims of an eviction to hold back."""

    @hookspec
    def build_hicache_transfers(self, plan: TransferPlan, phase: Phase) -> tuple[Transfer, ...] | None:
        """Return transfers in addition to those that follow from reach and residency."""

    @hookspec
    def commit_hicache_transfer(self, plan: TransferPlan, phase: Phase, outcome: Outcome) -> Claim | None:
        """Note how a transfer ended. The core has updated residency already."""

    @hookspec
    def deferred_forward_ops(self, batch: tuple[WalkView, ...]) -> tuple[Op, ...] | None:
        """Return ops to run in a step, in addition to the derived ones."""

    @hookspec
    def run_forward_op(self, op: Op, stream: Any) -> None:
        """Run an op of the component's own kind on the forward stream."""


COLD_HOOKS = tuple(n for n in vars(RegistrySpecs) if not n.startswith("_"))

HOT_HOOKS = tuple(n for n in vars(ComponentSpecs) if not n.startswith("_"))
