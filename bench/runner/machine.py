"""The speed of the machine between measurements. Other programs on it take shared caches and parts of a core.

Times of two runs can be compared only where these figures are alike. Ratios within one run can always be compared.
"""

from __future__ import annotations

import random
import statistics
import time
from itertools import pairwise
from typing import Any

CHAIN = 100_000
"""Objects of 90 bytes each. Together they are larger than a core's own cache and smaller than a server's shared one."""
ITERATIONS = 1_000_000

Readings = dict[str, list[float]]
"""By kind of work: nanoseconds, one figure per reading."""


class MachineSpeed:
    """Times work that never changes: a loop that needs no memory, and a walk through objects in random order."""

    def __init__(self) -> None:
        objects: list[list[Any]] = [[None] for _ in range(CHAIN)]
        random.Random(1).shuffle(objects)
        for one, following in pairwise(objects):
            one[0] = following
        self.first = objects[0]
        self.readings: Readings = {"loop iteration": [], "memory access": []}

    def read(self) -> None:
        """Add one reading of each kind: the median of three runs."""
        for name, work in (("loop iteration", _iteration), ("memory access", self._access)):
            self.readings[name].append(statistics.median(work() for _ in range(3)))

    def _access(self) -> float:
        one = self.first
        before = time.thread_time_ns()
        while one is not None:
            one = one[0]
        return (time.thread_time_ns() - before) / CHAIN


def _iteration() -> float:
    total = 0
    before = time.thread_time_ns()
    for number in range(ITERATIONS):
        total += number & 7
    return (time.thread_time_ns() - before) / ITERATIONS


def describe(readings: Readings) -> str:
    """Return one line: the median of each kind, and the least and the most."""
    figures = [
        f"{name} {statistics.median(each):.0f} ns ({min(each):.0f}-{max(each):.0f})" for name, each in readings.items()
    ]
    return f"Speed of the machine between the rounds: {', '.join(figures) or 'not measured'}."
