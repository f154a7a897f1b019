"""The backdoor: every private field of the core that the testing package reads, behind one function each.

A cache's public methods do not show its tree, its lanes or its leases, and tests must see them. This module is the
only one that knows in which fields the core keeps them: when a field moves, this file changes and nothing else. The
functions read; the few that change something say so in their docstrings.

Words: a *lane* is what the cache has for one component (a *tier lane*: for one component below the device); a *cell*
is what one lane keeps at one node; a *holding* is what one sequence has of one lane; a *fill* is an op that must give
a running state its content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...cache.cache import Cache
from ...cache.match_plan import MatchPlan
from ...cache.sequence import Sequence
from ...device.flight import Work
from ...device.pool import Pool
from ...device.streams import Stream
from ...insight import debug
from ...insight.debug import Debug
from ...operations.lease import Lease
from ...operations.match import limit_of
from ...operations.state import Hold
from ...operations.step import Step
from ...tiers import host_copies
from ...tiers.host_copies import HostCopies
from ...tiers.host_tier import LowerTier
from ...tree.lane import Lane
from ...tree.radix import Root


# ---------------------------------------------------------------- lanes and pools
def lanes(cache: Cache) -> tuple[Lane, ...]:
    """Return the lanes of the device, in the order of the composition's parts."""
    return cache.core.shape.lanes


def lane(cache: Cache, component: str) -> Lane:
    """Return the device lane of one component."""
    return cache.core.shape.lane(component)


def pools(cache: Cache) -> list[Pool]:
    """Return every pool of the device lanes. A lane that stores states in another form has two."""
    return [pool for each in cache.core.shape.lanes for pool in each.pools]


def has_admission(cache: Cache) -> bool:
    """Return whether an admission policy may keep states out of the tree."""
    return cache.core.shape.has_admission


# ---------------------------------------------------------------- the tree
def roots(cache: Cache) -> dict[str, Root]:
    """Return the root of each namespace that is known; the dictionary is a copy."""
    return dict(cache.core.index.tree.roots)


def nodes(cache: Cache, *, dropped: bool = False) -> Iterator[Any]:
    """Yield every node, roots included; ``dropped``: those of dropped namespaces, too."""
    stack: list[Any] = [*cache.core.index.tree.roots.values(), *(cache.core.index.dropped_roots if dropped else ())]
    while stack:
        node = stack.pop()
        stack += node.children
        yield node


def cell(node: Any, of: Any) -> Any:
    """Return what one lane keeps at a node; None if it keeps nothing there."""
    return node.cells[of.index]


def locks(cache: Cache) -> dict[tuple[str, int, int], int]:
    """Return how many leases lock each cell, by (component, start, end) of its edge."""
    found: dict[tuple[str, int, int], int] = {}
    for node in nodes(cache):
        for each in cache.core.shape.lanes:
            kept = node.cells[each.index]
            if kept is not None and node.end:
                found[each.name, node.start, node.end] = kept.locks
    return found


def extra_numbers(cache: Cache) -> dict[int, Any]:
    """Return what each negative number of the tree's keys stands for."""
    return dict(cache.core.keys.meant)


def flushes(cache: Cache) -> int:
    """Return how often the cache was flushed."""
    return cache.core.index.flushes


# ---------------------------------------------------------------- what is in flight
def works_in_flight(cache: Cache) -> list[Work[Hold]]:
    """Return the steps and copies that have begun and are not known to be over, oldest first."""
    return cache.core.flight.works


def stream_errors(stream: Stream) -> list[BaseException]:
    """Return the errors of the work that failed on a stream, oldest first."""
    return [error for _, error in stream.failures]


def page_table_tensors(cache: Cache) -> dict[str, list[Any]]:
    """Return the tensors of each component's page table: the one in use, then those that steps in flight may read."""
    found = {}
    for name, table in cache.core.tables.by_component.items():
        every = [table.tensor, *(old for _, old in table.outgrown)]
        found[name] = [tensor for tensor in every if tensor is not None]
    return found


# ---------------------------------------------------------------- debug mode
def checks(cache: Cache) -> int | None:
    """Return how often debug mode has looked at everything; None without debug mode."""
    watcher = cache.core.watcher
    return watcher.checks if isinstance(watcher, Debug) else None


