"""TrackedReplicas: what a router knows of each replica, as a routing policy is told it.

``TrackedReplica`` is a ``ReplicaView``. Its cache is known from events or, where these cannot be gone by, from what was
sent there. Its load is what this router has sent and is not answered yet, and what the replica itself says of others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from prefixloom import PrefixloomError, SequenceNeeds

from ..routing.contract import RoutingRequest
from .followed import FollowedEvents
from .sent_prompts import SentPrompts


@attrs.define(eq=False)
class SentRequest:
    """A request that was sent to a replica and is not answered yet.

    ``promised``  how many of its tokens the replica's events said would hit; None: the events were not gone by
    ``ahead``     how many of its tokens are to be computed, until its first byte comes
    ``needs``     by component, the part of the replica's memory that it holds at most
    """

    request: RoutingRequest
    promised: int | None
    ahead: int
    needs: Mapping[str, float]


class TrackedReplica:
    """One replica, as one router knows it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.metadata: Mapping[str, Any] = {}
        """What the replica said of itself when it began."""
        self.stats: Mapping[str, Any] = {}
        """What it said of its load a moment ago."""
        self.sent = SentPrompts()
        self.events: FollowedEvents | None = None
        self._under_way: set[SentRequest] = set()

    # ------------------------------------------------------------ as a policy is told it
    @property
    def tokens_ahead(self) -> int:
        return max(sum(each.ahead for each in list(self._under_way)), int(self.stats.get("tokens_ahead", 0)))

    @property
    def running(self) -> int:
        return max(len(self._under_way), int(self.stats.get("running", 0)))

    @property
    def free(self) -> Mapping[str, float]:
        """What the replica said, or what the requests of this router leave if it has sent more since."""
        told: Mapping[str, float] = self.stats.get("free", {})
        under_way = list(self._under_way)
        return {
            name: min(share, 1.0 - sum(each.needs.get(name, 0.0) for each in under_way)) for name, share in told.items()
        }

    def needs(self, request: RoutingRequest) -> Mapping[str, float]:
        needs: SequenceNeeds | None = self.metadata.get("needs")
        return {} if needs is None else needs.shares(request.count + request.output)

    def matched(self, request: RoutingRequest) -> int:
        found = None if self.events is None else self.events.pages(request.prompt, request.namespace)
        return self.sent.matched(request) if found is None else found

    def resumable(self, request: RoutingRequest) -> int:
        found = self._promised(request)
        return self.sent.resumable(request) if found is None else found

    def _promised(self, request: RoutingRequest) -> int | None:
        return None if self.events is None else self.events.boundary(request.prompt[:-1], request.namespace)

    @property
    def under_way(self) -> int:
        """How many requests of this router it has not answered yet."""
        return len(self._under_way)

    @property
    def doubt(self) -> str:
        """Why its events are not gone by, in words; "": they are."""
        return "it publishes no events" if self.events is None else self.events.doubt

    # ------------------------------------------------------------ what becomes of requests
    def begin(self, request: RoutingRequest) -> SentRequest:
        """Count a request that is sent to this replica."""
        promised = self._promised(request)
        known = self.sent.resumable(request) if promised is None else promised
        sent = SentRequest(request, promised, max(request.count - known, 1), self.needs(request))
        self._under_way.add(sent)
        self.sent.add(request)
        return sent

    def first_byte(self, sent: SentRequest) -> None:
        sent.ahead = 0

    def end(self, sent: SentRequest, hit: int | None) -> None:
        """End a request that was answered, or will not be. ``hit``: how many tokens hit, if the replica said so."""
        self._under_way.discard(sent)
        if hit is not None and sent.promised is not None and self.events is not None:
            self.events.settle(sent.promised, hit)

    # ------------------------------------------------------------ what it says of itself
    def heard(self, metadata: Mapping[str, Any], stats: Mapping[str, Any], follow: bool) -> None:
        """Take what the replica says. ``follow``: read its events, if it has any."""
        self.metadata, self.stats = metadata, stats
        if follow and self.events is None and metadata.get("events"):
            with contextlib.suppress(PrefixloomError):
                keys = metadata.get("events_keys")
                self.events = FollowedEvents(self.name, metadata["events"], metadata["replay"], keys)
        if self.events is not None and "batches" in stats:
            self.events.told(int(stats["batches"]))

    def close(self) -> None:
        if self.events is not None:
            self.events.close()


class TrackedReplicas:
    """All replicas that a router knows, by name. ``follow``: read their events."""

    def __init__(self, follow: bool = True) -> None:
        self._follow = follow
        self._known: dict[str, TrackedReplica] = {}

    def follow_events(self) -> None:
        """Read the events of all replicas from now on."""
        if not self._follow:
            self._follow = True
            for each in self.all():
                each.heard(each.metadata, each.stats, True)

    def update(self, told: Iterable[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> None:
        """Take the replicas that there are now: the name of each, and what it says of itself."""
        here = {name: (metadata, stats) for name, metadata, stats in told}
        for name in self._known.keys() - here.keys():
            self._known.pop(name).close()
        for name, (metadata, stats) in here.items():
            self.get(name).heard(metadata, stats, self._follow)

    def get(self, name: str) -> TrackedReplica:
        return self._known.setdefault(name, TrackedReplica(name))

    def all(self) -> Sequence[TrackedReplica]:
        return list(self._known.values())

    def close(self) -> None:
        for each in self._known.values():
            each.close()
        self._known.clear()
