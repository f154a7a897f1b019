"""Queues: the cells that may be evicted, in the order of eviction.

A cell stands in a queue exactly while it may be evicted; ``cell.next is not None`` says that a live cell does. A queue
knows nothing of trees or pools. The cost of a list queue does not depend on the size of the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Link:
    """Something that can stand in a queue. While it does not, ``next`` is None and ``prev`` has no meaning."""

    __slots__ = ("next", "prev")

    prev: Any
    next: Any


class End(Link):
    """The sentinel before the first and behind the last entry of a list.

    Its ``below`` makes it look like a cell with cells below it, which may not be evicted: a loop over evictable cells
    stops there without an extra test.
    """

    __slots__ = ()
    below = 1


class Queue:
    """The order of eviction among the cells of one component."""

    __slots__ = ()

    def add(self, cell: Any) -> None:
        """Enter a cell that was used just now and may be evicted from now on."""
        raise NotImplementedError

    def add_first(self, cell: Any) -> None:
        """Enter a cell that may be evicted, and should be evicted next."""
        raise NotImplementedError

    def remove(self, cell: Any) -> None:
        """Take out a cell, which is in the queue: it may not be evicted any more, or it is a state that goes before
        all that stand in the queue.
        """
        raise NotImplementedError

    def pop(self) -> Any:
        """Take out the next cell to evict and return it; None if the queue is empty."""
        raise NotImplementedError

    def forget(self, cell: Any) -> None:
        """Forget a cell that is gone for good."""

    def drop(self, cell: Any) -> None:
        """``remove`` a cell that is gone for good. Its links need not be reset."""
        self.remove(cell)

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        """Give ``upper``, which was split off ``lower``, the same history; if ``linked``, enter it behind ``lower``."""
        raise NotImplementedError

    def touch(self, cell: Any) -> None:
        """Note that a cell, which is in the queue, was used just now."""
        self.remove(cell)
        self.add(cell)

    # The core alone uses what follows, and only of the queues that this project defines.
    def before(self) -> Queue:
        """Make the queue of what is evicted before all that stands here."""
        return ListQueue()

    def due(self) -> Iterable[Any]:
        """What stands in the queue, in the order in which it is evicted; for queues that ``before`` makes."""
        return self

    def count(self, namespace: str, pages: int) -> None:
        """Note that the tree has so many pages (or states) more of ``namespace``."""

    def going(self, cell: Any, pages: int) -> None:
        """Note that a cell that was popped goes soon, with so many pages, unless it is added again."""

    # Debug mode alone uses what follows.
    def __iter__(self) -> Iterator[Any]:
        """What stands in the queue, in any order."""
        raise NotImplementedError

    @property
    def remembered(self) -> Iterable[Any]:
        """The cells whose history is known, whether they stand in the queue or not."""
        return ()


class ListQueue(Queue):
    """A queue with the least recently used cell first: an intrusive list, every operation O(1)."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        end = self._end = End()
        end.prev = end.next = end

    @property
    def empty(self) -> bool:
        return self._end.next is self._end

    def __iter__(self) -> Iterator[Any]:
        cell = self._end.next
        while cell is not self._end:
            yield cell
            cell = cell.next

    def add(self, cell: Any) -> None:
        end = self._end
        last = end.prev
        cell.prev = last
        cell.next = end
        last.next = end.prev = cell

    def add_first(self, cell: Any) -> None:
        end = self._end
        first = end.next
        cell.prev = end
        cell.next = first
        first.prev = end.next = cell

    def remove(self, cell: Any) -> None:
        before, after = cell.prev, cell.next
        before.next = after
        after.prev = before
        cell.prev = cell.next = None

    def drop(self, cell: Any) -> None:
        before, after = cell.prev, cell.next
        before.next = after
        after.prev = before

    def pop(self) -> Any:
        end = self._end
        cell = end.next
        if cell is end:
            return None
        after = cell.next
        end.next = after
        after.prev = end
        cell.next = None
        return cell

    def touch(self, cell: Any) -> None:
        end = self._end
        before, after = cell.prev, cell.next
        before.next = after
        after.prev = before
        last = end.prev
        cell.prev = last
        cell.next = end
        last.next = end.prev = cell

    def __del__(self) -> None:
        end = getattr(self, "_end", None)  # None: an interrupt came while it was made
        if end is not None:
            end.prev = end.next = None  # an empty list is a cycle

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        if linked:
            after = lower.next
            upper.prev = lower
            upper.next = after
            lower.next = after.prev = upper


class MruQueue(ListQueue):
    """A queue with the most recently used cell first."""

    __slots__ = ()

    def add(self, cell: Any) -> None:
        super().add_first(cell)

    def touch(self, cell: Any) -> None:
        self.remove(cell)
        self.add(cell)


