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
from .queues import Link, ListQueue, Queue


def owner_of(namespace: str) -> str:
    """Return whose ``namespace`` is, under whatever identity."""
    return plain_name(namespace).partition("/")[0]


class _Owned(Queue[Link]):
    """A queue for each owner."""

    __slots__ = ("_make", "_owners", "queues")

    def __init__(self, make: Callable[[], Queue[Link]]) -> None:
        self._make = make
        self._owners: dict[Link, str] = {}
        self.queues: dict[str, Queue[Link]] = {}

    def _of(self, cell: Link) -> Queue[Link]:
        owner = self._owners.get(cell)
        if owner is None:
            root = cell.node
            while root.parent is not None:
                root = root.parent
            owner = self._owners[cell] = owner_of(root.namespace)
        queue = self.queues.get(owner)
        if queue is None:
            queue = self.queues[owner] = self._make()
        return queue

    def add(self, cell: Link) -> None:
        self._of(cell).add(cell)

    def add_first(self, cell: Link) -> None:
        self._of(cell).add_first(cell)

    def remove(self, cell: Link) -> None:
        self._of(cell).remove(cell)

    def touch(self, cell: Link) -> None:
        self._of(cell).touch(cell)

    def __iter__(self) -> Iterator[Link]:
        return chain.from_iterable(self.queues.values())

    @property
    def empty(self) -> bool:
        return all(queue.empty for queue in self.queues.values())

    def inherit(self, upper: Link, lower: Link, linked: bool) -> None:
        if lower in self._owners:
            self._owners[upper] = self._owners[lower]
            self._of(lower).inherit(upper, lower, linked)

    def having(self) -> list[str]:
        """Return the owners that have cells here."""
        return [owner for owner, queue in self.queues.items() if not queue.empty]


class SharedQueue(_Owned):
    """The cells of one component that may be evicted. ``shares``: by owner; who is not there has 1.

    ``held``     by owner, the pages (or states) in the tree, without those that are about to go
    ``running``  by owner, those that its running sequences have beside
    """

    __slots__ = ("_going", "_shares", "held", "running")

    def __init__(self, make: Callable[[], Queue[Link]], shares: Mapping[str, float]) -> None:
        super().__init__(make)
        self._shares = shares
        self._going: dict[Link, int] = {}
        self.held: Counter[str] = Counter()
        self.running: Counter[str] = Counter()

    def before(self) -> BeforeOthers:
        return BeforeOthers(self)

    def count(self, namespace: str, pages: int) -> None:
        self.held[owner_of(namespace)] += pages

    def next_owner(self, held: Mapping[str, int], more: Iterable[str] = ()) -> str | None:
        """Return the owner that keeps most for its share, of those that have a cell here and of ``more``."""
        running, shares = self.running, self._shares
        return max(
            chain(self.having(), more),
            key=lambda owner: (held[owner] + running[owner]) / shares.get(owner, 1.0),
            default=None,
        )

    # ------------------------------------------------------------ cells
    def add(self, cell: Link) -> None:
        self._went(cell)
        super().add(cell)

    def pop(self) -> Link | None:
        owner = self.next_owner(self.held)
        return None if owner is None else self.queues[owner].pop()

    def going(self, cell: Link, pages: int) -> None:
        self._of(cell)  # a state that stood before others alone has no owner here yet
        self._going[cell] = pages
        self.held[self._owners[cell]] -= pages

    def _went(self, cell: Link) -> None:
        """Count the pages of ``cell`` again, if it was going: it has gone and was counted, or it stays."""
        if cell in self._going:
            self.held[self._owners[cell]] += self._going.pop(cell)

    def forget(self, cell: Link) -> None:
        self._went(cell)
        if cell in self._owners:
            queue = self._of(cell)
            queue.forget(cell)
            owner = self._owners.pop(cell)
            if not self.held[owner] and queue.empty:  # else the owners that ever were would be remembered
                del self.held[owner], self.queues[owner]

    @property
    def remembered(self) -> Iterable[Link]:
        return [*self._owners, *(cell for queue in self.queues.values() for cell in queue.remembered)]


class BeforeOthers(_Owned):
    """What goes before all other cells of its owner, and not before those of an owner that keeps more."""

    __slots__ = ("_shared",)

    def __init__(self, shared: SharedQueue) -> None:
        super().__init__(ListQueue)
        self._shared = shared

    def remove(self, cell: Link) -> None:
        super().remove(cell)
        self._forget_owner_of(cell)

    def pop(self) -> Link | None:
        having = self.having()
        owner = self._shared.next_owner(self._shared.held, having)
        cell = self.queues[owner].pop() if owner in having else None
        if cell is not None:
            self._forget_owner_of(cell)
        return cell

    def _forget_owner_of(self, cell: Link) -> None:
        owner = self._owners.pop(cell)
        if self.queues[owner].empty:  # else the owners that ever were would be remembered
            del self.queues[owner]

    def due(self) -> Iterator[Any]:
        """Yield what goes before the next cell of the shared queue has to. The entries here say their ``pages``."""
        held = self._shared.held.copy()
        queues: dict[str, Iterator[Any]] = {owner: iter(self.queues[owner]) for owner in self.having()}
        first = {owner: next(links) for owner, links in queues.items()}
        while (owner := self._shared.next_owner(held, first)) in first:
            link = first.pop(owner)
            held[owner] -= link.pages
            yield link
            if (link := next(queues[owner], None)) is not None:
                first[owner] = link
