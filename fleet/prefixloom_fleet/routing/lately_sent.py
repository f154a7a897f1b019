"""LatelySent: which prefixes were sent to which replica, of which no event has told yet.

A replica announces a prefix when it is computed. Until then a second request of the same new prefix would be sent
anywhere, and would be computed twice. So a policy remembers what it sent lately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from .contract import ReplicaView, RoutingRequest

LATELY = 8
"""Requests that count as sent lately, beside those that the replica has not answered yet."""
FINE = 32
"""The first so many pages of a prompt are all remembered, and of the others at least one in so many."""
MOST_LINKS = 1 << 19
"""The most links that are remembered, of all replicas together."""


def marks(count: int) -> Iterator[int]:
    """Yield the places of those pages that are remembered: ever fewer towards the end of a long prompt."""
    place, step, until = 0, 1, 2 * FINE
    while place < count:
        yield place
        place += step
        if place >= until:
            step, until = 2 * step, 2 * until


class LatelySent:
    """The prefixes of the last requests that were sent to each replica.

    ``always``  everything counts that is still remembered, and not only what was sent lately: for routers that are told
                nothing of what replicas have
    """

    def __init__(self, *, always: bool = False, most: int = MOST_LINKS) -> None:
        self._always, self._most = always, most
        self._count = self._size = 0
        self._sent: dict[str, deque[int]] = {}
        """By replica, the numbers of the requests that were sent there and are remembered."""
        self._links: dict[int, tuple[str, tuple[int, ...]]] = {}
        """By number of a request, the replica that it was sent to, and the links that are remembered of it."""
        self._where: dict[int, dict[str, int]] = {}
        """By link, the replicas that it was sent to, each with the number of the last request that had it."""

    def __len__(self) -> int:
        return self._size

    def add(self, request: RoutingRequest, replica: ReplicaView) -> None:
        """Note that ``request`` is sent to ``replica``."""
        name, links = replica.name, request.links
        kept = tuple(links[place] for place in marks(len(links)))
        self._count += 1
        self._links[self._count] = name, kept
        self._sent.setdefault(name, deque()).append(self._count)
        self._size += len(kept)
        for link in kept:
            self._where.setdefault(link, {})[name] = self._count
        if not self._always:
            while len(self._sent[name]) > replica.running + 1 + LATELY:
                self._forget(self._sent[name][0])
        while self._size > self._most and len(self._links) > 1:
            self._forget(next(iter(self._links)))

    def depths(self, request: RoutingRequest) -> dict[str, int]:
        """Return by replica how many tokens of ``request`` were sent there before."""
        found: dict[str, int] = {}
        reached: dict[str, int] | None = None
        for place in marks(len(request.links)):
            here = self._where.get(request.links[place])
            if here is None:
                break
            names = here if reached is None else [name for name in reached if name in here]
            reached = dict.fromkeys(names, (place + 1) * request.unit)
            if not reached:
                break
            found |= reached
        return found

    def _forget(self, number: int) -> None:
        name, links = self._links.pop(number)
        self._size -= len(links)
        sent = self._sent[name]
        sent.popleft()  # of one replica, the oldest is forgotten first
        if not sent:
            del self._sent[name]
        for link in links:
            here = self._where[link]
            if here.get(name) == number:
                del here[name]
                if not here:
                    del self._where[link]