class SortedQueue(Queue):
    """Base of queues that are made of several lists: which list a cell stands in, and how often it was used.

    ``uses`` has a number for every cell that is or was in the queue, and is not gone for good.
    """

    __slots__ = ("_first", "_place", "uses")

    def __init__(self) -> None:
        self._first = ListQueue()
        self.uses: dict[Any, int] = {}
        self._place: dict[Any, ListQueue] = {}

    def __iter__(self) -> Iterator[Any]:
        return iter(self._place)

    @property
    def remembered(self) -> Iterable[Any]:
        return self.uses

    def _put(self, cell: Any, queue: ListQueue) -> None:
        self._place[cell] = queue
        queue.add(cell)

    def add_first(self, cell: Any) -> None:
        self._place[cell] = self._first
        self._first.add_first(cell)

    def remove(self, cell: Any) -> None:
        self._place.pop(cell).remove(cell)

    def forget(self, cell: Any) -> None:
        self.uses.pop(cell, None)

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        if lower in self.uses:
            self.uses[upper] = self.uses[lower]
        if linked:
            place = self._place[upper] = self._place[lower]
            place.inherit(upper, lower, linked)

    def _popped(self, cell: Any) -> Any:
        if cell is not None:
            del self._place[cell]
        return cell


class SlruQueue(SortedQueue):
    """Segmented LRU: cells that were used again are protected, up to four fifths of all; others are evicted first."""

    __slots__ = ("_probation", "_protected", "_protected_count")

    def __init__(self) -> None:
        super().__init__()
        self._probation = ListQueue()
        self._protected = ListQueue()
        self._protected_count = 0

    def add(self, cell: Any) -> None:
        if cell not in self.uses:
            self.uses[cell] = 0
            self._put(cell, self._probation)
            return
        self._put(cell, self._protected)
        self._protected_count += 1
        if self._protected_count * 5 > len(self._place) * 4 and self._protected_count > 1:
            oldest = self._protected.pop()
            self._protected_count -= 1
            self._put(oldest, self._probation)

    def remove(self, cell: Any) -> None:
        if self._place[cell] is self._protected:
            self._protected_count -= 1
        super().remove(cell)

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        super().inherit(upper, lower, linked)
        if linked and self._place[upper] is self._protected:
            self._protected_count += 1

    def pop(self) -> Any:
        cell = self._first.pop() or self._probation.pop()
        if cell is None:
            cell = self._protected.pop()
            self._protected_count -= cell is not None
        return self._popped(cell)


class _Bucket(ListQueue):
    __slots__ = ("rank",)

    def __init__(self, rank: Any) -> None:
        super().__init__()
        self.rank = rank


class BucketQueue(SortedQueue):
    """A queue with the lowest rank first, and the least recently used first within a rank.

    There is a bucket for each rank that is in use.
    """

    __slots__ = ("_buckets", "_rank", "_ranks")

    def __init__(self, rank: Callable[[Any, int], Any]) -> None:
        super().__init__()
        self._rank = rank
        self._buckets: dict[Any, _Bucket] = {}
        self._ranks: list[Any] = []  # a heap; a rank may stand in it after its bucket has gone

    def add(self, cell: Any) -> None:
        count = self.uses[cell] = self.uses.get(cell, 0) + 1
        self._put(cell, self._bucket(self._rank(cell, count)))

    def _bucket(self, rank: Any) -> _Bucket:
        bucket = self._buckets.get(rank)
        if bucket is None:
            bucket = self._buckets[rank] = _Bucket(rank)
            heapq.heappush(self._ranks, rank)
            if len(self._ranks) > 2 * len(self._buckets) + 64:
                self._ranks = sorted(self._buckets)
        return bucket

    def _drop_if_empty(self, bucket: ListQueue | None) -> None:
        if isinstance(bucket, _Bucket) and bucket.empty:
            del self._buckets[bucket.rank]

    def remove(self, cell: Any) -> None:
        bucket = self._place.get(cell)
        super().remove(cell)
        self._drop_if_empty(bucket)

    def pop(self) -> Any:
        cell = self._first.pop()
        ranks = self._ranks
        while cell is None and ranks:
            bucket = self._buckets.get(ranks[0])
            if bucket is None:
                heapq.heappop(ranks)
                continue
            cell = bucket.pop()
            self._drop_if_empty(bucket)
        return self._popped(cell)


KEPT_TURNS = 8
"""A priority above 0 keeps what nobody uses for so many turns of eviction. In a turn as many cells are evicted as stood
in the queue when it began."""


class PriorityQueue(BucketQueue):
    """A queue with the lowest priority first, and the least recently used first within a priority.

    A priority above 0 ends when the cell was not used for ``KEPT_TURNS`` turns. Otherwise one request could pin what it
    left for ever.
    """

    __slots__ = ("_left", "_turn")

    def __init__(self) -> None:
        turn = [0]

        def rank(cell: Any, uses: int) -> tuple[int, int]:
            priority = cell.node.priority
            return priority, turn[0] if priority > 0 else 0

        super().__init__(rank)
        self._turn = turn
        self._left = 0
        """How many more evictions the turn has."""

    def pop(self) -> Any:
        if not self._left:
            self._begin_turn()
        cell = super().pop()
        self._left -= cell is not None
        return cell

    def _begin_turn(self) -> None:
        self._turn[0] += 1
        self._left = len(self._place)
        over = sorted(rank for rank in self._buckets if rank[0] > 0 and rank[1] <= self._turn[0] - KEPT_TURNS)
        for cell in reversed([cell for rank in over for cell in self._buckets[rank]]):
            self.remove(cell)
            self._place[cell] = bucket = self._bucket((0, 0))
            bucket.add_first(cell)  # unlike what else has no priority, it was not used for all these turns
