"""Servers for tests: the app over the built-in model on a free port of loopback, in a thread of its own."""

from __future__ import annotations

import atexit
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache as remembered
from typing import Any

import attrs
import httpx
import torch
import uvicorn

from prefixloom import compose
from prefixloom_engine import Engine, ThreeWay
from prefixloom_engine.server.access import Access, Hosts, Tenant
from prefixloom_engine.server.admin import Admin, AttachedStore
from prefixloom_engine.server.app import Limits, Server, make_app
from prefixloom_engine.server.connection import HEAD_SECONDS, STALLED_SECONDS, Connection
from prefixloom_engine.server.insight import Insight
from prefixloom_engine.server.reading.processes import TextProcesses
from prefixloom_engine.server.worker import EngineWorker
from prefixloom_engine.threeway import SIZES
from prefixloom_engine.threeway.text import BYTE_VOCABULARY, END, ByteTokenizer
from tests.support.engines import nothing_left

ADMIN, ALICE, BOB = "admin-key-0123456789", "alice-key-0123456789", "bob-key-01234567890"
CAPACITY = {"full": 2048, "swa": 2048, "mamba": 64}
KEYS = {
    ADMIN: Tenant("root", "root", admin=True),
    ALICE: Tenant("alice", "alice"),
    BOB: Tenant("bob", "bob"),
}


@remembered
def text_model() -> ThreeWay:
    return ThreeWay(attrs.evolve(SIZES["tiny"], vocabulary=BYTE_VOCABULARY), dtype="float64")


@remembered
def byte_texts() -> TextProcesses:
    """The processes that read bodies for all servers of the built-in model. They end with this one."""
    texts = TextProcesses(ByteTokenizer)
    atexit.register(texts.close)
    return texts


@attrs.frozen
class RunningServer:
    """``url``: of the API. ``server``, ``store``: what is behind it. ``http``: end it by ``http.should_exit``."""

    url: str
    server: Server
    http: uvicorn.Server
    store: AttachedStore

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def client(self, key: str = "", **options: Any) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.root, headers=headers, timeout=60, trust_env=False, **options)


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
TEXT = ByteTokenizer()


def eventually(true: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until something is true, which it has to be in so many seconds."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


def ask(prompt: str, count: int, **more: Any) -> dict[str, Any]:
    """Return the body that asks for so many of the likeliest tokens."""
    return {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, **more}


@remembered
def right(prompt: str, count: int) -> str:
    """Return the answer to ``ask``; the end of a message is a token without text."""
    return TEXT.decode(greedy(TEXT.encode(prompt), count, ends=False))


@contextmanager
def connected(server: RunningServer, sends: bytes = b"", receives: int = 0) -> Iterator[socket.socket]:
    """A connection on which something is sent. ``receives``: the bytes that the system takes for it, if not all."""
    with socket.socket() as it:
        if receives:
            it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        it.settimeout(20)
        it.connect(("127.0.0.1", int(server.root.rpartition(":")[2])))
        it.sendall(sends)
        yield it


def posted(body: dict[str, Any], key: str = "", length: int = 0) -> bytes:
    """Return a request as bytes. ``length``: what its head says of the body, if not the truth."""
    content = json.dumps(body).encode()
    more = b"\r\nauthorization: Bearer %b" % key.encode() if key else b""
    return (HEAD % (length or len(content))).replace(b"\r\n\r\n", more + b"\r\n\r\n") + content


@contextmanager
def serving(
    model: Any = None,
    texts: TextProcesses | None = None,
    *,
    capacity: Mapping[str, int] | None = None,
    tier: Any = None,
    keys: Mapping[str, Tenant] | None = None,
    limits: Limits | None = None,
    most: int = 64,
    prepare: Callable[[Engine], None] = lambda engine: None,
    debug: bool = True,
    head_seconds: float = HEAD_SECONDS,
    stalled_seconds: float = STALLED_SECONDS,
    connection: type[Connection] = Connection,
    hosts: Hosts = Hosts(),  # noqa: B008  frozen
    around: Callable[[Server, Any], Any] = lambda server, app: app,
    **options: Any,
) -> Iterator[RunningServer]:
    """A server that answers while the block runs; nothing is left of it in the end."""
    torch.set_num_threads(1)
    it, plugins = model or text_model(), [] if tier is None else [tier]
    store, access = AttachedStore(tier), Access(keys or {})
    wrong: list[BaseException] = []

    def make() -> Engine:
        cache = compose(
            it.config, plugins=plugins, capacity=capacity or CAPACITY, policy="priority", debug=debug,
            shares=access.cache_shares, max_rewind=options.get("speculate", 0),
        )  # fmt: skip
        engine = Engine(it, cache, **{"policy": "priority", "shares": access.shares, **options})
        prepare(engine)
        return engine

    def ended() -> None:
        try:
            nothing_left(worker.engine.cache)
            store.close()
        except BaseException as error:
            wrong.append(error)

    running = options.get("max_running", 16)
    worker = EngineWorker(make, most, lambda error: None, ended, running=running, shares=access.shares)
    server = Server(worker, texts or byte_texts(), access, limits or Limits(), "built-in", "fp_0")
    app = around(server, make_app(server, [*Admin(server, store).routes(), *Insight(server).routes()], hosts))
    kind = type("Kind", (connection,), {"head_seconds": head_seconds, "stalled_seconds": stalled_seconds})
    http = uvicorn.Server(
        uvicorn.Config(
            app, port=0, log_level="warning", lifespan="on", timeout_graceful_shutdown=20, http=kind, ws="none"
        )
    )
    thread = threading.Thread(target=http.run)
    thread.start()
    while not http.started:
        assert thread.is_alive()
        time.sleep(0.005)
    port = http.servers[0].sockets[0].getsockname()[1]
    try:
        yield RunningServer(f"http://127.0.0.1:{port}/v1", server, http, store)
    finally:
        http.should_exit = True
        thread.join()
    assert (worker.load, wrong) == (0, [])


def greedy(prompt: list[int], count: int, *, ends: bool = True) -> list[int]:
    """What the model answers without any server or cache; with ``ends``, up to the end of its message."""
    cache = compose(text_model().config, capacity={"full": 2048, "swa": 2048, "mamba": 10})
    with Engine(text_model(), cache, overlap=False) as engine:
        (answer,) = engine.generate([prompt], max_tokens=count)
    tokens = answer.tokens
    return tokens[: tokens.index(END)] if ends and END in tokens else tokens


def spoiled(rng: random.Random, good: list[str]) -> bytes:
    """A body in which something is wrong: bytes, structure, or values."""
    body = bytearray(rng.choice(good).encode())
    how = rng.randrange(4)
    if how == 0:
        for _ in range(rng.randrange(1, 6)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        return bytes(body)
    if how == 1:
        return bytes(body[: rng.randrange(len(body))])
    if how == 2:
        return b"[" * rng.choice((3, 100_000))
    told = json.loads(body)
    names = [*told, "stop", "seed", "n", "temperature", "top_p", "logprobs", "cache_salt", "stop_token_ids", "tools"]
    value = rng.choice((None, True, -1, 0, 1e308, 10**30, "", "\0", "x" * 5000, [], {}, [[]], [None], {"a": {}}))
    return json.dumps({**told, rng.choice(names): value, "max_tokens": 2}).encode()
