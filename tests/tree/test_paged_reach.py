"""What is remembered of a reach, in pages, is what the reach says of positions."""

from __future__ import annotations

import random

import pytest

from prefixloom import Chunk, Reach, Sinks, Tail, Window
from prefixloom.contract.reach import NEVER
from prefixloom.tree.paged_reach import PagedReach, Pages, gaps

LENGTH = 96


class Drawn(Reach):
    """Each position is needed by boundaries that were drawn, or for good. Odd ones let go of some too early."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        chance = random.Random(seed)
        self.last = [chance.choice((p + chance.randrange(40), p + 3, NEVER)) for p in range(LENGTH)]
        self.rarely = [chance.randrange(4) for _ in range(LENGTH)]

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        found = [(p, p + 1) for p in range(n) if self.last[p] >= n and n % 4 >= self.rarely[p]]
        return (*found[::-1], (n // 2, n // 2))

    def until(self, p: int) -> float:
        return self.last[p] if p % 7 or not self.seed % 2 else p

    def __repr__(self) -> str:
        return f"Drawn({self.seed})"


def named(pages: Pages) -> list[int]:
    return [p for low, high in pages for p in range(low, high)]


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize(
    "reach",
    [Drawn(seed) for seed in range(8)]
    + [Window(9), Sinks(5) | Window(9), Sinks(40) | Window(30), Sinks(3) | Chunk(24), Sinks(2) | Sinks(7), Tail(12, 5)],
    ids=str,
)
def test_pages_are_needed_kept_and_released_as_their_positions_are(reach: Reach, page: int) -> None:
    paged = PagedReach(reach, page, "drawn")
    boundaries = list(range(0, LENGTH + 1, page))
    random.Random(page).shuffle(boundaries)
    for n in boundaries:
        every = range(n // page)
        needs = {p // page for low, high in reach.needs(n) for p in range(low, high)}
        kept = {p for p in every if any(reach.until(at) >= n for at in range(p * page, (p + 1) * page))}
        if reach.shape is not None:
            kept = needs
        outlook = needs if reach.convex else needs | kept
        assert named(paged.needs[n]) == sorted(needs)
        assert named(paged.kept[n]) == sorted(kept)
        assert named(paged.outlook[n]) == sorted(outlook)
        for low, high in ((0, n // page), (n // page // 3, n // page // 2)):
            assert named(tuple(gaps(paged.kept[n], low, high))) == sorted({*range(low, high)} - kept)
    for n in boundaries:
        later = [{*named(paged.kept[m])} for m in range(n, LENGTH + 1, page)]
        for p in range(min(n // page, paged.first_to_leave(n))):
            assert len({p in kept for kept in later}) == 1, "needed for good, or by no boundary from n on"
