"""Calls: what goes from the front to a replica and back.

A ``RoutedCall`` is for the router alone, which runs in the front's process: it does not travel. An ``HttpCall`` travels
to the replica. What comes back is one ``ResponseHead``, then bytes, and at the end one ``ResponseEnd``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any

import attrs
from starlette.types import ASGIApp, Message

from ..knowledge.replicas import SentRequest, TrackedReplica, TrackedReplicas
from ..routing.contract import RoutingRequest

HITS: ContextVar[list[int] | None] = ContextVar("prefixloom_hits", default=None)
"""Of the requests of the engine that one HTTP request begins: how many tokens of each hit."""


@attrs.frozen
class HttpCall:
    """A request of HTTP, whose body was read."""

    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


@attrs.frozen
class ResponseHead:
    """``name``: the replica that answers."""

    name: str
    status: int
    headers: Sequence[tuple[bytes, bytes]]


@attrs.frozen
class ResponseEnd:
    """``hit``: how many tokens of the prompt hit; None: nothing was computed."""

    hit: int | None


class RoutedCall:
    """One try to have a request answered: what a router needs to choose, and what it chose.

    ``avoid``   names of replicas that were tried before
    ``looks``   it asks only which replicas there are
    ``follow``  whoever looks wants the events of all replicas to be read from now on
    """

    def __init__(
        self,
        request: RoutingRequest,
        avoid: frozenset[str] = frozenset(),
        *,
        looks: bool = False,
        follow: bool = False,
    ) -> None:
        self.request, self.avoid, self.looks, self.follow = request, avoid, looks, follow
        self.replica: TrackedReplica | None = None
        self.known: TrackedReplicas | None = None
        """All that the router knows of. The router sets it for whoever looks."""
        self.order: list[str] = []
        """The replicas in the policy's order, which is asked once, however often Ray looks."""
        self._sent: SentRequest | None = None
        self._over = False
        self._lock = threading.Lock()  # Ray runs the router in a loop of its own

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def goes_to(self, replica: TrackedReplica) -> None:
        """Note that the router sends it to ``replica``, or expects to. If the try is over, nothing is noted."""
        with self._lock:
            if not self._over and replica is not self.replica:
                self._leave(None)
                self.replica, self._sent = replica, replica.begin(self.request)

    def first_byte(self) -> None:
        if self.replica is not None and self._sent is not None:
            self.replica.first_byte(self._sent)

    def end(self, hit: int | None) -> None:
        """End the call: it counts at no replica any more. A second call does nothing."""
        with self._lock:
            self._over = True
            self._leave(hit)

    def _leave(self, hit: int | None) -> None:
        if self.replica is not None and self._sent is not None:
            self.replica.end(self._sent, hit)
        self._sent = None


async def answered(app: ASGIApp, call: HttpCall, name: str) -> AsyncIterator[ResponseHead | bytes | ResponseEnd]:
    """Yield what ``app`` answers to ``call``. Whoever leaves early ends the call, as a client that hangs up."""
    hits: list[int] = []
    come: asyncio.Queue[Message | BaseException | None] = asyncio.Queue()
    body = [call.body]
    left = asyncio.Event()

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        come.put_nowait(message)

    async def run() -> None:
        HITS.set(hits)
        try:
            await app(scope_of(call), receive, send)
            come.put_nowait(None)
        except BaseException as error:
            come.put_nowait(error)
            raise

    running = asyncio.create_task(run())
    try:
        while True:
            message = await come.get()
            if message is None:
                break
            if isinstance(message, BaseException):
                raise message
            if message["type"] == "http.response.start":
                yield ResponseHead(
                    name, message["status"], [(bytes(key), bytes(value)) for key, value in message["headers"]]
                )
            elif message["type"] == "http.response.body" and message.get("body"):
                yield bytes(message["body"])
        yield ResponseEnd(hits[0] if hits else None)
    finally:
        left.set()
        if not running.done():
            running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def scope_of(call: HttpCall) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode("utf-8", "surrogateescape"),
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": None,
        "server": None,
        "state": {},
    }
