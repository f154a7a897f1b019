"""Ages: how long it takes until a path is used again, by class of paths, learned while a cache runs.

Time is counted in tokens that were asked for, never by a clock. A *visit* is one use of a path; it ends when the path
is used again, or is lost sight of. For each class and each range of ages it is known how many visits ended by a use,
and how long visits were seen at such an age, those that go on included. So rates of use are not biased by what is still
young. A rate that rises with the age is believed only once many uses say so: with few, it is mostly chance.

The index of a class at an age is the most that waiting on can give for each token of time, over all times t to stop at:

    index(age) = max over t of P(used within t) / E[time until it is used, or t]

This is Gittins' index (Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979): evicting the lowest is
optimal for one place, and it is how LHD ranks (Beckmann and others, "LHD: Improving Cache Hit Rate by Maximizing Hit
Density", NSDI 2018), which stops where the cache itself would evict.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from math import expm1

import attrs

RATIO = 1.6
RANGES = 32
SLICES = 64


@attrs.define(slots=True, eq=False)
class Visit:
    """``kind``    its class
    ``at``      the time of the use
    ``turn``    how many uses its path had with it
    ``end``     how deep the path is
    ``mark``    the deepest mark of its path; -1: it has none
    ``held``    by how many cells and marks its path is still known; at none, it is lost sight of
    ``over``    whether it has ended
    """

    kind: int
    at: int
    turn: int
    end: int = 0
    mark: int = -1
    held: int = 0
    over: bool = False


class Ages:
    """``first``: where the second range of ages begins, in tokens. ``belief``: so many visits count for a rate that
    falls with the age, under which the least recently used has the lowest index. ``shared``: so many for that of all
    classes. ``doubt``: so many uses it takes to believe that a rate rises with the age.
    """

    def __init__(
        self, kinds: int, first: int = 64, *, belief: float = 8.0, shared: float = 12.0, doubt: float = 50.0
    ) -> None:
        self.bounds = [0] + [int(first * RATIO**each) for each in range(RANGES - 1)]
        self.widths = [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)] + [self.bounds[-1]]
        self.kinds = kinds
        self.now = 0
        self._belief, self._shared, self._doubt = belief, shared, doubt
        self._used = [[0.0] * RANGES for _ in range(kinds)]
        self._ended = [[0.0] * RANGES for _ in range(kinds)]
        self._rest = [[0.0] * RANGES for _ in range(kinds)]
        self._width = first * 16  # of a slice of time
        self._alive = [Counter[int]() for _ in range(kinds)]  # visits that go on, by the slice in which they began

    def begin(self, visit: Visit) -> None:
        row = self._alive[visit.kind]
        row[visit.at // self._width] += 1
        if len(row) > SLICES:
            self._width *= 2
            self._alive = [_in_pairs(row) for row in self._alive]

    def end(self, visit: Visit, used: bool) -> None:
        """End a visit, unless it is over. ``used``: another visit continues it."""
        if visit.over:
            return
        visit.over = True
        kind = visit.kind
        row, slice_ = self._alive[kind], visit.at // self._width
        row[slice_] -= 1
        if not row[slice_]:
            del row[slice_]
        age = self.now - visit.at
        at = bisect_right(self.bounds, age) - 1
        self._ended[kind][at] += 1
        self._rest[kind][at] += age - self.bounds[at]
        if used:
            self._used[kind][at] += 1

    def release(self, visit: Visit) -> None:
        """End the visit if this was the last cell or mark that knows its path."""
        visit.held -= 1
        if not visit.held:
            self.end(visit, False)

    def fade(self) -> None:
        """Halve the weight of all that was learned."""
        for table in (self._used, self._ended, self._rest):
            for row in table:
                row[:] = [each / 2 for each in row]

    def rates(self) -> list[list[float]]:
        """Return by class and range the uses per token of time. Rates fall with age, unless many uses say otherwise."""
        seen = [self._seen(kind) for kind in range(self.kinds)]
        believed, shared, doubt = self._belief, self._shared, self._doubt
        common = []
        for at, width in enumerate(self.widths):
            falling = 0.3 / (self.bounds[at] + width)
            time = sum(row[at] for row in seen)
            used = sum(row[at] for row in self._used)
            common.append((used + believed * width * falling) / (time + believed * width))
        found = []
        for row, times in zip(self._used, seen, strict=True):
            own = [
                (used + shared * width * rate) / (time + shared * width)
                for used, time, width, rate in zip(row, times, self.widths, common, strict=True)
            ]
            found.append(
                [
                    (used + doubt) / (time + doubt / rate)
                    for used, time, rate in zip(row, times, falling_fit(own, times), strict=True)
                ]
            )
        return found

    def _seen(self, kind: int) -> list[float]:
        """Return the time for which visits of a class were seen at each range of ages."""
        widths, bounds = self.widths, self.bounds
        ended, rest = self._ended[kind][:], self._rest[kind][:]
        for slice_, count in self._alive[kind].items():
            age = max(self.now - int((slice_ + 0.5) * self._width), 0)
            at = bisect_right(bounds, age) - 1
            ended[at] += count
            rest[at] += count * (age - bounds[at])
        through = 0.0
        seen = [0.0] * RANGES
        for at in range(RANGES - 1, -1, -1):
            seen[at] = through * widths[at] + rest[at]
            through += ended[at]
        return seen

    def index(self) -> list[list[float]]:
        """Return by class and range of ages the steepest way up from there in the picture of uses over time."""
        found = []
        for row in self.rates():
            left = 1.0
            steps = []
            for rate, width in zip(row, self.widths, strict=True):
                used = left * -expm1(-rate * width)
                steps.append((used, used / rate if rate > 1e-15 else left * width))
                left = max(left - used, 1e-200)
            best: list[float] = []
            hull: list[tuple[float, float]] = []  # pieces of the way on, the steepest last
            for used, time in reversed(steps):
                while hull and hull[-1][0] * time > used * hull[-1][1]:
                    used, time = used + hull[-1][0], time + hull.pop()[1]
                hull.append((used, time))
                best.append(used / time)
            best.reverse()
            found.append(best)
        return found


def _in_pairs(row: Counter[int]) -> Counter[int]:
    """Return the counts of slices that are twice as wide."""
    wider: Counter[int] = Counter()
    for slice_, count in row.items():
        wider[slice_ // 2] += count
    return wider


def falling_fit(rates: list[float], weights: list[float]) -> list[float]:
    """Return the rates nearest to these, by weighted squares, of which none is above the one before it."""
    pools: list[tuple[float, float, int]] = []
    for rate, weight in zip(rates, weights, strict=True):
        weight, count = weight + 1e-3, 1
        while pools and pools[-1][0] <= rate:
            before, heavy, many = pools.pop()
            rate = (before * heavy + rate * weight) / (heavy + weight)
            weight, count = weight + heavy, count + many
        pools.append((rate, weight, count))
    return [max(rate, 1e-15) for rate, _, count in pools for _ in range(count)]
