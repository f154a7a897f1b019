"""Boundaries: at the end of which pages of a run requests can resume, from which pages are there.

The reaches are asked by the core's ``Residency``. What lies along a path is here what each holder has of each run.
It knows no cache and no event. First read ``Boundaries.judge``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from prefixloom import Residency

from .runs import Run, ones, stretches

Hull = tuple[int, int]
"""The first and the end of those pages of a component that have changed on a path, and of those between them."""


@attrs.frozen
class Holder:
    """One component on one tier, which holds pages or states there: a place of ``Residency``.

    ``place``  of the component in the composition
    ``index``  of the holder among all holders: where ``Run.kept`` has its bits
    ``parts``  how many pages of the component a page of the tree has; 1 for a state
    ``whole_above``  a page here stands for all pages above it
    """

    component: str
    tier: str
    place: int
    index: int
    parts: int
    whole_above: bool

    def gap(self, run: Run, at: int, high: int) -> tuple[int, int]:
        """Return the first pages of ``run`` in [``at``, ``high``) that it lacks; ``(high, high)`` if it has all."""
        absent = ~(run.kept[self.index] >> at - run.first * self.parts) & ones(high - at)
        if not absent:
            return high, high
        first = at + (absent & -absent).bit_length() - 1
        absent >>= first - at
        return first, first + (~absent & absent + 1).bit_length() - 1


class Boundaries:
    """What a composition needs at a boundary, on ``levels``: the first tier, and the first two together."""

    def __init__(self, composition: Any, tiers: Sequence[str]) -> None:
        self.page: int = composition.page
        self.holders: list[Holder] = []
        self._components: list[tuple[Holder, ...]] = []
        self.nothing: tuple[Hull, ...] = ((0, 0),) * len(composition.parts)
        """What has changed where nothing has."""
        self.levels: list[list[Residency]] = [[] for _ in tiers]
        """The residency of each component, by level."""
        for place, part in enumerate(composition.parts):
            parts = self.page // part.page_tokens if part.page_tokens else 1
            first, closed = len(self.holders), part.reach.closed_upward
            holders = tuple(
                Holder(part.name, tier, place, first + at, parts, closed and tier == "device")
                for at, tier in enumerate(tiers)
            )
            self.holders += holders
            self._components.append(holders)
            for level, residencies in enumerate(self.levels):
                residencies.append(Residency.of(part, holders[: level + 1], self.page))
        self.parts = tuple(holder.parts for holder in self.holders)
        self._states_first = sorted(
            range(len(self._components)), key=lambda at: bool(composition.parts[at].page_tokens)
        )

    def judge(self, run: Run, since: int) -> None:
        """Find ``run.resumable``.

        ``since``  the first page of the run of which something has changed; 0 if something has above the run. What can
                   be resumed at the end of those before it has not changed
        """
        low, high = (run.first + since) * self.page, run.end
        for level, residencies in enumerate(self.levels):
            found = ones(run.count - since)
            for at in self._states_first:  # few pages have one, and of the others nothing more is asked
                found &= residencies[at].resumable(run, low, high)
                if not found:
                    break
            run.resumable[level] = run.resumable[level] & ones(since) | found << since

    def changed(self, run: Run, above: tuple[Hull, ...]) -> tuple[Hull, ...] | None:
        """Return what has changed on the path to the end of ``run``, by component; None if it matters to none below.

        ``above``  what has changed above the run
        """
        hulls: list[Hull] = []
        matters = False
        for holders, residency, hull in zip(self._components, self.levels[0], above, strict=True):
            bits = 0
            if run.before is not None:
                for holder in holders:
                    bits |= run.kept[holder.index] ^ run.before.kept[holder.index]
            if bits:
                start = run.first * holders[0].parts
                (lowest, _), *_ = stretches(bits)
                hull = (hull[0] if hull[1] else start + lowest), start + bits.bit_length()
            hulls.append(hull)
            matters = matters or residency.matters_behind(run.end, *hull)
        return tuple(hulls) if matters else None
