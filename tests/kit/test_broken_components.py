"""The conformance kit is itself tested: each broken component is killed by the law it must be, and no sound one is."""

from __future__ import annotations

import pytest

from prefixloom.testing import LAWS, ComponentCase, report_on
from prefixloom.testing.conformance import name_of, verdict
from tests.support.broken import BROKEN, COSTS, ORIGINALS, Broken
from tests.support.sampling import only, sampled

LAW = {name_of(law): law for law in LAWS}


@pytest.mark.parametrize("broken", sampled(BROKEN, 3), ids=lambda broken: broken.mistake)
def test_a_broken_component_is_killed_by_the_law_that_must_see_it(broken: Broken) -> None:
    found = verdict(LAW[broken.law], broken.case())
    assert found.status == ("wasteful" if broken.mistake in COSTS else "broken")
    assert len(found.told) > 30
    assert found.clauses


@pytest.mark.parametrize("name", only(ORIGINALS, "state"))
def test_what_the_mistakes_were_made_in_breaks_no_law(name: str) -> None:
    make, truth = ORIGINALS[name]
    broken = report_on(ComponentCase(make, truth, name, effort=1)).broken
    assert [(verdict.law, verdict.told, verdict.script) for verdict in broken] == []


def test_there_are_enough_mistakes_and_every_kind_of_law_kills_one() -> None:
    assert len(BROKEN) >= 40
    assert len({broken.mistake for broken in BROKEN}) == len(BROKEN)
    assert len({broken.law for broken in BROKEN}) >= 15
