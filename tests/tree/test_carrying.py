"""What a publication hands over is covered in the same move: where that is not a leaf of which all is there."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import Path, Point, Reach, Window
from tests.support.helpers import cache_of, held, nodes, owners, part, run, serve, settle

WAYS = pytest.mark.parametrize("debug", [True, False], ids=["sources", "made"])


def window_of(length: int, debug: bool, *others: Reach, **options: Any) -> Any:
    parts = [part("window", Window(length)), *(part(f"other{at}", reach) for at, reach in enumerate(others))]
    return cache_of(*parts, debug=debug, slots=16, **options)


def cells(cache: Any) -> list[Any]:
    """What the tree has of the window."""
    lane = cache.core.shape.lane("window")
    return [node.cells[lane.index] for node in nodes(cache) if node.cells[lane.index] is not None]


def covered(cache: Any) -> list[tuple[int, int]]:
    """The nodes that leases cover in the window: (end, how often)."""
    return sorted((cell.node.end, cell.locks) for cell in cells(cache) if cell.locks)


def check(cache: Any, sequence: Any) -> None:
    owners(cache, [sequence])
    lane = cache.core.shape.lane("window")
    assert lane.leased == sum(cell.pages for cell in cells(cache) if cell.locks), "pages that leases cover"
    assert lane.in_tree == sum(cell.pages for cell in cells(cache))


@WAYS
def test_the_cover_slides(debug: bool) -> None:
    cache = window_of(10, debug, Path(), Point())
    with cache.open(range(101)) as sequence:
        for upto, want in ((8, [8]), (12, [8, 12]), (16, [8, 12, 16]), (20, [12, 16, 20]), (40, [40]), (44, [40, 44])):
            run(sequence, upto - sequence.reserved)
            sequence.publish()
            assert covered(cache) == [(end, 1) for end in want]
            check(cache, sequence)
    settle(cache)
    assert held(cache, list(range(44))) == 44


@WAYS
def test_what_arrived_is_handed_over_without_what_is_absent(debug: bool) -> None:
    cache = window_of(10, debug)
    with cache.open(range(130)) as sequence:
        run(sequence, 16)
        sequence.publish(8)
        sequence.grow(60, arriving=True)
        sequence.commit()
        for upto in (20, 76):
            sequence.publish(upto)
            check(cache, sequence)
    settle(cache)
    assert held(cache, list(range(76))) == 76


@WAYS
def test_another_has_published_the_same(debug: bool) -> None:
    cache = window_of(10, debug, Path())
    first, second = cache.open(range(61)), cache.open(range(61))
    for upto in (8, 20, 36, 60):
        for sequence in (first, second):
            run(sequence, upto - sequence.reserved)
            sequence.publish()
    assert {count for _, count in covered(cache)} == {2}
    owners(cache, [first, second])
    first.close()
    assert {count for _, count in covered(cache)} == {1}
    second.close()
    assert covered(cache) == []
    settle(cache)
    assert serve(cache, range(61)) == 60
