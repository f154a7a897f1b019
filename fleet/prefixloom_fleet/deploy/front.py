"""Front: takes requests of HTTP, has a replica answer each, and hands its answer on as it comes.

The front reads a request as far as a router needs: the tokens of its prompt, and the namespace. What is wrong with a
request, a replica says. So errors are the same as those of one server.

A replica may die, be full or be about to end. As long as the client has nothing of the answer, the request is then sent
to another replica. After the first byte the client is told, in the shape of the API.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from prefixloom import InputError, PrefixloomError
from prefixloom_engine.server.access import Access, read_tenants
from prefixloom_engine.server.app import CLIENT_LEFT, PREFILL_HEADER, BodyMemory, Limits, body_bytes, sent, told
from prefixloom_engine.server.command import hosts_of, name_of, text_of
from prefixloom_engine.server.endpoints import FORMS
from prefixloom_engine.server.protocol import ApiError
from prefixloom_engine.server.reading.bodies import Bounds
from prefixloom_engine.server.reading.processes import TextProcesses

from ..knowledge.replicas import TrackedReplica
from ..knowledge.sent_prompts import PAGE, links_of
from ..routing.contract import RoutingRequest
from .calls import HttpCall, ResponseEnd, ResponseHead, RoutedCall
from .config import FleetConfig
from .deployed_replicas import DeployedReplicas
from .figures import FrontFigures, exposed, gauges_of, together
from .prefill import PrefillRouter

log = logging.getLogger("prefixloom.fleet")
TRIES = 6
"""How many replicas are asked, one after the other, until the client gets an error."""
PAUSE_SECONDS = 0.1
"""How long the front waits before the second try; before each further one twice as long."""
FULL_SECONDS = 1
"""What a client is told to wait for when all replicas are full."""
FIRST_SECONDS = 5.0
"""How long a front waits, before it takes requests, for what the replicas have cached. In a fleet that has just begun
there may be none yet."""
ALL_SECONDS = 10.0
"""How long replicas may take to answer what all of them are asked."""
LONGEST_CHOICE = 4_000_000
"""Bytes of a body whose prompt is turned into tokens for the router. What is longer goes by load alone."""
ROLE_ALONE = b'"delta":{"role":"assistant","content":""}'
"""The first event of a chat. It says nothing of the answer, and comes before the replica has computed anything."""
PASSED_ON = {b"content-type", b"authorization", b"traceparent", b"tracestate", b"accept"}
"""The headers that a replica is told."""


class Front:
    """The deployment that takes requests.

    ``replicas``  the handle of the deployment of replicas, and ``prefill`` that of those that compute their prompts
    """

    async def __init__(  # type: ignore[misc]
        self, config: FleetConfig, replicas: DeploymentHandle[Any], prefill: DeploymentHandle[Any] | None = None
    ) -> None:
        self._config, self._replicas, self._prefill = config, replicas, prefill
        settings = config.settings_of(config.role)
        args, numbers = settings.args, settings.numbers
        self._known = DeployedReplicas(replicas, follow=config.events)
        self._prefill_router: PrefillRouter | None = None
        if prefill is not None:
            self._prefill_router = PrefillRouter(prefill, config.prefill_policy, config.events)
        self._access = Access() if args.keys is None else read_tenants(Path(args.keys))
        self._hosts = hosts_of(args, config.host)
        self._texts = TextProcesses(text_of(args, images=False))
        self._limits = Limits(
            numbers["max_body"], numbers["max_bodies"], seconds=numbers["timeout"], answer=numbers["max_answer"]
        )
        self._memory = BodyMemory(self._limits.bodies)
        self._figures = FrontFigures()
        most = 1 << 31  # what is too much, a replica says
        self._bounds = Bounds(name_of(args), most, most, most, self._limits.answer, self._limits.bodies)
        learned = [self._known, *([] if self._prefill_router is None else [self._prefill_router.replicas])]
        await asyncio.gather(*(each.heard(FIRST_SECONDS) for each in learned))

    async def __call__(self, request: Request) -> Response:
        """Answer a request of HTTP. Ray calls it, and cancels it if the client goes away."""
        try:
            return await self._answer(request)
        except ApiError as error:
            return told(error)
        except InputError as error:
            return told(ApiError(400, str(error)))
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)

    async def _answer(self, request: Request) -> Response:
        self._hosts.check(request.headers)
        path = request.url.path
        own: dict[tuple[str, str], Callable[[], Awaitable[Response]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/fleet"): self._fleet,
            ("GET", "/metrics"): self._metrics,
        }
        if (answer := own.get((request.method, path))) is not None:
            return await answer()
        with self._memory.share() as share:
            call = HttpCall(
                request.method, path, request.scope.get("query_string", b""),
                [(key, value) for key, value in request.headers.raw if key.lower() in PASSED_ON],
                await body_bytes(request, self._limits, share),
            )  # fmt: skip
            if path.startswith("/cache/") and path != "/cache/explain":
                return await self._all(call)
            return await self._one(await self._routing(request, call), call)

    # ------------------------------------------------------------ one replica answers
    async def _routing(self, request: Request, call: HttpCall) -> RoutingRequest:
        """Return what the router needs to know. A request that a replica will refuse may be sent to any replica."""
        session = request.headers.get(self._config.session, "")
        kind = next((form.body for form in FORMS if form.path == call.path), None)
        if kind is None or len(call.body) > LONGEST_CHOICE:
            return RoutingRequest((), 0, session=session)
        tenant = self._access.tenant(request.headers.get("authorization"))
        try:
            read = await self._texts.read(kind, call.body, self._bounds, tenant.name)
        except ApiError:
            return RoutingRequest((), 0, session=session)
        asked, tokens = read.asked, tuple(read.prompts[0].tokens)
        output = asked.n * (asked.most_tokens or self._limits.answer)  # the choices of a prompt share its pages
        namespace = tenant.namespace_of(asked.cache_salt)
        links = links_of(tokens, namespace)
        return RoutingRequest(tokens, len(tokens), output, namespace, session, links, PAGE)

    async def _one(self, routing: RoutingRequest, call: HttpCall) -> Response:
        """Have one replica answer, and another one compute its prompt, if there are such."""
        if self._prefill_router is None:
            return await self._tried(routing, call)
        with self._prefill_router.chosen(routing) as address:
            headers = [*call.headers, (PREFILL_HEADER.encode(), address.encode())]
            return await self._tried(routing, attrs.evolve(call, headers=headers))

    async def _tried(self, routing: RoutingRequest, call: HttpCall) -> Response:
        """Have one replica answer; another one, as long as nothing of the answer was seen."""
        avoid: frozenset[str] = frozenset()
        last: Exception | Response | None = None
        for number in range(TRIES):
            if number:
                self._figures.retries.inc()
                await asyncio.sleep(PAUSE_SECONDS * 2 ** (number - 1))
            attempt = Attempt(self._replicas, RoutedCall(routing, avoid), call)
            try:
                head, first = await attempt.begin()
            except BackPressureError:
                self._count("full")
                raise ApiError(
                    429, f"all replicas are full: ask again in {FULL_SECONDS} s", code="queue_full",
                    retry_after=FULL_SECONDS,
                ) from None  # fmt: skip
            except (RayError, RayServeException) as error:
                last = error
                log.warning("%s has not answered: %s", attempt.name or "no replica", first_line(error))
            else:
                if head.status not in (429, 503):
                    self._count("ok" if head.status < 400 else "refused")
                    return self._handed_on(head, first, attempt)
                last = await whole_response(head, first, attempt)
            finally:
                if not attempt.begun:
                    await attempt.close()
            avoid |= {attempt.name}
        if isinstance(last, Response):
            self._count("full" if last.status_code == 429 else "failed")
            return last
        self._count("failed")
        raise ApiError(503, "no replica answers now: ask again in a few seconds", code="no_replica", retry_after=2)

    def _handed_on(self, head: ResponseHead, first: list[bytes], attempt: Attempt) -> Response:
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in head.headers}
        headers["x-prefixloom-replica"] = head.name
        events = headers.get("content-type", "").startswith("text/event-stream")
        return HandedOn(self._rest(first, attempt, events), attempt, head.status, headers)

    async def _rest(self, first: list[bytes], attempt: Attempt, events: bool) -> AsyncIterator[bytes]:
        """Yield the answer from its first byte on. Send the client an error from now on as an event."""
        try:
            for piece in first:
                yield piece
            async for piece in attempt.rest():
                yield piece
        except (RayError, RayServeException) as error:
            self._count("cut")
            log.warning("%s died in the midst of an answer: %s", attempt.name, first_line(error))
            if not events:
                raise
            yield sent(ApiError(503, "the replica that answered has died: ask again", code="replica_died").body)
        except BaseException:
            self._count("left")
            raise
        finally:
            await attempt.close()

    # ------------------------------------------------------------ all replicas answer
    async def _all(self, call: HttpCall) -> Response:
        """Ask every replica. The status is the worst one."""
        answers = await self._broadcast(call)
        if not answers:
            raise ApiError(503, "no replica answers now", code="no_replica", retry_after=2)
        status = max(status for status, _ in answers.values())
        if status >= 400:
            body = next(body for each, body in answers.values() if each == status)
            return Response(body, status, media_type="application/json")
        return JSONResponse({"replicas": {name: json.loads(body) for name, (_, body) in sorted(answers.items())}})

    async def _broadcast(self, call: HttpCall) -> dict[str, tuple[int, bytes]]:
        """Return by replica the status and body of its answer, without replicas that do not answer."""
        answering, computing = await self._both(call)
        return {**answering, **computing}

    async def _both(self, call: HttpCall) -> list[dict[str, tuple[int, bytes]]]:
        """Return the same for replicas that answer clients, and for replicas that compute their prompts."""
        handles = (self._replicas, self._prefill)
        return await asyncio.gather(*(broadcast(handle, call) for handle in handles))

    async def _texts_of(self, path: str) -> dict[str, str]:
        answers = await self._broadcast(HttpCall("GET", path, b"", [], b""))
        return {name: body.decode() for name, (status, body) in answers.items() if status == 200}

    async def _metrics(self) -> Response:
        texts = await self._texts_of("/metrics")
        ranks = {name: str(rank) for rank, name in enumerate(sorted(texts))}
        known = [each for each in self._replicas_known() if each.name in texts]
        ranks |= {each.name: rank_of(each) for each in known if "rank" in each.stats}
        body = together({ranks[name]: text for name, text in texts.items()})
        body += exposed(gauges_of(known, ranks)) + self._figures.text()
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _health(self) -> Response:
        """Tell whether a replica that answers clients is well. Replicas that compute prompts do not matter for that."""
        both = await self._both(HttpCall("GET", "/health", b"", [], b""))
        well, prefill = (sorted(name for name, (status, _) in each.items() if status == 200) for each in both)
        ill = sorted({*both[0], *both[1]} - {*well, *prefill})
        told: dict[str, Any] = {"status": "ok" if well else "no replica answers", "replicas": well, "ill": ill}
        if self._prefill is not None:
            told["prefill"] = prefill
        return JSONResponse(told, 200 if well else 503)

    async def _fleet(self) -> Response:
        """Return all replicas, for ``prefixloom fleet status``."""
        rows = []
        by_name = {each.name: each for each in self._replicas_known()}
        answers = await self._broadcast(HttpCall("GET", "/insight", b"", [], b""))
        for name, (status, body) in sorted(answers.items()):
            known = by_name.get(name, TrackedReplica(name))
            rows.append(
                {
                    "name": name, "insight": json.loads(body) if status == 200 else None,
                    "rank": known.stats.get("rank"), "role": known.metadata.get("role"),
                    "pid": known.metadata.get("pid"),
                    "revision": known.metadata.get("revision"), "fingerprint": known.metadata.get("fingerprint"),
                    "running": known.running, "under_way": known.under_way, "tokens_ahead": known.tokens_ahead,
                    "free": {name: max(share, 0.0) for name, share in known.free.items()},
                    "events": (known.doubt or "followed") if name in by_name else "this front does not know it yet",
                }
            )  # fmt: skip
        outcomes = {
            sample.labels["outcome"]: int(sample.value)
            for family in self._figures.requests.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }
        return JSONResponse({"policy": self._config.policy, "requests": outcomes, "replicas": rows})

    def _replicas_known(self) -> Sequence[TrackedReplica]:
        """Return the replicas that the routers know."""
        return [*self._known.known(), *([] if self._prefill_router is None else self._prefill_router.replicas.known())]

    # ------------------------------------------------------------ counting
    def _count(self, outcome: str) -> None:
        self._figures.requests.labels(outcome=outcome).inc()


async def broadcast(handle: DeploymentHandle[Any] | None, call: HttpCall) -> dict[str, tuple[int, bytes]]:
    """Return by replica of one deployment the status and body of its answer. Those that do not answer are left out."""
    if handle is None:
        return {}
    try:
        found = await handle.broadcast("whole", call).results_async(timeout_s=ALL_SECONDS, return_exceptions=True)
    except (TimeoutError, DeploymentUnavailableError):
        return {}
    return {each[0]: (each[1], each[2]) for each in found if isinstance(each, tuple)}


def rank_of(known: TrackedReplica) -> str:
    """Return the name of a replica in metrics, which the replica that takes its place has, too."""
    rank = str(known.stats["rank"])
    return f"prefill-{rank}" if known.metadata.get("role") == "prefill" else rank


class Attempt:
    """One replica's answer to one request. ``begun``: the client is about to get it."""

    def __init__(self, replicas: DeploymentHandle[Any], routed: RoutedCall, call: HttpCall) -> None:
        self._routed = routed
        self.begun = False
        self._closed = False
        self._pieces = replicas.options(method_name="answer", stream=True).remote(routed, call)

    @property
    def name(self) -> str:
        return "" if self._routed.replica is None else self._routed.replica.name

    async def begin(self) -> tuple[ResponseHead, list[bytes]]:
        """Wait for the head and the first bytes that say something of the answer."""
        head = await anext(self._pieces)
        assert isinstance(head, ResponseHead)
        first: list[bytes] = []
        async for piece in self._pieces:
            if isinstance(piece, ResponseEnd):
                self._routed.end(piece.hit)
                break
            first.append(piece)
            if ROLE_ALONE not in piece:
                break
        self._routed.first_byte()
        self.begun = head.status not in (429, 503)
        return head, first

    async def rest(self) -> AsyncIterator[bytes]:
        async for piece in self._pieces:
            if isinstance(piece, ResponseEnd):
                self._routed.end(piece.hit)
                return
            yield piece

    async def close(self) -> None:
        """Close an answer that is over, or that nobody wants any more: the replica then ends it."""
        if not self._closed:
            self._closed = True
            self._routed.end(None)
            with contextlib.suppress(RayError, RayServeException, PrefixloomError):
                self._pieces.cancel()


class HandedOn(StreamingResponse):
    """An answer on its way to the client. The try behind it ends, whatever becomes of the client."""

    def __init__(self, pieces: AsyncIterator[bytes], attempt: Attempt, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(pieces, status, headers)
        self._attempt = attempt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._attempt.close()


async def whole_response(head: ResponseHead, first: list[bytes], attempt: Attempt) -> Response:
    """Return an answer that is not handed on yet, since another replica may do better."""
    pieces: Sequence[bytes] = first
    with contextlib.suppress(RayError, RayServeException):
        pieces = [*first, *[piece async for piece in attempt.rest()]]
    headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in head.headers}
    headers.pop("content-length", None)
    return Response(b"".join(pieces), head.status, headers)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
