"""Boundaries: at the end of which pages of a run requests can resume, from which pages are there.

As in the core, a boundary can be resumed at if every component has all that its reach needs there. Most reaches need
one interval that ends at the boundary. For these it is enough to know the gap before it: the end of the last page of
the component that is not there. So all boundaries between two gaps are judged at once.

It knows no cache and no event. First read ``Boundaries.judge``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from prefixloom import Reach

from .runs import Run, halved, ones, stretches


@attrs.frozen
class Holder:
    """One component on one tier, which holds pages or states there.

    ``place``  of the component in the composition
    ``index``  of the holder among all holders: where ``Run.kept`` has its bits
    ``parts``  how many pages of the component a page of the tree has; 1 for a state
    """

    component: str
    tier: str
    place: int
    index: int
    parts: int


@attrs.frozen
class Need:
    """What one component needs at a boundary.

    ``tokens``   of its page, 0 for a state
    ``ends``     its reach is one interval that ends at the boundary, so the gap before it decides alone
    ``place``    of the component in the composition
    ``parts``    how many pages of the component a page of the tree has; 1 for a state
    ``holders``  the indices of its holders, by tier, the first one first
    """

    reach: Reach
    tokens: int
    ends: bool
    place: int
    parts: int
    holders: tuple[int, ...]

    def first_behind(self, gap: int, low: int, high: int, page: int, start: int) -> int:
        """The first of the pages [low, high) whose boundary needs nothing before the position ``gap``; else ``high``.

        ``start``  the position at which page 0 begins
        """
        if not gap:
            return low
        shape = self.reach.shape
        if self.reach.closed_upward or shape is None:
            return high
        tail = shape.tail  # it never decreases
        if tail(start + (low + 1) * page) >= gap:
            return low
        if tail(start + high * page) < gap:
            return high
        needy, able = low, high - 1
        while able - needy > 1:
            middle = (needy + able) // 2
            if tail(start + (middle + 1) * page) >= gap:
                able = middle
            else:
                needy = middle
        return able


class Boundaries:
    """What a composition needs at a boundary, on ``levels``: the first tier, and the first two together."""

    def __init__(self, composition: Any, tiers: Sequence[str]) -> None:
        self.page: int = composition.page
        self.levels = range(len(tiers))
        self.holders: list[Holder] = []
        self._needs: list[Need] = []
        for place, part in enumerate(composition.parts):
            parts = self.page // part.page_tokens if part.page_tokens else 1
            shape = part.reach.shape
            ends = part.reach.closed_upward or (shape is not None and shape.head == 0)
            first = len(self.holders)
            self.holders += [Holder(part.name, tier, place, first + at, parts) for at, tier in enumerate(tiers)]
            indices = tuple(range(first, len(self.holders)))
            self._needs.append(Need(part.reach, part.page_tokens or 0, ends, place, parts, indices))
        # states first: few pages have one, and who has none is asked nothing more
        self._asked = sorted(self._needs, key=lambda need: need.tokens > 0)
        self.no_gaps = (0,) * (len(self.levels) * len(self._needs))
        """What ``Run.gaps`` is above all pages."""
        self.parts = tuple(holder.parts for holder in self.holders)
        self.scattered = frozenset(
            index for need in self._needs if need.tokens and not need.ends for index in need.holders
        )
        """The holders of which a change may matter to any boundary below it."""

    def judge(self, run: Run, since: int) -> bool:
        """Find ``run.resumable`` and ``run.gaps``. Whether what lies below the run is to be judged again.

        ``since``  the first page of the run of which something has changed; 0 if something has above the run. What can
                   be resumed at the end of those before it has not changed
        """
        assert run.parent is not None
        above, start = run.parent.gaps, run.first * self.page
        for level in self.levels:
            ok = ones(run.count) >> since << since
            for need in self._asked:
                have = self._have(run, need, level)
                if not need.tokens:
                    ok &= have
                elif need.ends:
                    gap = above[level * len(self._needs) + need.place]
                    if gap or have != ones(run.count * need.parts):
                        ok &= self._behind_gaps(need, have, gap, start, since, run.count)
                else:
                    ok = self._of_all_needs(run, need, level, ok)
                if not ok:
                    break
            run.resumable[level] = run.resumable[level] & ones(since) | ok
        before, run.gaps = run.gaps, self.gaps(run)
        return before != run.gaps and self._matters_below(run.end * self.page, before, run.gaps)

    def gaps(self, run: Run) -> tuple[int, ...]:
        """What ``run.gaps`` is, if that of its parent is right."""
        assert run.parent is not None
        above = iter(run.parent.gaps)
        return tuple(self._gap_behind(run, need, level, next(above)) for level in self.levels for need in self._needs)

    def _have(self, run: Run, need: Need, level: int) -> int:
        have = 0
        for index in need.holders[: level + 1]:
            have |= run.kept[index]
        return have

    def _gap_behind(self, run: Run, need: Need, level: int, above: int) -> int:
        """The end of the last page of a component, up to the end of ``run``, that is not there."""
        if not (need.tokens and need.ends):  # nobody asks for it
            return 0
        absent = ones(run.count * need.parts) & ~self._have(run, need, level)
        return run.first * self.page + absent.bit_length() * need.tokens if absent else above

    def _behind_gaps(self, need: Need, have: int, gap: int, start: int, since: int, count: int) -> int:
        """The pages from ``since`` on at whose end the gap before it lies before what the component needs."""
        early, late = halved(ones(count * need.parts) & ~have, since * need.parts)
        if early:
            gap = start + early.bit_length() * need.tokens
        page, parts, found, low = self.page, need.parts, 0, since
        last = (count - since) * parts
        for first, end in (*stretches(late), (last, last)):  # absent pages [first, end); at the end of the run, none
            high = since + first // parts  # up to these there is no other gap
            if low < high:
                able = need.first_behind(gap, low, high, page, start)
                found |= ones(high) >> able << able
            low = since + end // parts
            if not _is_dense(need.reach):  # the boundaries that follow an absent page may need nothing at all
                for at in range(high, low):
                    boundary = start + (at + 1) * page
                    if need.first_behind(boundary, at, at + 1, page, start) == at:
                        found |= 1 << at
            gap = start + since * page + end * need.tokens
        return found

    def _of_all_needs(self, run: Run, need: Need, level: int, wanted: int) -> int:
        """Those of the pages ``wanted`` at whose end a component has everything, whatever its reach is."""
        found = 0
        for low, high in stretches(wanted):
            for at in range(low, high):
                boundary = (run.first + at + 1) * self.page
                if all(self._has(run, need, level, lo, hi) for lo, hi in need.reach.needs(boundary)):
                    found |= 1 << at
        return found

    def _has(self, run: Run, need: Need, level: int, lo: int, hi: int) -> bool:
        """Whether a component has the positions [lo, hi) of the path to ``run``."""
        lo, hi = lo // need.tokens * need.tokens, -(-hi // need.tokens) * need.tokens
        while lo < hi:
            start = run.first * self.page
            if start < hi:
                first = max(lo, start)
                wanted = ones((hi - first) // need.tokens) << (first - start) // need.tokens
                if wanted & ~self._have(run, need, level):
                    return False
                hi = first
            assert run.parent is not None
            run = run.parent
        return True

    def _matters_below(self, end: int, before: Sequence[int], gaps: Sequence[int]) -> bool:
        """Whether a boundary behind ``end`` may need what lies before a gap that has changed.

        If none does, gaps below may be out of date: but only by what nothing there needs.
        """
        if not before:
            return True
        for at, (was, gap) in enumerate(zip(before, gaps, strict=True)):
            if was != gap and self._needs[at % len(self._needs)].reach.until(max(was, gap) - 1) > end:
                return True
        return False


def _is_dense(reach: Reach) -> bool:
    shape = reach.shape
    return reach.closed_upward or (shape is not None and shape.dense)
