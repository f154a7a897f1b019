"""The mistakes of lesson 4, put back into the way up: each must be seen by a test of ``test_lesson_4_wrong_anchor``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from prefixloom.operations.lease import acquire, swap
from prefixloom.tiers import host_copies, host_tier, restore
from prefixloom.tiers.host_lane import HostLane
from prefixloom.tree.radix import climb

Mutant = Callable[[pytest.MonkeyPatch], None]


def deepest_below(node: Any, index: int) -> Any:
    """The deepest node with such a cell on the way down, where it does not part."""
    found = node
    while len(node.children) == 1:
        (node,) = node.children
        if node.cells[index] is not None:
            found = node
    return found


def each_component_loads_from_its_own_deepest_node(patch: pytest.MonkeyPatch) -> None:
    honest = restore.lacking

    def lacking(host: Any, node: Any, pins: Any, wanted: Any) -> Any:
        deepest = deepest_below(node, host.index)
        return honest(host, deepest, pins, wanted if deepest is node else host.device.paged.needs[deepest.end])

    patch.setattr(restore, "lacking", lacking)


def the_anchor_is_the_deepest_node_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """The path alone says how deep a load goes; the others are looked for from there."""

    def restorable_at(copies: Any, match: Any, node: Any, boundary: int) -> Any:
        for lane in copies.core.shape.path_lanes:
            node, boundary = copies.residencies[lane.index].deepest(node, boundary)
        return node, max(boundary, match.ready)

    for module in (host_tier, restore):
        patch.setattr(module, "restorable_at", restorable_at)


def the_length_is_told_before_all_components_are_ready(patch: pytest.MonkeyPatch) -> None:
    honest = restore._load

    def load(copies: Any, running: Any, anchor: Any, claims: Any) -> None:
        running.ready = running.reserved = running.committed = anchor.end
        honest(copies, running, anchor, claims)

    patch.setattr(restore, "_load", load)


def a_failed_copy_is_published(patch: pytest.MonkeyPatch) -> None:
    """Whether the copy came is not looked at."""

    def hoping(args: Any) -> None:
        with contextlib.suppress(Exception):
            host_copies.copy_between(*args)

    patch.setattr(host_copies, "partial", lambda _, *args: lambda: hoping(args))


def sources_are_not_pinned_while_room_is_made(patch: pytest.MonkeyPatch) -> None:
    honest = restore.Pins.add

    def add(self: Any, lane: Any, cell: Any) -> None:
        if not isinstance(lane, HostLane):
            honest(self, lane, cell)

    patch.setattr(restore.Pins, "add", add)


def what_is_on_the_device_is_not_pinned_while_room_is_made(patch: pytest.MonkeyPatch) -> None:
    honest = restore.Pins.add

    def add(self: Any, lane: Any, cell: Any) -> None:
        if isinstance(lane, HostLane):
            honest(self, lane, cell)

    patch.setattr(restore.Pins, "add", add)


def the_lease_is_swapped_too_early(patch: pytest.MonkeyPatch) -> None:
    honest = restore.make_room

    def make_room(core: Any, wanted: Any, verb: str, count: int, running: Any) -> None:
        root = core.index.root(running.namespace)
        swap(core, running, acquire(core, root, running.namespace))
        honest(core, wanted, verb, count, running)

    patch.setattr(restore, "make_room", make_room)


def the_old_lease_is_left_behind(patch: pytest.MonkeyPatch) -> None:
    def swap_only(core: Any, lease: Any, other: Any) -> None:
        kept.append(other)
        for name in ("node", "covers", "receipts"):
            mine, theirs = getattr(lease, name), getattr(other, name)
            setattr(lease, name, theirs)
            setattr(other, name, mine)

    kept: list[Any] = []
    patch.setattr(restore, "swap", swap_only)


def one_reservation_is_kept_when_another_fails(patch: pytest.MonkeyPatch) -> None:
    """Each component makes room and takes its slots by itself, one after the other."""
    honest = restore.make_room

    def make_room(core: Any, wanted: Any, *more: Any) -> None:
        taken = []
        for lane, count, holding in wanted:
            honest(core, [(lane, count, holding)], *more)
            taken.append((lane, lane.pool.take(count)))
        for lane, slots in taken:
            lane.pool.give(slots.tobytes())

    patch.setattr(restore, "make_room", make_room)


def what_lies_between_two_candidates_is_taken_for_one(patch: pytest.MonkeyPatch) -> None:
    """Candidates are an interval: what is shorter than one that is restorable must be, too."""
    patch.setattr(restore, "restorable_at", lambda copies, match, node, boundary: (climb(node, boundary), boundary))


def a_stale_plan_is_executed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restore, "find_again", lambda core, match: match)


def a_failed_source_is_tried_again_and_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(host_copies.HostCopies, "forsake", lambda self, parts: None)


def the_anchor_may_be_unlinked_while_room_is_made(patch: pytest.MonkeyPatch) -> None:
    """It holds nothing on the device, and what it holds below may be all that there is."""
    honest = restore.make_room

    def make_room(core: Any, wanted: Any, *more: Any) -> None:
        honest(core, wanted, *more)
        for host in core.below.copies.lanes:
            host.leased = 0
            host.evict(1000, freed := [])
            core.index.tree.prune_all(freed)

    patch.setattr(restore, "make_room", make_room)
