"""Residency: what some places hold of one component along a path, and what its reach makes of that.

A *place* is where a component's data lies: its lane on the device, its lane on a tier below, or what a router knows of
either. The questions are the same for any list of places: a page is there if one of them has it. So a second tier below
the device is a longer list.

A state is asked for as a page is: it is the last page of the tree before its boundary, and the boundary needs that one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

from ..contract.composition import Part
from ..contract.reach import Interval, merged
from .paged_reach import PagedReach, Pages, overlap


class PathEdge(Protocol):
    """A part of a path: the tokens from the end of its ``parent`` to its own ``end``."""

    @property
    def parent(self) -> Any: ...

    @property
    def end(self) -> int: ...


E = TypeVar("E", bound=PathEdge)


class Place(Protocol):
    """Something that holds pages of a component on the edges of paths."""

    @property
    def whole_above(self) -> bool:
        """True if it holds all pages of the path above each page that it holds."""
        ...

    def gap(self, edge: Any, at: int, high: int) -> Interval:
        """Return the first pages of ``edge`` in [``at``, ``high``) that it lacks; ``(high, high)`` if it has all.

        If it lacks ``at`` and pages just before, it may begin with these.
        """
        ...


class Residency:
    """One component on some places, the device first. ``step`` is a page of the tree: boundaries are its multiples."""

    __slots__ = ("page", "paged", "places", "step")

    def __init__(self, paged: PagedReach, places: tuple[Place, ...], step: int) -> None:
        self.paged = paged
        self.places = places
        self.page = paged.page
        self.step = step

    @classmethod
    def of(cls, part: Part, places: tuple[Place, ...], step: int) -> Residency:
        """Return the residency of ``part`` on ``places``, in a tree whose pages have ``step`` tokens."""
        return cls(PagedReach(part.reach, part.page_tokens or step, part.name), places, step)

    def with_place(self, place: Place) -> Residency:
        """Return the residency on these places and on one more, below them."""
        return Residency(self.paged, (*self.places, place), self.step)

    def deepest(self, edge: E, boundary: int) -> tuple[E, int]:
        """Return the deepest boundary from which the component can resume, and its edge.

        It is at most ``boundary``, which lies in ``edge``.
        """
        needs = self.paged.needs
        while boundary:
            gap = next(self.gaps(edge, needs[boundary]), None)
            if gap is None:
                break
            boundary = self._before(boundary, gap[0], gap[1])
            while edge.end and edge.parent.end >= boundary:
                edge = edge.parent
        return edge, boundary

    def _before(self, boundary: int, first: int, end: int) -> int:
        """Return the deepest boundary that may do without the pages [first, end), of which ``boundary`` needs some."""
        paged, page, step = self.paged, self.page, self.step
        needs = paged.needs
        if paged.convex:  # behind what is needed of it, every boundary needs that, and so up to ``end`` if dense
            if not paged.dense:
                first = next(max(first, low) for low, high in needs[boundary] if high > first)
            return first * page // step * step
        boundary -= step
        while boundary > first * page and overlap(needs[boundary], first, end):
            boundary -= step
        return boundary

    def resumable(self, edge: E, low: int, high: int) -> int:
        """Return a bit for each boundary of ``edge`` from ``low + step`` to ``high``: 1 if it can be resumed at.

        The lowest bit is that of ``low + step``.
        """
        paged, page, step = self.paged, self.page, self.step
        needs = paged.needs
        bounds = range(low + step, high + 1, step)
        found = (1 << len(bounds)) - 1
        if not paged.convex:
            for at, boundary in enumerate(bounds):
                if next(self.gaps(edge, needs[boundary]), None) is not None:
                    found ^= 1 << at
            return found
        if not found:
            return 0
        # a page above ``low`` that any of the boundaries needs, the first one needs
        for first, end, _ in self.gaps(edge, merged((*needs[low + step], (low // page, high // page)))):
            inside = max(0, first * page - low) // step  # boundaries from here on lie behind pages of the gap
            behind = max(inside, -(-(end * page - low) // step) - 1)  # and from here on behind all of it
            upto = behind + 1
            if upto < len(bounds) and overlap(needs[bounds[upto]], first, end):
                upto = bisect_left(bounds, True, upto + 1, key=lambda n: not overlap(needs[n], first, end))
            elif not overlap(needs[bounds[behind]], first, end):
                upto = behind
            blocked = (1 << upto) - (1 << inside)
            if not paged.dense:
                for at in range(inside, behind):
                    if not overlap(needs[bounds[at]], first, end):
                        blocked ^= 1 << at
            found &= ~blocked
        return found

    def matters_behind(self, boundary: int, first: int, end: int) -> bool:
        """Return whether a boundary behind ``boundary`` may need any of the pages [first, end), which lie before it."""
        paged = self.paged
        return first < end and (not paged.convex or overlap(paged.needs[boundary + self.step], first, end))

    def lacking(self, edge: PathEdge, boundary: int) -> tuple[Interval, ...]:
        """Return the positions, in whole pages, that ``boundary`` in ``edge`` needs and that no place has."""
        return self.positions(self.absent(edge, self.paged.needs[boundary]))

    def positions(self, pages: Pages) -> tuple[Interval, ...]:
        """Return the positions of ``pages``."""
        page = self.page
        return tuple((low * page, high * page) for low, high in pages)

    def absent(self, edge: PathEdge, wanted: Pages) -> Pages:
        """Return those of the pages ``wanted``, on the path to ``edge``, that no place has."""
        return merged((at, end) for _, end, at in self.gaps(edge, wanted))

    def gaps(self, edge: PathEdge, wanted: Pages) -> Iterator[tuple[int, int, int]]:
        """Yield all gaps in the pages ``wanted`` of the path to ``edge``, those of lower edges first.

        A gap is (first, end, at): no place has the pages [first, end), and [at, end) are wanted.
        """
        page, places = self.page, self.places
        for low, high in reversed(wanted):
            while high > low:
                start = edge.parent.end // page
                if start >= high:
                    edge = edge.parent
                    continue
                at = upto = low if low > start else start
                while at < high:
                    first, end = start, high
                    for place in places:
                        lacks, lacks_to = place.gap(edge, at, high)
                        if lacks > at:  # it has the pages before
                            at = lacks
                            if at >= high and place.whole_above:
                                return
                            break
                        if lacks > first:
                            first = lacks
                        if lacks_to < end:
                            end = lacks_to
                    else:
                        yield first, end, at
                        at = end
                high = upto
