"""PrefillRouter: chooses the replica that computes a prompt for another one, in a fleet where these are apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ray.serve.handle import DeploymentHandle

from ..knowledge.replicas import TrackedReplica
from ..routing import find_policy
from ..routing.contract import RoutingRequest
from .deployed_replicas import DeployedReplicas


def ready(replicas: Sequence[TrackedReplica]) -> list[TrackedReplica]:
    """Return the replicas that have said where they can be asked to compute prompts."""
    return [each for each in replicas if each.metadata.get("prefill")]


def addresses(replicas: Sequence[TrackedReplica]) -> list[str]:
    return sorted(each.metadata["prefill"] for each in ready(replicas))


class PrefillRouter:
    """Chooses who computes a prompt. ``policy``: by its name. ``events``: whether those of replicas are followed."""

    def __init__(self, handle: DeploymentHandle[Any], policy: str, events: bool) -> None:
        self.replicas = DeployedReplicas(handle, follow=events)
        self._policy = find_policy(policy, follows=events)

    @contextlib.contextmanager
    def chosen(self, request: RoutingRequest) -> Iterator[str]:
        """Yield the address of who is to compute the prompt, and count the prompt there in the block. "": nobody is."""
        replicas = ready(self.replicas.known()) if request.count else []
        ordered = self._policy.order(request, replicas) if replicas else []
        if not ordered:
            yield ""
            return
        best = next(each for each in replicas if each.name == ordered[0].name)
        sent = best.begin(request)
        try:
            yield str(best.metadata["prefill"])
        finally:
            best.end(sent, None)