def watch_accesses(cache: Cache, told: Callable[..., None]) -> None:
    """Have ``told`` called after the race detector is told of slots, with the same arguments; this changes the cache.

    The cache must be in debug mode. The arguments: stream, what, pool, reads, writes, the pool that is read.
    """
    watcher = cache.core.watcher
    assert watcher is not None, "accesses are told in debug mode only"
    original = watcher.accessed

    def accessed(*arguments: Any) -> None:
        original(*arguments)
        told(*arguments)

    setattr(watcher, "accessed", accessed)  # noqa: B010


def empty_work() -> Callable[[], None]:
    """Return the function that debug mode enqueues in place of layers; it touches nothing."""
    return debug.no_work


# ---------------------------------------------------------------- the tier below the device
def tier(cache: Cache) -> LowerTier:
    """Return the tier below the device; an assertion fails if there is none."""
    below = cache.core.below
    assert isinstance(below, LowerTier), "this cache has no tier below the device"
    return below


def tier_lanes(cache: Cache) -> tuple[Any, ...]:
    """Return the lanes of the tier, in the order in which the tier made them."""
    return tier(cache).copies.lanes


def tier_lane(cache: Cache, component: str) -> Any:
    """Return the tier's lane of one component; None if the tier keeps nothing of it."""
    return tier(cache).copies.by_component[cache.core.shape.lane(component).index]


def transfer_streams(cache: Cache) -> dict[str, Stream]:
    """Return the streams of the copies, by "up" and "down"; this is the tier's own dictionary."""
    return tier(cache).copies.streams


def copies(cache: Cache) -> HostCopies:
    """Return what makes the tier's copies."""
    return tier(cache).copies


def put_transfer_stream(cache: Cache, way: str, stream: Any) -> Stream:
    """Have the copies of one way ("up" or "down") run on a stream; this changes the tier.

    The stream is returned in the form in which the cache knows it.
    """
    found = tier(cache).copies.streams[way] = cache.core.stream(stream)
    return found


@contextmanager
def failing_copies() -> Iterator[None]:
    """Let each copy between the device and a tier raise in this context when it is made."""

    def fails(*_: object) -> None:
        raise RuntimeError("the kit lets this copy fail")

    module: Any = host_copies
    before, module.copy_between = module.copy_between, fails
    try:
        yield
    finally:
        module.copy_between = before


def remembered(cache: Cache) -> int:
    """Return how many cells the queues know, all components together."""
    return sum(len([*lane.queue.remembered]) for lane in cache.core.shape.all_lanes)


# ---------------------------------------------------------------- leases and plans
def _hold(of: Lease | Hold | Sequence) -> Hold:
    return of.running if isinstance(of, Sequence) else of


def anchor(of: Lease | Hold | Sequence) -> Any:
    """Return the node at which a lease, or a sequence's lease, is anchored."""
    return _hold(of).node


def longest_match(plan: MatchPlan) -> int:
    """Return the deepest boundary that the match behind a plan could have found."""
    return limit_of(plan.core, plan.match)


# ---------------------------------------------------------------- sequences and steps
def holding(sequence: Sequence, component: str) -> Any:
    """Return what a sequence has of one component. ProtocolError: the sequence holds nothing any more."""
    return sequence.running.holding(component)[1]


def state_holdings(sequence: Sequence) -> list[tuple[Any, Any]]:
    """Return (lane, holding) of the components with states."""
    return list(sequence.running.states)


def state_slots(sequence: Sequence, component: str) -> list[int]:
    """Return all slots that a sequence owns of a component with states."""
    return list(holding(sequence, component).slots())


def fills(sequence: Sequence) -> list[tuple[str, str, int]]:
    """Return (component, kind, source slot) of each op that must still give a running state its content."""
    return [(each.name, kind, source) for each, _, kind, source in sequence.running.fills]


def unfilled(sequence: Sequence) -> set[str]:
    """Return the components whose running state has no content yet."""
    return {component for component, _, _ in fills(sequence)}


def needs_a_step(sequence: Sequence) -> bool:
    """Return whether plugins have, or may have, ops of their own for the sequence's layers."""
    asked = any(each.hooks.deferred_forward_ops is not None for each in sequence.core.shape.lanes)
    return asked or bool(sequence.running.claimed_ops)


def has_plugin_ops(step: Step) -> bool:
    """Return whether plugins have ops of their own for a step."""
    return step.has_plugin_ops
