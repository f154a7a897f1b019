"""Queues: the cells that may be evicted, in the order of eviction.

A cell stands in a queue exactly while it may be evicted; ``cell.next is not None`` says that a live cell does. A queue
knows nothing of trees or pools. The cost of a list queue does not depend on the size of the tree.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic

import attrs
from typing_extensions import TypeVar


class Link:
    """Something that can stand in a queue. While it does not, ``next`` is None and ``prev`` has no meaning."""

    __slots__ = ("next", "prev")

    prev: Any
    next: Any
    node: Any
    """The tree's node that the cell belongs to."""


class End(Link):
    """The sentinel before the first and behind the last entry of a list.

    Its ``below`` makes it look like a cell with cells below it, which may not be evicted: a loop over evictable cells
    stops there without an extra test.
    """

    __slots__ = ()
    below = 1


L = TypeVar("L", bound=Link, default=Any)
"""The cells of a queue."""


class Queue(Generic[L]):
    """The order of eviction among the cells of one component."""

    __slots__ = ()

    def add(self, cell: L) -> None:
        """Enter a cell that was used just now and may be evicted from now on."""
        raise NotImplementedError

    def add_first(self, cell: L) -> None:
        """Enter a cell that may be evicted, and should be evicted next."""
        raise NotImplementedError

    def remove(self, cell: L) -> None:
        """Take out a cell, which is in the queue."""
        raise NotImplementedError

    def pop(self) -> L | None:
        """Take out the next cell to evict and return it; None if the queue is empty."""
        raise NotImplementedError

    def forget(self, cell: L) -> None:
        """Forget a cell that is gone for good."""

    def inherit(self, upper: L, lower: L, linked: bool) -> None:
        """Give ``upper``, which was split off ``lower``, the same history; if ``linked``, enter it behind ``lower``."""
        raise NotImplementedError

    def touch(self, cell: L) -> None:
        """Note that a cell, which is in the queue, was used just now."""
        self.remove(cell)
        self.add(cell)

    # The core alone uses what follows, and only of the queues that this project defines.
    def before(self) -> Queue[Any]:
        """Make the queue of what is evicted before all that stands here."""
        return ListQueue()

    def due(self) -> Iterable[L]:
        """Return what stands in a queue that ``before`` made, in the order of eviction."""
        return self

    @property
    def empty(self) -> bool:
        """Whether no cell stands in the queue."""
        raise NotImplementedError

    def count(self, namespace: str, pages: int) -> None:
        """Note that the tree has so many pages (or states) more of ``namespace``."""

    def going(self, cell: L, pages: int) -> None:
        """Note that a popped cell with so many pages is about to be freed, unless it is added again."""

    # Debug mode alone uses what follows.
    def __iter__(self) -> Iterator[L]:
        """Yield the cells in the queue, in any order."""
        raise NotImplementedError

    @property
    def remembered(self) -> Iterable[L]:
        """The cells whose history is known, whether they stand in the queue or not."""
        return ()


