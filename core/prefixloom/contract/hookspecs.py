"""Hook specifications, in the order of a cache's life.

There are two levels. The process-wide registry asks the *cold* hooks of every selected distribution once. The *hot*
hooks belong to one composed cache. Each hot hook is optional, and ``None`` in the bound table where a component does
not override it.

No hook may change anything: it gets read-only views and returns one frozen value. The core folds answers in one
direction only: they can narrow validity and widen protection. *Raises* says what an exception does: it fails the
operation, or it is counted and the derived default holds. docs/hooks.md is the contract; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from ..storage import BackendType
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
        """Offer one kind of component.

        When: once per process, when the component is first selected, or to find which components serve a model config.
        Entry point name: the component's kind.
        Mutates: nothing. Folded: not; one offer per entry point. Raises: composition is refused.
        Example: ``return ComponentType(kind="ring", make=RingComponent)``
        """

    @hookspec
    def prefixloom_storage(self) -> BackendType:  # type: ignore[empty-body]
        """Offer a kind of store for the lowest tier.

        When: once per process, when it is first selected. Entry point name: ``storage:NAME``.
        Mutates: nothing. Folded: not. Raises: the caller that selected it gets a CompositionError.
        Example: ``return BackendType("shelf", ShelfBackend)``
        """

    @hookspec
    def prefixloom_policy(self) -> Any:
        """Offer an eviction policy: an ``EvictionPolicy``.

        When: once per process, when the policy is first selected. Entry point name: ``policy:NAME``.
        Mutates: nothing. Folded: not. Raises: composition is refused.
        Example: ``return EvictionPolicy("biggest", key=lambda use: -use.tokens)``
        """

    @hookspec
    def prefixloom_admission(self) -> Any:
        """Offer an admission policy for states: an ``AdmissionPolicy``.

        When: once per process, when the policy is first selected. Entry point name: ``admission:NAME``.
        Mutates: nothing. Folded: not. Raises: composition is refused.
        Example: ``return AdmissionPolicy("sparse", admit=lambda state: state.boundary - state.above >= 512)``
        """

    @hookspec(firstresult=True)
    def prefixloom_session(
        self, cache: Any, model: Any, ids: Any, options: dict[str, Any]
    ) -> AbstractContextManager[Any] | None:
        """Return a session in which a model's own code runs over ``cache``, or None if this plugin does not know it.

        When: once per ``cache.session(model, ids)``, until one answers. Entry point name: ``session:NAME``.
        Mutates: nothing; the session starts its work when it is entered. Folded: adapters are asked in the order of
        their names, the first answer that is not None wins. Raises: no session is made.
        Example: ``return MySession(cache, model, ids, **options) if isinstance(model, MyModel) else None``
        """

    @hookspec(firstresult=True)
    def prefixloom_truth(self, options: dict[str, Any]) -> Any:
        """Say what the layers of a component really do: a ``prefixloom.testing.Truth``.

        When: when the conformance kit tests the component by its name. It stands beside ``prefixloom_component`` and
        has no entry point of its own. ``options`` are those with which the component is made, its defaults included.
        Mutates: nothing. Folded: not. Raises: the test cannot run.
        Example: ``return Truth(reads=lambda q: range(max(0, q + 1 - options["window"]), q), ahead=0, grid=1)``
        """


class ComponentSpecs:
    """Hot hooks: what one component of a composed cache does differently. All are optional."""

    @hookspec
    def create_match_validator(self, tiers: tuple[Tier, ...]) -> Callable[[WalkView], int] | None:
        """Narrow which boundaries may be resumed at.

        When: when the cache is made, once with ``("device",)`` and, with a tier below, once more with ``("device",
        "host")``; what it returns is called once per match over these tiers and candidate boundary.
        Returns: a function from a walk to the deepest boundary it accepts, not above ``walk.boundary``; or None.
        Mutates: nothing. Folded: intersected with the reach and with all other components; a boundary above
        ``walk.boundary`` changes nothing. Raises: here, composition is refused; in the validator, the match fails.
        Example: ``return lambda walk: walk.boundary // 64 * 64``
        """

    @hookspec
    def finalize_match_result(self, walk: WalkView) -> Claim | None:
        """Say what a match at ``walk.boundary`` needs.

        When: once per match, at the boundary that every reach and validator accepts; also by ``peek``: it must be pure.
        Mutates: nothing. Folded: needs are added to the derived ones (``open`` makes room for them), ops run after the
        derived ones, branch is floored to a boundary and the deepest is taken. Raises: the match fails.
        Example: ``return Claim(branch=walk.walked) if walk.walked > walk.boundary else None``
        """

    @hookspec
    def commit_insert(self, walk: WalkView) -> Claim | None:
        """Say what to keep of the span ``[walk.start, walk.boundary)`` that a sequence publishes.

        When: once per publication, before anything moves.
        Mutates: nothing. Folded: the tree takes ``keep``, rounded outward to pages, and what ``walk.boundary`` needs;
        the rest of the span is freed at once. A component that is closed upward publishes the whole span, and so does
        one that is not convex while the sequence runs on. A boundary component publishes its state unless ``keep`` is
        empty. Raises: counted; the whole span is published.
        Example: ``return Claim(keep=((max(walk.start, walk.boundary - 128), walk.boundary),))``
        """

    @hookspec
    def redistribute_on_node_split(self, parent: NodeView, child: NodeView) -> SplitRule | None:
        """Say how a boundary cell divides when its node is split; page cells are always sliced by position.

        When: once per split of a node that holds the component's data; the child is the half that keeps the node's end.
        Mutates: nothing. Folded: not; the child keeps the state unless the answer drops it and no lease covers it.
        Raises: counted; the child keeps it.
        Example: ``return SplitRule(keep="drop") if child.end - child.start < 16 else None``
        """

    @hookspec
    def acquire_component_lock(self, anchor: AnchorView, tier: Tier) -> Receipt | None:
        """Widen what a lease at ``anchor`` covers.

        When: once per lease, and once per publication, which moves the sequence's lease to a new anchor; before
        anything is covered or moved.
        Mutates: nothing; the core counts. Folded: united with what the reach covers; positions that hold no data are
        ignored. Raises: the operation fails, and nothing was covered.
        Example: ``return Receipt(positions=((0, 4),))``
        """

    @hookspec
    def release_component_lock(self, receipt: Receipt) -> Touch | None:
        """Say which covered positions become recent.

        When: once per release of a lease that still covers something of the component; with the receipt of the last
        ``acquire_component_lock``, or an empty one.
        Mutates: nothing. Folded: not. None, or a touch of any positions: all that is uncovered becomes recent; a touch
        of no positions: it is evicted next. Raises: counted; it becomes recent.
        Example: ``return Touch(positions=())``
        """

    @hookspec
    def evict_component(self, node: tuple[NodeView, ...], tier: Tier) -> Claim | None:
        """Look at the victims before the core frees them, and hold some back.

        When: once per eviction, with all its victims; again only with the victims that replace kept ones.
        Mutates: nothing. Folded: victims whose index is in ``keep``, and the cells above them, become recent instead
        and others are chosen; they are evicted nevertheless if there are too few others. Raises: counted; all victims
        are evicted.
        Example: ``return Claim(keep=tuple(i for i, v in enumerate(node) if v.start == 0))``
        """

    @hookspec
    def build_hicache_transfers(self, plan: TransferPlan, phase: Phase) -> tuple[Transfer, ...] | None:
        """Add transfers to those that follow from reach and residency.

        When: with a tier below the device, once per plan of copies, before anything is reserved. Phases: backup, load.
        Mutates: nothing. Folded: united with the derived ones and de-duplicated; what the source does not have is
        ignored. Raises: counted; the derived ones are made.
        Example: ``return (Transfer("ring", 0, 4, "host", "device"),) if phase == "load" else None``
        """

    @hookspec
    def commit_hicache_transfer(self, plan: TransferPlan, phase: Phase, outcome: Outcome) -> Claim | None:
        """Learn how a transfer ended. The core has updated residency already.

        When: once per plan for which copies were made, when the copies are over.
        Mutates: nothing. Folded: not. Raises: counted.
        Example: ``return None``
        """

    @hookspec
    def deferred_forward_ops(self, batch: tuple[WalkView, ...]) -> tuple[Op, ...] | None:
        """Add ops to a step.

        When: once per step of role "target", with one view per sequence (its committed, named, reserved and published
        lengths); never for role "draft".
        Mutates: nothing. Folded: concatenated after all derived and claimed ops, in the order of the components. An
        op names places of a sequence of the batch, and the core turns them into slots. Raises: no step is made.
        Example: ``return tuple(Op("flush", "ring", dst=(w.boundary,), sequence=i) for i, w in enumerate(batch) if
        w.walked > w.boundary)``
        """

    @hookspec
    def run_forward_op(self, op: Op, stream: Any) -> None:
        """Run an op of the component's own kind on the forward stream.

        When: once per op whose kind is not ``copy``, ``clear`` or ``track``; its ``dst`` and ``src`` are slots.
        Mutates: the content of the slots in ``dst``, nothing else. Folded: not. Raises: the step commits
        nothing.
        Example: ``self.pool.buffers["ring"][:, list(op.dst)] = 0``
        """


COLD_HOOKS = tuple(n for n in vars(RegistrySpecs) if not n.startswith("_"))

HOT_HOOKS = tuple(n for n in vars(ComponentSpecs) if not n.startswith("_"))
