"""A reach in whole pages, whose answers are remembered.

A reach answers for token positions; pages are kept and given back as a whole. Needs are rounded outward to pages here,
once, and ``until`` is asked for each position once: the answers of a reach never change. What is remembered is bounded:
each kind of answer for so many boundaries as have ``MOST`` intervals together, one number for each page of the longest
prompt, and which of these pages are needed for good.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ..contract.reach import NEVER, Interval, Reach, merged
from ..errors import PluginError

Pages = tuple[Interval, ...]
"""Intervals of pages, ascending and apart from each other."""

A = TypeVar("A", bound=tuple[Any, ...])

MOST = 1 << 16
"""The most intervals that one ``Remembered`` holds."""


class Remembered(dict[int, A]):
    """The answers of ``ask``, a pure function of a boundary. With too many intervals in it, it begins again."""

    def __init__(self, ask: Callable[[int], A]) -> None:
        self.ask = ask
        self.intervals = 0

    def __missing__(self, n: int) -> A:
        answer = self.ask(n)
        self.intervals += len(answer) + 1
        if self.intervals > MOST:
            self.clear()
            self.intervals = len(answer) + 1
        self[n] = answer
        return answer


class PagedReach:
    """What ``reach`` says of pages of ``page`` tokens, for each boundary ``n``.

    ``needs[n]``: what resuming there needs. ``kept[n]``: what of the positions before ``n`` is needed at ``n`` or
    later, as ``until`` or the closed form says. ``outlook[n]``: both; a lease covers it.
    """

    __slots__ = (
        "_always", "_asks_until", "_farthest", "_last", "_name", "_reach", "_shape", "closed_form", "convex", "dense",
        "kept", "needs", "outlook", "page", "unneeded",
    )  # fmt: skip

    def __init__(self, reach: Reach, page: int, name: str) -> None:
        """Answer for ``reach``, of the component ``name``. ``page``: its tokens; for a state, of a tree's page."""
        self.page = page
        self._name = name
        self._reach = reach
        self._shape = reach.shape
        is_state = reach.unit == "boundary"
        self.convex = reach.convex or reach.closed_upward or is_state
        self.dense = reach.closed_upward or is_state or (self._shape is not None and self._shape.dense)
        self._asks_until = type(reach).until is not Reach.until
        self.needs: Remembered[Pages] = Remembered(self._needs)
        if is_state:  # the last page of the tree stands for the state at its end
            self.needs.ask = lambda n: ((n // page - 1, n // page),) if n else ()
        elif reach.closed_upward:
            self.needs.ask = lambda n: ((0, n // page),) if n else ()
        self.kept = self.needs if self._shape is not None else Remembered(self._kept)
        self.outlook = self.needs if self.convex else Remembered(self._outlook)
        self.closed_form = is_state or self._shape is not None
        """Whether no answer has to be asked of the reach, which may raise if it is plain Python."""
        self.unneeded: Callable[[int], Interval] = self._unneeded
        """The first pages in a row that neither resuming at a boundary needs, nor one behind it."""
        if is_state:
            self.unneeded = lambda n: (0, n // page - 1)
        elif (shape := self._shape) is not None:
            head = -(-shape.head // page)
            self.unneeded = lambda n: (head, shape.tail(n) // page)
        self._last = array("d")
        """By page, as far as it was asked: the last boundary that may need it."""
        self._always: list[Interval] = []
        """Of these pages, those that are needed for good."""
        self._farthest = page
        """Of the others, the most tokens from the start of a page to the last boundary that may need it."""

    def _needs(self, n: int) -> Pages:
        page = self.page
        shape = self._shape
        if shape is None:
            return merged(pages_of(self._asked("needs", n), page))
        low, high, end = shape.tail(n) // page, -(-min(shape.head, n) // page), n // page
        if low <= high or low >= end:
            return ((0, end),) if low < end else ((0, high),) if high else ()
        return ((0, high), (low, end)) if high else ((low, end),)

    def _asked(self, what: str, number: int) -> Any:
        """Ask the reach, once for each number. PluginError: it raises, or answers what cannot be."""
        try:
            answer = getattr(self._reach, what)(number)
            if what == "until":
                right = answer >= 0
            else:
                answer = tuple(answer)
                right = all(
                    low.__class__ is high.__class__ is int and 0 <= low <= high <= number for low, high in answer
                )
        except Exception as error:
            raise PluginError(f"component {self._name!r}: {what}({number}) of its reach raised {error!r}") from error
        if not right:
            raise PluginError(f"component {self._name!r}: {what}({number}) of its reach is {answer!r}, which cannot be")
        return answer

    def _kept(self, n: int) -> Pages:
        end = n // self.page
        if not self._asks_until:
            return ((0, end),) if end else ()
        always, last = self._always, self._last
        first = self.first_to_leave(n)
        settled = max(0, bisect_left(always, (first,)) - 1)  # what comes next may reach beyond ``first``
        rest = ((low, min(high, end)) for low, high in always[settled : bisect_left(always, (end,))])
        leaving = ((p, p + 1) for p in range(first, end) if last[p] >= n)
        return (*always[:settled], *merged((*rest, *leaving)))

    def _outlook(self, n: int) -> Pages:
        needs, kept = self.needs[n], self.kept[n]
        return kept if set(needs) <= set(kept) else merged((*needs, *kept))

    def _unneeded(self, n: int) -> Interval:
        outlook = self.outlook[n]
        if not outlook or outlook[0][0]:
            return 0, outlook[0][0] if outlook else n // self.page
        return outlook[0][1], outlook[1][0] if len(outlook) > 1 else n // self.page

    def first_to_leave(self, n: int) -> int:
        """Return a page before which every page is needed for good, or by no boundary from ``n`` on."""
        if self._shape is not None:
            return self._shape.tail(n) // self.page
        pages = n // self.page
        if not self._asks_until:
            return pages
        if pages > len(self._last):
            self._ask_until(pages)
        return max(0, n - self._farthest) // self.page

    def _ask_until(self, pages: int) -> None:
        """Ask until when the first ``pages`` pages may be needed, as far as they were not asked for yet."""
        page = self.page
        for p in range(len(self._last), pages):
            start, end = p * page, (p + 1) * page
            last = max(self._asked("until", position) for position in range(start, end))
            if last != NEVER:
                self._farthest = max(self._farthest, int(last) - start)
            elif self._always and self._always[-1][1] == p:
                self._always[-1] = self._always[-1][0], p + 1
            else:
                self._always.append((p, p + 1))
            self._last.append(last)


def pages_of(positions: Iterable[Interval], page: int) -> Iterator[Interval]:
    """Yield the intervals of pages that ``positions`` touch."""
    return ((low // page, -(-high // page)) for low, high in positions if low < high)


def gaps(pages: Pages, low: int, high: int) -> Iterator[Interval]:
    """Yield the intervals of [low, high) of which no page is one of ``pages``, ascending."""
    at = low
    for first, end in pages[max(0, bisect_left(pages, (low,)) - 1) :]:
        if first >= high:
            break
        if first > at:
            yield at, first
        at = max(at, end)
    if at < high:
        yield at, high


def overlap(pages: Pages, first: int, end: int) -> bool:
    """Return whether any of ``pages`` lies in [first, end)."""
    for low, high in reversed(pages):
        if low < end:
            return high > first
    return False
