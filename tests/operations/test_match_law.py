"""A match with hooks answers as a search over plain sets does: validators, claims of branches, and states."""

from __future__ import annotations

import random
from typing import Any

import pytest

from prefixloom import Claim, Component, Path, Point, hookimpl
from tests.support.helpers import PAGE, cache_of, part, run

LENGTH = 48
TOKENS = list(range(LENGTH))


class Picky(Component):
    """A state whose hooks refuse boundaries that a test draws, and claim branches."""

    valid: frozenset[int] = frozenset()
    branches: dict[int, int] = {}

    @hookimpl
    def create_match_validator(self, tiers: Any) -> Any:
        return lambda walk: max(at for at in self.valid if at <= walk.boundary)

    @hookimpl
    def finalize_match_result(self, walk: Any) -> Claim:
        return Claim(branch=self.branches.get(walk.boundary))


def searched(picky: Any, states: set[int], deepest: int) -> tuple[int, int | None]:
    """The boundary and the branch, from the deepest that the keys agree with."""

    def accepted(boundary: int) -> tuple[int, int | None]:
        branch = None
        while boundary:
            state = max(at for at in states if at <= boundary)
            if state < boundary:
                branch = branch or boundary  # here was all but a state
                boundary = state
            lower = max(at for at in picky.valid if at <= boundary)
            if lower == boundary and state == boundary:
                break
            boundary = lower
        return boundary, branch

    boundary, branch = accepted(deepest)
    claimed = picky.branches.get(boundary, 0)
    if boundary < claimed <= LENGTH:
        branch = max(branch or 0, claimed // PAGE * PAGE) or None
    return boundary, branch


@pytest.mark.parametrize("seed", range(60))
def test_a_match_is_the_search_over_sets(seed: int) -> None:
    rng = random.Random(seed)
    picky: Any = part("state", Point(), kind=Picky)
    cache = cache_of(part("keys", Path()), picky, slots=20)
    every = range(0, LENGTH + 1, PAGE)
    picky.valid = frozenset(every)
    states = {0}
    with cache.open(TOKENS) as sequence:
        for boundary in every[1:]:
            run(sequence, PAGE)
            if rng.random() < 0.5 or boundary == LENGTH:
                sequence.publish()
                states.add(boundary)
    for _ in range(8):
        picky.valid = frozenset({0, *(at for at in every if rng.random() < 0.6)})
        picky.branches = {at: rng.randrange(LENGTH + 8) for at in every if rng.random() < 0.3}
        leave = rng.randrange(LENGTH)
        plan = cache.match(TOKENS, leave=leave)
        wanted = searched(picky, states, (LENGTH - leave) // PAGE * PAGE)
        assert (plan.ready, plan.branch) == wanted, (states, picky.valid, picky.branches, leave)
        assert plan.limited_by == ("state" if plan.ready < (LENGTH - leave) // PAGE * PAGE else None)
