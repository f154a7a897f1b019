"""Hook specifications, in the order of a cache's life.

Two levels. The *cold* hooks are asked once, of every selected distribution, by the process-wide registry. The *hot*
hooks belong to one composed cache; each is optional, asked of each component instance at most once per operation, and
replaced by ``None`` in the bound table where a component does not override it.

No hook may change anything: it gets read-only views and returns one frozen value. The core folds answers in one
direction only: validity narrows, protection widens. docs/hooks.md is the contract; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from .values import (
        AnchorView,
        Claim,
        ComponentType,
        NodeView,
        Op,
        Phase,
        Profile,
        Receipt,
        SplitRule,
        Tier,
        Touch,
        Transfer,
        WalkView,
    )

PROJECT = "prefixloom"
API_VERSION = 1
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class RegistrySpecs:
    """Cold: what a distribution offers."""

    @hookspec
    def prefixloom_component(self) -> ComponentType:  # type: ignore[empty-body]
        """Offer one kind of component.

        When: once per process, when the component is first selected. Entry point name: the component's kind.
        Mutates: nothing. Folded: not; one offer per entry point.
        Example: ``return ComponentType(kind="ring", make=RingComponent)``
        """

    @hookspec(firstresult=True)
    def prefixloom_profile(self, model_config: dict[str, Any]) -> Profile | None:
        """Turn a model config into a component set, or None if this config is not known here.

        When: once per compose() of a model config. Entry point name: ``profile:NAME``.
        Mutates: nothing. Folded: the first answer that is not None wins; the built-in reader comes last.
        Example: ``return Profile((ComponentSpec("ring"),)) if model_config.get("model_type") == "mine" else None``
        """

    @hookspec
    def prefixloom_storage(self) -> Any:
        """Offer a storage backend for the lowest tier.

        When: once per process, when the backend is first selected. Entry point name: ``storage:NAME``.
        Mutates: nothing. Folded: not.
        Example: ``return MyBackend``
        """

    @hookspec
    def prefixloom_policy(self) -> Any:
        """Offer an eviction policy: an ``EvictionPolicy``.

        When: once per process, when the policy is first selected. Entry point name: ``policy:NAME``.
        Mutates: nothing. Folded: not.
        Example: ``return EvictionPolicy("biggest", key=lambda use: -use.tokens)``
        """


class ComponentSpecs:
    """Hot: what is special about one component of a composed cache. All optional."""

    @hookspec
    def create_match_validator(self, tiers: tuple[Tier, ...]) -> Callable[[WalkView], int] | None:
        """Narrow which boundaries may be resumed at.

        When: once per composition and set of tiers; the answer is called once per match and candidate.
        Returns: a function from a walk to the deepest boundary it accepts, not above ``walk.boundary``; or None.
        Mutates: nothing. Folded: intersected with the reach and with all other components.
        Example: ``return lambda walk: walk.boundary // 64 * 64``
        """

    @hookspec
    def finalize_match_result(self, walk: WalkView) -> Claim | None:
        """Say what a match at ``walk.boundary`` needs, and whether it is wanted.

        When: once per match and accepted candidate; also by ``peek``, so it must be pure.
        Mutates: nothing. Folded: needs summed, ops concatenated after the derived ones, branch floored to the grid and
        the deepest taken; a reject moves on to the next candidate.
        Example: ``return Claim(reject=walk.boundary < 128)``
        """

    @hookspec
    def commit_insert(self, walk: WalkView) -> Claim | None:
        """Say what to keep of the span ``[walk.start, walk.boundary)`` that a sequence publishes.

        When: once per publish and component.
        Mutates: nothing. Folded: ``keep`` intervals, rounded outward to pages, are what the tree takes; the rest of
        the span stays with the sequence. A component closed upward always keeps all. A boundary component keeps its
        state unless ``keep`` is empty.
        Example: ``return Claim(keep=((max(walk.start, walk.boundary - 128), walk.boundary),))``
        """

    @hookspec
    def redistribute_on_node_split(self, parent: NodeView, child: NodeView) -> SplitRule | None:
        """Say how a boundary cell divides when its node is split; page cells are always sliced by position.

        When: once per split of a node that holds the component's data.
        Mutates: nothing. Folded: not; the child keeps the state unless the answer drops it.
        Example: ``return SplitRule(keep="drop") if child.end - child.start < 16 else None``
        """

    @hookspec
    def acquire_component_lock(self, anchor: AnchorView, tier: Tier) -> Receipt | None:
        """Widen what a lease at ``anchor`` covers.

        When: once per acquired lease and component. The core counts; if an implementation raises, what the lease had
        taken is given back.
        Mutates: nothing. Folded: united with what the reach covers; positions that hold no data are passed over.
        Example: ``return Receipt(positions=((0, 4),))``
        """

    @hookspec
    def release_component_lock(self, receipt: Receipt) -> Touch | None:
        """Say which covered positions become recent.

        When: once per released lease and component, after the core's decrement.
        Mutates: nothing. Folded: not; what is not touched is the first to go, what is not covered is unaffected.
        Example: ``return Touch(positions=())``
        """

    @hookspec
    def evict_component(self, node: tuple[NodeView, ...], tier: Tier) -> Claim | None:
        """Look at the victims before the core frees them; hold some back.

        When: once per eviction and component, with all its victims.
        Mutates: nothing. Folded: victims whose index is in ``keep`` become recent instead and others are sought; a
        victim is held back once per eviction, so that a full pool still makes room.
        Example: ``return Claim(keep=tuple(i for i, v in enumerate(node) if v.start == 0))``
        """

    @hookspec
    def build_hicache_transfers(self, plan: Any, phase: Phase) -> tuple[Transfer, ...] | None:
        """Add transfers to those that reach and residency derive.

        When: once per plan, phase and component. Phases: backup, load, store, prefetch, hand_over.
        Mutates: nothing. Folded: united with the derived ones and de-duplicated.
        Example: ``return (Transfer("ring", 0, 4, "device", "host"),) if phase == "backup" else None``
        """

    @hookspec
    def commit_hicache_transfer(self, plan: Any, phase: Phase, outcome: Any) -> Claim | None:
        """Learn how a transfer ended. Residency is the core's.

        When: once per finished transfer plan and component.
        Mutates: nothing. Folded: needs summed.
        Example: ``return None``
        """

    @hookspec
    def deferred_forward_ops(self, batch: tuple[WalkView, ...]) -> tuple[Op, ...] | None:
        """Add ops to a step.

        When: once per step of role "target" and component, with one view per sequence; never for role "draft".
        Mutates: nothing. Folded: concatenated after the derived ops of the same component.
        Example: ``return (Op("flush", "ring"),)``
        """

    @hookspec
    def run_forward_op(self, op: Op, stream: Any) -> None:
        """Run an op of the component's own kind on the forward stream.

        When: once per op whose kind the core does not run itself.
        Mutates: the slots that the op names, nothing else. Folded: not.
        Example: ``self.pool.buffers["ring"][:, list(op.dst)] = 0``
        """


COLD_HOOKS = tuple(n for n in vars(RegistrySpecs) if not n.startswith("_"))
HOT_HOOKS = tuple(n for n in vars(ComponentSpecs) if not n.startswith("_"))
