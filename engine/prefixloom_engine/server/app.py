"""The app: the routes of the server, its limits, and its errors.

``Server`` has what the routes share. A request is read within limits, becomes requests of the engine (``answers``), and
is answered whole or as a stream of events. A client that leaves is noticed at once, and what it asked is aborted.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import socket
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import FrameType
from typing import Any, TypeVar

import anyio
import attrs
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from prefixloom import InputError

from ..contract.model import Trained
from .access import Access, Hosts, Tenant
from .answers import TextAnswer, requests_of
from .connection import EVENTS
from .endpoints import FORMS
from .endpoints.form import Form, Object, TextPiece
from .protocol import ApiError, Body, DetokenizeAsked, TokenizeAsked
from .reading.bodies import Bounds, ReadBody
from .reading.processes import SMALL, TextProcesses
from .worker import EngineDown, EngineWorker, QueueFull

log = logging.getLogger("prefixloom.server")
R = TypeVar("R")
UNEXPECTED = ApiError(500, "something went wrong in the server")
HURRIED_SECONDS = 2.0
BACKLOG = 2048
"""Connections that the system keeps until they are accepted."""
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
NO_ROOM_SECONDS = 60.0
"""How often the log says that no connection can be accepted."""
PREFILL_HEADER = "x-prefixloom-prefill"
"""The address of the prefill process that is to compute the prompts of a body, if a router has chosen it."""
BODY_TYPES = ("", "application/json", "application/x-www-form-urlencoded")
"""What a body may be called. It is JSON; ``curl -d`` calls it the last one. With that, browsers tell the origin."""
CLIENT_LEFT = 499
"""The status that logs have of a request whose client has gone."""


@attrs.frozen
class Limits:
    """``body``: bytes of a body. ``bodies``: of all bodies that are read or turned into tokens, and of all images that
    wait to be computed, together. ``body_seconds``: how long a client may take to send a body. ``body_rate``: the bytes
    of one tenant's large bodies that are received in a second. ``seconds``: how long an answer may take. ``answer``:
    the tokens of an answer to a chat that does not say how many. ``drain_seconds``: how long the end of the server
    waits for running answers, and then for the store. ``context``: the tokens of a prompt and its answer; 0: as the
    model says."""

    body: int = 8 << 20
    bodies: int = 256 << 20
    body_seconds: float = 30.0
    body_rate: int = 8 << 20
    seconds: float = 600.0
    answer: int = 2048
    drain_seconds: float = 30.0
    context: int = 0


class BodyShare:
    """What one request has of the memory for ``Limits.bodies``. A context manager, at whose end it has nothing, unless
    it is ``kept``: then whoever answers gives it back."""

    kept = False

    def __init__(self, memory: BodyMemory, tenant: str) -> None:
        self._memory, self._tenant, self._bytes = memory, tenant, 0

    def hold(self, count: int) -> None:
        """Have so many bytes from now on. ``ApiError``: the requests at hand have too much.

        A tenant gets no more than what is left free then, so that others find something.
        """
        memory, more = self._memory, count - self._bytes
        if 0 < more > memory.most - memory.used - (memory.of[self._tenant] if self._tenant else 0):
            raise ApiError(
                503, "the requests that this server has at hand are too large together: ask again in a second",
                code="too_many_bodies", retry_after=1,
            )  # fmt: skip
        memory.used += more
        memory.of[self._tenant] += more
        self._bytes = count

    def __enter__(self) -> BodyShare:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.kept:
            self.hold(0)


@attrs.define
class BodyMemory:
    """The memory for what requests bring along: ``most`` bytes, of which ``used`` are in use, by tenant ``of``."""

    most: int
    used: int = 0
    of: Counter[str] = attrs.field(factory=Counter)

    def share(self, tenant: str = "") -> BodyShare:
        return BodyShare(self, tenant)


async def body_bytes(request: Request, limits: Limits, share: BodyShare, turn: asyncio.Lock | None = None) -> bytes:
    """Read a body within the limits; ``share`` holds its bytes. ``ApiError``: it is too large, or too slow.

    ``turn``: of a tenant whose large bodies are received one after another, at the rate of the limits.
    """
    data = bytearray()
    try:
        with anyio.fail_after(limits.body_seconds) as patience:
            async with AsyncExitStack() as large:
                async for chunk in request.stream():
                    data += chunk
                    if len(data) > limits.body:
                        raise ApiError(413, f"the body has more than {limits.body} bytes", code="body_too_large")
                    share.hold(len(data))
                    if turn is not None and len(data) > SMALL:
                        if len(data) - len(chunk) <= SMALL:
                            patience.deadline = math.inf  # its own tenant keeps it waiting
                            await large.enter_async_context(turn)
                            patience.deadline = anyio.current_time() + limits.body_seconds
                        # What is not taken waits in the system: an event loop that takes 300 MB a second has Python's
                        # lock so often that others' answers take three times as long.
                        paused = len(chunk) / limits.body_rate
                        patience.deadline += paused
                        await asyncio.sleep(paused)
    except TimeoutError:
        raise ApiError(408, f"the body took more than {limits.body_seconds:g} seconds") from None
    return bytes(data)


class Server:
    """What the routes share. ``name``: of the model. ``fingerprint``: changes with the model's weights."""

    def __init__(
        self, worker: EngineWorker, texts: TextProcesses, access: Access, limits: Limits, name: str, fingerprint: str
    ) -> None:
        self.worker, self.texts, self.access, self.limits = worker, texts, access, limits
        self.tokenizer = texts.tokenizer
        self.name, self.fingerprint = name, fingerprint
        model = worker.engine.model
        context = limits.context or (model.context if isinstance(model, Trained) else None)
        held = worker.engine.longest + 1  # of the answer's last token nothing is computed
        self.bounds = Bounds(
            name, model.vocabulary, min(held, context or held), worker.most, limits.answer, limits.bodies
        )
        self.begun = int(time.time())
        self.memory = BodyMemory(limits.bodies)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Of tenants, to send a large body."""
        self.hurried = False
        """Whether the server ends at once, and waits for nothing."""

    # ------------------------------------------------------------ reading a request
    def tenant(self, request: Request) -> Tenant:
        return self.access.tenant(request.headers.get("authorization"))

    async def read(self, request: Request, kind: type[Body], share: BodyShare, data: bytes = b"") -> ReadBody:
        """Read the request's body, or else ``data``, in another process, unless the client leaves.

        ``share`` holds its bytes, and then the memory of its prompts.
        """
        name = self.tenant(request).name
        if not data:
            called = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if called not in BODY_TYPES:
                raise ApiError(415, f"a body is application/json, got {called[:100]!r}", code="unsupported_media_type")
            data = await body_bytes(request, self.limits, share, self._turns[name] if name else None)
        found = await unless_left(request, self.texts.read(kind, data, self.bounds, name))
        share.hold(found.bytes)
        return found

    # ------------------------------------------------------------ answering
    def answering(self, kind: type[Form]) -> Callable[[Request], Awaitable[Response]]:
        """Return a function that answers the requests at an endpoint."""

        async def answer(request: Request) -> Response:
            tenant = self.tenant(request)
            with self.memory.share(tenant.name) as share:
                form, answers = await self._begin(kind, request, tenant, share)

                def over() -> None:
                    share.hold(0)
                    for each in answers:
                        each.leave()

                if form.asked.stream:
                    share.kept = True
                    return EventStream(self.events(form, answers), over)
                try:
                    return await unless_left(request, self.whole(form, answers))
                finally:
                    over()

        return answer

    async def _begin(
        self, kind: type[Form], request: Request, tenant: Tenant, share: BodyShare
    ) -> tuple[Form, list[TextAnswer]]:
        """Ask the engine for all choices of all prompts of a body, which is not needed any more then."""
        self.worker.check_room(1, tenant.name)
        read = await self.read(request, kind.body, share)
        share.hold(sum(each.bytes for each in read.prompts))
        form, asked = kind(self.name, self.fingerprint, read, self.tokenizer), read.asked
        stops = self.worker.engine.model.stops | self.tokenizer.stops
        requests = [
            each
            for prompt in read.prompts
            for each in requests_of(
                asked, prompt, self.bounds.room(len(prompt.tokens), asked.most_tokens), stops, tenant,
                request.headers.get(PREFILL_HEADER, ""),
            )
        ]  # fmt: skip
        tickets = await self.worker.add(*requests)
        answers = [
            TextAnswer(self.worker, ticket, self.tokenizer, asked.stops, at, self.limits.seconds)
            for at, ticket in enumerate(tickets)
        ]
        form.answers = answers
        return form, answers

    async def whole(self, form: Form, answers: Sequence[TextAnswer]) -> Response:
        pieces = await asyncio.gather(*(answer.collected() for answer in answers))
        return JSONResponse(form.answer(list(map(form.choice, answers, pieces))))

    async def events(self, form: Form, answers: Sequence[TextAnswer]) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events. An error that comes late is an event as well."""
        try:
            for answer in answers:
                if begun := form.begin(answer.index):
                    yield sent(form.chunk(begun))
            async for answer, piece in side_by_side(answers, whole=form.parses):
                yield sent(form.chunk(form.deltas(answer, piece)))
            if form.asked.include_usage:
                yield sent(form.chunk([], form.usage))
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            log.warning("a stream ended with an error: %s", error.message)
            yield sent(error.body)
        except Exception:
            log.exception("a stream ended with an error")
            yield sent(UNEXPECTED.body)

    # ------------------------------------------------------------ routes
    async def tokenize(self, request: Request) -> Response:
        with self.memory.share(self.tenant(request).name) as share:
            (prompt,) = (await self.read(request, TokenizeAsked, share)).prompts
        told = {"count": len(prompt.tokens), "max_model_len": self.bounds.context, "tokens": prompt.tokens}
        return JSONResponse(told)

    async def detokenize(self, request: Request) -> Response:
        with self.memory.share(self.tenant(request).name) as share:
            (text,) = (await self.read(request, DetokenizeAsked, share)).texts
        return JSONResponse({"prompt": text})

    async def models(self, request: Request) -> Response:
        self.tenant(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self.tenant(request)
        self.bounds.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    def _model(self) -> Object:
        return {
            "id": self.name,
            "object": "model",
            "created": self.begun,
            "owned_by": "prefixloom",
            "max_model_len": self.bounds.context,
        }

    async def health(self, request: Request) -> Response:
        """Answer whether the engine lives, what keeps it or the text from answering, and what prefill processes do.

        Without these the server answers as well. It needs no key, since whoever watches over a server asks it.
        """
        error, peers = self.worker.error, dict(self.worker.engine.peers)
        troubles = {"engine": self.worker.trouble, "text": self.texts.trouble}
        told: Object = {name: each for name, each in troubles.items() if each}
        status = str(error or ("degraded" if told else "ok"))
        ill = error is not None or "engine" in told
        return JSONResponse({"status": status, **told, **({"prefill": peers} if peers else {})}, 503 if ill else 200)

    def routes(self) -> list[Route]:
        return [
            *(Route(form.path, self.answering(form), methods=["POST"]) for form in FORMS),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
        ]


class Guard:
    """Refuses requests of other sites' pages, and requests that tell their length in two ways."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self.hosts.check(headers)
                if "transfer-encoding" in headers and ("content-length" in headers or scope["http_version"] == "1.0"):
                    raise ApiError(400, "Transfer-Encoding stands alone, and not in HTTP/1.0", code="invalid_http")
            except ApiError as error:
                app = told(error, {"connection": "close"})  # what follows on this connection may be no request
        await app(scope, receive, send)


def make_app(server: Server, more: Sequence[Route] = (), hosts: Hosts = Hosts()) -> Starlette:  # noqa: B008  frozen
    """Make the application. The engine runs from its start to its end."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.worker.start()
        await server.texts.begin()
        try:
            yield
        finally:
            await server.worker.stop(0 if server.hurried else server.limits.drain_seconds)

    handlers: dict[Any, Any] = {
        ApiError: lambda request, error: told(error),
        InputError: lambda request, error: told(ApiError(400, str(error))),
        QueueFull: lambda request, error: told(ApiError(429, str(error), code="queue_full", retry_after=error.seconds)),
        EngineDown: lambda request, error: told(ApiError(503, str(error), code="engine_down")),
        ClientDisconnect: lambda request, error: Response(status_code=CLIENT_LEFT),
        404: lambda request, error: told(ApiError(404, f"there is no {request.url.path} here")),
        405: lambda request, error: told(
            ApiError(405, f"{request.url.path} does not take {request.method}"), error.headers
        ),
        500: lambda request, error: told(UNEXPECTED, {"connection": "close"}),  # which is what happens then
    }
    return Starlette(
        routes=[*server.routes(), *more],
        exception_handlers=handlers,
        lifespan=lifespan,
        middleware=[Middleware(Guard, hosts)],
    )


def told(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    if error.retry_after:
        headers = {**(headers or {}), "retry-after": str(error.retry_after)}
    return JSONResponse(error.body, error.status, headers)


def sent(told: Object) -> bytes:
    """Return one server-sent event."""
    return f"data: {json.dumps(told, ensure_ascii=False, separators=(',', ':'))}\n\n".encode("utf-8", "surrogatepass")


class EventStream(StreamingResponse):
    """A stream of events, which ends the answers behind it whatever becomes of the client."""

    def __init__(self, events: AsyncIterator[bytes], over: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[EVENTS] = True
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


async def side_by_side(answers: Sequence[TextAnswer], *, whole: bool) -> AsyncIterator[tuple[TextAnswer, TextPiece]]:
    """Yield the pieces of all answers, each as soon as it comes. ``whole``: each answer in one piece."""
    if len(answers) == 1 and not whole:
        async for piece in answers[0].pieces():
            yield answers[0], piece
        return
    come: asyncio.Queue[tuple[TextAnswer, TextPiece | Exception]] = asyncio.Queue()

    async def follow(answer: TextAnswer) -> None:
        try:
            if whole:
                come.put_nowait((answer, await answer.collected()))
                return
            async for piece in answer.pieces():
                come.put_nowait((answer, piece))
        except Exception as error:
            come.put_nowait((answer, error))

    tasks = [asyncio.create_task(follow(answer)) for answer in answers]
    try:
        left = len(tasks)
        while left:
            answer, found = await come.get()
            if isinstance(found, Exception):
                raise found
            left -= bool(found.reason)
            yield answer, found
    finally:
        for task in tasks:
            task.cancel()


async def unless_left(request: Request, answer: Awaitable[R]) -> R:
    """Await ``answer``, and cancel it if the client goes away meanwhile: ``ClientDisconnect``."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(left())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        raise ClientDisconnect
    finally:
        answering.cancel()
        leaving.cancel()


# ---------------------------------------------------------------- running


class Announced(uvicorn.Server):
    """Serves until a signal comes, and says on standard output when it has begun.

    Answers that run then may end within ``drain_seconds``. After these, or at a second signal, they end with an error.
    A second signal waits for clients that have to read that error for ``HURRIED_SECONDS``, and for nothing else.
    """

    def __init__(self, config: uvicorn.Config, server: Server, what: str, lines: Sequence[str]) -> None:
        super().__init__(config)
        self._server, self._what, self._lines = server, what, lines
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quiet_until = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._loop_failed)
        await super().startup(sockets)
        if self.started:
            for each in self.servers[0].sockets:
                with each.dup() as same:
                    same.listen(BACKLOG)  # asyncio tries, and complains, as often as the backlog that it knows: once
            port = self.servers[0].sockets[0].getsockname()[1]
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            print(f"{self._what} at http://{host}:{port}/v1")
            print("\n".join(f"  {line}" for line in self._lines), flush=True)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say once a minute that there are no descriptors for further connections, which wait. asyncio tries again."""
        if getattr(context.get("exception"), "errno", None) not in NO_ROOM:
            loop.default_exception_handler(context)
        elif loop.time() > self._quiet_until:
            self._quiet_until = loop.time() + NO_ROOM_SECONDS
            log.error("no connection can be accepted now: %s", context["exception"])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        late = asyncio.get_running_loop().call_later(self._server.limits.drain_seconds, self._abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and self._loop is not None and not self._server.hurried:
            self._server.hurried = True
            self._loop.call_soon_threadsafe(self._hurry)
        elif not self.should_exit or self._loop is None:
            super().handle_exit(sig, frame)

    def _hurry(self) -> None:
        self._abort_all()
        assert self._loop is not None
        self._loop.call_later(HURRIED_SECONDS, self._force)

    def _force(self) -> None:
        self.force_exit = True

    def _abort_all(self) -> None:
        self._server.texts.close()
        self._server.worker.abort_all(ApiError(503, "the server ends before this answer does", code="server_ends"))
