"""Eviction policies: by name, or by a key of somebody else's, and the queues (``queues``) that they make."""

from __future__ import annotations

import heapq
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import attrs

from .errors import CompositionError
from .queues import BucketQueue, ListQueue, MruQueue, Queue, SlruQueue

log = logging.getLogger("prefixloom")


@attrs.define(slots=True)
class Use:
    """What is known of a cell's use: logical times, never the clock."""

    born: int
    last: int
    uses: int
    tokens: int
    depth: int
    priority: int


def _last_use(use: Use) -> int:
    return use.last


class KeyedQueue(Queue):
    """Smallest key first, in a heap with lazy deletion: O(log n), for keys of somebody else's.

    A cell that leaves the queue keeps its entry in the heap, and uses it again if it comes back with the same key.
    """

    __slots__ = ("_entries", "_heap", "_key", "_tick", "_use")

    def __init__(self, key: Callable[[Use], Any]) -> None:
        self._key = key
        self._use: dict[Any, Use] = {}
        self._heap: list[tuple[int, Any, int, Any]] = []
        self._entries: dict[Any, tuple[int, Any, int, Any]] = {}  # the newest of each cell that is in the heap
        self._tick = 0

    def _enter(self, cell: Any, rank: int) -> None:
        self._tick += 1
        use = self._use.get(cell)
        if use is None:
            node = cell.node
            use = self._use[cell] = Use(self._tick, self._tick, 1, node.end - node.parent.end, node.end, 0)
        use.priority = cell.node.priority
        known = self._entries.get(cell)
        tick = self._tick
        try:
            key = self._key(use) if rank else -tick
            if known is not None and known[0] == rank and known[1] == key:
                tick = known[2]
            else:
                entry = (rank, key, tick, cell)
                heapq.heappush(self._heap, entry)
                self._entries[cell] = entry
        except Exception as error:  # serving must not depend on somebody else's idea of order
            cell.next = self
            cell.prev = tick
            self._fall_back(error)
        cell.next = self
        cell.prev = tick
        if len(self._heap) > 4 * len(self._use) + 64:
            self._heap = [entry for entry in self._heap if entry[3].next is self and entry[3].prev == entry[2]]
            self._entries = {entry[3]: entry for entry in self._heap}
            heapq.heapify(self._heap)

    def _fall_back(self, error: Exception) -> None:
        log.warning("the key of an eviction policy failed with %r; going on by last use", error)
        self._key = _last_use
        self._heap = [(1, use.last, cell.prev, cell) for cell, use in self._use.items() if cell.next is self]
        self._entries = {entry[3]: entry for entry in self._heap}
        heapq.heapify(self._heap)

    def add(self, cell: Any) -> None:
        use = self._use.get(cell)
        if use is not None:
            use.last = self._tick + 1
            use.uses += 1
        self._enter(cell, 1)

    def add_first(self, cell: Any) -> None:
        self._enter(cell, 0)

    def remove(self, cell: Any) -> None:
        cell.prev = cell.next = None

    def pop(self) -> Any:
        while self._heap:
            try:
                _, _, tick, cell = heapq.heappop(self._heap)
            except Exception as error:
                self._fall_back(error)
                continue
            newest = self._entries.get(cell)
            if newest is not None and newest[2] == tick:
                del self._entries[cell]
            if cell.next is self and cell.prev == tick:
                cell.prev = cell.next = None
                return cell
        return None

    def forget(self, cell: Any) -> None:
        self._use.pop(cell, None)
        self._entries.pop(cell, None)

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        use = self._use.get(lower)
        if use is not None:
            cut = upper.node.end
            self._use[upper] = attrs.evolve(use, tokens=cut - upper.node.parent.end, depth=cut)
            use.tokens = lower.node.end - cut
        if linked:
            self.add_first(upper) if use is None else self._enter(upper, 1)


