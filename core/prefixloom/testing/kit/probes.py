"""Probes: the boundaries at which a reach is asked, near the numbers of the component and of its layers.

A reach is a function of any boundary, and a mistake in it shows where a window, a chunk or a landmark begins or ends.
So besides all small boundaries, those around each number are asked, and around its multiples, up to prompts of ``FAR``
tokens. The numbers are options, powers of two, and the distances that the answers themselves have in common. How many
questions are asked depends on these numbers alone, and on no clock.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ...contract.reach import Interval, merged
from .case import ComponentCase, LawBroken
from .watching import gaps_of, watch

DENSE = 320
"""Every boundary below this one is asked."""
FAR = 1 << 17
"""The longest prompt whose boundaries are asked."""
POWERS = tuple(1 << k for k in range(18))
TIMES = (1, 2, 3, 4, 8)
BESIDE = (-2, -1, 0, 1, 2)


def spans_of(positions: Iterable[int]) -> tuple[Interval, ...]:
    """Return positions as sorted intervals."""
    if isinstance(positions, range) and positions.step == 1:
        return ((positions.start, positions.stop),) if positions else ()
    out: list[Interval] = []
    for p in sorted(set(positions)):
        if out and out[-1][1] == p:
            out[-1] = (out[-1][0], p + 1)
        else:
            out.append((p, p + 1))
    return tuple(out)


def first_outside(wanted: Iterable[Interval], have: tuple[Interval, ...], upto: int) -> int | None:
    """Return the first position before ``upto`` that ``wanted`` has and ``have`` has not. Both are sorted."""
    held = iter(have)
    low, high = next(held, (upto, upto))
    for start, end in wanted:
        at, end = start, min(end, upto)
        while at < end:
            while high <= at:
                low, high = next(held, (FAR << 8, FAR << 9))
            if at < low:
                return at
            at = high
    return None


def contains(spans: tuple[Interval, ...], p: int) -> bool:
    """Return whether one of these intervals, which are sorted and apart, has position p."""
    at = bisect_right(spans, (p, FAR << 9)) - 1
    return at >= 0 and p < spans[at][1]


def ends_of(spans: tuple[Interval, ...]) -> list[int]:
    """Return the positions of intervals at which a mistake would show: the ends of each, and its middle."""
    found: dict[int, None] = {}
    for low, high in (*spans[:24], *spans[-8:]):
        found |= dict.fromkeys(p for p in (low, low + 1, (low + high) // 2, high - 2, high - 1) if low <= p < high)
    return list(found)


# ---------------------------------------------------------------- answers


class Answers:
    """The answers of a case's reach and of its layers, each asked once."""

    def __init__(self, case: ComponentCase) -> None:
        self._layers = watch(case)
        self._reach, self._reads = case.reach, case.truth.reads
        self._needs: dict[int, tuple[Interval, ...]] = {}
        self._read: dict[int, tuple[Interval, ...]] = {}

    def needs(self, n: int) -> tuple[Interval, ...]:
        if n not in self._needs:
            self._needs[n] = merged(self._answer(self._reach.needs, "needs", n))
        return self._needs[n]

    def reads(self, q: int) -> tuple[Interval, ...]:
        """Return the positions before q that the layers read to compute the token at q."""
        assert self._reads is not None
        if q not in self._read:
            spans = spans_of(self._answer(self._reads, "reads", q))
            self._read[q] = tuple((low, min(high, q)) for low, high in spans if low < q)
        return self._read[q]

    @property
    def watched(self) -> bool:
        """Whether what is read has to be found out by running layers, which is slow."""
        return self._reads is None

    def read_outside(self, q: int, n: int) -> int | None:
        """Return the first position before n that the token at q reads, and that is not there once n was resumed at."""
        if not self.watched:
            return first_outside(self.reads(q), self.needs(n), n)
        assert self._layers is not None
        return self._layers.first_heard(q, gaps_of(self.needs(n), n))

    def is_read(self, p: int, q: int) -> bool:
        """Return whether the token at q reads position p."""
        if not self.watched:
            return contains(self.reads(q), p)
        assert self._layers is not None
        return self._layers.heard(q, [(p, p + 1)])

    @staticmethod
    def _answer(function: Any, name: str, n: int) -> Any:
        try:
            return function(n)
        except Exception as error:
            raise LawBroken(f"{name}({n}) raises {type(error).__name__}: {error}") from error


class Probes(Answers):
    """The answers of a case's reach and of its layers, and the boundaries at which they are asked."""

    def __init__(self, case: ComponentCase) -> None:
        super().__init__(case)
        self._chance = random.Random(f"{case.seed} probes")
        component, reach = (getattr(each, "__dict__", {}) for each in (case.component(), self._reach))
        said = (*case.options.values(), *component.values(), *reach.values())
        self.numbers = sorted({n for n in said if type(n) is int and 1 < n <= FAR} | self._distances())
        self.boundaries = self._chosen()

    def served(self, dense: int, far: int) -> list[int]:
        """Return the boundaries at which what is read is asked: all, or some of the small and of the far ones."""
        if not self.watched:
            return list(self.boundaries)
        small, large = self.boundaries[:DENSE], self.boundaries[DENSE:]
        near = [n for n in large if any(abs(n - number) < 3 for number in self.numbers)]
        kept = sorted({*near[: far // 2], *self._chance.sample(large, min(far // 2, len(large)))})
        return [*small[:40], *small[40 :: DENSE // dense], *kept]

    def later(self, n: int) -> list[int]:
        """Return some tokens from n on: those that come next, and those that a number away from n reads or needs."""
        found = {n, n + 1, n + 2, n + 7}
        found |= {n + number + beside for number in self.numbers[:24] for beside in (-1, 0, 1)}
        later = sorted(q for q in found if n <= q <= FAR)
        return [*later[:4], *later[4 :: max(1, len(later) // 6)]] if self.watched else later

    def _distances(self) -> set[int]:
        """Return the numbers that the answers share: distances from the start and from the boundary, and steps."""
        points = [777, 1500, 5000, 9999, 20011, 50021, 99991, FAR]
        found: set[int] = set()
        for name, function in (("needs", self._reach.needs), ("reads", self._reads)):
            if function is None:
                continue
            counted: Counter[int] = Counter()
            lows = []
            for n in points:
                answer = self._answer(function, name, n)
                spans = merged(answer) if name == "needs" else spans_of(answer)
                counted.update({each for low, high in spans[:64] for each in (low, high, n - low, n - high)})
                lows += [low for low, _ in spans[-1:] if low]
            found |= {number for number, times in counted.items() if times > 1 and 1 < number < FAR}
            step = math.gcd(*lows) if len(lows) > 2 else 0
            found |= {step} if step > 1 else set()
        return found

    def _chosen(self) -> tuple[int, ...]:
        """Return all small boundaries, and those near numbers, their multiples and their sums."""
        numbers = [*self.numbers, *POWERS[8:]]
        near = {number * times + beside for number in numbers for times in TIMES for beside in BESIDE}
        near |= {one + other for one in self.numbers[:12] for other in self.numbers[:12]}
        near |= {int(DENSE * (FAR / DENSE) ** self._chance.random()) for _ in range(60)}
        return (*range(DENSE), *sorted(n for n in near if DENSE <= n <= FAR))


def probes_of(case: ComponentCase) -> Probes:
    """Return the probes of a case, made once."""
    if "probes" not in case.memo:
        case.memo["probes"] = Probes(case)
    found: Probes = case.memo["probes"]
    return found
