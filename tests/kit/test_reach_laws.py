"""The laws of a reach at the sizes of real models: every mistake is found, wherever its numbers lie."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from prefixloom import Buffer, Chunk, Component, Manifest, Path, Reach, Sinks, Tail, Window
from prefixloom.contract.reach import Interval
from prefixloom.testing import ComponentCase, Truth
from prefixloom.testing.conformance import verdict
from prefixloom.testing.kit.probes import FAR, first_outside, probes_of, spans_of
from prefixloom.testing.laws import reach as laws

LAWS = [law for name, law in vars(laws).items() if name.startswith("law_")]
COVERS, COSTS = "law_the_reach_covers_what_the_layers_read", "law_the_reach_names_nothing_that_no_layer_reads"
UNTIL, CONVEX = "law_until_is_the_last_boundary", "law_convex_is_true"
KV = Manifest([Buffer("kv", (2,), "float32")])


def found(reach: Reach, reads: Callable[[int], Iterable[int]]) -> dict[str, str]:
    """The laws that do not hold, each with how it does not."""
    case = ComponentCase(lambda: Component("subject", KV, reach), Truth(reads=reads))
    verdicts = [verdict(law, case) for law in LAWS]
    return {each.law: each.status for each in verdicts if each.status in ("broken", "wasteful")}


def window(w: int) -> Callable[[int], range]:
    return lambda q: range(max(0, q - w + 1), q)


def chunk(c: int) -> Callable[[int], range]:
    return lambda q: range(q - q % c, q)


class Landmarks(Reach):
    """The last ``w`` positions, and every ``step``-th one before, the last ``count`` of them."""

    def __init__(self, w: int, step: int, count: int, late: int = 0) -> None:
        self.w, self.step, self.count, self.late = w, step, count, late

    def needs(self, n: int) -> tuple[Interval, ...]:
        low = max(0, n - self.w + 1)
        last = (low - 1) // self.step * self.step
        marks = list(range(last, -1, -self.step))[: self.count]
        return (*((p, p + 1) for p in sorted(marks) if p < low), *(((low, n),) if low < n else ()))

    def until(self, p: int) -> float:
        if p % self.step:
            return p + self.w - 1
        return p + self.w - 1 + self.step * self.count + self.late


def landmarks(w: int, step: int, count: int) -> Callable[[int], set[int]]:
    """What ``Landmarks`` serves, said in another way."""

    def reads(q: int) -> set[int]:
        seen = set(range(max(0, q - w + 1), q))
        behind = max(0, q - w + 1)
        first = math.ceil(behind / step) - count
        return seen | {k * step for k in range(max(0, first), math.ceil(behind / step))}

    return reads


class Doubling(Reach):
    """For layers that see what lies a power of two behind them."""

    def __init__(self, most: int) -> None:
        self.most = most

    def needs(self, n: int) -> tuple[Interval, ...]:
        # a later token sees every position that lies at most so far behind: all of them are needed
        low = max(0, n - (1 << self.most))
        return ((low, n),) if low < n else ()

    def until(self, p: int) -> float:
        return p + (1 << self.most)


class Late(Window):
    """A window that is kept too long."""

    late = 1
    convex = True

    def until(self, p: int) -> float:
        return p + self.w - 1 + self.late


class Kept(Window):
    """A window that is never given back."""

    convex = False

    def until(self, p: int) -> float:
        return math.inf


class EarlyFarOn(Window):
    """A window that is given back one boundary too early beyond 12,288."""

    convex = True

    def until(self, p: int) -> float:
        return p + self.w - 1 - (p > 12_288)


class Holes(Reach):
    """A window of which every boundary leaves out one position in the middle, and says that it is convex."""

    convex = True

    def __init__(self, w: int, hole: int) -> None:
        self.w, self.hole = w, hole

    def needs(self, n: int) -> tuple[Interval, ...]:
        low = max(0, n - self.w + 1)
        hole = n - self.hole
        return ((low, hole), (hole + 1, n)) if low < hole else ((low, n),) if low < n else ()

    def until(self, p: int) -> float:
        return p + self.w - 1


RIGHT: dict[str, tuple[Reach, Any]] = {
    "a window of 4096": (Window(4096), window(4096)),
    "a window of 1": (Window(1), window(1)),
    "a path": (Path(), range),
    "a chunk of 8192": (Chunk(8192), chunk(8192)),
    "the tail of a group": (Tail(512, 100), lambda q: range(max(q // 512 * 512, q - 100), q)),
    "sinks and a window": (Sinks(4) | Window(1024), lambda q: {*range(min(q, 4)), *range(max(0, q - 1023), q)}),
    "landmarks": (Landmarks(128, 64, 23), landmarks(128, 64, 23)),
    "landmarks far apart": (Landmarks(16, 1000, 40), landmarks(16, 1000, 40)),
    "powers of two": (Doubling(11), lambda q: {q - (1 << k) for k in range(12) if q >= 1 << k}),
}
WRONG: dict[str, tuple[Reach, Any, str, str]] = {
    "511 for 512": (Window(511), window(512), COVERS, "broken"),
    "4095 for 4096": (Window(4095), window(4096), COVERS, "broken"),
    "65535 for 65536": (Window(65535), window(65536), COVERS, "broken"),
    "a window for a path": (Window(100_000), range, COVERS, "broken"),
    "a chunk one too short": (Chunk(8191), chunk(8192), COVERS, "broken"),
    "a chunk for a window": (Chunk(4096), window(4096), COVERS, "broken"),
    "sixteen landmarks too few": (Landmarks(128, 64, 7), landmarks(128, 64, 23), COVERS, "broken"),
    "one landmark too few": (Landmarks(16, 1000, 39), landmarks(16, 1000, 40), COVERS, "broken"),
    "the first token is forgotten": (
        Window(1024),
        lambda q: {*range(min(q, 1)), *range(max(0, q - 1023), q)},
        COVERS,
        "broken",
    ),
    "a far token is forgotten": (Window(64), lambda q: {*range(max(0, q - 63), q), *range(777, 778)}, COVERS, "broken"),
    "one more power of two": (
        Doubling(10),
        lambda q: {q - (1 << k) for k in range(12) if q >= 1 << k},
        COVERS,
        "broken",
    ),
    "4097 for 4096": (Window(4097), window(4096), COSTS, "wasteful"),
    "a path for a window of 4096": (Path(), window(4096), COSTS, "wasteful"),
    "a landmark too many": (Landmarks(16, 1000, 41), landmarks(16, 1000, 40), COSTS, "wasteful"),
    "until one too late": (Late(4096), window(4096), UNTIL, "broken"),
    "kept for ever": (Kept(512), window(512), "law_nothing_is_kept_for_ever", "broken"),
    "landmarks kept too long": (Landmarks(128, 64, 23, late=64), landmarks(128, 64, 23), UNTIL, "broken"),
    "landmarks given back early": (Landmarks(128, 64, 23, late=-64), landmarks(128, 64, 23), UNTIL, "broken"),
    "until one too early far on": (EarlyFarOn(16), window(16), UNTIL, "broken"),
    "a window one short behind many sinks": (
        Sinks(4096) | Window(511),
        lambda q: {*range(min(q, 4096)), *range(max(0, q - 511), q)},
        COVERS,
        "broken",
    ),
    "convex, with a hole far back": (Holes(4096, 3000), window(4096), CONVEX, "broken"),
}


@pytest.fixture(autouse=True)
def hours_between_two_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at a clock is an hour after the last one, as on a machine that is very slow."""
    for name in ("monotonic", "perf_counter", "process_time", "time"):
        monkeypatch.setattr(time, name, itertools.count(0, 3600).__next__)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_reach_of_any_size_breaks_no_law(name: str) -> None:
    reach, reads = RIGHT[name]
    assert found(reach, reads) == {}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reach_of_any_size_is_found(name: str) -> None:
    reach, reads, law, status = WRONG[name]
    assert found(reach, reads).get(law) == status


