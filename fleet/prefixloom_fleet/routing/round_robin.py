"""Round robin: each replica in its turn. It asks nobody anything."""

from __future__ import annotations

from collections.abc import Sequence

from .contract import ReplicaView, RoutingRequest
from .turns import Turns


class RoundRobin:
    """Sends a request to the replica that was sent to longest ago."""

    def __init__(self, *, follows: bool = True) -> None:
        self._turns = Turns()

    def order(self, request: RoutingRequest, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        ordered = sorted(replicas, key=self._turns.last)
        if ordered:
            self._turns.take(ordered[0], replicas)
        return ordered
