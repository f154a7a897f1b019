"""Each mistake of lesson 4, put back into our code, fails a test of that lesson."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.lessons import mutants_of_lesson_4 as mutants
from tests.lessons import test_lesson_4_wrong_anchor as lesson

FIVE = lesson.test_five_may_be_restorable_while_four_and_three_are_not
ONE = lesson.test_the_anchor_of_a_load_is_one_node_for_all
ACCEPT = lesson.test_all_components_load_from_the_deepest_boundary_that_all_accept
ROOM = lesson.test_without_room_it_comes_to_the_deepest_candidate_that_fits
COPY = lesson.test_a_copy_that_fails_leaves_the_deepest_that_is_ready
EVERY = lesson.test_if_every_copy_fails_it_ends_with_what_is_ready_and_does_not_try_for_ever
SOURCES = lesson.test_sources_and_what_is_there_already_stay_while_room_is_made
CHANGED = lesson.test_what_changes_between_match_and_restore_is_planned_again
NEEDS = lesson.test_room_is_not_made_of_what_the_boundary_needs_and_the_device_has
RESUMES = lesson.test_no_room_is_made_of_what_the_sequence_resumes_from
KILLED: list[tuple[mutants.Mutant, Any, tuple[Any, ...]]] = [
    (mutants.each_component_loads_from_its_own_deepest_node, FIVE, ()),
    (mutants.each_component_loads_from_its_own_deepest_node, ONE, ("patch",)),
    (mutants.the_anchor_is_the_deepest_node_on_the_host, FIVE, ()),
    (mutants.the_anchor_is_the_deepest_node_on_the_host, ACCEPT, (1,)),
    (mutants.the_length_is_told_before_all_components_are_ready, ROOM, ("full", ())),
    (mutants.the_length_is_told_before_all_components_are_ready, COPY, (0, (), False, "patch")),
    (mutants.a_failed_copy_is_published, COPY, (1, (), True, "patch")),
    (mutants.a_failed_copy_is_published, EVERY, ("patch",)),
    (mutants.sources_are_not_pinned_while_room_is_made, SOURCES, ()),
    (mutants.what_is_on_the_device_is_not_pinned_while_room_is_made, NEEDS, ()),
    (mutants.the_lease_is_swapped_too_early, RESUMES, ("patch",)),
    (mutants.the_old_lease_is_left_behind, CHANGED, (16, lesson.split_it)),
    (mutants.one_reservation_is_kept_when_another_fails, ROOM, ("state", ())),
    (mutants.what_lies_between_two_candidates_is_taken_for_one, ROOM, ("full", (24, 32))),
    (mutants.a_stale_plan_is_executed, CHANGED, (0, lesson.evict_below)),
    (mutants.a_stale_plan_is_executed, CHANGED, (16, lesson.evict_all_below)),
    (mutants.a_failed_source_is_tried_again_and_again, EVERY, ("patch",)),
    (mutants.the_anchor_may_be_unlinked_while_room_is_made, FIVE, ()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mutant", "test", "arguments"), KILLED, ids=[f"{mutant.__name__}-{k}" for k, (mutant, *_) in enumerate(KILLED)]
)
def test_the_mistakes_of_lesson_4_are_seen(
    mutant: mutants.Mutant, test: Any, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    given = [monkeypatch if argument == "patch" else argument for argument in arguments]
    with pytest.raises(BaseException) as failure:  # whatever the mistake breaks
        test(*given)
    assert not isinstance(failure.value, KeyboardInterrupt | TypeError), failure.value
    stale = isinstance(failure.value, AttributeError) and str(failure.traceback[-1].path) == mutants.__file__
    assert not stale, failure.value  # the mutant asks for what our code has no longer


def test_every_mistake_of_lesson_4_is_seen_by_something() -> None:
    known = {
        mutant
        for mutant in vars(mutants).values()
        if inspect.isfunction(mutant)
        and mutant.__module__ == mutants.__name__
        and list(inspect.signature(mutant).parameters) == ["patch"]
    }
    assert known == {mutant for mutant, *_ in KILLED}
