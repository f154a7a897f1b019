"""Each lesson's mistake, put back into our code, fails the lesson's tests: a test that cannot fail is a defect."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import mutants_of_lessons as mutants
import pytest

LESSON_1, LESSON_3, RETENTION = "test_lesson_1_cow_over_release", "test_lesson_3_stale_map", "test_retention_law"
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
    found = named(importlib.import_module(module), test)
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises(BaseException) as failure:  # whatever the mistake breaks
            found(*arguments)
    assert not isinstance(failure.value, KeyboardInterrupt | TypeError), failure.value


def test_every_mutant_is_killed_by_something() -> None:
    known = {
        mutant
        for name, mutant in vars(mutants).items()
        if inspect.isfunction(mutant)
        and mutant.__module__ == mutants.__name__
        and list(inspect.signature(mutant).parameters) == ["patch"]
    }
    assert known == {mutant for mutant, *_ in KILLED}
