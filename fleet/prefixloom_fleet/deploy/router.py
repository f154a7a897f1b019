"""PolicyRouter: a request router of Ray Serve that asks a routing policy.

Ray runs it in the front's process, in an event loop of its own. Ray knows which replicas there are, which of them are
full, and when one died. The router adds what each has cached (``TrackedReplicas``), and hands Ray the policy's order.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ..knowledge.replicas import TrackedReplicas
from ..routing import find_policy
from .calls import RoutedCall


class PolicyRouter(RequestRouter):
    """Hands Ray the replicas in the order of a policy, each in a rank of its own."""

    def initialize_state(self, policy: str = "resumable", events: bool = True, **_: Any) -> None:
        """Take ``request_router_kwargs``; Ray calls this."""
        self.known = TrackedReplicas(follow=False)
        self.policy = find_policy(policy, follows=events)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas. Ray calls this whenever a replica comes, goes, or says something new of itself."""
        super().update_replicas(replicas)
        self.known.update((name_of(each), each.replica_metadata, each.routing_stats) for each in replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:  # so that Ray waits between two looks, if all are full
            pending_request.routing_context.should_backoff = True
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if isinstance(call, RoutedCall) and call.looks:
            call.known = self.known
            if call.follow:
                self.known.follow_events()
        if not isinstance(call, RoutedCall) or call.looks or not candidate_replicas:
            return [candidate_replicas]
        by_name = {name_of(each): each for each in candidate_replicas}
        names = [name for name in by_name if name not in call.avoid] or list(by_name)
        if set(call.order) != set(names):
            order = self.policy.order(call.request, [self.known.get(name) for name in names])
            call.order = [each.name for each in order]
        ranks = [by_name[name] for name in call.order]
        open_ones = self.select_available_replicas(ranks)
        if open_ones:
            # counted at once: Ray tells which one took it only after the replica was asked
            call.goes_to(self.known.get(name_of(open_ones[0])))
        return [[each] for each in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        call = pending_request.args[0] if pending_request.args else None
        if isinstance(call, RoutedCall) and not call.looks:
            call.goes_to(self.known.get(replica_id.unique_id))


def name_of(replica: RunningReplica) -> str:
    return str(replica.replica_id.unique_id)
