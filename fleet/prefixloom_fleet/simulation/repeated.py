"""Repeated: a trace several times over, with other content each time, so that a larger fleet has as much to do.

Each copy is in a namespace of its own, so that it shares no prefix with another one, and begins a little later.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import attrs

from prefixloom import InputError
from prefixloom.lab import LabRequest, RequestFile, SyntheticTrace

APART = 60.0
"""All copies begin within so many seconds."""
GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, without what stands before the point, lie evenly between 0 and 1 however many there are."""


@attrs.frozen
class RepeatedTrace:
    """``copies`` of a trace. ``speed``: the times between requests are so many times shorter."""

    trace: RequestFile | SyntheticTrace
    copies: int = 1
    speed: float = 1.0

    def __attrs_post_init__(self) -> None:
        if self.copies.__class__ is not int or self.copies < 1:
            raise InputError(f"copies of a trace are a whole number from 1 up, got {self.copies!r}")
        if not 0 < self.speed < math.inf:
            raise InputError(f"the speed of a trace is a number above 0, got {self.speed!r}")

    @property
    def name(self) -> str:
        several = f"{self.copies} x " if self.copies > 1 else ""
        return f"{several}{self.trace.name}" + (f", {self.speed:g} times as fast" if self.speed != 1 else "")

    def __iter__(self) -> Iterator[LabRequest]:
        return heapq.merge(*map(self._copy, range(self.copies)), key=lambda request: request.at)

    def _copy(self, number: int) -> Iterator[LabRequest]:
        later = number * GOLDEN % 1 * APART
        for request in self.trace:
            namespace = f"{request.namespace}#{number}" if number else request.namespace
            yield attrs.evolve(request, at=request.at / self.speed + later, namespace=namespace)