class WatchedQueue(Queue):
    """A queue of somebody else's, until it raises or answers what cannot be: from then on the order is by last use.

    So what asks a queue need not reckon with its failing half-way: each call has its effect. Who stands in it is
    therefore known here as well, the one that was used last at the end.
    """

    __slots__ = ("_name", "_queue", "_standing")

    def __init__(self, name: str, queue: Queue) -> None:
        self._name = name
        self._queue = queue
        self._standing: OrderedDict[Any, None] = OrderedDict()

    def add(self, cell: Any) -> None:
        self._standing[cell] = None
        self._tell(cell, self._queue.add, cell)

    def add_first(self, cell: Any) -> None:
        self._standing[cell] = None
        self._standing.move_to_end(cell, last=False)
        self._tell(cell, self._queue.add_first, cell)

    def remove(self, cell: Any) -> None:
        del self._standing[cell]
        try:
            self._tell(None, self._queue.remove, cell)
        finally:
            cell.prev = cell.next = None

    def touch(self, cell: Any) -> None:
        self._standing.move_to_end(cell)
        self._tell(cell, self._queue.touch, cell)

    def forget(self, cell: Any) -> None:
        self._tell(None, self._queue.forget, cell)

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        if linked:
            self._standing[upper] = None
        self._tell(upper if linked else None, self._queue.inherit, upper, lower, linked)

    def pop(self) -> Any:
        standing = self._standing
        try:
            cell = self._queue.pop()
            if cell not in standing and (cell is not None or standing):
                raise LookupError(f"{cell!r} was the next of {len(standing)}, and is none of them")
        except BaseException as error:
            self._dismiss(error)
            cell = self._queue.pop()
        if cell is not None:
            del standing[cell]
            cell.prev = cell.next = None
        return cell

    def _tell(self, stands: Any, function: Callable[..., object], *arguments: Any) -> None:
        """The cell that ``stands`` in the queue by it, if one does, must look like it then."""
        try:
            function(*arguments)
            if stands is not None and stands.next is None:
                raise LookupError(f"{stands!r} was added, and its next is None")
        except BaseException as error:
            self._dismiss(error)

    def _dismiss(self, error: BaseException) -> None:
        """Whoever stands in the queue stands in one of ours; an interrupt is passed on after that."""
        log.warning("eviction policy %r failed with %r; going on by last use", self._name, error)
        self._queue = ListQueue()
        for cell in self._standing:
            self._queue.add(cell)
        if not isinstance(error, Exception):
            raise error


@attrs.frozen
class EvictionPolicy:
    """A way to order eviction: either a ready queue, or a key over ``Use`` (the smallest goes first)."""

    name: str
    key: Callable[[Use], Any] | None = None
    make: Callable[[], Queue] | None = None

    def queue(self) -> Queue:
        if self.make is not None:
            return self.make()
        if self.key is None:
            raise CompositionError(f"eviction policy {self.name!r} has neither a key nor a queue")
        return KeyedQueue(self.key)


BUILT_IN: dict[str, EvictionPolicy] = {
    policy.name: policy
    for policy in (
        EvictionPolicy("lru", make=ListQueue),
        EvictionPolicy("mru", make=MruQueue),
        EvictionPolicy("slru", make=SlruQueue),
        EvictionPolicy("lfu", make=lambda: BucketQueue(lambda cell, uses: uses)),
        EvictionPolicy("priority", make=lambda: BucketQueue(lambda cell, uses: int(cell.node.priority))),
        EvictionPolicy("fifo", key=lambda use: use.born),
    )
}


def serving(policy: EvictionPolicy) -> Queue:
    """A queue for a cache, which serves on whatever somebody else's idea of order does."""
    if policy.make is None or BUILT_IN.get(policy.name) is policy:
        return policy.queue()
    try:
        queue = policy.make()
    except Exception as error:
        log.warning("eviction policy %r makes no queue, %r; going on by last use", policy.name, error)
        queue = ListQueue()
    return queue if queue.__class__ is ListQueue else WatchedQueue(policy.name, queue)
