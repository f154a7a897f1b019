"""Eviction policies: the built-in ones by name, and how a third-party key or queue serves a component safely."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs

from ..errors import CompositionError
from .queues import BucketQueue, Link, ListQueue, MruQueue, PriorityQueue, Queue, SlruQueue
from .shares import SharedQueue

log = logging.getLogger("prefixloom")


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


class KeyedQueue(Queue):
    """A queue in the order of a third-party key, smallest first: a heap with lazy deletion, O(log n).

    A cell that leaves the queue keeps its entry in the heap, and uses it again if it comes back with the same key.
    """

    __slots__ = ("_entries", "_heap", "_key", "_tick", "_use")

    def __init__(self, key: Callable[[Use], Any]) -> None:
        self._key = key
        self._use: dict[Any, Use] = {}
        self._heap: list[tuple[int, Any, int, Any]] = []
        self._entries: dict[Any, tuple[int, Any, int, Any]] = {}  # the newest of each cell that is in the heap
        self._tick = 0

    def __iter__(self) -> Iterator[Any]:
        return (cell for _, _, tick, cell in self._heap if cell.next is self and cell.prev == tick)

    @property
    def remembered(self) -> Iterable[Any]:
        return {**self._use, **self._entries}

    def _enter(self, cell: Any, rank: int) -> None:
        self._tick += 1
        use = self._use.get(cell)
        if use is None:
            node = cell.node
            use = self._use[cell] = Use(self._tick, self._tick, 1, node.end - node.parent.end, node.end, 0)
        use.priority = cell.node.priority
        known = self._entries.get(cell)
        tick = self._tick
        key = self._key(use) if rank else -tick
        if known is not None and known[0] == rank and known[1] == key:
            tick = known[2]
        else:
            entry = (rank, key, tick, cell)
            heapq.heappush(self._heap, entry)
            self._entries[cell] = entry
        cell.next = self
        cell.prev = tick
        if len(self._heap) > 4 * len(self._use) + 64:
            self._heap = [entry for entry in self._heap if entry[3].next is self and entry[3].prev == entry[2]]
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
            _, _, tick, cell = heapq.heappop(self._heap)
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


class Guest(Link):
    """A stand-in for a cell in a third-party queue. It knows the cell's ``node`` and has links of its own."""

    __slots__ = ("cell", "node")

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self.node = cell.node
        self.prev = self.next = None


class WatchedQueue(ListQueue):
    """A third-party eviction queue under supervision: once it raises or gives an impossible answer, eviction goes on
    by last use.

    The cells stand in a list of our own, and guests for them in the third-party queue. So it is always known which
    cells may be evicted, each call has its effect, and the third-party queue can be dismissed at any time.
    """

    __slots__ = ("_guests", "_name", "_queue")

    def __init__(self, name: str, queue: Queue) -> None:
        super().__init__()
        self._name = name
        self._queue: Queue | None = queue
        self._guests: dict[Any, Guest] = {}

    @property
    def remembered(self) -> Iterable[Any]:
        return self._guests

    def add(self, cell: Any) -> None:
        super().add(cell)
        self._forward("add", cell)

    def add_first(self, cell: Any) -> None:
        super().add_first(cell)
        self._forward("add_first", cell)

    def remove(self, cell: Any) -> None:
        super().remove(cell)
        self._forward("remove", cell)

    def drop(self, cell: Any) -> None:
        self.remove(cell)

    def touch(self, cell: Any) -> None:
        super().touch(cell)
        self._forward("touch", cell)

    def forget(self, cell: Any) -> None:
        guest = self._guests.get(cell)
        if guest is not None:
            self._forward("forget", cell)
            self._guests.pop(cell, None)
            guest.cell = guest.node = None  # a queue that keeps the guest must not keep the cell alive

    def inherit(self, upper: Any, lower: Any, linked: bool) -> None:
        super().inherit(upper, lower, linked)
        if lower in self._guests:
            self._forward("inherit", upper, self._guests[lower], linked)

    def pop(self) -> Any:
        if self._queue is None:
            return super().pop()
        try:
            guest = self._queue.pop()
            if guest is None and self.empty:
                return None
            cell = getattr(guest, "cell", None)
            if cell is None or self._guests.get(cell) is not guest or cell.next is None:
                raise LookupError("pop() gave a cell that does not stand in the queue")
        except BaseException as error:
            self._dismiss(error)
            return super().pop()
        super().remove(cell)
        return cell

    def _forward(self, method: str, cell: Any, *more: Any) -> None:
        """Call ``method`` of the third-party queue with the guest for ``cell``."""
        if self._queue is None:
            return
        guest = self._guests.get(cell)
        if guest is None:
            guest = self._guests[cell] = Guest(cell)
        try:
            getattr(self._queue, method)(guest, *more)
        except BaseException as error:
            self._dismiss(error)

    def _dismiss(self, error: BaseException) -> None:
        """Go on without the third-party queue. An interrupt (not an ``Exception``) is raised again."""
        self._queue = None
        self._clear_guests()
        if not isinstance(error, Exception):
            raise error
        log.warning("eviction policy %r failed; going on by last use", self._name, exc_info=error)

    def _clear_guests(self) -> None:
        """Cut the links of all guests, which form cycles with the third-party queue."""
        guests = self._guests
        self._guests = {}
        for guest in guests.values():
            guest.cell = guest.node = guest.prev = guest.next = None

    def __del__(self) -> None:
        super().__del__()
        self._clear_guests()


@attrs.frozen
class EvictionPolicy:
    """An order of eviction: ``make`` returns a queue, or ``key`` is a function of a ``Use`` (lowest evicted first).

    ``make_states`` returns the queue of a component of states, if that is another one than ``make`` returns. ``shares``
    are those of ``compose``: then each owner has a queue of its own.
    """

    name: str
    key: Callable[[Use], Any] | None = None
    make: Callable[[], Queue] | None = None
    make_states: Callable[[], Queue] | None = None
    shares: Mapping[str, float] | None = None

    def queue(self, *, states: bool = False) -> Queue:
        """Make the queue of one component. ``states``: its cells are states, of one slot each, and not pages."""
        if states and self.make_states is not None:
            return self.make_states()
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
        EvictionPolicy("priority", make=PriorityQueue),
        EvictionPolicy("fifo", key=lambda use: use.born),
    )
}


def missing_methods(queue: object) -> list[str]:
    """The methods that a queue must have and this one has not."""
    needed = ("add", "add_first", "remove", "touch", "pop", "forget", "inherit")
    return [name for name in needed if not callable(getattr(queue, name, None))]


def serving(policy: EvictionPolicy, *, states: bool = False) -> Queue:
    """Make the queue of one component, of states or of pages. It keeps working even if a third-party policy fails."""
    if policy.shares is not None:
        return SharedQueue(partial(serving, attrs.evolve(policy, shares=None), states=states), policy.shares)
    if policy in BUILT_IN.values():
        return policy.queue()
    try:
        queue = policy.queue(states=states)
        if missing := missing_methods(queue):
            raise LookupError(f"it made {queue!r}, which has no {', '.join(missing)}")
    except Exception as error:
        log.warning("eviction policy %r makes no queue; going on by last use", policy.name, exc_info=error)
        queue = ListQueue()
    return ListQueue() if type(queue) is ListQueue else WatchedQueue(policy.name, queue)
