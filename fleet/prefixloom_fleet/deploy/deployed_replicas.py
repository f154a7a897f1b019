"""DeployedReplicas: the replicas of one deployment, as one process of the fleet knows them.

A front has to know them before it takes its first request. Else it sends that request by nothing but the load. Where
prompts are computed apart, a front asks which replica is to compute one, and a replica that decodes asks where those
are.

All learn it from Ray, which says who comes and goes. So a replica that hangs keeps nobody waiting for long. Ray starts
to tell a process when its router was asked for the first time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from ..knowledge.replicas import TrackedReplica, TrackedReplicas
from ..routing.contract import RoutingRequest
from .calls import RoutedCall

log = logging.getLogger("prefixloom.fleet")
LEARN_SECONDS = 1.0
"""How long Ray may take to name the replicas, before it is asked again."""
POLL_SECONDS = 0.02
"""How often it is looked for what has not come."""


class DeployedReplicas:
    """``handle``: of their deployment. ``follow``: read the events of each, so that it is known what it has cached."""

    def __init__(self, handle: DeploymentHandle[Any], *, follow: bool = False) -> None:
        self._handle, self._follow = handle, follow
        self._known: TrackedReplicas | None = None
        self._learning: asyncio.Task[None] | None = None

    def known(self) -> Sequence[TrackedReplica]:
        """Return the replicas, as soon as Ray has named them. The first call begins to ask."""
        if self._learning is None:
            self._learning = asyncio.create_task(self._learn())
        return [] if self._known is None else self._known.all()

    async def heard(self, seconds: float) -> bool:
        """Wait until they are known, and what each has cached, if that is followed. False: it took too long."""
        until = time.monotonic() + seconds
        while not (known := self.known()) or any(each.events is not None and each.doubt for each in known):
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def _learn(self) -> None:
        """Ask until the router of this process knows of replicas. From then on Ray keeps it up to date."""
        while self._known is None:
            call = RoutedCall(RoutingRequest((), 0), looks=True, follow=self._follow)
            try:
                await asyncio.wait_for(self._handle.options(method_name="introduce").remote(call), LEARN_SECONDS)
            except (RayError, RayServeException, TimeoutError):
                pass
            except Exception:
                log.exception("the replicas cannot be asked for")
            self._known = call.known
            if self._known is None:  # Ray may refuse at once, as long as all queues are full or no replica has started
                await asyncio.sleep(POLL_SECONDS)
