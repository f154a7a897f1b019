"""Each lesson's mistake, put back into our code, fails the lesson's tests: a test that cannot fail is a defect.

Of the arguments, ``PATCH`` stands for a ``MonkeyPatch``, and "patch:NAME" for a name of the test's module.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from prefixloom import RaceError
from prefixloom.testing.schedules.explore import FailingSchedule
from tests.lessons import mutants_of_lessons as mutants
from tests.lessons import mutants_of_tiers as tiers
from tests.support.places import relative

LESSON_1, LESSON_3, RETENTION = "test_lesson_1_cow_over_release", "test_lesson_3_stale_map", "test_retention_law"
LESSON_2, READERS = "test_lesson_2_overlap_race", "test_lesson_2_readers"
TWO, SETS = "test_lesson_3_two_processes", "test_property"
TIERS, LESSON_4, LESSON_5 = "test_lesson_2_tiers", "test_lesson_4_wrong_anchor", "test_lesson_5_polluted_descriptor"
PATCH = "patch"
KILLED: list[tuple[mutants.Mutant, str, str, tuple[Any, ...]]] = [
    (mutants.the_temporary_pin_walks_to_the_root, LESSON_1, "finds_no_state_slot", (64, False)),
    (mutants.the_temporary_pin_walks_to_the_root, LESSON_1, "finds_no_state_slot", (64, True)),
    (mutants.the_temporary_pin_walks_to_the_root, LESSON_1, "refused_match_of_it_do_not_meet", ()),
    (mutants.the_temporary_pin_is_not_released, LESSON_1, "finds_no_state_slot", (64, False)),
    (mutants.every_release_walks_to_the_root, LESSON_1, "must_evict_for_its_state", (False,)),
    (mutants.a_part_is_released_twice, LESSON_1, "let_go_once", ()),
    (mutants.a_split_forgets_who_holds_the_upper_half, SETS, "random_times_agree", ("windows that keep less",)),
    (mutants.running_out_of_states_is_an_assertion, LESSON_1, "finds_no_state_slot", (64, False)),
    (mutants.an_open_step_is_taken_for_complete, LESSON_2, "chunked_prefill", ("M", 0, "inside")),
    (mutants.what_is_planned_is_taken_for_computed, LESSON_2, "chunked_prefill", ("FM", 0, "inside")),
    (mutants.states_are_copied_by_the_scheduling_thread, LESSON_2, "chunked_prefill", ("M", 0, "whole")),
    (mutants.states_are_copied_by_the_scheduling_thread, LESSON_2, "decoding", ("M", 2)),
    (mutants.states_are_copied_by_the_scheduling_thread, READERS, "does_not_miss_by_a_step", ("M", False)),
    (mutants.a_draft_runs_the_ops_of_the_step_before, LESSON_2, "draft_step", ("FM", False)),
    (mutants.a_draft_runs_the_ops_of_the_step_before, LESSON_2, "draft_step", ("M", True)),
    (mutants.ops_run_again_with_the_second_half_of_the_layers, LESSON_2, "chunked_prefill", ("M", 0, "split")),
    (mutants.ops_run_after_the_layers, LESSON_2, "chunked_prefill", ("M", 0, "split")),
    (mutants.ops_run_after_the_layers, LESSON_2, "eviction", ("FM", "open")),
    (mutants.states_are_cleared_after_the_copies, LESSON_2, "chunked_prefill", ("M", 0, "whole")),
    (mutants.states_are_cleared_after_the_copies, READERS, "does_not_miss_by_a_step", ("FM", True)),
    (mutants.tracks_are_taken_before_the_layers, LESSON_2, "chunked_prefill", ("M", 2, "whole")),
    (mutants.tracks_are_taken_before_the_layers, LESSON_2, "decoding", ("M", 2)),
    (mutants.the_accepted_count_is_ignored, LESSON_2, "speculation", ("M", (1, 3), False)),
    (mutants.slots_are_free_while_a_step_still_writes_them, LESSON_2, "an_abort", ("M", True)),
    (mutants.slots_are_free_while_a_step_still_writes_them, LESSON_2, "retire_together", ("M",)),
    (mutants.slots_are_free_while_a_step_still_writes_them, LESSON_2, "eviction", ("M", "plan")),
    (mutants.slots_are_taken_without_their_fence, LESSON_2, "an_abort", ("FSM", True)),
    (mutants.slots_are_taken_without_their_fence, LESSON_2, "retire_together", ("FM",)),
    (mutants.no_stream_waits_for_another, LESSON_2, "draft_step", ("M", True)),
    (mutants.no_stream_waits_for_another, LESSON_2, "retire_together", ("FM",)),
    (mutants.no_stream_waits_for_another, READERS, "two_that_compute", ("FM", True)),
    (mutants.readers_do_not_come_after_what_they_read, READERS, "does_not_miss_by_a_step", ("M", True)),
    (mutants.readers_do_not_come_after_what_they_read, READERS, "duplicates", ("FM",)),
    (mutants.what_a_failed_step_published_stays, READERS, "step_that_fails", ("M", False, 0)),
    (mutants.what_a_failed_step_published_stays, READERS, "step_that_fails", ("FM", True, 1)),
    (mutants.who_read_a_failed_step_runs_on, READERS, "step_that_fails", ("M", False, 0)),
    (mutants.who_read_a_failed_step_runs_on, READERS, "step_that_fails", ("FM", True, 1)),
    (mutants.a_donation_is_a_copy, LESSON_2, "chunked_prefill", ("M", 0, "whole")),
    (mutants.a_donation_is_a_copy, READERS, "does_not_miss_by_a_step", ("FM", False)),
    (mutants.windows_are_freed_through_a_table_of_full_slots, LESSON_3, "in_any_order", ((0, 1, 10), (0, 1, 2), 4)),
    (mutants.windows_are_freed_through_a_table_of_full_slots, LESSON_3, "leads_to_nothing", ()),
    (mutants.what_arrived_absent_is_freed_too, LESSON_3, "freed_in_any_order", ((0, 1, 10), (0, 1, 2), 4)),
    (mutants.a_tail_gets_the_slots_of_all, LESSON_3, "slot_or_absent", (0, 4)),
    (mutants.windows_are_freed_through_a_table_of_full_slots, TWO, "from_process_to_process", (1,)),
    (mutants.windows_are_freed_through_a_table_of_full_slots, TWO, "from_process_to_process", (4,)),
    (mutants.what_arrived_absent_is_freed_too, TWO, "from_process_to_process", (4,)),
    (mutants.an_evicted_window_is_freed_again_at_the_end, TWO, "from_process_to_process", (1,)),
    (mutants.a_tail_gets_the_slots_of_all, TWO, "from_process_to_process", (4,)),
    (mutants.a_window_is_freed_that_a_checkpoint_still_needs, SETS, "random_check", ("checkpoints under a window",)),
    (mutants.a_copied_source_is_not_covered, SETS, "random_times_agree", ("path, window and point",)),
    (mutants.a_donation_without_a_slot_to_go_on_with, RETENTION, "dry_while_donating", ()),
    (mutants.a_checkpoint_without_room_fails_the_request, RETENTION, "dry_while_donating", ()),
    (mutants.slots_are_free_while_a_step_still_writes_them, TIERS, "slots_that_go_to_another", ("FSM",)),
    (mutants.slots_are_free_while_a_step_still_writes_them, TIERS, "are_given_to_others", ("FSM",)),
    (tiers.loads_do_not_come_after_the_copy_down, TIERS, "while_all_that_runs", ("M", "through")),
    (tiers.copies_down_do_not_come_after_the_step, TIERS, "while_all_that_runs", ("M", "back")),
    (tiers.readers_do_not_come_after_a_load, TIERS, "has_yet_to_bring", ("M", True)),
    (tiers.copies_take_slots_without_their_fence, TIERS, "are_given_to_others", ("FSM",)),
    (tiers.a_failed_copy_down_ends_who_reads_its_source, TIERS, "ends_nobody", ("FSM",)),
    (tiers.what_a_load_should_have_brought_stays, TIERS, "is_forgotten", ("M", 1)),
    (tiers.what_a_load_should_have_brought_stays, TIERS, "is_forgotten", ("FSM", 2)),
    (tiers.a_load_goes_into_a_state_that_was_filled_already, TIERS, "is_filled_once", ("M", True)),
    (tiers.each_component_loads_from_its_own_deepest_node, LESSON_4, "five_may_be", ()),
    (tiers.each_component_loads_from_its_own_deepest_node, LESSON_4, "anchor_of_a_load", (PATCH,)),
    (tiers.the_anchor_is_the_deepest_node_on_the_host, LESSON_4, "five_may_be", ()),
    (tiers.the_anchor_is_the_deepest_node_on_the_host, LESSON_4, "that_all_accept", (1,)),
    (tiers.the_length_is_told_before_all_components_are_ready, LESSON_4, "candidate_that_fits", ("full", ())),
    (tiers.the_length_is_told_before_all_components_are_ready, LESSON_4, "that_is_ready", (0, (), False, PATCH)),
    (tiers.a_failed_copy_is_published, LESSON_4, "that_is_ready", (1, (), True, PATCH)),
    (tiers.a_failed_copy_is_published, LESSON_4, "try_for_ever", (PATCH,)),
    (tiers.sources_are_not_pinned_while_room_is_made, LESSON_4, "sources_and_what_is_there", ()),
    (tiers.what_is_on_the_device_is_not_pinned_while_room_is_made, LESSON_4, "needs_and_the_device_has", ()),
    (tiers.the_lease_is_swapped_too_early, LESSON_4, "resumes_from", (PATCH,)),
    (tiers.the_old_lease_is_left_behind, LESSON_4, "is_planned_again", (16, "patch:split_it")),
    (tiers.one_reservation_is_kept_when_another_fails, LESSON_4, "candidate_that_fits", ("state", ())),
    (tiers.what_lies_between_two_candidates_is_taken_for_one, LESSON_4, "candidate_that_fits", ("full", (24, 32))),
    (tiers.a_stale_plan_is_executed, LESSON_4, "is_planned_again", (0, "patch:evict_below")),
    (tiers.a_stale_plan_is_executed, LESSON_4, "is_planned_again", (16, "patch:evict_all_below")),
    (tiers.a_failed_source_is_tried_again_and_again, LESSON_4, "try_for_ever", (PATCH,)),
    (tiers.the_anchor_may_be_unlinked_while_room_is_made, LESSON_4, "five_may_be", ()),
    (tiers.copies_are_told_in_the_callers_lists, LESSON_5, "what_a_caller_changes", ("down", PATCH)),
    (tiers.copies_are_told_in_the_callers_lists, LESSON_5, "what_a_caller_changes", ("up", PATCH)),
    (tiers.the_host_records_the_devices_numbers, LESSON_5, "evict_below", ("page_first", "through")),
    (tiers.the_host_records_the_devices_numbers, LESSON_5, "takes_it_back", ("back", PATCH)),
    (tiers.a_state_is_freed_by_the_devices_number, LESSON_5, "takes_it_back", ("through", PATCH)),
    (tiers.a_copy_writes_the_numbers_that_it_wants_into_the_record, LESSON_5, "evict_below", ("layer_first", "back")),
    (tiers.a_plan_can_be_changed, LESSON_5, "plan_of_a_transfer", ()),
]  # fmt: skip


def module_of(name: str) -> ModuleType:
    return importlib.import_module(relative(name).removesuffix(".py").replace("/", "."))


def named(module: ModuleType, part: str) -> Callable[..., None]:
    (found,) = [test for name, test in vars(module).items() if name.startswith("test_") and part in name]
    assert inspect.isfunction(found)
    return found


@pytest.mark.parametrize(
    ("mutant", "module", "test", "arguments"),
    KILLED,
    ids=[f"{mutant.__name__}-{test}-{number}" for number, (mutant, _, test, _) in enumerate(KILLED)],
)
def test_the_lessons_test_fails_on_the_mistake(
    mutant: mutants.Mutant, module: str, test: str, arguments: tuple[Any, ...]
) -> None:
    from_where = module_of(module)
    found = named(from_where, test)
    with pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as inner:
        mutant(patch)
        given = [_argument(each, from_where, inner) for each in arguments]
        with pytest.raises((Exception, pytest.fail.Exception)) as failure:  # whatever the mistake breaks
            found(*given)
    assert not isinstance(failure.value, TypeError), failure.value
    where = str(failure.traceback[-1].path)
    stale = isinstance(failure.value, AttributeError) and where in (mutants.__file__, tiers.__file__)
    assert not stale, failure.value  # the mutant asks for what our code has no longer


def _argument(written: Any, module: ModuleType, patch: pytest.MonkeyPatch) -> Any:
    kind, _, name = written.partition(":") if isinstance(written, str) else ("", "", "")
    return written if kind != PATCH else getattr(module, name) if name else patch


def test_every_mutant_is_killed_by_something() -> None:
    known = {
        mutant
        for module in (mutants, tiers)
        for mutant in vars(module).values()
        if inspect.isfunction(mutant)
        and mutant.__module__ == module.__name__
        and list(inspect.signature(mutant).parameters) == ["patch"]
    }
    assert known == {mutant for mutant, *_ in KILLED}


RACES: list[tuple[mutants.Mutant, str, str, tuple[Any, ...], str, str, str]] = [
    (mutants.states_are_copied_by_the_scheduling_thread, LESSON_2, "decoding", ("M", 2),
     "track of state", "the layers of <step", "the scheduling thread must see an event recorded on stream 'forward'"),
    (mutants.slots_are_free_while_a_step_still_writes_them, LESSON_2, "retire_together", ("M",),
     "the layers of <step 2", "the layers of <step 1", "stream 'second' must wait for an event recorded on stream"),
    (mutants.slots_are_taken_without_their_fence, LESSON_2, "retire_together", ("FM",),
     "the layers of <step 2", "the layers of <step 1", "stream 'second' must wait for an event recorded on stream"),
    (mutants.no_stream_waits_for_another, LESSON_2, "draft_step", ("M", True),
     "the layers of <draft step", "the layers of <step", "stream 'draft' must wait for an event recorded on stream"),
    (mutants.readers_do_not_come_after_what_they_read, READERS, "does_not_miss_by_a_step", ("M", True),
     "copy of state", "the layers of <step", "stream 'other' must wait for an event recorded on stream 'forward'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mutant", "module", "test", "arguments", "now", "before", "edge"), RACES, ids=[race[0].__name__ for race in RACES]
)
def test_the_race_detector_names_both_ops_and_the_missing_edge(
    mutant: mutants.Mutant, module: str, test: str, arguments: tuple[Any, ...], now: str, before: str, edge: str
) -> None:
    found = named(module_of(module), test)
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises(FailingSchedule) as failure:
            found(*arguments)
    assert isinstance(failure.value.error, RaceError)
    first, *_, was, comes, missing = str(failure.value.error).splitlines()
    assert first.startswith(f"'{now}") and f"after '{before}" in first, first
    assert was.startswith(f"  before: '{before}") and ", recorded at " in was, was
    assert comes.startswith(f"  now:    '{now}") and ", recorded at " in comes, comes
    assert missing.startswith(f"  missing edge: {edge}"), missing