class ListQueue(Queue[L]):
    """A queue with the least recently used cell first: an intrusive list, every operation O(1)."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        end = self._end = End()
        end.prev = end.next = end

    @property
    def empty(self) -> bool:
        return self._end.next is self._end

    def __iter__(self) -> Iterator[L]:
        cell = self._end.next
        while cell is not self._end:
            yield cell
            cell = cell.next

    def add(self, cell: L) -> None:
        end = self._end
        last = end.prev
        cell.prev = last
        cell.next = end
        last.next = end.prev = cell

    def add_first(self, cell: L) -> None:
        end = self._end
        first = end.next
        cell.prev = end
        cell.next = first
        first.prev = end.next = cell

    def remove(self, cell: L) -> None:
        before, after = cell.prev, cell.next
        before.next = after
        after.prev = before
        cell.prev = cell.next = None

    def pop(self) -> L | None:
        end = self._end
        cell: L = end.next
        if cell is end:
            return None
        after = cell.next
        end.next = after
        after.prev = end
        cell.next = None
        return cell

    def __del__(self) -> None:
        end = getattr(self, "_end", None)  # None: an interrupt came while it was made
        if end is not None:
            end.prev = end.next = None  # an empty list is a cycle

    def inherit(self, upper: L, lower: L, linked: bool) -> None:
        if linked:
            after = lower.next
            upper.prev = lower
            upper.next = after
            lower.next = after.prev = upper


@attrs.define(slots=True)
class Use:
    """The use of a cell, as the key of an eviction policy sees it.

    ``born``, ``last``   logical times of the first and of the last use; never the time of a clock
    ``uses``             number of uses
    ``tokens``, ``depth``  tokens of the cell's edge, and tokens from the root to its end
    ``priority``         the priority of its node
    """

    born: int
    last: int
    uses: int
    tokens: int
    depth: int
    priority: int


Entry = tuple[int, Any, int, L]
"""Of a heap: 0 if the cell goes before those with a key, else 1; its key; when it came; and the cell."""


class KeyedQueue(Queue[L]):
    """A queue in the order of a key, smallest first, and of equals the one that came first: a heap, O(log n).

    ``cell.prev`` says when a cell came. An entry of another time is of a cell that has left since.
    """

    __slots__ = ("_heap", "_key", "_tick", "_use", "standing")

    def __init__(self, key: Callable[[Use], Any]) -> None:
        self._key = key
        self._use: dict[L, Use] = {}
        self._heap: list[Entry[L]] = []
        self._tick = 0
        self.standing = 0
        """How many cells stand in the queue."""

    @property
    def empty(self) -> bool:
        return not self.standing

    def __iter__(self) -> Iterator[L]:
        return (entry[3] for entry in self._heap if self._stands(entry))

    def _stands(self, entry: Entry[L]) -> bool:
        return entry[3].next is self and entry[3].prev == entry[2]

    @property
    def remembered(self) -> Iterable[L]:
        return self._use

    def _enter(self, cell: L, rank: int) -> None:
        self._tick += 1
        use = self._use.get(cell)
        if use is None:
            node = cell.node
            use = self._use[cell] = Use(self._tick, self._tick, rank, node.end - node.parent.end, node.end, 0)
        use.priority = cell.node.priority
        heapq.heappush(self._heap, (rank, self._key(use) if rank else -self._tick, self._tick, cell))
        self.standing += cell.next is None
        cell.next = self
        cell.prev = self._tick
        if len(self._heap) > 4 * len(self._use) + 64:
            self._heap = [entry for entry in self._heap if self._stands(entry)]
            heapq.heapify(self._heap)

    def add(self, cell: L) -> None:
        use = self._use.get(cell)
        if use is not None:
            use.last = self._tick + 1
            use.uses += 1
        self._enter(cell, 1)

    def add_first(self, cell: L) -> None:
        self._enter(cell, 0)

    def remove(self, cell: L) -> None:
        self.standing -= 1
        cell.prev = cell.next = None

    def pop(self) -> L | None:
        while self._heap:
            if self._stands(entry := heapq.heappop(self._heap)):
                self.remove(entry[3])
                return entry[3]
        return None

    def forget(self, cell: L) -> None:
        self._use.pop(cell, None)

    def inherit(self, upper: L, lower: L, linked: bool) -> None:
        use = self._use.get(lower)
        if use is not None:
            cut = upper.node.end
            self._use[upper] = attrs.evolve(use, tokens=cut - upper.node.parent.end, depth=cut)
            use.tokens = lower.node.end - cut
        if linked:
            self.add_first(upper) if use is None else self._enter(upper, 1)


KEPT_TURNS = 8
"""A rank above 0 keeps what nobody uses for so many turns of eviction. In a turn as many cells are evicted as stood in
the queue when it began."""


class RankedQueue(KeyedQueue[L]):
    """A queue with the lowest rank first, and the least recently used first within a rank.

    A rank above 0 ends when the cell was not used for ``KEPT_TURNS`` turns. Otherwise what was wanted once would stay
    for ever, and one request could pin what it left.
    """

    __slots__ = ("_began", "_kept", "_left", "_rank")

    def __init__(self, rank: Callable[[Use], int]) -> None:
        began = self._began = deque([0], KEPT_TURNS)
        """When the last turns began. What was used last before the first of them has no rank above 0 any more."""
        self._kept: OrderedDict[L, None] = OrderedDict()
        """The cells with a rank above 0, by last use. After a split the upper half is last: its rank may end late."""
        self._left = 0  # how many more evictions the turn has
        self._rank = rank
        super().__init__(lambda use: (min(rank(use), 0) if use.last <= began[0] else rank(use), use.last))

    def add(self, cell: L) -> None:
        super().add(cell)
        self._kept.pop(cell, None)
        if self._rank(self._use[cell]) > 0:
            self._kept[cell] = None

    def add_first(self, cell: L) -> None:
        super().add_first(cell)
        self._kept.pop(cell, None)

    def forget(self, cell: L) -> None:
        super().forget(cell)
        self._kept.pop(cell, None)

    def inherit(self, upper: L, lower: L, linked: bool) -> None:
        super().inherit(upper, lower, linked)
        if lower in self._kept:
            self._kept[upper] = None

    def pop(self) -> L | None:
        if not self._left:
            self._begin_turn()
        cell = super().pop()
        self._left -= cell is not None
        return cell

    def _begin_turn(self) -> None:
        self._began.append(self._tick)
        self._left = self.standing
        while self._kept and self._use[cell := next(iter(self._kept))].last <= self._began[0]:
            del self._kept[cell]
            if cell.next is self:
                self._enter(cell, 1)
