"""The kit's state machine and its faults: they meet what they are meant to meet, and see what is put wrong."""

from __future__ import annotations

from typing import Any

import mutants_of_lessons as lessons
import pytest

from broken import BROKEN, ORIGINALS
from prefixloom.testing import ComponentCase, LawBroken, Pit, check_law, replay
from prefixloom.testing.bench import Failure
from prefixloom.testing.conformance import LAWS, name_of
from prefixloom.testing.laws_of_hooks import COUNTED, FAIL, quiet
from prefixloom.testing.laws_of_machine import LENGTH, PITS
from prefixloom.testing.laws_of_schedules import BUDGET, SCENARIOS, explored
from prefixloom.testing.oracle import faults
from prefixloom.testing.oracle.machine import fails, written

SETS, FAULTS = "law_every_answer_is_what_the_sets_say", "law_a_fault_at_any_step_leaves_the_state_before_or_after"
ORDERS = "law_no_schedule_of_steps_goes_wrong"
LAW = {name_of(law): law for law in LAWS}
KINDS = ("path", "window", "state", "every hook")


def case_of(name: str) -> ComponentCase:
    make, truth = ORIGINALS[name]
    return ComponentCase(make, truth, name, effort=1)


@pytest.mark.parametrize("name", KINDS)
def test_the_machine_meets_hits_refusals_losses_splits_and_rewinds(name: str) -> None:
    counts: dict[str, int] = {}
    for number, beside in enumerate(PITS):
        pit = Pit(case_of(name), beside)
        for seed in range(4):
            world = replay(pit, written(f"{number} {seed}", pit, LENGTH))
            for what, times in world.counts.items():
                counts[what] = counts.get(what, 0) + times
    for what in ("hit", "miss", "lost", "split", "rewind", "grow refused", "step failed", "publish", "arrive"):
        assert counts.get(what, 0) > 0, (what, counts)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_fault_is_met(name: str) -> None:
    pit = Pit(case_of(name), ("window",))
    script = faults.walkthrough(pit.unit)
    with quiet():
        raised = {hook: faults.in_hook(pit.case, pit.beside, hook, script) for hook in (*FAIL, *COUNTED)}
        assert all(raised.values()), raised
        assert faults.in_pools(pit.case, pit.beside, script) > 20
        assert faults.in_layers(pit.case, pit.beside, script) > 40


@pytest.mark.parametrize(
    ("mutant", "law", "name"),
    [
        (lessons.running_out_of_states_is_an_assertion, FAULTS, "state"),
        (lessons.a_donation_without_a_slot_to_go_on_with, FAULTS, "state"),
        (lessons.a_checkpoint_without_room_fails_the_request, FAULTS, "state"),
        (lessons.a_part_is_released_twice, SETS, "window"),
        (lessons.slots_are_free_while_a_step_still_writes_them, ORDERS, "state"),
        (lessons.slots_are_taken_without_their_fence, ORDERS, "path"),
        (lessons.states_are_copied_by_the_scheduling_thread, ORDERS, "state"),
        (lessons.a_donation_is_a_copy, ORDERS, "state"),
        (lessons.a_split_forgets_who_holds_the_upper_half, SETS, "window"),
        (lessons.what_arrived_absent_is_freed_too, SETS, "window"),
        (lessons.an_evicted_window_is_freed_again_at_the_end, SETS, "window"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_mistake_of_our_own_code_is_seen(mutant: lessons.Mutant, law: str, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises((LawBroken, AssertionError, ZeroDivisionError)):
            check_law(LAW[law], case_of(name))


def test_what_the_machine_finds_comes_with_a_script_that_can_be_pasted() -> None:
    (broken,) = [row for row in BROKEN if row.mistake == "an op clears all states"]
    with pytest.raises(LawBroken) as told:
        check_law(LAW[SETS], broken.case())
    code = told.value.script
    assert code.startswith("from prefixloom.testing import Pit, replay\n")
    assert code.count("('") <= 8, code
    with pytest.raises(Failure):
        exec(code, {"case": broken.case()})
    exec(code, {"case": case_of("state")})


def test_a_script_fails_the_same_way_each_time() -> None:
    (broken,) = [row for row in BROKEN if row.mistake == "until is a page too early"]
    pit = Pit(broken.case())
    script = written("again", pit, 200)
    told: list[Any] = [str(fails(pit, script)) for _ in range(2)]
    assert told[0] == told[1] and "lacks pages" in told[0]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_schedule_of_a_scenario_is_tried(scenario: Any) -> None:
    for name, beside in (("window", ()), ("state", ("path",)), ("path", ("state",))):
        report = explored(case_of(name), scenario, beside)
        assert report.complete and 10 <= report.classes < BUDGET, report
