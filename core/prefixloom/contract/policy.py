"""Eviction policies: the built-in ones by name, and how a third-party key or queue serves a component safely."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import attrs

from ..errors import CompositionError
from .checks import function, typed
from .queues import KeyedQueue, Link, ListQueue, Queue, RankedQueue, Use
from .shares import SharedQueue

log = logging.getLogger("prefixloom")


class Guest(Link):
    """A stand-in for a cell in a third-party queue. It knows the cell's ``node`` and has links of its own."""

    __slots__ = ("cell", "node")

    cell: Link | None

    def __init__(self, cell: Link) -> None:
        self.cell = cell
        self.node = cell.node
        self.prev = self.next = None


class WatchedQueue(ListQueue[Link]):
    """A third-party eviction queue under supervision: once it raises or gives an impossible answer, eviction goes on
    by last use.

    The cells stand in a list of our own, and guests for them in the third-party queue. So it is always known which
    cells may be evicted, each call has its effect, and the third-party queue can be dismissed at any time.
    """

    __slots__ = ("_guests", "_name", "_queue")

    def __init__(self, name: str, queue: Queue[Guest]) -> None:
        super().__init__()
        self._name = name
        self._queue: Queue[Guest] | None = queue
        self._guests: dict[Link, Guest] = {}

    @property
    def remembered(self) -> Iterable[Link]:
        return self._guests

    def add(self, cell: Link) -> None:
        super().add(cell)
        self._forward("add", cell)

    def add_first(self, cell: Link) -> None:
        super().add_first(cell)
        self._forward("add_first", cell)

    def remove(self, cell: Link) -> None:
        super().remove(cell)
        self._forward("remove", cell)

    def touch(self, cell: Link) -> None:
        super().touch(cell)
        self._forward("touch", cell)

    def forget(self, cell: Link) -> None:
        guest = self._guests.get(cell)
        if guest is not None:
            self._forward("forget", cell)
            self._guests.pop(cell, None)
            guest.cell = guest.node = None  # a queue that keeps the guest must not keep the cell alive

    def inherit(self, upper: Link, lower: Link, linked: bool) -> None:
        super().inherit(upper, lower, linked)
        if lower in self._guests:
            self._forward("inherit", upper, self._guests[lower], linked)

    def pop(self) -> Link | None:
        if self._queue is None:
            return super().pop()
        try:
            guest = self._queue.pop()
            if guest is None and self.empty:
                return None
            cell: Link | None = getattr(guest, "cell", None)
            if cell is None or self._guests.get(cell) is not guest or cell.next is None:
                raise LookupError("pop() gave a cell that does not stand in the queue")
        except BaseException as error:
            self._dismiss(error)
            return super().pop()
        super().remove(cell)
        return cell

    def _forward(self, method: str, cell: Link, *more: object) -> None:
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


METHODS = ("add", "add_first", "remove", "touch", "pop", "forget", "inherit")
"""The methods that a queue must have."""


@attrs.frozen
class EvictionPolicy:
    """An order of eviction: ``make`` returns a queue, or ``key`` is a function of a ``Use`` (lowest evicted first).

    ``make_states`` returns the queue of a component of states, if that is another one than ``make`` returns. ``shares``
    are those of ``compose``: then each owner has a queue of its own.
    """

    name: str = attrs.field(validator=typed(str))
    key: Callable[[Use], Any] | None = attrs.field(default=None, validator=function)
    make: Callable[[], Queue] | None = attrs.field(default=None, validator=function)
    make_states: Callable[[], Queue] | None = attrs.field(default=None, validator=function)
    shares: Mapping[str, float] | None = None

    def queue(self, *, states: bool = False) -> Queue:
        """Make the queue of one component. ``states``: its cells are states, of one slot each, and not pages."""
        make = self.make_states if states and self.make_states is not None else self.make
        if make is None:
            if self.key is None:
                raise CompositionError("it has neither a key nor a queue")
            make = partial(KeyedQueue, self.key)
        queue = make()
        if missing := [name for name in METHODS if not callable(getattr(queue, name, None))]:
            raise CompositionError(f"it makes {queue!r}, which has no {', '.join(missing)}")
        return queue


BUILT_IN: dict[str, EvictionPolicy] = {
    policy.name: policy
    for policy in (
        EvictionPolicy("lru", make=ListQueue),
        EvictionPolicy("slru", make=lambda: RankedQueue(lambda use: use.uses > 1)),
        EvictionPolicy("lfu", make=lambda: RankedQueue(lambda use: use.uses)),
        EvictionPolicy("priority", make=lambda: RankedQueue(lambda use: use.priority)),
    )
}


def serving(policy: EvictionPolicy, *, states: bool = False) -> Queue:
    """Make the queue of one component, of states or of pages. It keeps working even if a third-party policy fails."""
    if policy.shares is not None:
        return SharedQueue(partial(serving, attrs.evolve(policy, shares=None), states=states), policy.shares)
    if policy in BUILT_IN.values():
        return policy.queue()
    try:
        queue = policy.queue(states=states)
    except Exception as error:
        log.warning("eviction policy %r makes no queue; going on by last use", policy.name, exc_info=error)
        queue = ListQueue()
    return ListQueue() if type(queue) is ListQueue else WatchedQueue(policy.name, queue)
