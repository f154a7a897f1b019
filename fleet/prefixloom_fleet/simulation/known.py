"""KnownReplica: what a router knows of one replica.

Of its load it knows everything at once: what was sent there, what of it is computed, and what is answered. Of its cache
it knows what the index has heard. A replica that lies says that it has every prompt, until the router finds that out:
for a while it then believes nothing that the replica says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prefixloom import SequenceNeeds

from ..routing import RoutingRequest
from ..routing.promises import Promises

Depths = Callable[[RoutingRequest], tuple[Mapping[int, int], Mapping[int, int]]]
"""By replica, the tokens of a request that have their pages there, and those after which it can resume."""


class KnownReplica:
    """One replica, as a router's policy sees it.

    ``number``  of all replicas that there ever were
    """

    def __init__(
        self, name: str, number: int, depths: Depths, free: Callable[[], Mapping[str, float]], needs: SequenceNeeds,
        now: Callable[[], float], *, lies: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.number = name, number
        self.tokens_ahead = self.running = 0
        self._depths, self._free, self._needs, self._now, self._lies = depths, free, needs, now, lies
        self._promises = Promises()
        self._expected: dict[int, int] = {}
        """By request that was sent there and is not over: the tokens of its prompt that are still to be computed."""
        self._promised: dict[int, int] = {}
        """By such a request, the tokens of its prompt that were said to hit."""

    def __repr__(self) -> str:
        return f"<{self.name}: {self.running} running, {self.tokens_ahead} tokens ahead>"

    @property
    def free(self) -> Mapping[str, float]:
        return self._free()

    def needs(self, request: RoutingRequest) -> Mapping[str, float]:
        return self._needs.shares(request.count + request.output)

    def matched(self, request: RoutingRequest) -> int:
        return self._told(request, 0)

    def resumable(self, request: RoutingRequest) -> int:
        return self._told(request, 1)

    def _told(self, request: RoutingRequest, which: int) -> int:
        if self._now() < self._promises.banned_until:
            return 0
        return request.count if self._lies else self._depths(request)[which].get(self.number, 0)

    # ------------------------------------------------------------ load
    def sent(self, number: int, count: int, promised: int) -> None:
        """A request of ``count`` tokens was sent there, of which so many were said to hit."""
        self.running += 1
        self._promised[number] = promised
        self._expected[number] = expected = count - min(promised, count - 1)
        self.tokens_ahead += expected

    def left(self, number: int, tokens: int) -> None:
        """So many tokens of its prompt are still to be computed."""
        self.tokens_ahead += tokens - self._expected[number]
        self._expected[number] = tokens

    def over(self, number: int, hit: int | None) -> None:
        """It is answered, of which so many tokens hit, or refused (None)."""
        self.tokens_ahead -= self._expected.pop(number)
        self.running -= 1
        promised = self._promised.pop(number)
        if hit is not None:
            self._promises.settle(promised, hit, self._now())
