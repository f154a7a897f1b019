"""Administering a server: statistics, flushing, namespaces and the store, over HTTP and as ``prefixloom cache``.

Everything here is done in the engine's thread, between two steps, and wants the key of an administrator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import quote

import attrs
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prefixloom import InputError, PrefixloomError, open_store
from prefixloom.storage import Backend, shown_url

from .app import Server
from .client import KEY_VARIABLE, ServerRefused, add_server_arguments, ask, key_of
from .protocol import ApiError, StoreAsked

log = logging.getLogger("prefixloom.server")


class Tier(Protocol):
    """The tier below the device, behind which a store may be."""

    store: Any

    def attach(self, kind: Any) -> None: ...

    def detach(self) -> None: ...


class AttachedStore:
    """The store behind the host tier: which one it is, and how to change it while the cache runs."""

    def __init__(self, tier: Tier | None) -> None:
        self._tier = tier
        self._opened: Any = None
        self.url: str | None = None
        """As it may be shown: without a password."""

    def attach(self, url: str) -> None:
        self.check_free()
        self.take(open_store(url), url)

    def check_free(self) -> None:
        """Raise if no store can be attached now."""
        if self._tier is None:
            raise InputError("there is no tier of host memory for a store to be behind: start with --host-memory")
        if self.url is not None:
            raise InputError(f"the store {self.url!r} is attached already: detach it first")

    def take(self, opened: Backend, url: str) -> None:
        """Attach a store that was opened. If that cannot be, it is closed."""
        try:
            self.check_free()
            assert self._tier is not None
            self._tier.attach(opened)
        except BaseException:
            opened.close()
            raise
        self._opened, self.url = opened, shown_url(url)

    def detach(self) -> None:
        """Detach the store and close it. Whoever wants all to be written first waits for it before."""
        if self._tier is None or self.url is None:
            raise InputError("no store is attached")
        self._tier.detach()
        self._opened.close()
        self._opened, self.url = None, None

    def close(self) -> None:
        """Detach the store if there is one."""
        if self.url is not None:
            self.detach()


class Admin:
    """The routes of an administrator."""

    def __init__(self, server: Server, store: AttachedStore) -> None:
        self.server, self.store = server, store
        self.engine = server.worker.engine

    def routes(self) -> list[Route]:
        return [
            Route("/cache/stats", self.stats, methods=["GET"]),
            Route("/cache/flush", self.flush, methods=["POST"]),
            Route("/cache/namespaces", self.namespaces, methods=["GET"]),
            Route("/cache/namespaces/{name:path}", self.drop, methods=["DELETE"]),
            Route("/cache/store", self.attach, methods=["PUT"]),
            Route("/cache/store", self.detach, methods=["DELETE"]),
        ]

    async def _do(self, request: Request, what: Callable[[], Any]) -> Response:
        tenant = self.server.access.admin(request.headers.get("authorization"))
        log.info("%s: %s %s", tenant.name, request.method, request.url.path)
        return JSONResponse(await self.server.worker.call(what))

    async def stats(self, request: Request) -> Response:
        return await self._do(request, self._stats)

    def _stats(self) -> dict[str, Any]:
        told = attrs.asdict(self.engine.cache.stats())
        return {
            **told,
            "engine": attrs.asdict(self.engine.counts),
            "load": self.server.worker.load,
            "store": self.store.url,
        }

    async def flush(self, request: Request) -> Response:
        return await self._do(request, self._flush)

    def _flush(self) -> dict[str, Any]:
        nodes = self.engine.cache.stats().nodes
        self.engine.cache.flush()
        return {"flushed": nodes}

    async def namespaces(self, request: Request) -> Response:
        return await self._do(request, self._namespaces)

    def _namespaces(self) -> dict[str, Any]:
        """Return by namespace and component how many tokens are cached, or how many states."""
        found: dict[str, Counter[str]] = {}
        begin = self.engine.namespace("")
        for change in self.engine.cache.contents():
            name = change.namespace.removeprefix(begin)
            held = 1 if change.boundary is not None else sum(end - start for start, end in change.spans)
            found.setdefault(name, Counter())[f"{change.component} {change.tier}"] += held
        return {"namespaces": {name: dict(held) for name, held in sorted(found.items())}}

    async def drop(self, request: Request) -> Response:
        name = request.path_params["name"]
        return await self._do(request, lambda: self._drop(name))

    def _drop(self, name: str) -> dict[str, Any]:
        self.engine.cache.drop_namespace(self.engine.namespace(name))
        return {"dropped": name}

    async def attach(self, request: Request) -> Response:
        tenant = self.server.access.admin(request.headers.get("authorization"))
        with self.server.memory.share(tenant.name) as share:
            body = (await self.server.read(request, StoreAsked, share)).asked
        # on a thread of its own: opening asks the network, or reads a directory
        opened = await asyncio.to_thread(self._open, body.url)
        return await self._do(request, lambda: self._changed(lambda: self.store.take(opened, body.url)))

    def _open(self, url: str) -> Backend:
        try:
            self.store.check_free()
            return open_store(url)
        except PrefixloomError as error:
            raise ApiError(409, str(error)) from error

    async def detach(self, request: Request) -> Response:
        return await self._do(request, lambda: self._changed(self.store.detach))

    def _changed(self, change: Callable[[], None]) -> dict[str, Any]:
        try:
            change()
        except PrefixloomError as error:
            raise ApiError(409, str(error)) from error
        self.engine.cache.poll()
        return {"store": self.store.url}


# ---------------------------------------------------------------- from the command line


ACTIONS = {
    "stats": ("GET", "/cache/stats", "what is cached, by component and tier, and what was done so far"),
    "flush": ("POST", "/cache/flush", "forget everything; what runs starts over"),
    "namespaces": ("GET", "/cache/namespaces", "what is cached, by namespace"),
    "drop": ("DELETE", "/cache/namespaces/", "forget a namespace"),
    "attach": ("PUT", "/cache/store", "attach a store, by its URL"),
    "detach": ("DELETE", "/cache/store", "detach the store"),
}
WITH_NAME = {"drop": "NAME", "attach": "URL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    for name, (_, _, summary) in ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name in WITH_NAME:
            action.add_argument("name", metavar=WITH_NAME[name])
        add_server_arguments(action)


def run(args: argparse.Namespace) -> int:
    """Ask a running server, and print its answer. Return 1 if the server refuses."""
    method, path, _ = ACTIONS[args.action]
    body = None
    if args.action == "drop":
        path += quote(args.name, safe="")
    elif args.action == "attach":
        body = {"url": args.name}
    if not key_of(args.key_file):
        raise InputError(f"an administrator shows a key: give --key-file FILE, or set {KEY_VARIABLE}")
    try:
        print(json.dumps(ask(args, method, path, body), indent=2))
        return 0
    except ServerRefused as error:
        print(f"prefixloom: {error}", file=sys.stderr)
        return 1
