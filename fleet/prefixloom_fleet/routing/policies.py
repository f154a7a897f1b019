"""Policies: the routing policies by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from prefixloom import InputError

from .contract import RoutingPolicy
from .decode_room import DecodeRoom
from .least_loaded import LeastLoaded
from .prefix_affinity import PrefixAffinity
from .resumable_boundary import ResumableBoundary
from .round_robin import RoundRobin


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
    """A new policy. InputError: there is none of this name.

    ``follows``  replicas announce what they have; False: a policy goes by all that it remembers to have sent
    """
    made = POLICIES.get(name)
    if made is None:
        raise InputError(f"routing policies are {', '.join(POLICIES)}; got {name!r}")
    return made(follows=follows)
