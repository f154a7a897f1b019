"""The kill tables: each broken component is killed by its law, and each mistake in our own code by its killer.

Nothing is recorded: a row that is no longer true fails here. By default a part of the rows runs; ``-m slow`` runs all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from prefixloom.testing import LAWS, check_law, report_on
from prefixloom.testing.conformance import name_of, verdict
from tests.kit.test_kit_distributions import WRONG as OF_DISTRIBUTIONS
from tests.lessons import mutants_of_lessons as lessons
from tests.support.broken import BROKEN, COSTS, ORIGINALS, Broken, original
from tests.support.killing import convicted
from tests.support.mutants import LESSONS_BY_LAW, MUTANTS, Mutant
from tests.support.places import ROOT
from tests.support.sampling import only, sampled, sampled_rows

LAW = {name_of(law): law for law in LAWS}
EVERY = 14
"""Each so many-th mutant is run by default."""

# ---------------------------------------------------------------- broken components


@pytest.mark.parametrize("broken", sampled(BROKEN, 11, 3), ids=lambda broken: broken.mistake)
def test_a_broken_component_is_killed_by_the_law_that_must_see_it(broken: Broken) -> None:
    found = verdict(LAW[broken.law], broken.case())
    assert found.status == ("wasteful" if broken.mistake in COSTS else "broken")
    assert len(found.told) > 30
    assert found.clauses


@pytest.mark.parametrize("broken", sampled(BROKEN, 88, 12), ids=lambda broken: broken.mistake)
def test_the_first_law_that_speaks_is_about_the_mistake(broken: Broken) -> None:
    assert convicted(broken)


@pytest.mark.parametrize("name", only(ORIGINALS, "state"))
def test_what_the_mistakes_were_made_in_breaks_no_law(name: str) -> None:
    broken = report_on(original(name)).broken
    assert [(verdict.law, verdict.told, verdict.script) for verdict in broken] == []


# ---------------------------------------------------------------- our own code


def run(*options: str) -> dict[str, str]:
    """Return what came of each mutant of a run, in words; empty for one that survived."""
    call = [sys.executable, "-m", "tests.support.killing", "--json", *options]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True, timeout=3000)
    results: dict[str, str] = json.loads(done.stdout)
    return results


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    """What came of every mutant, all run at once."""
    return run()


def test_some_mistakes_in_the_core_are_killed() -> None:
    told = run("--every", str(EVERY))
    assert len(told) == -(-len(MUTANTS) // EVERY)
    assert [name for name, what in told.items() if not what or "ImportError" in what or "SyntaxError" in what] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_in_the_core_is_killed_by_what_the_table_says(mutant: Mutant, told: dict[str, str]) -> None:
    assert told[mutant.name], f"{mutant.killer} says nothing"
    assert "ImportError" not in told[mutant.name] and "SyntaxError" not in told[mutant.name], told[mutant.name]


@pytest.mark.parametrize(
    ("mutant", "law", "name"), sampled_rows(LESSONS_BY_LAW, 4, 1), ids=[f"{row[0]}-{row[1]}" for row in LESSONS_BY_LAW]
)
def test_a_mistake_of_the_lessons_is_killed_by_a_law_of_the_kit_too(mutant: str, law: str, name: str) -> None:
    change: Callable[[pytest.MonkeyPatch], None] = getattr(lessons, mutant)
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        with pytest.raises(Exception):  # noqa: B017 - whatever the mistake breaks
            check_law(LAW[law], original(name))


def test_every_law_kills_something_and_names_are_told_once() -> None:
    killers = {broken.law for broken in BROKEN} | {mutant.killer[1] for mutant in MUTANTS}
    killers |= {law for _, law, _ in LESSONS_BY_LAW} | {law.__name__ for _, _, _, law, _ in OF_DISTRIBUTIONS}
    assert [name for name in LAW if name not in killers] == []
    for table in ([broken.mistake for broken in BROKEN], [mutant.name for mutant in MUTANTS]):
        assert len(set(table)) == len(table) > 100
