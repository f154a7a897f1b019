"""How fast the machine is between measurements: what else runs there takes its caches, and half of a core's units.

Times of two runs can be compared where these figures are alike; ratios within one run always.
"""

from __future__ import annotations

import random
import statistics
import time
from itertools import pairwise
from typing import Any

HOPS = 100_000
"""Of 90 bytes each: more than a core's own cache holds, and less than the one that the cores of a server share."""
TURNS = 1_000_000

Looks = dict[str, list[float]]
"""By what was done, in nanoseconds each time."""


class Machine:
    """Work that is always the same: a loop that needs no memory, and a walk through objects in random order."""

    def __init__(self) -> None:
        objects: list[list[Any]] = [[None] for _ in range(HOPS)]
        random.Random(1).shuffle(objects)
        for one, following in pairwise(objects):
            one[0] = following
        self.first = objects[0]
        self.looks: Looks = {"a turn of a loop": [], "a hop in memory": []}

    def look(self) -> None:
        for name, work in (("a turn of a loop", _turn), ("a hop in memory", self._hop)):
            self.looks[name].append(statistics.median(work() for _ in range(3)))

    def _hop(self) -> float:
        one = self.first
        before = time.thread_time_ns()
        while one is not None:
            one = one[0]
        return (time.thread_time_ns() - before) / HOPS


def _turn() -> float:
    total = 0
    before = time.thread_time_ns()
    for number in range(TURNS):
        total += number & 7
    return (time.thread_time_ns() - before) / TURNS


def in_words(looks: Looks) -> str:
    """The median of each, and the least and the most."""
    figures = [
        f"{name} {statistics.median(each):.0f} ns ({min(each):.0f}-{max(each):.0f})" for name, each in looks.items()
    ]
    return f"The machine between the rounds: {', '.join(figures) or 'nobody looked'}."
