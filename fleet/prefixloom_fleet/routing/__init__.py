"""Routing: which replica answers a request. It knows no process, no network, no clock and no chance.

Read ``contract`` first: what a policy is asked, and what it is told. ``policies`` finds one by its name. Each policy
that asks caches has a file, and ``turns`` and ``lately_sent`` are what several of them remember. ``promises`` judges
what replicas say.
"""

from .contract import ReplicaView, RoutingPolicy, RoutingRequest
from .policies import POLICIES, USUAL, find_policy

__all__ = ["POLICIES", "USUAL", "ReplicaView", "RoutingPolicy", "RoutingRequest", "find_policy"]
