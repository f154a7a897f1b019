"""Reach: which token positions must be present to resume at a boundary.

``needs(n)`` answers for the boundary ``n`` (the first new token is at position ``n``) with half-open token intervals.
``until(p)`` is its inverse: the last boundary that can need position ``p``. Validation, locks, retention, eviction and
transfers are all derived from these two answers. A reach knows no page, no pool and no component: the core rounds
outward to pages, once.

The reaches of attention have ``needs`` in closed form (``shape``). One written as plain Python has no shape, and the
core asks ``needs`` and ``until`` alone. Both must be pure: the core remembers answers, and asks again only for what it
had to forget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import reduce

import attrs

from ..errors import CompositionError
from .checks import at_least, whole

Interval = tuple[int, int]

NEVER: float = math.inf
"""``until`` of a position that some later boundary may always need."""


@attrs.frozen
class ReachShape:
    """A reach in closed form: ``needs(n) == [0, min(head, n)) | [tail(n), n)``.

    The first ``head`` positions are always needed. ``tail(n)`` is the first needed position of the last interval, and
    never decreases as ``n`` grows. ``dense``: every boundary but 0 needs at least the position just before it.
    """

    head: int
    tail: Callable[[int], int]
    dense: bool = False


class Reach:
    """Base class of every reach. A subclass defines ``needs``, and ``until`` if data can be released early.

    ``unit``: ``"page"`` if data belongs to token positions, ``"boundary"`` if it belongs to the boundary itself.
    ``closed_upward``: whether every boundary needs all positions above it, as full attention does.
    ``convex``: whether a position that any boundary needs is needed by every boundary from just behind it to ``until``.
    """

    unit: str = "page"
    closed_upward: bool = False
    convex: bool = False

    def needs(self, n: int) -> tuple[Interval, ...]:
        """Return the intervals of positions that must be present to resume at boundary ``n``."""
        if self.shape is None:
            raise NotImplementedError(f"{type(self).__name__} must define needs(n)")
        return merged(((0, min(self.shape.head, n)), (self.shape.tail(n), n)))

    def until(self, p: int) -> float:
        """Return the last boundary that can need position ``p``."""
        return NEVER

    @property
    def shape(self) -> ReachShape | None:
        """The closed form of ``needs``; None if there is none."""
        return None

    def __or__(self, other: Reach) -> Reach:
        return Union((self, other))

    def shift(self, k: int) -> Reach:
        """Return this reach as seen ``k`` tokens later: needs(n) of the result is needs(n - k) of this one."""
        return Shift(self, k)


@attrs.frozen
class Path(Reach):
    """The reach of full attention: all positions from 0."""

    closed_upward = True
    convex = True

    @property
    def shape(self) -> ReachShape:
        return ReachShape(0, lambda n: 0, dense=True)


@attrs.frozen
class Window(Reach):
    """The reach of a sliding window: the last ``w`` positions, the query's own included.

    Resuming at n needs ``[n - w + 1, n)``.
    """

    w: int = attrs.field(validator=at_least(1, "a window"))
    convex = True

    def until(self, p: int) -> float:
        return p + self.w - 1

    @property
    def shape(self) -> ReachShape:
        back = self.w - 1

        def tail(n: int) -> int:
            return n - back if n > back else 0

        return ReachShape(0, tail, dense=back > 0)


@attrs.frozen
class Point(Reach):
    """The reach of a recurrent state: nothing but the boundary itself."""

    unit = "boundary"
    convex = True

    def needs(self, n: int) -> tuple[Interval, ...]:
        return ()

    def until(self, p: int) -> float:
        return p


@attrs.frozen
class Chunk(Reach):
    """The reach of chunked attention: all positions from the last multiple of ``c``."""

    c: int = attrs.field(validator=at_least(1, "a chunk"))
    convex = True

    def until(self, p: int) -> float:
        return p // self.c * self.c + self.c - 1

    @property
    def shape(self) -> ReachShape:
        c = self.c
        return ReachShape(0, lambda n: n // c * c)


@attrs.frozen
class Tail(Reach):
    """The reach of compressed KV: the last ``k`` positions of an unfinished group of ``c``."""

    c: int = attrs.field(validator=at_least(1, "a group"))
    k: int = attrs.field(validator=at_least(1, "a tail"))
    convex = True

    def until(self, p: int) -> float:
        return min(p // self.c * self.c + self.c - 1, p + self.k)

    @property
    def shape(self) -> ReachShape:
        c, k = self.c, self.k
        return ReachShape(0, lambda n: max(n // c * c, n - k))


@attrs.frozen
class Sinks(Reach):
    """The reach of attention sinks: the first ``s`` positions."""

    s: int = attrs.field(validator=at_least(1, "sinks"))
    convex = True

    def until(self, p: int) -> float:
        return NEVER if p < self.s else p

    @property
    def shape(self) -> ReachShape:
        return ReachShape(self.s, _end)


@attrs.frozen
class Optional(Reach):
    """The reach of memory that is used if it is there and never needed: retrieval attention, a cached prefetch.

    No boundary needs it, so it never lowers a hit. Any later boundary may use it, so a lease protects what is there.
    """

    def needs(self, n: int) -> tuple[Interval, ...]:
        return ()


def _end(n: int) -> int:
    """Return ``n``, the tail of a reach that has none: no tail is later."""
    return n


def _earlier(one: Callable[[int], int], other: Callable[[int], int]) -> Callable[[int], int]:
    """Return the tail of a union of two reaches: the earlier of both tails."""
    if one is _end or other is _end:
        return other if one is _end else one

    def tail(n: int) -> int:
        first, second = one(n), other(n)
        return first if first < second else second

    return tail


@attrs.frozen
class Union(Reach):
    """All positions that any of several reaches needs."""

    parts: tuple[Reach, ...]

    def __attrs_post_init__(self) -> None:
        for part in self.parts:
            if not isinstance(part, Reach):
                raise CompositionError(f"a union of reaches got {part!r}, which is no Reach")
            if part.unit != "page":
                raise CompositionError(
                    f"{part!r} belongs to boundaries and cannot be united with positions: use a separate component"
                )

    @property
    def closed_upward(self) -> bool:  # type: ignore[override]
        return any(part.closed_upward for part in self.parts)

    @property
    def convex(self) -> bool:  # type: ignore[override]
        return all(part.convex for part in self.parts)

    def needs(self, n: int) -> tuple[Interval, ...]:
        return merged(span for part in self.parts for span in part.needs(n))

    def until(self, p: int) -> float:
        return max(part.until(p) for part in self.parts)

    @property
    def shape(self) -> ReachShape | None:
        shapes = [part.shape for part in self.parts]
        known = [shape for shape in shapes if shape is not None]
        if len(known) != len(shapes):
            return None
        return ReachShape(
            head=max(shape.head for shape in known),
            tail=reduce(_earlier, (shape.tail for shape in known)),
            dense=any(shape.dense for shape in known),
        )


@attrs.frozen
class Shift(Reach):
    """Another reach, shifted ``k`` tokens later."""

    base: Reach
    k: int

    def __attrs_post_init__(self) -> None:
        if self.base.unit != "page":
            raise CompositionError(f"{self.base!r} belongs to boundaries and cannot be shifted")
        whole(self.k, "the tokens that a reach is shifted later by", 0)

    def needs(self, n: int) -> tuple[Interval, ...]:
        return self.base.needs(max(0, n - self.k))

    def until(self, p: int) -> float:
        return self.base.until(p) + self.k


def merged(spans: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the intervals sorted, with overlapping and touching ones joined and empty ones dropped."""
    out: list[Interval] = []
    for lo, hi in sorted(spans):
        if not out or lo > out[-1][1]:
            if lo < hi:
                out.append((lo, hi))
        elif hi > out[-1][1]:
            out[-1] = (out[-1][0], hi)
    return tuple(out)
