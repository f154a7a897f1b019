"""Resumable boundary: the replica from which the first token comes soonest, counted in tokens to compute.

What is ahead of a request at a replica, and what is left of it behind the deepest boundary at which the replica can
resume, is what has to be computed before its first token. Pages of full attention that lead to no boundary count for
nothing. What is left of the request has a price above one, or sessions leave their replica for every short queue.
Several things follow from this one sum:

- A hot prefix gets a second copy when the queue before its first one costs more than to compute it again.
- A replica that joins empty gets requests that can resume nowhere, and as soon as others have queues, the rest too.
- Two requests of one new prefix go to one replica, since what was sent there lately counts as if it were there.
"""

from __future__ import annotations

from collections.abc import Sequence

from .contract import ReplicaView, RoutingRequest
from .lately_sent import LatelySent
from .turns import Turns

PRICE = 12
"""What a token to compute of the request itself counts, against one that is ahead of it. It counts more than once,
since it also delays the requests behind this one, and takes memory from what they could hit (decision 0069)."""
ENOUGH = 0.3
"""The part of a prompt that has to be resumable, or it counts for nothing. Else all prompts with a short beginning in
common would crowd where that is cached."""
EQUAL = 512
"""Replicas whose sums differ by no more tokens are equal: among them it goes in turns."""
STAY = 2048
"""So many tokens more may be computed so that a session stays at its replica."""
MOST_SESSIONS = 1 << 16


class ResumableBoundary:
    """Sends a request to where the tokens ahead of it and the tokens to compute of it are the fewest together.

    ``follows``  replicas announce what they have; False: the policy goes by all that it remembers to have sent
    """

    def __init__(self, *, follows: bool = True) -> None:
        self._turns = Turns()
        self._sent = LatelySent(always=not follows)
        self._homes: dict[tuple[str, str], str] = {}
        """By session, the replica that it was last sent to."""

    def order(self, request: RoutingRequest, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        if not replicas:
            return []
        session = (request.namespace, request.session) if request.session else None
        home = self._homes.get(session) if session else None
        sent = self._sent.depths(request)
        sums: dict[str, int] = {}
        for each in replicas:
            there = min(max(each.resumable(request), sent.get(each.name, 0)), request.count - 1)
            if there < ENOUGH * request.count:
                there = 0
            ahead = each.tokens_ahead - (STAY if each.name == home else 0)
            sums[each.name] = ahead + PRICE * (request.count - there)
        near = min(sums.values()) + EQUAL

        def rank(each: ReplicaView) -> tuple[int, bool, int]:
            return max(sums[each.name], near), each.name != home, self._turns.last(each)

        ordered = sorted(replicas, key=rank)
        first = ordered[0]
        self._turns.take(first, replicas)
        self._sent.add(request, first)
        if session:
            self._homes.pop(session, None)
            self._homes[session] = first.name
            if len(self._homes) > MOST_SESSIONS:
                del self._homes[next(iter(self._homes))]
        return ordered
