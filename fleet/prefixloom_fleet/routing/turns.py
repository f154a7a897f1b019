"""Turns: which replica was sent to longest ago. It decides where nothing else does."""

from __future__ import annotations

from collections.abc import Sequence

from .contract import ReplicaView


class Turns:
    """Counts the requests, and remembers with which one each replica was last chosen.

    A replica that was never chosen comes first, so that one that joins empty gets the next request that may go
    anywhere.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last: dict[str, int] = {}

    def last(self, replica: ReplicaView) -> int:
        """Return the number of the request that the replica was last chosen for; 0: it never was."""
        return self._last.get(replica.name, 0)

    def take(self, replica: ReplicaView, replicas: Sequence[ReplicaView]) -> None:
        """Note that ``replica`` is chosen for the next request. Forget at times names that are not in ``replicas``."""
        self._count += 1
        self._last[replica.name] = self._count
        if len(self._last) > 2 * len(replicas) + 64:
            names = {each.name for each in replicas}
            self._last = {name: last for name, last in self._last.items() if name in names}
