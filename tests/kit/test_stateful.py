"""Hypothesis over the operations of the state machine. Without it the seeded scripts stand alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="the extra 'testing' brings it; .ci/run installs it")

from hypothesis import Phase

from prefixloom.testing import ComponentCase, Pit, state_machine
from tests.support.broken import BROKEN, ORIGINALS

SOUND = ("path", "sinks and a window", "every hook on a state")


def played(case: ComponentCase, *beside: str) -> None:
    """The same examples each time, and none is shrunk, which takes minutes."""
    machine: Any = state_machine(
        Pit(case, beside), derandomize=True, database=None, phases=[Phase.generate], max_examples=25
    )
    machine.TestCase("runTest").runTest()


@pytest.mark.parametrize("name", SOUND)
def test_hypothesis_finds_nothing_in_a_sound_component(name: str) -> None:
    make, truth = ORIGINALS[name]
    played(ComponentCase(make, truth, name), "window")


@pytest.mark.parametrize("mistake", ["an op clears all states", "until is a page too early", "a hook takes a slot"])
def test_hypothesis_finds_a_mistake_by_the_same_operations(mistake: str) -> None:
    (broken,) = [row for row in BROKEN if row.mistake == mistake]
    with pytest.raises(Exception, match=r"sequence|state|slots"):
        played(broken.case())
