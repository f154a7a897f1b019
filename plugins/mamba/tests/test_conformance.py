"""The conformance kit on states: at every boundary, on a grid with checkpoints, and on those worth keeping."""

import pytest

from prefixloom.testing import ComponentCase, Truth, parametrize_with_laws
from prefixloom_mamba import MambaComponent

BOTH = Truth(grid=1, buffers=("conv", "recurrent"), layers=(0, 1))
state = ComponentCase(lambda: MambaComponent(layers=2, conv=(4, 3), recurrent=(2, 4)), BOTH, "state")
grid = ComponentCase(lambda: MambaComponent(conv=(4, 3), grid=8, checkpoint_every=8), Truth(grid=8), "grid")
sparse = ComponentCase(lambda: MambaComponent(conv=(4, 3), states_per_path=2, admit="branch-and-last"), label="sparse")


@parametrize_with_laws(state)
def test_conformance(case, law):  # type: ignore[no-untyped-def]
    law(case)


@pytest.mark.slow
@parametrize_with_laws(grid, sparse)
def test_conformance_of_the_others(case, law):  # type: ignore[no-untyped-def]
    law(case)
