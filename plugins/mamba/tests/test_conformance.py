"""The conformance kit on states: at every boundary, on a grid with checkpoints, and on those worth keeping."""

import pytest

from prefixloom.testing import ComponentCase, parametrize_with_laws

state = ComponentCase.installed("mamba", layers=2, conv=(4, 3), recurrent=(2, 4))
grid = ComponentCase.installed("mamba", conv=(4, 3), grid=8, checkpoint_every=8)
sparse = ComponentCase.installed("mamba", conv=(4, 3), admit="branch-and-last")


@parametrize_with_laws(state)
def test_conformance(case, law):  # type: ignore[no-untyped-def]
    law(case)


@pytest.mark.slow
@parametrize_with_laws(grid, sparse)
def test_conformance_of_the_others(case, law):  # type: ignore[no-untyped-def]
    law(case)
