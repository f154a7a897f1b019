"""A reach in whole pages, whose answers are remembered.

A reach answers for token positions; pages are kept and given back as a whole. Needs are rounded outward to pages here,
once, and ``until`` is asked for each position once: the answers of a reach never change. What is remembered is bounded:
each kind of answer for so many boundaries as have ``MOST`` intervals together, one number for each page of the longest
prompt, and which of these pages are needed for good.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..contract.reach import NEVER, Interval, Reach, merged
from ..errors import PluginError

Intervals = tuple[Interval, ...]
"""Ascending, and apart from each other."""

MOST = 1 << 16
"""The most intervals that one ``Remembered`` holds."""


class Remembered(dict[int, Intervals]):
    """The answers of ``ask``, a pure function of a boundary. With too many intervals in it, it begins again."""

    def __init__(self, ask: Callable[[int], Intervals]) -> None:
        self.ask = ask
        self.intervals = 0

    def __missing__(self, n: int) -> Intervals:
        answer = self.ask(n)
        self.intervals += len(answer) + 1
        if self.intervals > MOST:
            self.clear()
            self.intervals = len(answer) + 1
        self[n] = answer
        return answer


class PagedReach:
    """What ``reach`` says of pages of ``page`` tokens, for each boundary ``n``.

    ``needs[n]``: what resuming there needs. ``outlook[n]``: that, and what of the positions before ``n`` a later
    boundary may need; a lease covers it. ``unneeded[n]``: the pages that are not in the outlook. ``released[n]``: the
    pages that no boundary from ``n`` on needs any more, as ``until`` or the closed form says. ``first_to_leave(n)``: a
    page before which every page is needed for good, or by no boundary from ``n`` on.
    """

    __slots__ = (
        "_always", "_asks_until", "_farthest", "_last", "_name", "_reach", "_shape", "convex", "dense",
        "first_to_leave", "needs", "outlook", "page", "released", "unneeded",
    )  # fmt: skip

    def __init__(self, reach: Reach, page: int, name: str) -> None:
        """``name`` is that of the component whose reach it is."""
        self.page = page
        self._name = name
        self.convex = reach.convex
        self._reach = reach
        self._shape = reach.shape
        self.dense = self._shape is not None and self._shape.dense
        self._asks_until = type(reach).until is not Reach.until
        self.needs = Remembered(self._needs)
        self.first_to_leave = lru_cache(MOST >> 4)(self._first_to_leave)
        self.outlook = self.needs if self.convex else Remembered(self._outlook)
        self.unneeded = Remembered(lambda n: self._other_pages(self.outlook[n], n))
        self.released = Remembered(lambda n: self._other_pages(self._kept(n), n))
        if self.convex and self._shape is not None:
            self.released = self.unneeded
        self._last = array("d")
        """By page, as far as it was asked: the last boundary that may need it."""
        self._always: list[Interval] = []
        """Of these pages, those that are needed for good."""
        self._farthest = page
        """Of the others, the most tokens from the start of a page to the last boundary that may need it."""

    def _needs(self, n: int) -> Intervals:
        page = self.page
        shape = self._shape
        if shape is None:
            return merged((lo // page * page, -(-hi // page) * page) for lo, hi in self._asked("needs", n))
        low, high = shape.tail(n) // page * page, -(-min(shape.head, n) // page) * page
        if low <= high or low >= n:
            return ((0, n),) if low < n else ((0, high),) if high else ()
        return ((0, high), (low, n)) if high else ((low, n),)

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

    def _kept(self, n: int) -> Intervals:
        """What of the positions before ``n`` is needed at ``n`` or later, as ``until`` or the closed form says."""
        if self._shape is not None:
            return self.needs[n]
        if not self._asks_until:
            return ((0, n),) if n else ()
        page = self.page
        first = self._first_to_leave(n)
        always = self._always[: bisect_left(self._always, (n, n))]
        leaving = ((p * page, (p + 1) * page) for p in range(first, n // page) if self._last[p] >= n)
        return merged((*((lo, min(hi, n)) for lo, hi in always), *leaving))

    def _outlook(self, n: int) -> Intervals:
        return merged((*self.needs[n], *self._kept(n)))

    def _other_pages(self, spans: Intervals, n: int) -> Intervals:
        """The pages before boundary ``n`` between and around ``spans``."""
        page = self.page
        ends = [0, *(high // page for _, high in spans)]
        starts = [*(low // page for low, _ in spans), n // page]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def _first_to_leave(self, n: int) -> int:
        if self._shape is not None:
            return self._shape.tail(n) // self.page
        if not self._asks_until:
            return n // self.page
        self._ask_until(n // self.page)
        return max(0, n - self._farthest) // self.page

    def _ask_until(self, pages: int) -> None:
        """Ask until when the first ``pages`` pages may be needed, as far as they were not asked for yet."""
        page = self.page
        for p in range(len(self._last), pages):
            start, end = p * page, (p + 1) * page
            last = max(self._asked("until", position) for position in range(start, end))
            if last != NEVER:
                self._farthest = max(self._farthest, int(last) - start)
            elif self._always and self._always[-1][1] == start:
                self._always[-1] = self._always[-1][0], end
            else:
                self._always.append((start, end))
            self._last.append(last)


def overlap(spans: Intervals, low: int, high: int) -> bool:
    """Whether any of ``spans`` has something of [low, high)."""
    for start, end in reversed(spans):
        if start < high:
            return end > low
    return False
