"""Reach: which token positions must be present to resume at a boundary.

``needs(n)`` answers for the boundary ``n`` (the first new token is at position ``n``) with half-open token intervals.
``until(p)`` is its inverse: the last boundary that can need position ``p``. Validation, locks, retention, eviction and
transfers are all derived from these two answers. A reach knows no page, no pool and no component: rounding outward to
pages is the core's, and done once.

The combinators also say their answer in closed form (``shape``), which the core compiles to fast paths; a reach written
as plain Python has no shape and is asked for ``needs`` instead: correct, and slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from ..errors import CompositionError

Interval = tuple[int, int]

NEVER: float = math.inf
"""``until`` of a position that some later boundary may always need."""


@attrs.frozen
class Shape:
    """The closed form ``needs(n) == [0, min(head, n)) | [tail(n), n)``.

    ``head`` positions at the start are always needed; ``tail`` gives the first needed position of the end, and never
    decreases as ``n`` grows. ``dense``: every boundary but 0 needs at least the position just before it.
    """

    head: int
    tail: Callable[[int], int]
    dense: bool = False


class Reach:
    """Base of every reach. Subclass it and write ``needs`` (and ``until``, which enables early release).

    ``unit``: ``"page"`` if data belongs to token positions, ``"boundary"`` if it belongs to the boundary itself.
    ``closed_upward``: every boundary needs all that lies above it, as a path does.
    ``convex``: a position needed by any boundary is needed by every boundary from just behind it to ``until``.
    """

    unit: str = "page"
    closed_upward: bool = False
    convex: bool = False

    def needs(self, n: int) -> tuple[Interval, ...]:
        raise NotImplementedError(f"{type(self).__name__} must define needs(n)")

    def until(self, p: int) -> float:
        return NEVER

    @property
    def shape(self) -> Shape | None:
        return None

    def __or__(self, other: Reach) -> Reach:
        return Union((self, other))

    def shift(self, k: int) -> Reach:
        """The same reach seen ``k`` tokens later: needs(n) of the result is needs(n - k) of this one."""
        return Shift(self, k)


def _positive(value: int, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CompositionError(f"{what} must be a whole number of at least 1, got {value!r}")
    return value


@attrs.frozen
class Path(Reach):
    """All positions from 0: full attention."""

    closed_upward = True
    convex = True

    def needs(self, n: int) -> tuple[Interval, ...]:
        return ((0, n),) if n else ()

    @property
    def shape(self) -> Shape:
        return Shape(0, lambda n: 0, dense=True)


@attrs.frozen
class Window(Reach):
    """The last ``w`` positions, the query's own included: resuming at n needs ``[n - w + 1, n)``."""

    w: int = attrs.field(validator=lambda _, __, v: void(_positive(v, "a window")))
    convex = True

    def needs(self, n: int) -> tuple[Interval, ...]:
        lo = max(0, n - self.w + 1)
        return ((lo, n),) if lo < n else ()

    def until(self, p: int) -> float:
        return p + self.w - 1

    @property
    def shape(self) -> Shape:
        back = self.w - 1

        def tail(n: int) -> int:
            return n - back if n > back else 0

        return Shape(0, tail, dense=back > 0)


@attrs.frozen
class Point(Reach):
    """Nothing but the boundary itself: a recurrent state."""

    unit = "boundary"
    convex = True

    def needs(self, n: int) -> tuple[Interval, ...]:
        return ()

    def until(self, p: int) -> float:
        return p


@attrs.frozen
class Chunk(Reach):
    """From the last multiple of ``c``: chunked attention."""

    c: int = attrs.field(validator=lambda _, __, v: void(_positive(v, "a chunk")))
    convex = True

    def needs(self, n: int) -> tuple[Interval, ...]:
        lo = n // self.c * self.c
        return ((lo, n),) if lo < n else ()

    def until(self, p: int) -> float:
        return p // self.c * self.c + self.c - 1

    @property
    def shape(self) -> Shape:
        c = self.c
        return Shape(0, lambda n: n // c * c)


@attrs.frozen
class Tail(Reach):
    """The last ``k`` entries of an unfinished group of ``c``: compressed KV."""

    c: int = attrs.field(validator=lambda _, __, v: void(_positive(v, "a group")))
    k: int = attrs.field(validator=lambda _, __, v: void(_positive(v, "a tail")))
    convex = True

    def needs(self, n: int) -> tuple[Interval, ...]:
        lo = max(n // self.c * self.c, n - self.k)
        return ((lo, n),) if lo < n else ()

    def until(self, p: int) -> float:
        return min(p // self.c * self.c + self.c - 1, p + self.k)

    @property
    def shape(self) -> Shape:
        c, k = self.c, self.k
        return Shape(0, lambda n: max(n // c * c, n - k))


@attrs.frozen
class Sinks(Reach):
    """The first ``s`` positions."""

    s: int = attrs.field(validator=lambda _, __, v: void(_positive(v, "sinks")))
    convex = True

    def needs(self, n: int) -> tuple[Interval, ...]:
        return ((0, min(self.s, n)),) if n else ()

    def until(self, p: int) -> float:
        return NEVER if p < self.s else p

    @property
    def shape(self) -> Shape:
        return Shape(self.s, lambda n: n)


@attrs.frozen
class Union(Reach):
    """What any of its parts needs."""

    parts: tuple[Reach, ...]

    def __attrs_post_init__(self) -> None:
        for part in self.parts:
            if not isinstance(part, Reach):
                raise CompositionError(f"a union of reaches got {part!r}, which is no Reach")
            if part.unit != "page":
                raise CompositionError(
                    f"{part!r} belongs to boundaries and cannot be united with positions: use a component of its own"
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
    def shape(self) -> Shape | None:
        shapes = [part.shape for part in self.parts]
        known = [shape for shape in shapes if shape is not None]
        if len(known) != len(shapes):
            return None
        tails = [shape.tail for shape in known]
        return Shape(max(shape.head for shape in known), lambda n: min(tail(n) for tail in tails))


@attrs.frozen
class Shift(Reach):
    """Another reach, ``k`` tokens late."""

    base: Reach
    k: int

    def __attrs_post_init__(self) -> None:
        if self.base.unit != "page":
            raise CompositionError(f"{self.base!r} belongs to boundaries and cannot be shifted")
        if not isinstance(self.k, int) or isinstance(self.k, bool) or self.k < 0:
            raise CompositionError(f"a reach can only be shifted later, by whole tokens, got {self.k!r}")

    def needs(self, n: int) -> tuple[Interval, ...]:
        return self.base.needs(max(0, n - self.k))

    def until(self, p: int) -> float:
        return self.base.until(p) + self.k


def merged(spans: object) -> tuple[Interval, ...]:
    """Intervals sorted, with overlapping and touching ones joined and empty ones dropped."""
    out: list[Interval] = []
    for lo, hi in sorted(spans):  # type: ignore[call-overload]
        if lo >= hi:
            continue
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], hi))
        else:
            out.append((lo, hi))
    return tuple(out)


def void(_: object) -> None:
    """An attrs validator's value, thrown away."""
