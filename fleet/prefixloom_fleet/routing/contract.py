"""What a routing policy is asked, and what it is told of the replicas.

A request can resume at a boundary at which *every* component of the model has what it needs: pages of full attention
without the window before them, or without a state, save nothing. So what is known of a replica's cache has two numbers:
``matched``, which routers for full attention use, and ``resumable``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs


@attrs.frozen
class RoutingRequest:
    """A request that is to be sent to a replica.

    ``prompt``     its tokens, in a form that the views of replicas understand
    ``count``      how many they are
    ``output``     tokens of its answers at most, if that is known
    ``namespace``  where its prefixes are shared
    ``session``    the conversation that it belongs to; "" if nobody said
    ``links``      a number for each whole page of ``unit`` tokens, which stands for all text up to the page's end, and
                   for the namespace. So a policy can compare prompts that it sent. Empty: it cannot
    """

    prompt: Any
    count: int
    output: int = 0
    namespace: str = ""
    session: str = ""
    links: Sequence[int] = ()
    unit: int = 0


class ReplicaView(Protocol):
    """What a router knows of one replica. It may be late, or wrong: a request is answered rightly nevertheless.

    ``name``          its name, which no other replica ever has
    ``tokens_ahead``  tokens of prompts that were sent there and are not computed yet
    ``running``       requests that were sent there and are not answered yet
    ``free``          by component, the part of its memory that is free or can be evicted, at most 1
    """

    @property
    def name(self) -> str: ...
    @property
    def tokens_ahead(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def free(self) -> Mapping[str, float]: ...

    def needs(self, request: RoutingRequest) -> Mapping[str, float]:
        """Return by component the part of its memory that the request holds while it runs.

        Only the replica's composition says it: a component's reach, and how large its pool is. Empty: it is not known.
        """

    def matched(self, request: RoutingRequest) -> int:
        """Return how many tokens of the prompt have their pages there, under full attention alone."""

    def resumable(self, request: RoutingRequest) -> int:
        """Return the deepest boundary of the prompt at which the replica can resume, of its device's memory."""


class RoutingPolicy(Protocol):
    """Says which replica a request is sent to. One instance serves one router, and may remember what it said."""

    def order(self, request: RoutingRequest, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        """Return the replicas that take requests now, the best first. The others are asked if the first are full."""
