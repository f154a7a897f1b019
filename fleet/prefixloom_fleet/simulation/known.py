"""KnownReplica: what a router knows of one replica.

Of its load it knows everything at once: what was sent there, what of it is computed, and what is answered. Of its cache
it knows what the index has heard. A replica that lies says that it has every prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prefixloom import SequenceNeeds

from ..routing import RoutingRequest

Depths = Callable[[RoutingRequest], tuple[Mapping[int, int], Mapping[int, int]]]
"""By replica, the tokens of a request that have their pages there, and those after which it can resume."""


class KnownReplica:
    """One replica, as a router's policy sees it.

    ``number``  of all replicas that there ever were
    """

    def __init__(
        self, name: str, number: int, depths: Depths, free: Callable[[], Mapping[str, float]], needs: SequenceNeeds,
        *, lies: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.number = name, number
        self.tokens_ahead = self.running = 0
        self._depths, self._free, self._needs, self._lies = depths, free, needs, lies
        self._expected: dict[int, int] = {}
        """By request that was sent there and is not over: the tokens of its prompt that are still to be computed."""

    def __repr__(self) -> str:
        return f"<{self.name}: {self.running} running, {self.tokens_ahead} tokens ahead>"

    @property
    def free(self) -> Mapping[str, float]:
        return self._free()

    def needs(self, request: RoutingRequest) -> Mapping[str, float]:
        return self._needs.shares(request.count + request.output)

    def matched(self, request: RoutingRequest) -> int:
        return request.count if self._lies else self._depths(request)[0].get(self.number, 0)

    def resumable(self, request: RoutingRequest) -> int:
        return request.count if self._lies else self._depths(request)[1].get(self.number, 0)

    # ------------------------------------------------------------ load
    def sent(self, number: int, expected: int) -> None:
        """A request was sent there, of which so many tokens are to be computed, as far as the router knows."""
        self.running += 1
        self.tokens_ahead += expected
        self._expected[number] = expected

    def left(self, number: int, tokens: int) -> None:
        """So many tokens of its prompt are still to be computed."""
        self.tokens_ahead += tokens - self._expected[number]
        self._expected[number] = tokens

    def over(self, number: int) -> None:
        """It is answered or refused."""
        self.tokens_ahead -= self._expected.pop(number)
        self.running -= 1
