"""The kit's scripts of the sets and of faults: they meet what they are meant to meet, and see what is put wrong."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import AdmissionPolicy, Point
from prefixloom.script import Failure, ScriptError, World, failure, play
from prefixloom.testing import ComponentCase, LawBroken, Pit, Setting, check_law
from prefixloom.testing.conformance import LAWS, name_of
from prefixloom.testing.laws.hooks import COUNTED, FAIL, quiet
from prefixloom.testing.laws.machine import LENGTH, PITS
from prefixloom.testing.laws.schedules import BUDGET, SCENARIOS, explored
from prefixloom.testing.oracle import faults
from prefixloom.testing.oracle.writer import SetsWriter
from tests.support.broken import BROKEN, ORIGINALS, of, original
from tests.support.sampling import only

SETS = "law_every_answer_is_what_the_sets_say"
LAW = {name_of(law): law for law in LAWS}
KINDS = ("path", "window", "state", "every hook")


@pytest.mark.parametrize("name", only(KINDS, "window"))
def test_the_machine_meets_hits_refusals_losses_splits_and_rewinds(name: str) -> None:
    counts: dict[str, int] = {}
    for number, beside in enumerate(PITS):
        pit = Pit(original(name), beside)
        for seed in range(4):
            world = play(pit, SetsWriter(f"{number} {seed}", pit).script(LENGTH))
            for what, times in world.counts.items():
                counts[what] = counts.get(what, 0) + times
    for what in ("hit", "miss", "lost", "split", "rewind", "grow refused", "step failed", "publish", "arrive"):
        assert counts.get(what, 0) > 0, (what, counts)


@pytest.mark.parametrize("name", only(KINDS, "window"))
def test_every_kind_of_fault_is_met(name: str) -> None:
    pit = Pit(original(name), ("window",))
    script = faults.walkthrough(pit.unit)
    with quiet():
        raised = {hook: faults.in_hook(pit, hook, script) for hook in (*FAIL, *COUNTED)}
        assert all(raised.values()), raised
        assert faults.in_pools(pit, script) > 20
        assert faults.in_layers(pit, script) > 40


def test_a_policy_may_keep_states_back_while_a_hook_raises() -> None:
    admission = of(reach=Point, admission=AdmissionPolicy("none", admit=lambda view: False))
    pit = Pit(ComponentCase(admission, ORIGINALS["state"][1], "admitted", effort=1), ("window",))
    with quiet():
        assert faults.in_hook(pit, "commit_insert", faults.walkthrough(pit.unit))


def test_what_the_machine_finds_comes_with_a_script_that_can_be_pasted() -> None:
    (broken,) = [row for row in BROKEN if row.mistake == "an op clears all states"]
    with pytest.raises(LawBroken) as told:
        check_law(LAW[SETS], broken.case())
    code = told.value.script
    assert code.startswith("from prefixloom.testing import Pit, play\n")
    assert code.count("('") <= 8, code
    with pytest.raises(Failure):
        exec(code, {"case": broken.case()})
    exec(code, {"case": original("state")})


def test_a_script_fails_the_same_way_each_time() -> None:
    (broken,) = [row for row in BROKEN if row.mistake == "until is a page too early"]
    pit = Pit(broken.case())
    script = SetsWriter("again", pit).script(200)
    told: list[Any] = [str(failure(pit, script)) for _ in range(2)]
    assert told[0] == told[1] and "lacks pages" in told[0]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_schedule_of_a_scenario_is_tried(scenario: Any) -> None:
    for name, beside in (("window", ()), ("state", ("path",)), ("path", ("state",))):
        report = explored(original(name), scenario, beside)
        assert report.complete and 10 <= report.classes < BUDGET, report


class Counting(World):
    def do_add(self, number: int) -> None:
        self.count("sum", number + 0)


def test_an_operation_that_a_world_has_not_is_an_error_of_the_script() -> None:
    assert play(Counting, [("add", 1), ("repeat", 2, [("add", 3)])]).counts == {"sum": 7}
    with pytest.raises(ScriptError, match=r"no operation 'fly' in \('fly', 3\); there are add, repeat"):
        play(Counting, [("add", 1), ("fly", 3)])
    with pytest.raises(ScriptError, match=r"\('add',\): missing a required argument: 'number'; it is add\(number"):
        play(Counting, [("add",)])
    with pytest.raises(Failure, match="TypeError"):
        play(Counting, [("add", "x")])


def test_a_setting_beside_an_unknown_kind_is_an_error_of_the_script() -> None:
    with pytest.raises(ScriptError, match="no 'p' can stand beside a component; there are path, window, state"):
        play(Setting(original("path"), beside="path"), [])
