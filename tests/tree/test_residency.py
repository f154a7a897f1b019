"""From which boundaries of an edge one component can resume: all at once, and each for itself."""

from __future__ import annotations

import random

import attrs
import pytest

from prefixloom import Chunk, Path, Point, Reach, Residency, Sinks, Tail, Window
from prefixloom.tree.paged_reach import PagedReach
from tests.tree.test_paged_reach import Drawn

STEP = 8
REACHES: list[Reach] = [
    *(Path(), Window(9), Window(1), Window(40), Sinks(5) | Window(9), Sinks(20), Chunk(24), Tail(24, 9), Point()),
    *(Drawn(1), Path() | Window(3)),
]


@attrs.frozen
class Edge:
    parent: Edge | None
    end: int


@attrs.frozen
class Pages:
    """A place that has these pages of whatever edge."""

    has: frozenset[int]
    whole_above: bool = False

    def gap(self, edge: Edge, at: int, high: int) -> tuple[int, int]:
        first = next((page for page in range(at, high) if page not in self.has), high)
        return first, next((page for page in range(first, high) if page in self.has), high)


@pytest.mark.parametrize("page", [2, STEP])
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_all_boundaries_of_an_edge_are_judged_as_each_alone(reach: Reach, page: int) -> None:
    if reach.unit == "boundary":
        page = STEP
    chance, bits = random.Random(f"{reach} {page}"), set()
    for _ in range(300):
        ends = sorted(chance.sample(range(STEP, 12 * STEP + 1, STEP), 4))
        edge = Edge(None, 0)
        for end in ends:
            edge = Edge(edge, end)
        share = chance.choice((0.5, 0.9, 0.97))
        has = [frozenset(p for p in range(ends[-1] // page) if chance.random() < share / 2) for _ in range(2)]
        places = [Pages(has[0]), Pages(has[1] | frozenset(p for p in range(50) if chance.random() < share))]
        if reach.closed_upward and chance.random() < 0.5:  # on the device, a path lacks nothing above what it has
            places[0] = Pages(frozenset(range(chance.randrange(ends[-1] // page + 1))), whole_above=True)
        residency = Residency(PagedReach(reach, page, "drawn"), tuple(places), STEP)
        low = chance.randrange(ends[-2], ends[-1] + 1, STEP)
        found = residency.resumable(edge, low, ends[-1])
        alone = [residency.deepest(edge, n)[1] == n for n in range(low + STEP, ends[-1] + 1, STEP)]
        assert [bool(found >> at & 1) for at in range(len(alone))] == alone
        assert not found >> len(alone)
        bits.update(alone)
    assert bits == {True, False} or reach == Window(1)


@pytest.mark.parametrize("reach", [each for each in REACHES if each.convex], ids=str)
def test_a_page_matters_behind_a_boundary_as_long_as_a_deeper_one_needs_it(reach: Reach) -> None:
    residency = Residency(PagedReach(reach, STEP, "drawn"), (), STEP)
    for boundary in range(STEP, 12 * STEP, STEP):
        for page in range(boundary // STEP):
            deeper = range(boundary + STEP, 30 * STEP, STEP)
            needed = any(low <= page < high for n in deeper for low, high in residency.paged.needs[n])
            assert residency.matters_behind(boundary, page, page + 1) == needed
        assert not residency.matters_behind(boundary, 1, 1)
