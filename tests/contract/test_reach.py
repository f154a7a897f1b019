"""Reach: needs and until are inverse, the closed form equals the pure one, and bad arguments are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from prefixloom import Chunk, CompositionError, Path, Point, Reach, Sinks, Tail, Window
from prefixloom.contract.reach import Shift, Union, merged
from tests.support.helpers import Blocks, Holes
from tests.support.names import stable

LIMIT = 200
COMBINATORS: list[Reach] = [
    Path(), Window(1), Window(2), Window(7), Window(64), Chunk(1), Chunk(5), Chunk(16), Tail(12, 5), Tail(4, 4),
    Tail(3, 9), Tail(1, 1), Sinks(1), Sinks(6), Sinks(6) | Window(10), Sinks(3) | Chunk(8) | Tail(12, 2),
    Path() | Window(3), Window(3) | Window(9), Window(6).shift(5), Sinks(4).shift(3), Path().shift(1),
    Chunk(8).shift(2) | Sinks(2), Window(4).shift(0), Blocks(8), Holes(),
]  # fmt: skip
each = pytest.mark.parametrize("reach", COMBINATORS, ids=stable)


def needed(reach: Reach, n: int) -> set[int]:
    return {p for lo, hi in reach.needs(n) for p in range(lo, hi)}


TABLE = {id(reach): [needed(reach, n) for n in range(2 * LIMIT + 80)] for reach in COMBINATORS}


@each
def test_until_is_the_inverse_of_needs(reach: Reach) -> None:
    table = TABLE[id(reach)]
    for p in range(LIMIT):
        until = reach.until(p)
        users = [n for n, positions in enumerate(table) if p in positions]
        if math.isinf(until):
            continue
        assert not [n for n in users if n > until], f"position {p} is needed after until={until}"
        if users:
            assert users[-1] == until, f"position {p} is last needed at {users[-1]}, until says {until}"


@each
def test_only_positions_that_are_needed_for_ever_have_no_until(reach: Reach) -> None:
    if isinstance(reach, Holes):
        assert math.isinf(reach.until(3))  # nothing is said, so nothing may be released early
        return
    table = TABLE[id(reach)]
    for p in range(LIMIT):
        assert math.isinf(reach.until(p)) == (p in table[-1] and p in table[-2] and p < LIMIT)


@each
def test_needs_lie_below_the_boundary_and_nothing_is_needed_at_zero(reach: Reach) -> None:
    for n in range(LIMIT):
        spans = reach.needs(n)
        assert all(0 <= lo < hi <= n for lo, hi in spans)
        assert all(a[1] < b[0] for a, b in pairwise(spans)), "spans are sorted and apart"


@each
def test_the_closed_form_equals_needs(reach: Reach) -> None:
    shape = reach.shape
    if shape is None:
        return
    for n in range(LIMIT):
        closed = set(range(min(shape.head, n))) | set(range(shape.tail(n), n))
        assert closed == needed(reach, n)
        assert shape.tail(n) <= shape.tail(n + 1), "the tail never moves back"


def test_every_combinator_has_a_closed_form_and_plain_python_has_none() -> None:
    for reach in COMBINATORS:
        parts = reach.parts if isinstance(reach, Union) else (reach,)
        plain = any(isinstance(p, (Blocks, Holes, Shift)) for p in parts)
        assert (reach.shape is None) == plain, reach


def test_paths_and_windows_are_dense_and_what_may_need_nothing_is_not() -> None:
    assert Path().shape.dense
    assert Window(2).shape.dense
    assert not Window(1).shape.dense
    assert not Chunk(4).shape.dense
    assert not Tail(4, 4).shape.dense
    assert not Sinks(4).shape.dense
    assert Union((Sinks(4), Window(2))).shape.dense
    assert not Union((Sinks(4), Window(1))).shape.dense


@each
def test_a_convex_reach_needs_a_position_from_just_behind_it_until_its_end(reach: Reach) -> None:
    if not reach.convex:
        return
    table = TABLE[id(reach)]
    for p in range(LIMIT):
        users = [n for n, positions in enumerate(table) if p in positions]
        if users:
            assert users == list(range(p + 1, users[-1] + 1))


def test_the_convex_ones_say_so() -> None:
    assert all(reach.convex for reach in (Path(), Window(3), Chunk(4), Tail(4, 2), Sinks(2), Sinks(2) | Window(3)))
    assert not Window(3).shift(2).convex
    assert not (Window(3).shift(2) | Window(3)).convex
    assert not Holes().convex


@each
def test_a_reach_that_is_closed_upward_needs_everything_above_what_it_needs(reach: Reach) -> None:
    if reach.closed_upward:
        assert all(needed(reach, n) == set(range(n)) for n in range(LIMIT))


def test_only_a_path_and_unions_with_one_are_closed_upward() -> None:
    assert Path().closed_upward
    assert (Window(3) | Path()).closed_upward
    assert not any(r.closed_upward for r in (Window(3), Chunk(4), Tail(4, 2), Sinks(2), Sinks(2) | Window(3), Holes()))


@pytest.mark.parametrize("other", [Window(10), Chunk(8), Sinks(9), Blocks(8), Holes()], ids=stable)
def test_a_union_needs_what_any_of_its_parts_needs(other: Reach) -> None:
    first = Tail(12, 5)
    both = first | other
    for n in range(LIMIT):
        assert needed(both, n) == needed(first, n) | needed(other, n)
        assert both.until(n) == max(first.until(n), other.until(n))


def test_a_shifted_reach_answers_for_an_earlier_boundary() -> None:
    late = Window(6).shift(5)
    assert late.needs(20) == Window(6).needs(15)
    assert late.needs(5) == late.needs(0) == ()
    assert late.until(7) == Window(6).until(7) + 5


def test_a_point_needs_no_position_and_belongs_to_the_boundary() -> None:
    assert Point().unit == "boundary"
    assert all(Point().needs(n) == () for n in range(LIMIT))
    assert Point().until(9) == 9


def test_merged_joins_what_overlaps_or_touches_and_drops_what_is_empty() -> None:
    assert merged([(4, 8), (0, 2), (2, 3), (5, 6), (9, 9), (8, 10)]) == ((0, 3), (4, 10))
    assert merged([]) == ()


def test_reaches_compare_by_value() -> None:
    assert Window(4) == Window(4)
    assert Window(4) != Window(5)
    assert Sinks(4) | Window(3) == Union((Sinks(4), Window(3)))
    assert len({Path(), Path(), Point()}) == 2


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "4", None])
@pytest.mark.parametrize(
    "make", [Window, Chunk, Sinks, lambda v: Tail(v, 4), lambda v: Tail(4, v)], ids=["w", "chunk", "sinks", "c", "k"]
)
def test_a_size_that_is_no_positive_whole_number_is_refused(make: Callable[[Any], Reach], wrong: Any) -> None:
    with pytest.raises(CompositionError, match="must be a whole number of at least 1"):
        make(wrong)


@pytest.mark.parametrize("wrong", [-1, 1.5, "4", None, True])
def test_a_shift_that_is_no_whole_number_from_zero_up_is_refused(wrong: Any) -> None:
    with pytest.raises(CompositionError, match="shift"):
        Window(4).shift(wrong)


def test_a_state_can_neither_be_united_nor_shifted() -> None:
    with pytest.raises(CompositionError, match="use a separate component"):
        _ = Point() | Window(3)
    with pytest.raises(CompositionError, match="use a separate component"):
        _ = Window(3) | Point()
    with pytest.raises(CompositionError, match="cannot be shifted"):
        Point().shift(1)


def test_only_reaches_can_be_united() -> None:
    with pytest.raises(CompositionError, match="which is no Reach"):
        _ = Window(3) | 5  # type: ignore[operator]
