"""The mistakes of the field, put back into our code at run time: each must be seen by the test of its lesson.

A mutant is a function that patches, through a ``MonkeyPatch``, what the mistake changes. ``KILLED`` in
``test_lesson_mutants.py`` says which tests see it; they are run on it, and one that passes is a failure.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from prefixloom import CapacityError, Sequence
from prefixloom.cache.cache import Cache
from prefixloom.device.flight import Flight
from prefixloom.device.pool import ABSENT, Pool
from prefixloom.device.streams import InlineStream
from prefixloom.operations import ops, publish, step, teardown
from prefixloom.operations.state import Hold, Running
from prefixloom.operations.step import Step
from prefixloom.operations.unwritten import Unwritten
from prefixloom.tree.holdings import PageHolding, StateHolding
from prefixloom.tree.lane import PageLane
from prefixloom.tree.partial_lane import PartialLane
from prefixloom.tree.path_lane import PathLane
from prefixloom.tree.state_lane import StateLane
from tests.support.helpers import free_at_once

Mutant = Callable[[pytest.MonkeyPatch], None]

# ---------------------------------------------------------------- lesson 1


def released_to_the_root(self: PartialLane, record: Any, recent: bool = True) -> None:
    """No boundary token: every window lock up to the root goes down, whoever took it."""
    node = record[0][0].node
    while node.parent is not None:
        cell = node.cells[self.index]
        if cell is not None and cell.locks:
            self.unpin(cell, recent)
        node = node.parent


def while_opening(patch: pytest.MonkeyPatch, *changes: tuple[type, str, Any]) -> None:
    """Patch what a match does to its temporary pin, and nothing that happens later."""
    honest = Cache.open

    def opening(self: Cache, *args: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            for what, name, value in changes:
                inner.setattr(what, name, value)
            return honest(self, *args, **options)

    patch.setattr(Cache, "open", opening)


def the_temporary_pin_walks_to_the_root(patch: pytest.MonkeyPatch) -> None:
    """The lease that a match takes while it looks for a free state slot is given up without its boundary."""
    while_opening(patch, (PartialLane, "release", released_to_the_root))


def every_release_walks_to_the_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartialLane, "release", released_to_the_root)


def the_temporary_pin_is_not_released(patch: pytest.MonkeyPatch) -> None:
    """The other way to get it wrong: the exit that finds no slot forgets the pin."""
    lanes = (PathLane, PartialLane, StateLane)
    while_opening(patch, *((lane, "release", lambda self, record, recent=True: None) for lane in lanes))


def a_part_is_released_twice(patch: pytest.MonkeyPatch) -> None:
    """A running sequence lets its window go early, and its end lets it go again."""

    def release_part(hold: Any, lane: Any) -> None:
        if hold.covers[lane.index] is not None:
            lane.release(hold.covers[lane.index])

    patch.setattr("prefixloom.operations.retain.release_part", release_part)


def a_split_forgets_who_holds_the_upper_half(patch: pytest.MonkeyPatch) -> None:
    divide = PartialLane.divide

    def forgetful(self: PartialLane, upper: Any, lower: Any) -> None:
        divide(self, upper, lower)
        cell = upper.cells[self.index]
        if cell is not None and cell.locks:
            cell.locks = 1
            self.unpin(cell)

    patch.setattr(PartialLane, "divide", forgetful)


def running_out_of_states_is_an_assertion(patch: pytest.MonkeyPatch) -> None:
    """What killed the servers: no free slot was not a value."""
    honest = Cache.open

    def opening(self: Cache, *args: Any, **options: Any) -> Any:
        try:
            return honest(self, *args, **options)
        except CapacityError as error:
            raise AssertionError("no free slot") from error

    patch.setattr(Cache, "open", opening)


# ---------------------------------------------------------------- lesson 3


class FullToWindow:
    """The side table of the field: from a full component's page to a window's, filled when both are there together."""

    def __init__(self) -> None:
        self.entries: dict[int, int] = {}

    def note(self, full: array[int], window: array[int]) -> None:
        """One to one for what has both; nobody clears the entries of what has a full page only."""
        for page, slot in zip(full, window, strict=False):
            if slot != ABSENT:
                self.entries[page] = slot

    def freed_with(self, full: array[int]) -> bytes:
        return array("i", [self.entries[page] for page in full if page in self.entries]).tobytes()


def windows_are_freed_through_a_table_of_full_slots(patch: pytest.MonkeyPatch) -> None:
    """A sequence that ends frees its full pages, and by the table the window pages that go with them."""
    tables: dict[int, FullToWindow] = {}
    grow, give_back = Sequence.grow, teardown.give_back

    def growing(self: Any, count: int, *, arriving: bool = False) -> None:
        grow(self, count, arriving=arriving)
        full, window = _two(self.running)
        if full is not None and window is not None:
            tables.setdefault(id(self.core), FullToWindow()).note(full.table, array("i", window.row()))

    def giving_back(core: Any, running: Any) -> None:
        full, window = _two(running)
        table = tables.get(id(core))
        if full is not None and window is not None and table is not None:
            lane = next(lane for lane, holding in running.paged if holding is window)
            stale = table.freed_with(full.table[full.owned :])
            window.table, window.owned = array("i"), 0
            lane.pool.give(stale)
        give_back(core, running)

    patch.setattr(Sequence, "grow", growing)
    for module in ("cache.sequence", "operations.publish"):
        patch.setattr(f"prefixloom.{module}.give_back", giving_back)


def _two(running: Any) -> tuple[PageHolding | None, PageHolding | None]:
    """What a running sequence holds of the first path and of the first window."""
    full = window = None
    for lane, holding in running.paged:
        if lane.part.reach.closed_upward:
            full = full or holding
        else:
            window = window or holding
    return full, window


def what_arrived_absent_is_freed_too(patch: pytest.MonkeyPatch) -> None:
    """The extent is freed as if every position had a slot: the page before the tail, say, is somebody else's."""

    def own_pages(self: PageHolding) -> bytes:
        data = list(self.table[self.owned :])
        present = [slot for slot in data if slot != ABSENT]
        return array("i", [present[0] if slot == ABSENT and present else slot for slot in data]).tobytes()

    patch.setattr(PageHolding, "own_pages", own_pages)


