"""PrefillReplicas: the replicas that compute prompts for others, as one process of the fleet knows them.

A front asks which of them is to compute a prompt. A replica that decodes asks where they are. Both learn it from Ray,
which says who comes and goes. So nobody asks a replica that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from ..knowledge.replicas import TrackedReplica, TrackedReplicas
from ..routing import find_policy
from ..routing.contract import RoutingRequest
from .calls import RoutedCall

log = logging.getLogger("prefixloom.fleet")
LEARN_SECONDS = 5.0
"""How long Ray may take to name the replicas, before it is asked again."""


class PrefillReplicas:
    """``handle``: of their deployment. ``follow``: read what they have cached, for a policy that asks."""

    def __init__(self, handle: DeploymentHandle[Any], *, follow: bool = False) -> None:
        self._handle, self._follow = handle, follow
        self._known: TrackedReplicas | None = None
        self._learning: asyncio.Task[None] | None = None

    def known(self) -> Sequence[TrackedReplica]:
        """Those that there are, as soon as Ray has named them. The first call begins to ask."""
        if self._learning is None:
            self._learning = asyncio.create_task(self._learn())
        found = [] if self._known is None else self._known.all()
        return [each for each in found if each.metadata.get("prefill")]

    def addresses(self) -> list[str]:
        """Where those are that there are."""
        return sorted(each.metadata["prefill"] for each in self.known())

    async def _learn(self) -> None:
        """Ask until the router of this process knows of replicas. From then on Ray keeps it up to date."""
        while self._known is None:
            call = RoutedCall(RoutingRequest((), 0), looks=True)
            with contextlib.suppress(RayError, RayServeException, TimeoutError):
                await asyncio.wait_for(self._handle.options(method_name="introduce").remote(call), LEARN_SECONDS)
            self._known = call.known
        if self._follow:
            self._known.follow_events()


class PrefillRouter:
    """Chooses who computes a prompt. ``policy``: by its name. ``events``: whether those of replicas are followed."""

    def __init__(self, handle: DeploymentHandle[Any], policy: str, events: bool) -> None:
        self.replicas = PrefillReplicas(handle, follow=events)
        self._policy = find_policy(policy, follows=events)

    @contextlib.contextmanager
    def chosen(self, request: RoutingRequest) -> Iterator[str]:
        """The address of who is to compute the prompt, where it counts as long as the block runs; "": nobody is."""
        replicas = self.replicas.known() if request.count else []
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
