"""Least loaded: the replica with the fewest tokens of prompts to compute. It asks nothing of caches."""

from __future__ import annotations

from collections.abc import Sequence

from .contract import ReplicaView, RoutingRequest
from .turns import Turns


class LeastLoaded:
    """Sends a request to where the fewest tokens are ahead of it, of equal ones to where the fewest requests run."""

    def __init__(self, *, follows: bool = True) -> None:
        self._turns = Turns()

    def order(self, request: RoutingRequest, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        ordered = sorted(replicas, key=lambda each: (each.tokens_ahead, each.running, self._turns.last(each)))
        if ordered:
            self._turns.take(ordered[0], replicas)
        return ordered
