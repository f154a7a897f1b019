"""Policies: the routing policies by their names, and the two that ask nothing of caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from prefixloom import InputError

from .contract import ReplicaView, RoutingPolicy, RoutingRequest
from .decode_room import DecodeRoom
from .prefix_affinity import PrefixAffinity
from .resumable_boundary import ResumableBoundary
from .turns import Turns


class RoundRobin:
    """Sends a request to the replica that was sent to longest ago."""

    def __init__(self, *, follows: bool = True) -> None:
        self._turns = Turns()

    def order(self, request: RoutingRequest, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        ordered = sorted(replicas, key=self._rank)
        if ordered:
            self._turns.take(ordered[0], replicas)
        return ordered

    def _rank(self, replica: ReplicaView) -> tuple[int, ...]:
        return (self._turns.last(replica),)


class LeastLoaded(RoundRobin):
    """Sends a request to where the fewest tokens are ahead of it, of equal ones to where the fewest requests run."""

    def _rank(self, replica: ReplicaView) -> tuple[int, ...]:
        return replica.tokens_ahead, replica.running, self._turns.last(replica)


class MakesPolicy(Protocol):
    """Makes a policy. ``follows``: replicas announce what they have."""

    def __call__(self, *, follows: bool = True) -> RoutingPolicy: ...


POLICIES: Mapping[str, MakesPolicy] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix": PrefixAffinity,
    "resumable": ResumableBoundary,
    "decode-room": DecodeRoom,
}
USUAL = ("round-robin", "least-loaded", "prefix", "resumable")
"""Those for replicas that compute prompts. Any other is for replicas that decode what others have computed."""


def find_policy(name: str, *, follows: bool = True) -> RoutingPolicy:
    """Return a new policy. InputError: there is none of this name.

    ``follows``  replicas announce what they have; False: a policy goes by all that it remembers to have sent
    """
    made = POLICIES.get(name)
    if made is None:
        raise InputError(f"routing policies are {', '.join(POLICIES)}; got {name!r}")
    return made(follows=follows)
