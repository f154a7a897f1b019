"""Prefix affinity: the replica that has most of the prompt's pages, as routers for full attention choose.

The rule and its three numbers are those of the cache-aware policy of SGLang's router (``cache_aware``, with
``--cache-threshold 0.3``, ``--balance-abs-threshold 64`` and ``--balance-rel-threshold 1.5``):
https://docs.sglang.io/advanced_features/router.html. Ray Serve's ``PrefixCacheAffinityRouter`` has the same rule with
other numbers: https://docs.ray.io/en/latest/serve/llm/prefix-aware-request-router.html. Both go by what they sent. Here
what replicas announce counts as well. Where too little of a prompt matches, SGLang takes the replica that was sent the
fewest different tokens; here it is the one with the fewest requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from .contract import ReplicaView, RoutingRequest
from .lately_sent import LatelySent
from .turns import Turns

ENOUGH = 0.3
"""The part of a prompt that has to match."""
APART = 64
TIMES = 1.5
"""Load is out of balance if the busiest replica has ``APART`` requests more than the idlest, and ``TIMES`` as many."""


class PrefixAffinity:
    """Sends a request to the longest match, or to the least loaded if no match is long enough or one is too busy.

    ``follows``  replicas announce what they have; False: the policy goes by all that it remembers to have sent
    """

    def __init__(self, *, follows: bool = True) -> None:
        self._turns = Turns()
        self._sent = LatelySent(always=not follows)

    def order(self, request: RoutingRequest, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        if not replicas:
            return []
        idle = sorted(replicas, key=lambda each: (each.running, self._turns.last(each)))
        least, most = idle[0].running, idle[-1].running
        ordered = idle
        if not (most - least > APART and most > TIMES * least):
            sent = self._sent.depths(request)
            there = {each.name: max(each.matched(request), sent.get(each.name, 0)) for each in replicas}
            if max(there.values()) > ENOUGH * request.count:
                ordered = sorted(idle, key=lambda each: -there[each.name])
        self._turns.take(ordered[0], replicas)
        self._sent.add(request, ordered[0])
        return ordered