def an_evicted_window_is_freed_again_at_the_end(patch: pytest.MonkeyPatch) -> None:
    """What was let go early stays in the table, and goes with the sequence a second time."""
    forget = PartialLane._forget

    def remembering(self: PartialLane, holding: Any, *where: Any) -> None:
        kept = array("i", holding.table), holding.owned
        forget(self, holding, *where)
        holding.table, holding.owned = kept

    patch.setattr(PartialLane, "_forget", remembering)


def a_tail_gets_the_slots_of_all(patch: pytest.MonkeyPatch) -> None:
    """Tail grants that are none: slots for every position, whatever was needed."""
    patch.setattr(PartialLane, "needed_pages", PageLane.needed_pages)


# ---------------------------------------------------------------- lesson 2


def an_open_step_is_taken_for_complete(patch: pytest.MonkeyPatch) -> None:
    """Publish before complete: the tree gets a state that the layers of an open step are about to write."""
    honest = Step.run_ops

    def running(self: Step, stream: Any = None) -> None:
        honest(self, stream)
        for holding in [holding for running in self._running for _, holding in running.states]:
            holding.ready = True

    patch.setattr(Step, "run_ops", running)
    patch.setattr(Running, "hold_states_back", lambda self: None)


def what_is_planned_is_taken_for_computed(patch: pytest.MonkeyPatch) -> None:
    """Publish before complete: the tree gets pages whose step was not even enqueued."""

    def publishable(self: Running) -> int:
        return max(self.published, min(self.names.count, self.reserved) // 2 * 2)

    patch.setattr(Running, "publishable", property(publishable))


def states_are_copied_by_the_scheduling_thread(patch: pytest.MonkeyPatch) -> None:
    """At once, when the op is recorded: whatever writes the source may still run, and the reader of the target, too."""
    honest = step.run_kind

    def at_once(core: Any, stream: Any, lane: Any, kind: str, src: list[int], dst: list[int]) -> None:
        honest(core, stream if kind == "clear" else InlineStream("now"), lane, kind, src, dst)

    for module in (ops, step):
        patch.setattr(module, "run_kind", at_once)


def again(self: Step, fills: Any) -> None:
    """Run what was to fill the sequences' states once more."""
    for lane, kind, src, dst in fills:
        step.run_kind(self._core, self._work.stream, lane, kind, [] if kind == "clear" else [src], [dst])  # type: ignore[arg-type]


def remembering_fills(patch: pytest.MonkeyPatch, then: Callable[[Step, Any], None]) -> None:
    """``then`` is called behind every run_ops with what each of the step's sequences had filled last."""
    honest = Step.run_ops
    filled: dict[Any, list[Any]] = {}

    def running(self: Step, stream: Any = None) -> None:
        for each in self._running if self.role == "target" else ():
            filled[each] = [(lane, kind, source, it.slot) for lane, it, kind, source in each.fills]
        honest(self, stream)
        then(self, [fill for each in self._running for fill in filled.get(each, ())])

    patch.setattr(Step, "run_ops", running)


def a_draft_runs_the_ops_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    remembering_fills(patch, lambda self, fills: again(self, fills) if self.role == "draft" else None)


def ops_run_again_with_the_second_half_of_the_layers(patch: pytest.MonkeyPatch) -> None:
    honest = Step.__exit__
    late: dict[Step, Any] = {}

    def ending(self: Step, *error: Any) -> None:
        again(self, late.pop(self, ()))
        honest(self, *error)

    remembering_fills(patch, late.__setitem__)
    patch.setattr(Step, "__exit__", ending)


def ops_run_after_the_layers(patch: pytest.MonkeyPatch) -> None:
    """Clear after copy, and both after what reads them: the order of a step's parts is another."""
    honest, ending = step.run_fills, Step.__exit__
    late: list[Any] = []

    def exiting(self: Step, *error: Any) -> None:
        while late:
            honest(*late.pop(0))
        ending(self, *error)

    patch.setattr(step, "run_fills", lambda *args: late.append(args))
    patch.setattr(Step, "__exit__", exiting)


def states_are_cleared_after_the_copies(patch: pytest.MonkeyPatch) -> None:
    """A clear that was meant for the slot's last owner runs behind the copy that fills it for the new one."""
    honest = step.run_kind

    def kind_and_clear(core: Any, stream: Any, lane: Any, kind: str, src: list[int], dst: list[int]) -> None:
        honest(core, stream, lane, kind, src, dst)
        if kind != "clear":
            honest(core, stream, lane, "clear", [], dst)

    patch.setattr(ops, "run_kind", kind_and_clear)


def tracks_are_taken_before_the_layers(patch: pytest.MonkeyPatch) -> None:
    honest = Step.run_ops

    def running(self: Step, stream: Any = None) -> None:
        honest(self, stream)
        for lane, (src, dst) in ops.keep_checkpoints(self._core, self._work, self._rows, False)[0].items():
            ops.run_kind(self._core, self._work.stream, lane, lane.kept, src, dst)  # type: ignore[arg-type]

    patch.setattr(Step, "run_ops", running)
    patch.setattr(step, "keep_checkpoints", lambda *args: ({}, 0))


def the_accepted_count_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def select(core: Any, stream: Any, lane: Any, kept: Any, found: Any) -> None:
        for _, holding in found:
            holding.accepted = True

    patch.setattr("prefixloom.operations.ops._select", select)


def slots_are_free_while_a_step_still_writes_them(patch: pytest.MonkeyPatch) -> None:
    """What is given back is anybody's at once, whoever is still writing."""
    patch.setattr(Pool, "give", free_at_once)


def slots_are_taken_without_their_fence(patch: pytest.MonkeyPatch) -> None:
    """grow and open take what retires, and do not come after the steps that it retires from."""
    patch.setattr(Hold, "take_fence", lambda self, flight: setattr(flight, "taken_early", 0))


def no_stream_waits_for_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Flight, "order", lambda self, *how: None)


