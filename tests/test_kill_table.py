"""Every row of the kill table that is a mistake in our own code: each mutant is run, and its killer must fail on it.

Nothing is recorded: a row that is no longer true, or whose text is no longer in the core, fails here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import mutants_of_lessons as lessons
import pytest

from broken import BROKEN, ORIGINALS
from conformance_tables import ROOT
from killing import mutated
from mutants import LESSONS_BY_LAW, MUTANTS, Mutant
from prefixloom.testing import LAWS, ComponentCase, check_law
from prefixloom.testing.conformance import name_of

LAW = {name_of(law): law for law in LAWS}


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """What came of every mutant, all run at once."""
    call = [sys.executable, str(ROOT / "tests" / "killing.py"), "--json"]
    done = subprocess.run(call, capture_output=True, text=True, check=True, timeout=1500)
    results: dict[str, str] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_in_the_core_is_killed_by_what_the_table_says(mutant: Mutant, told: dict[str, str]) -> None:
    assert mutated(mutant) is not None, f"stale: {mutant.file} has no longer {mutant.old!r}"
    assert told[mutant.name], f"{mutant.killer} says nothing"
    assert "ImportError" not in told[mutant.name] and "SyntaxError" not in told[mutant.name], told[mutant.name]


@pytest.mark.parametrize(
    ("mutant", "law", "name"), LESSONS_BY_LAW, ids=[f"{row[0]}-{row[1]}" for row in LESSONS_BY_LAW]
)
def test_a_mistake_of_the_lessons_is_killed_by_a_law_of_the_kit_too(mutant: str, law: str, name: str) -> None:
    make, truth = ORIGINALS[name]
    change: Callable[[pytest.MonkeyPatch], None] = getattr(lessons, mutant)
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        with pytest.raises(Exception):  # noqa: B017 - whatever the mistake breaks
            check_law(LAW[law], ComponentCase(make, truth, name, effort=1))


def test_every_law_kills_something_and_names_are_told_once() -> None:
    killers = {broken.law for broken in BROKEN} | {mutant.killer[1] for mutant in MUTANTS}
    killers |= {law for _, law, _ in LESSONS_BY_LAW}
    assert [name for name in LAW if name not in killers] == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
