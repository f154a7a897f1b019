"""Each lesson's mistake, put back into our code, fails the lesson's tests: a test that cannot fail is a defect."""

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
from tests.support.places import relative

LESSON_1, LESSON_3, RETENTION = "test_lesson_1_cow_over_release", "test_lesson_3_stale_map", "test_retention_law"
LESSON_2, READERS = "test_lesson_2_overlap_race", "test_lesson_2_readers"
BAD_INPUT, TWO = "test_bad_input_states", "test_lesson_3_two_processes"
KILLED: list[tuple[mutants.Mutant, str, str, tuple[Any, ...]]] = [
    (mutants.the_temporary_pin_walks_to_the_root, LESSON_1, "finds_no_state_slot", (64, False)),
    (mutants.the_temporary_pin_walks_to_the_root, LESSON_1, "finds_no_state_slot", (64, True)),
    (mutants.the_temporary_pin_walks_to_the_root, LESSON_1, "after_a_refused_match", ()),
    (mutants.the_temporary_pin_walks_to_the_root, LESSON_1, "refused_match_of_it_do_not_meet", ()),
    (mutants.the_temporary_pin_is_not_released, LESSON_1, "finds_no_state_slot", (64, False)),
    (mutants.every_release_walks_to_the_root, LESSON_1, "must_evict_for_its_state", (False,)),
    (mutants.every_release_walks_to_the_root, LESSON_1, "any_interleaving", (1,)),
    (mutants.a_part_is_released_twice, LESSON_1, "let_go_once", ()),
    (mutants.a_part_is_released_twice, LESSON_1, "any_interleaving", (1,)),
    (mutants.a_split_forgets_who_holds_the_upper_half, LESSON_1, "any_interleaving", (1,)),
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
    (mutants.windows_are_freed_through_a_table_of_full_slots, LESSON_3, "a_soak_of", (4,)),
    (mutants.windows_are_freed_through_a_table_of_full_slots, LESSON_3, "random_operations", ()),
    (mutants.what_arrived_absent_is_freed_too, LESSON_3, "freed_in_any_order", ((0, 1, 10), (0, 1, 2), 4)),
    (mutants.what_arrived_absent_is_freed_too, LESSON_3, "random_operations", ()),
    (mutants.an_evicted_window_is_freed_again_at_the_end, LESSON_3, "random_operations", ()),
    (mutants.an_evicted_window_is_freed_again_at_the_end, LESSON_3, "a_soak_of", (1,)),
    (mutants.a_tail_gets_the_slots_of_all, LESSON_3, "slot_or_absent", (0, 4)),
    (mutants.windows_are_freed_through_a_table_of_full_slots, TWO, "from_process_to_process", (1,)),
    (mutants.windows_are_freed_through_a_table_of_full_slots, TWO, "from_process_to_process", (4,)),
    (mutants.what_arrived_absent_is_freed_too, TWO, "from_process_to_process", (4,)),
    (mutants.an_evicted_window_is_freed_again_at_the_end, TWO, "from_process_to_process", (1,)),
    (mutants.a_tail_gets_the_slots_of_all, TWO, "from_process_to_process", (4,)),
    (mutants.a_window_is_freed_that_a_checkpoint_still_needs, RETENTION, "law_a_checkpoint_keeps_the_window", (6, 8)),
    (mutants.a_window_is_freed_that_a_checkpoint_still_needs, RETENTION, "named_late_and_taken_back", ()),
    (mutants.a_copied_source_is_not_covered, BAD_INPUT, "dry_before_the_copy", ()),
    (mutants.a_donation_without_a_slot_to_go_on_with, BAD_INPUT, "dry_while_donating", ()),
    (mutants.a_checkpoint_without_room_fails_the_request, BAD_INPUT, "dry_while_donating", ()),
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
    found = named(module_of(module), test)
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises(BaseException) as failure:  # whatever the mistake breaks
            found(*arguments)
    assert not isinstance(failure.value, KeyboardInterrupt | TypeError), failure.value
    stale = isinstance(failure.value, AttributeError) and str(failure.traceback[-1].path) == mutants.__file__
    assert not stale, failure.value  # the mutant asks for what our code has no longer


def test_every_mutant_is_killed_by_something() -> None:
    known = {
        mutant
        for name, mutant in vars(mutants).items()
        if inspect.isfunction(mutant)
        and mutant.__module__ == mutants.__name__
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
