"""The oracle's model: a prefix cache as plain sets, with no tree, no locks and no queues.

The model shares nothing with the core but the pure functions ``reach.needs`` and ``reach.until``. A *piece* is one
thing that a component can have cached: a page, named by its index and the prefix that it ends in (namespace, tokens,
extra keys), or a state, named by its prefix. The model keeps the set of resident pieces and derives every answer of the
cache from it. The number of a prefix is also the content that a forward pass writes into a slot.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...contract.reach import Reach
from ..inside.names import Names, with_extra

__all__ = ["Facts", "ModelLease", "ModelSequence", "Names", "Piece", "SetModel", "with_extra"]

Piece = tuple[int, int]
"""(number of the prefix that names its tree page, index of the component's page or boundary of the state)."""


@dataclass(frozen=True, eq=False)
class Facts:
    """The facts of one component. ``page`` is in tokens, 0 for states; ``group`` is the tokens per entry."""

    name: str
    reach: Reach
    page: int
    group: int
    lookahead: int
    capacity: int
    rewind: int | None
    every: int = 0
    """States: a checkpoint is kept at each multiple of this."""
    steps: int = 0
    """States: slots for the states after each token of a small step, to rewind to."""
    _needed: dict[int, frozenset[int]] = field(default_factory=dict)
    _outlook: dict[int, frozenset[int]] = field(default_factory=dict)

    @property
    def boundary(self) -> bool:
        return self.reach.unit == "boundary"

    @property
    def path(self) -> bool:
        return self.reach.closed_upward

    def needed(self, n: int) -> frozenset[int]:
        """Return the indices of the pages that resuming at ``n`` needs, rounded outward to whole pages."""
        known = self._needed.get(n)
        if known is None:
            spans = () if self.boundary else self.reach.needs(n)
            known = frozenset(i for lo, hi in spans if lo < hi for i in range(lo // self.page, -(-hi // self.page)))
            self._needed[n] = known
        return known

    def outlook(self, n: int) -> frozenset[int]:
        """Return the pages before ``n`` that resuming at ``n`` or any later boundary may need. A lease covers these.

        Where the reach is convex, no later boundary needs more than ``n`` does, whatever ``until`` says.
        """
        known = self._outlook.get(n)
        if known is None:
            later = () if self.boundary or self.reach.convex else range(-(-n // self.page))
            known = self.needed(n) | {index for index in later if self.ever_needed_from(index, n)}
            self._outlook[n] = known
        return known

    def ever_needed_from(self, index: int, floor: int) -> bool:
        """Return whether any boundary from ``floor`` on may need page ``index``, by ``until``."""
        return any(self.reach.until(t) >= floor for t in range(index * self.page, (index + 1) * self.page))


@dataclass(eq=False)
class ModelSequence:
    """The model of one open sequence. ``future``: the tokens that will come, of which the first ``named`` are known."""

    sequence: Any
    namespace: str
    future: list[Hashable]
    salt: int
    ready: int
    reserved: int
    committed: int
    published: int
    named: int
    ids: list[int]
    written: dict[str, int]
    pending: set[str]
    """Components with states whose running slot must still be filled by an op."""
    sourced: set[str]
    """Those pending components that are filled from a state of the tree, at ``published``."""
    tracks: dict[str, list[int]] = field(default_factory=dict)
    """Boundaries of the checkpoints that are not published yet, by component."""
    step_from: int = -1
    """Where the last small step began, if the states after its single tokens are kept; otherwise -1."""
    arrived: int = 0
    """Up to here content arrived from elsewhere; there are no states of its single tokens."""
    absent: dict[str, set[int]] = field(default_factory=dict)
    """Pages that never got a slot because they were not among those that arrived."""
    deepest: int = 0
    """The most tokens that were ever committed. Pages too far below it may have been released."""
    floor: int = 0
    """The highest value so far of the first boundary that can still be published or rewound to."""
    keep: int = 0
    """The same boundary at the last commit or publication. Pages before it may be kept while there is room."""
    spoiled: bool = False
    """A step failed and may have written half a state, so the running states are not usable."""
    gone: bool = False
    """A flush made the sequence unusable."""
    detached: bool = False
    """The namespace was dropped, so what the sequence publishes cannot be found."""
    cover: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """The edges that its lease covered when it took its current place, by component."""
    complete: int = 0
    """Up to here a forward pass has written all content with the tokens that it looks ahead at."""
    chosen_from: int = -1
    """Where the last step began, if it chose the tokens behind each of its positions itself; otherwise -1."""
    chosen_upto: int = 0
    """So many tokens are named or were chosen by layers, which have written with them."""
    alone: int = 0
    """So many tokens were named when what is computed outside of steps began at the earliest."""


@dataclass(eq=False)
class ModelLease:
    """The model of a lease that belongs to no sequence."""

    lease: Any
    namespace: str
    ids: list[int]
    boundary: int
    gone: bool = False
    detached: bool = False
    cover: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


class SetModel:
    """A composition's arithmetic over the set of resident pieces."""

    def __init__(self, facts: Sequence[Facts], page: int, lookahead: int, max_rewind: int) -> None:
        self.facts = tuple(facts)
        self.page = page
        self.lookahead = lookahead
        self.max_rewind = max_rewind
        self.names = Names()
        self.resident: dict[str, set[Piece]] = {f.name: set() for f in facts}
        self.keys: set[int] = set()
        """The prefixes in the tree. A match goes no deeper than these, even if nothing is needed (a window of 1)."""

    # ------------------------------------------------------------ names
    def piece(self, f: Facts, ids: Any, index: int) -> Piece:
        """Return the piece of page ``index`` of a prefix; for a state, ``index`` is its boundary."""
        end = index if f.boundary else (index * f.page // self.page + 1) * self.page
        return ids[end + self.lookahead], index

    def pieces(self, f: Facts, ids: Sequence[int], boundary: int) -> set[Piece]:
        """Return all pieces of one component that resuming at ``boundary`` needs."""
        if f.boundary:
            return {self.piece(f, ids, boundary)} if boundary else set()
        return {self.piece(f, ids, index) for index in f.needed(boundary)}

    # ------------------------------------------------------------ matching
    def has(self, f: Facts, ids: Sequence[int], boundary: int) -> bool:
        """Return whether one component has what resuming at ``boundary`` needs."""
        return self.pieces(f, ids, boundary) <= self.resident[f.name]

    def usable(self, ids: Sequence[int], boundary: int) -> bool:
        return all(self.has(f, ids, boundary) for f in self.facts)

    def walked(self, ids: Sequence[int]) -> int:
        """Return how far the keys lead that are in the tree."""
        found = 0
        for boundary in range(self.page, len(ids) - self.lookahead, self.page):
            if ids[boundary + self.lookahead] not in self.keys:
                break
            found = boundary
        return found

    def limit(self, tokens: int, leave: int) -> int:
        return max(0, tokens - max(leave, self.lookahead)) // self.page * self.page

    def candidates(self, ids: Sequence[int], limit: int) -> list[int]:
        found = [0]
        for boundary in range(self.page, limit + 1, self.page):
            if ids[boundary + self.lookahead] not in self.keys:
                break
            if self.usable(ids, boundary):
                found.append(boundary)
        return found

    def deepest(self, ids: Sequence[int], limit: int) -> int:
        return self.candidates(ids, limit)[-1]

    def branch(self, ids: Sequence[int], limit: int) -> int | None:
        """Return the boundary where a checkpoint was missing: all pages are there, and no state at it or deeper."""
        paged = [f for f in self.facts if not f.boundary]
        found = 0
        for boundary in range(self.page, limit + 1, self.page):
            if ids[boundary + self.lookahead] not in self.keys:
                break
            if all(self.pieces(f, ids, boundary) <= self.resident[f.name] for f in paged):
                found = boundary
        return found if found > self.deepest(ids, limit) else None

    # ------------------------------------------------------------ a running sequence
    def publishable(self, run: ModelSequence) -> int:
        upto = min(run.named - self.lookahead, run.complete) // self.page * self.page
        return max(run.published, upto)

    def saw(self, run: ModelSequence, start: int, upto: int, named: int, ahead: int = 0) -> None:
        """Note what a pass over [start, upto) could write, with ``named`` tokens, its own and ``ahead`` more."""
        run.complete = max(run.complete, min(upto, max(named, upto + ahead) - self.lookahead))
        if ahead:
            run.chosen_upto = max(run.chosen_upto, upto + ahead)
        if upto > start:
            run.chosen_from = start if ahead >= self.lookahead > 0 else -1
        run.alone = run.named

    def rewind_floor(self, run: ModelSequence) -> int:
        """Return the shortest length that ``run`` may be rewound to."""
        depths = []
        for f in self.facts:
            if f.boundary or not f.path:
                depths.append(self.max_rewind)
            elif f.rewind is not None:
                depths.append(f.rewind)
        floor = min(run.committed, run.deepest - min(depths)) if depths else 0
        if any(f.boundary for f in self.facts):
            floor = max(floor, run.committed if run.step_from < 0 else run.step_from + 1)
        named_by_keys = min(run.named, run.published + self.lookahead) if run.published else 0
        return max(run.published, floor, named_by_keys)

    def retain(self, run: ModelSequence) -> None:
        """Update the first boundary that still matters, after a commit or a publication."""
        run.deepest = max(run.deepest, run.committed)
        run.keep = self.lowest(run)
        run.floor = max(run.floor, run.keep)
        run.keep = min([run.keep, *(boundary for tracks in run.tracks.values() for boundary in tracks)])

    def lowest(self, run: ModelSequence) -> int:
        """Return the first boundary that can still be published after the deepest rewind that is still allowed."""
        left = max(0, self.max_rewind - (run.deepest - run.committed))
        floor = min(run.complete, run.named - self.lookahead) - left
        return max(floor // self.page * self.page, run.published)

    def must_hold(self, f: Facts, run: ModelSequence) -> set[int]:
        """Return the pages with content that a boundary needs which can still be published or rewound to."""
        lengths = set(range(run.floor, run.reserved + 2 * self.page, self.page))
        lengths.update(range(self.rewind_floor(run), run.committed + 1))
        lengths.update(boundary for tracks in run.tracks.values() for boundary in tracks)
        had = f.needed(run.ready)
        absent = run.absent.get(f.name, set())
        return {
            index
            for n in lengths
            if not absent & f.needed(n)  # a needed page did not arrive, so nothing can resume there
            for index in f.needed(n)
            if index * f.page < run.committed and (index * f.page >= run.ready or index in had)
        }

    def checkpoint(self, f: Facts, run: ModelSequence, upto: int) -> int:
        """Return the deepest boundary up to ``upto`` for which ``run`` has a complete state; -1: there is none."""
        tracks = [boundary for boundary in run.tracks[f.name] if boundary <= upto]
        complete = f.name not in run.pending and not run.spoiled
        own = [run.committed] if complete and run.committed <= upto else []
        return max(tracks + own, default=-1)

    def published_by(self, run: ModelSequence, held: dict[str, set[int]], upto: int) -> dict[str, set[Piece]]:
        """Return the pieces of components with pages that publishing ``run`` up to ``upto`` adds to the tree."""
        return {
            f.name: {self.piece(f, run.ids, index) for index in held[f.name] if run.published <= index * f.page < upto}
            for f in self.facts
            if not f.boundary
        }
