"""Member: one replica of a simulated fleet while it is there, and what a router's policy sees of it.

Of its load a router knows everything at once: what was sent there, what of it is computed, and what is answered. Of its
cache it knows what the index has heard. A replica that lies says that it has every prompt, until the router finds that
out: for a while it then believes nothing that the replica says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import attrs

from prefixloom import Cache, SequenceNeeds

from ..routing import RoutingRequest
from ..routing.promises import Promises
from .replica import SimulatedReplica

Depths = tuple[Mapping[int, int], Mapping[int, int]]
"""By replica, the tokens of a request that have their pages there, and those after which it can resume."""


class Router(Protocol):
    """The router that all replicas have in common."""

    needs: SequenceNeeds
    now: float

    def depths(self, request: RoutingRequest) -> Depths: ...


@attrs.define(eq=False)
class Member:
    """One replica, as a policy sees it, and what the fleet keeps of it.

    ``number``  of all replicas that there ever were, and ``place`` among those of the fleet
    ``due``     when its next event is
    ``lost``    tokens that it had computed for nothing when it died
    """

    name: str
    number: int
    place: int
    begun: float
    lies: bool
    _router: Router
    replica: SimulatedReplica | None = None
    cache: Cache | None = None
    due: float = math.inf
    lost: int = 0
    died: float | None = None
    tokens_ahead: int = 0
    running: int = 0
    _promises: Promises = attrs.field(factory=Promises, init=False)
    _expected: dict[int, int] = attrs.field(factory=dict, init=False)
    """By request that was sent there and is not over: the tokens of its prompt that are still to be computed."""
    _promised: dict[int, int] = attrs.field(factory=dict, init=False)
    """By such a request, the tokens of its prompt that were said to hit."""

    @property
    def free(self) -> Mapping[str, float]:
        if self.cache is None:
            return {}
        figures = self.cache.stats().components
        return {name: (each.free + each.cached - each.leased) / each.capacity for name, each in figures.items()}

    def needs(self, request: RoutingRequest) -> Mapping[str, float]:
        return self._router.needs.shares(request.count + request.output)

    def matched(self, request: RoutingRequest) -> int:
        return self._told(request, 0)

    def resumable(self, request: RoutingRequest) -> int:
        return self._told(request, 1)

    def _told(self, request: RoutingRequest, which: int) -> int:
        if self._router.now < self._promises.banned_until:
            return 0
        return request.count if self.lies else self._router.depths(request)[which].get(self.number, 0)

    # ------------------------------------------------------------ load
    def sent(self, number: int, count: int, promised: int) -> None:
        """Count a request of ``count`` tokens that was sent there, of which so many were said to hit."""
        self.running += 1
        self._promised[number] = promised
        self._expected[number] = expected = count - min(promised, count - 1)
        self.tokens_ahead += expected

    def left(self, number: int, tokens: int) -> None:
        """Note that so many tokens of its prompt are still to be computed."""
        self.tokens_ahead += tokens - self._expected[number]
        self._expected[number] = tokens

    def over(self, number: int, hit: int | None) -> None:
        """Count a request no more: it is answered, and so many of its tokens hit, or it was refused (None)."""
        self.tokens_ahead -= self._expected.pop(number)
        self.running -= 1
        promised = self._promised.pop(number)
        if hit is not None:
            self._promises.settle(promised, hit, self._router.now)
