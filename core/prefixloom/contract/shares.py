"""Shares: what each owner of namespaces may keep of a pool, where several owners want it.

The owner of a namespace is what its plain name has before the first slash. Eviction takes the next cell from the owner
that keeps most for its share. So an owner keeps its share whatever others ask, and what nobody else wants as well. Uses
and priorities are compared among the cells of one owner alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from .identity import plain_name
from .queues import ListQueue, Queue


def owner_of(namespace: str) -> str:
    """Return whose ``namespace`` is, under whatever identity."""
    return plain_name(namespace).partition("/")[0]


class _Owned(Queue):
    """A queue for each owner. ``standing``: how many cells stand there."""

    __slots__ = ("_make", "_owners", "_queues", "standing")

    def __init__(self, make: Callable[[], Queue]) -> None:
        self._make = make
        self._owners: dict[Any, str] = {}
        self._queues: dict[str, Queue] = {}
        self.standing: Counter[str] = Counter()

    def _owner(self, cell: Any) -> str:
        owner = self._owners.get(cell)
        if owner is None:
            root = cell.node
            while root.parent is not None:
                root = root.parent
            owner = self._owners[cell] = owner_of(root.namespace)
        return owner

    def _of(self, owner: str) -> Queue:
        queue = self._queues.get(owner)
        if queue is None:
            queue = self._queues[owner] = self._make()
        return queue

    def add(self, cell: Any) -> None:
        owner = self._owner(cell)
        self._of(owner).add(cell)
        self.standing[owner] += 1

    def add_first(self, cell: Any) -> None:
        owner = self._owner(cell)
        self._of(owner).add_first(cell)
        self.standing[owner] += 1

    def remove(self, cell: Any) -> None:
        owner = self._owner(cell)
        self.standing[owner] -= 1
        self._queues[owner].remove(cell)

    def touch(self, cell: Any) -> None:
        self._queues[self._owner(cell)].touch(cell)

    def _pop_of(self, owner: str | None) -> Any:
        if owner is None or not self.standing[owner]:
            return None
        self.standing[owner] -= 1
        return self._queues[owner].pop()

    def __iter__(self) -> Iterator[Any]:
        for queue in self._queues.values():
            yield from queue


class SharedQueue(_Owned):
    """The cells of one component that may be evicted. ``shares``: by owner; who is not there has 1.

    ``held``     by owner, the pages (or states) in the tree, without those that are about to go
    ``running``  by owner, those that its running sequences have beside
    """

    __slots__ = ("_before", "_going", "_shares", "held", "running")

    def __init__(self, make: Callable[[], Queue], shares: Mapping[str, float]) -> None:
        super().__init__(make)
        self._shares = shares
        self._before: BeforeOthers | None = None
        self._going: dict[Any, int] = {}
        self.held: Counter[str] = Counter()
        self.running: Counter[str] = Counter()

    def before(self) -> BeforeOthers:
        self._before = BeforeOthers(self)
        return self._before

    def count(self, namespace: str, pages: int) -> None:
        self.held[owner_of(namespace)] += pages

    def next_owner(self, held: Mapping[str, int], more: Iterable[str] = ()) -> str | None:
        """Return the owner that keeps most for its share, of those that have a cell here and of ``more``."""
        having = chain((owner for owner, cells in self.standing.items() if cells), more)
        running, shares = self.running, self._shares
        return max(having, key=lambda owner: (held[owner] + running[owner]) / shares.get(owner, 1.0), default=None)

    # ------------------------------------------------------------ cells
    def add(self, cell: Any) -> None:
        self._went(cell)
        super().add(cell)

    def pop(self) -> Any:
        return self._pop_of(self.next_owner(self.held))

    def going(self, cell: Any, pages: int) -> None:
        self._going[cell] = pages
        self.held[self._owners[cell]] -= pages

    def forget(self, cell: Any) -> None:
        self._went(cell)
        owner = self._owners.pop(cell, None)
        if owner is not None:
            self._of(owner).forget(cell)
            if not self.held[owner] and not self.standing[owner]:  # else the owners that ever were would be remembered
                del self.held[owner], self.standing[owner], self._queues[owner]

    def _went(self, cell: Any) -> None:
        """``cell``, if it was going, has gone and was counted, or it stays."""
        if cell in self._going:
            self.held[self._owners[cell]] += self._going.pop(cell)

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        owner = self._owners.get(lower)
        if owner is not None:
            self._owners[upper] = owner
            self._queues[owner].inherit(upper, lower, linked)
            self.standing[owner] += linked

    @property
    def remembered(self) -> Iterable[Any]:
        return [*self._owners, *(cell for queue in self._queues.values() for cell in queue.remembered)]


class BeforeOthers(_Owned):
    """What goes before all other cells of its owner, and not before those of an owner that keeps more."""

    __slots__ = ("_shared",)

    def __init__(self, shared: SharedQueue) -> None:
        super().__init__(ListQueue)
        self._shared = shared

    def remove(self, cell: Any) -> None:
        super().remove(cell)
        self._forget_owner_of(cell)

    def pop(self) -> Any:
        cell = self._pop_of(self._shared.next_owner(self._shared.held, self.standing))
        if cell is not None:
            self._forget_owner_of(cell)
        return cell

    def _forget_owner_of(self, cell: Any) -> None:
        owner = self._owners.pop(cell)
        if not self.standing[owner]:  # else the owners that ever were would be remembered
            del self.standing[owner], self._queues[owner]

    def due(self) -> Iterator[Any]:
        """What goes before the next cell of the shared queue has to. The entries here say their ``pages``."""
        held, left = self._shared.held.copy(), self.standing.copy()
        queues = {owner: iter(queue) for owner, queue in self._queues.items()}
        while (owner := self._shared.next_owner(held, +left)) is not None and left[owner]:
            link = next(queues[owner])
            left[owner] -= 1
            held[owner] -= link.pages
            yield link
