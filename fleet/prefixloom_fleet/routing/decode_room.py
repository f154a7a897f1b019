"""Decode room: the replica whose scarcest component has the most left when it runs the request.

It is for replicas that decode what others have computed. These compute no prompts, so that what counts is memory: an
answer holds pages of a path for all its tokens, a window, states. The pool that is short decides, and which one that is
differs by request and by replica. What is in the way of one more answer is never the sum of all pools.

What a replica has cached of the prompt need not be sent there, and has no second copy. That never saves any computing,
so it counts for little: for as much as ``KEPT`` of the scarcest pool, if it is the whole prompt. It takes no memory off
what the request needs, since pages that nobody uses count as free, and are not free any more once they are used.
"""

from __future__ import annotations

from collections.abc import Sequence

from .contract import ReplicaView, RoutingRequest
from .turns import Turns

KEPT = 0.1
"""What a prompt counts that the replica can resume at its end, as a part of the scarcest pool."""
EQUAL = 1 / 64
"""Replicas whose sums differ by no more are equal: among them the one comes first where fewer requests run."""


class DecodeRoom:
    """Sends a request to where the scarcest component has the most left, and of equal ones to where fewer run."""

    def __init__(self, *, follows: bool = True) -> None:
        self._turns = Turns()

    def order(self, request: RoutingRequest, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        if not replicas:
            return []
        rooms = {each.name: room_after(request, each) for each in replicas}
        near = max(rooms.values()) - EQUAL

        def rank(each: ReplicaView) -> tuple[float, int, int]:
            return -min(rooms[each.name], near), each.running, self._turns.last(each)

        ordered = sorted(replicas, key=rank)
        self._turns.take(ordered[0], replicas)
        return ordered


def room_after(request: RoutingRequest, replica: ReplicaView) -> float:
    """Return the room left in the scarcest component's pool, and what the cached part of the prompt counts."""
    free, needs = replica.free, replica.needs(request)
    left = min((free.get(name, 1.0) - needs.get(name, 0.0) for name in {**free, **needs}), default=1.0)
    return left + KEPT * min(replica.resumable(request), request.count) / max(request.count, 1)
