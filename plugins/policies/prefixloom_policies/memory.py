"""Memory: marks of paths in the order of their last use, of which the latest are an LRU pool in small.

A *mark* is a print of a path up to one of a few positions, chosen by the print itself, so that a path is known again
however its edges divide it, and after it was evicted. The latest marks, as many as the pool has of what it holds, are
what an LRU pool of the same size would hold: this is spatial sampling (Waldspurger and others, "Efficient MRC
Construction with SHARDS", FAST 2015). What has left them is remembered for some pools more. Each mark knows the last
visit of its path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .ages import Ages, Visit

HORIZON = 4
"""What an LRU pool has evicted is remembered for as much as so many pools hold."""

Mark = tuple[int, int]
"""How deep a position lies, and the print of the path up to it."""


class PathMemory:
    def __init__(self, ages: Ages) -> None:
        self._ages = ages
        self._recent: OrderedDict[int, Visit] = OrderedDict()
        self._older: OrderedDict[int, Visit] = OrderedDict()

    def recent(self, marks: Sequence[Mark]) -> int:
        """Return how deep an LRU pool has a path. ``marks``: those of the path, the deepest first."""
        recent = self._recent
        return next((depth for depth, mark in marks if mark in recent), 0)

    def seen(self, marks: Sequence[Mark]) -> tuple[int, Visit | None]:
        """Return how deep a path was seen, and the last visit there: to its end, if its last mark is on the path."""
        recent, older = self._recent, self._older
        for depth, mark in marks:
            visit = recent.get(mark) or older.get(mark)
            if visit is not None:
                return (visit.end if visit.mark == mark else depth), visit
        return 0, None

    def use(self, marks: Sequence[Mark], visit: Visit) -> None:
        """Give marks to a visit, the deepest first, so that an LRU pool evicts the deepest first."""
        recent, older = self._recent, self._older
        for _, mark in marks:
            old = recent.pop(mark, None) or older.pop(mark, None)
            recent[mark] = visit
            if old is not visit:
                visit.held += 1
                if old is not None:
                    self._ages.release(old)

    def put_first(self, marks: Sequence[Mark], visit: Visit) -> None:
        """Put the marks that only this visit used at the front of an LRU pool's order of eviction."""
        for _, mark in reversed(marks):
            if self._recent.get(mark) is visit:
                self._recent.move_to_end(mark, last=False)

    def lose(self, marks: Sequence[Mark]) -> None:
        """Count marks that the pool lost by no choice of its own as lost by an LRU pool too."""
        for _, mark in marks:
            visit = self._recent.pop(mark, None)
            if visit is not None:
                self._older[mark] = visit

    def shrink(self, held: int) -> None:
        """Shrink an LRU pool to ``held`` marks, as many as the full pool has."""
        recent, older = self._recent, self._older
        while len(recent) > held:
            mark, visit = recent.popitem(last=False)
            older[mark] = visit
        while len(older) > HORIZON * held:
            self._ages.release(older.popitem(last=False)[1])

    def thin(self, mask: int) -> None:
        """Forget the marks that have any bit of ``mask``."""
        for marks in (self._recent, self._older):
            for mark in [mark for mark in marks if mark & mask]:
                self._ages.release(marks.pop(mark))
