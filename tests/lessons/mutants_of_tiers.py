"""The mistakes of the field between tiers, put back into our code at run time: see ``mutants_of_lessons``."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from prefixloom.contract.values import TransferPlan
from prefixloom.operations.lease import acquire, swap
from prefixloom.operations.state import Hold
from prefixloom.operations.unwritten import Unwritten
from prefixloom.tiers import host_copies, host_tier, restore
from prefixloom.tiers.host_copies import HostCopies
from prefixloom.tiers.host_lane import HostCell, HostLane
from prefixloom.tree.radix import climb

Mutant = Callable[[pytest.MonkeyPatch], None]

# ---------------------------------------------------------------- lesson 2


def loads_do_not_come_after_the_copy_down(patch: pytest.MonkeyPatch) -> None:
    honest = Unwritten.read_node
    patch.setattr(Unwritten, "read_node", lambda self, hold, node, below=False: below or honest(self, hold, node))


def copies_down_do_not_come_after_the_step(patch: pytest.MonkeyPatch) -> None:
    """As the publication does, the backup takes for written what a step has yet to write."""
    honest = HostCopies.backup

    def backup(self: Any, *args: Any, **options: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Unwritten, "read_node", lambda *_, **__: None)
            honest(self, *args, **options)

    patch.setattr(HostCopies, "backup", backup)


def readers_do_not_come_after_a_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Unwritten, "read", lambda self, hold, node: None)


def copies_take_slots_without_their_fence(patch: pytest.MonkeyPatch) -> None:
    honest = Hold.take_fence

    def take_fence(self: Hold, flight: Any) -> None:
        fence = self.fence
        honest(self, flight)
        self.fence = fence if self.core is None else self.fence

    patch.setattr(Hold, "take_fence", take_fence)


def a_failed_copy_down_ends_who_reads_its_source(patch: pytest.MonkeyPatch) -> None:
    honest = Unwritten.add
    patch.setattr(Unwritten, "add", lambda self, *args, below=False: honest(self, *args))


def what_a_load_should_have_brought_stays(patch: pytest.MonkeyPatch) -> None:
    honest = Unwritten.add

    def add(self: Unwritten[Any], work: Any, hold: Any, run: Any, slots: Any, below: bool = False) -> None:
        if below:
            honest(self, work, hold, run, slots, below)

    patch.setattr(Unwritten, "add", add)


def a_load_goes_into_a_state_that_was_filled_already(patch: pytest.MonkeyPatch) -> None:
    """The mistake as it was: nobody looks at what else is written into the slot."""
    honest = restore._copy_up

    def copy_up(copies: Any, running: Any, parts: Any) -> Any:
        ready = [state.ready for _, state in running.states]
        kept, running.fence = running.fence, 0
        for _, state in running.states:
            state.ready = False
        try:
            return honest(copies, running, parts)
        finally:
            running.fence = max(kept, running.fence)
            for (_, state), was in zip(running.states, ready, strict=True):
                state.ready = was

    patch.setattr(restore, "_copy_up", copy_up)


# ---------------------------------------------------------------- lesson 4


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
    patch.setattr(HostCopies, "forsake", lambda self, parts: None)


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


# ---------------------------------------------------------------- lesson 5


def copies_are_told_in_the_callers_lists(patch: pytest.MonkeyPatch) -> None:
    """The numbers of a copy that waits are whatever its maker's lists say when it runs."""

    def as_given(numbers: Any) -> Any:
        return numbers if isinstance(numbers, list) else tuple(numbers)

    patch.setattr(host_copies, "tuple", as_given, raising=False)


def the_host_records_the_devices_numbers(patch: pytest.MonkeyPatch) -> None:
    def add(self: HostLane, node: Any, places: Any, slots: Any) -> None:
        theirs = self.device.edge(node)
        honest(self, node, places, array("i", [theirs[place] for place in places]))

    honest = HostLane.add
    patch.setattr(HostLane, "add", add)


def a_state_is_freed_by_the_devices_number(patch: pytest.MonkeyPatch) -> None:
    def slots_of(self: HostLane, cell: HostCell | None) -> list[int]:
        theirs = None if cell is None else cell.node.cells[self.device.index]
        return honest(self, cell) if theirs is None or self.unit == "page" else [theirs.slot]

    honest = HostLane.slots_of
    patch.setattr(HostLane, "slots_of", slots_of)


def a_copy_writes_the_numbers_that_it_wants_into_the_record(patch: pytest.MonkeyPatch) -> None:
    """As it was in the field: the record has the numbers of where the data is wanted next."""
    honest = restore._copy_up

    def copy_up(filling: Any, running: Any) -> Any:
        for made in filling.moving:
            for node, _ in made.at:
                cell = node.cells[made.lane.index]
                if made.lane.unit == "page":
                    cell.data = array("i", [slot % 16 for slot in array("i", cell.data)]).tobytes()
        return honest(filling, running)

    patch.setattr(restore, "_copy_up", copy_up)


def a_plan_can_be_changed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferPlan, "__setattr__", object.__setattr__)