def readers_do_not_come_after_what_they_read(patch: pytest.MonkeyPatch) -> None:
    """What is published with its step is read as if that were over."""
    honest = Unwritten.read

    def read(self: Unwritten[Any], hold: Any, node: Any) -> None:
        fence = hold.fence
        honest(self, hold, node)
        hold.fence = fence

    patch.setattr(Unwritten, "read", read)


def what_a_failed_step_published_stays(patch: pytest.MonkeyPatch) -> None:
    for lane in (PathLane, PartialLane, StateLane):
        patch.setattr(lane, "retract", lambda self, node, slots: None)


def who_read_a_failed_step_runs_on(patch: pytest.MonkeyPatch) -> None:
    honest = Unwritten.read

    def read(self: Unwritten[Any], hold: Any, node: Any) -> None:
        honest(self, hold, node)
        for published in (published for all_of_it in self.nodes.values() for published in all_of_it):
            published.readers.clear()

    patch.setattr(Unwritten, "read", read)


def a_donation_is_a_copy(patch: pytest.MonkeyPatch) -> None:
    """The tree gets the slot, and the sequence goes on writing it: two owners."""
    honest = StateLane.adopt

    def adopt(self: StateLane, run: Any, holding: Any) -> None:
        kept = holding.slot, holding.ready
        honest(self, run, holding)
        holding.slot, holding.ready = kept

    patch.setattr(StateLane, "adopt", adopt)


# ---------------------------------------------------------------- retention


def a_window_is_freed_that_a_checkpoint_still_needs(patch: pytest.MonkeyPatch) -> None:
    """A state is kept at an earlier boundary, and the window there is let go as if only the newest counted."""
    patch.setattr(StateHolding, "lowest_track", lambda self, floor: floor)


def a_copied_source_is_not_covered(patch: pytest.MonkeyPatch) -> None:
    """The state that a match found may be evicted before it was copied."""
    acquire, release = StateLane.acquire, StateLane.release

    def acquire_for_a_moment(self: StateLane, node: Any, receipt: Any = None) -> Any:
        cell = acquire(self, node)
        if cell is not None:
            release(self, cell)
        return cell

    def release_what_is_covered(self: StateLane, cover: Any, recent: bool = True) -> None:
        if cover.locks:
            release(self, cover, recent)

    patch.setattr(StateLane, "acquire", acquire_for_a_moment)
    patch.setattr(StateLane, "release", release_what_is_covered)


def a_donation_without_a_slot_to_go_on_with(patch: pytest.MonkeyPatch) -> None:
    """The state is handed to the tree before it is known that there is another slot."""
    patch.setattr(publish, "make_room", lambda *args, **options: None)


def a_checkpoint_without_room_fails_the_request(patch: pytest.MonkeyPatch) -> None:
    """Optional caching stops serving: the missing slot of a checkpoint is an error of the publication."""
    patch.setattr(publish, "CapacityError", ZeroDivisionError)
