"""Replica: one server in a process of its own, without a socket for clients.

It has the same application as ``prefixloom serve``, and runs it on calls of the front.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import ray.util
import torch
from ray import serve
from ray.serve.handle import DeploymentHandle

from prefixloom import PrefixloomError, SequenceNeeds
from prefixloom_engine.server.command import assembled
from prefixloom_engine.server.worker import EngineWorker, PendingAnswer

from .calls import HITS, HttpCall, ResponseEnd, ResponseHead, RoutedCall, answered
from .config import Role, listening, server_settings
from .deployed_replicas import DeployedReplicas
from .prefill import addresses

log = logging.getLogger("prefixloom.fleet")
FOLLOW_SECONDS = 0.2
"""How often a replica that decodes looks which prefill replicas there are."""


class Replica:
    """One server. Ray makes it, calls ``check_health`` and the ``record_`` methods, and ends it."""

    async def __init__(  # type: ignore[misc]
        self,
        options: Sequence[str],
        revision: str,
        role: Role = "whole",
        prefill: DeploymentHandle[Any] | None = None,
        *,
        events: bool = True,
    ) -> None:
        """``options``: of ``prefixloom serve``. ``revision``: when it is another one, Ray replaces all replicas.
        ``prefill``: of a replica that decodes, the handle of those that compute its prompts. ``events``: publish them.
        """
        self._failure: BaseException | None = None
        self.revision, self.role = revision, role
        here = host_of(ray.util.get_node_ip_address())
        settings = server_settings([*options, *listening(role, events, here)])
        if "threads" in settings.numbers:
            torch.set_num_threads(settings.numbers["threads"])
        self._events_keys = settings.args.events_keys
        self._chunk = settings.numbers["chunk"]
        self._made = await asyncio.to_thread(assembled, settings, self._failed)
        self._worker: EngineWorker = self._made.server.worker
        self._worker.start()
        self._worker.observe(count_hit, account=False)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._following = None if prefill is None else asyncio.create_task(self._follow(DeployedReplicas(prefill)))

    async def __del__(self) -> None:
        """Write to the store what waits for it, and end. Ray awaits this when the running answers are over."""
        made = getattr(self, "_made", None)
        following = getattr(self, "_following", None)
        if following is not None:
            following.cancel()
        if made is not None:
            await made.server.worker.stop(made.server.limits.drain_seconds)

    def _failed(self, error: BaseException) -> None:
        self._failure = error

    async def _follow(self, prefill: DeployedReplicas) -> None:
        """Tell the engine which prefill replicas there are, whenever that changes."""
        told: list[str] = []
        while True:
            found = addresses(prefill.known())
            if found != told:
                told = found
                try:
                    await self._worker.call(partial(self._made.set_peers, found))
                except PrefixloomError as error:
                    log.warning("the prefill replicas at %s cannot be asked: %s", ", ".join(found), error)
            await asyncio.sleep(FOLLOW_SECONDS)

    async def introduce(self, _: RoutedCall | None) -> str:
        """Return the name of this replica, for whoever lists the replicas."""
        return str(self._name)

    async def answer(self, _: RoutedCall | None, call: HttpCall) -> AsyncIterator[ResponseHead | bytes | ResponseEnd]:
        """Answer a request of HTTP."""
        async for piece in answered(self._made.app, call, self._name):
            yield piece

    async def whole(self, call: HttpCall) -> tuple[str, int, bytes]:
        """Return the name of this replica, the status, and the body of its answer. For what all replicas are asked."""
        status, body = 500, b""
        async for piece in answered(self._made.app, call, self._name):
            if isinstance(piece, ResponseHead):
                status = piece.status
            elif isinstance(piece, bytes):
                body += piece
        return self._name, status, body

    # ------------------------------------------------------------ what Ray asks
    def check_health(self) -> None:
        """Raise if the engine was given up: Ray then starts another replica in place of this one."""
        error = self._failure or self._worker.error
        if error is not None:
            raise PrefixloomError(f"the engine has failed: {error}")

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the facts that do not change while the replica lives."""
        publisher = self._made.publisher
        return {
            "pid": os.getpid(),
            "revision": self.revision,
            "fingerprint": self._made.server.fingerprint,
            "role": self.role,
            "prefill": self._made.prefill_at,
            "needs": SequenceNeeds.of(self._worker.engine.cache.composition, self._chunk),
            "events_keys": self._events_keys,
            "events": None if publisher is None else publisher.endpoint,
            "replay": None if publisher is None else publisher.replay_endpoint,
        }

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the load, for routers."""
        return await self._worker.call(self._stats)

    def _stats(self) -> dict[str, Any]:
        """Return the figures that the front asks for. Call this in the engine's thread."""
        engine, publisher = self._worker.engine, self._made.publisher
        running, waiting = engine.load
        parts: Mapping[str, Any] = engine.cache.stats().components
        free = {name: (each.free + each.evictable) / each.capacity for name, each in parts.items() if each.capacity}
        told: dict[str, Any] = {
            "running": running + waiting,
            "tokens_ahead": engine.tokens_ahead,
            "free": free,
            "rank": serve.get_replica_context().rank.rank,
        }
        if publisher is not None:
            told["batches"] = publisher.counts.batches
        return told


def host_of(address: str) -> str:
    """Return an IP address as it is written before a port."""
    return f"[{address}]" if ":" in address else address


def count_hit(ticket: PendingAnswer) -> None:
    """Note how many tokens of a request hit, for the call that began it."""
    hits = ticket.context.get(HITS)
    if hits is not None and ticket.admitted_at:
        hits.append(ticket.hit)