def test_what_a_reach_raises_at_a_long_prompt_is_told() -> None:
    class Short(Reach):
        def needs(self, n: int) -> tuple[Interval, ...]:
            if n > 40_000:
                raise IndexError("no such position")
            return ((0, n),) if n else ()

    case = ComponentCase(lambda: Component("subject", KV, Short()), Truth(reads=range))
    told = verdict(laws.law_needs_lie_before_the_boundary, case).told
    assert "raises IndexError: no such position" in told


def test_how_far_a_reach_was_asked_is_known() -> None:
    case = ComponentCase(lambda: Component("subject", KV, Window(7)), Truth(reads=window(7)))
    assert probes_of(case).boundaries[-1] == FAR
    assert 6 in probes_of(case).numbers


def test_positions_as_spans() -> None:
    assert spans_of({5, 1, 2, 9}) == ((1, 3), (5, 6), (9, 10))
    assert spans_of(range(3, 3)) == ()
    assert first_outside(((0, 4), (6, 9)), ((0, 3), (6, 9)), 9) == 3
    assert first_outside(((0, 4), (6, 9)), ((0, 4), (6, 7), (8, 12)), 9) == 7
    assert first_outside(((0, 4), (6, 9)), ((0, 12),), 9) is None
    assert first_outside(((0, 4), (6, 9)), ((0, 4),), 6) is None
    assert first_outside(((0, 1),), (), 5) == 0
