"""What clients that mean no good can take: time, memory and connections are bounded, and others are served."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from pydantic import BaseModel

from prefixloom import InputError
from prefixloom_engine.server.access import Hosts
from prefixloom_engine.server.app import BodyMemory, Limits
from prefixloom_engine.server.connection import Connection
from prefixloom_engine.server.endpoints.completions import CompletionAsked
from prefixloom_engine.server.protocol import ApiError
from prefixloom_engine.server.reading import processes
from prefixloom_engine.server.reading.bodies import MOST_ITEMS, Bounds, unwritten
from prefixloom_engine.server.reading.processes import TextProcesses
from prefixloom_engine.threeway.text import ByteTokenizer
from tests.support.servers import (
    ADMIN,
    ALICE,
    BOB,
    HEAD,
    KEYS,
    RunningServer,
    ask,
    byte_texts,
    connected,
    eventually,
    posted,
    right,
    serving,
)

LARGE = b'{"prompt": "a"%b}' % (b" " * 120_000)


@pytest.fixture(scope="module")
def guarded() -> Iterator[RunningServer]:
    with serving(keys=KEYS) as it:
        yield it


def all_of(it: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    told = b""
    while more := it.recv(1 << 16):
        told += more
    return told


def head_and_error(told: bytes) -> tuple[bytes, dict[str, Any]]:
    head, _, body = told.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return head, error


# ---------------------------------------------------------------- memory


def test_a_tenant_gets_as_much_memory_as_it_leaves_to_others_and_who_is_alone_gets_all() -> None:
    for tenant, fits in (("", 40), ("a", 20)):
        memory = BodyMemory(100)
        with memory.share(tenant) as first, memory.share(tenant) as second:
            first.hold(60 if not tenant else 40)
            second.hold(fits)
            with pytest.raises(ApiError, match="too large together"):
                second.hold(fits + 1)
            with memory.share("b") as other:
                other.hold((100 - memory.used) // 2)
        assert memory.used == 0


def test_bodies_that_are_too_large_together_are_refused_for_a_while() -> None:
    """And prompts count as what they are in memory."""
    with serving(keys=KEYS, limits=Limits(body=8000, bodies=10_000)) as server:
        memory = server.server.memory
        with server.client(ALICE) as alice, server.client(BOB) as bob:
            head = posted({}, BOB, length=7999)
            with connected(server, head + b"x" * (4000 - 2)):
                eventually(lambda: memory.used == 4000)
                refused = bob.post("/v1/completions", json=ask("y" * 2500, 1))
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert refused.json()["error"]["code"] == "too_many_bodies"
                assert alice.post("/v1/completions", json=ask("y" * 2500, 1)).status_code == 400, "read, and too long"
                assert bob.post("/v1/completions", json=ask("b", 4)).json()["choices"][0]["text"] == right("b", 4)
            eventually(lambda: memory.used == 0)
            told = bob.post("/v1/completions", json=ask("y" * 2500, 1))
            assert told.json()["error"]["code"] == "context_length_exceeded"
            assert bob.post("/v1/completions", json=ask("x" * 1000, 2)).json()["error"]["code"] == "too_many_bodies"
        assert memory.used == 0


def test_a_body_is_given_back_once_the_engine_has_its_tokens() -> None:
    with serving(limits=Limits(bodies=30_000)) as server:
        for stream in (False, True):
            with connected(server, posted(ask("a" * 500, 1500, stream=stream))):
                eventually(lambda: server.server.worker.load == 1)
                eventually(lambda: server.server.memory.used == 0)
                assert server.server.worker.load == 1
            eventually(lambda: server.server.worker.load == 0)


def test_all_choices_of_a_prompt_share_its_tokens_and_their_check() -> None:
    """Else one body of a few hundred kilobytes holds the engine for seconds, and hundreds of megabytes."""
    with serving() as server, server.client() as client:
        jobs: list[Any] = []
        scheduler = server.server.worker.engine._scheduler  # type: ignore[attr-defined]
        add = scheduler.add
        scheduler.add = lambda job: jobs.append(job) or add(job)
        assert client.post("/v1/completions", json={**ask("a" * 100, 2), "n": 3}).status_code == 200
        assert len(jobs) == 3
        assert len({id(job.request.tokens) for job in jobs}) == len({id(job.key) for job in jobs}) == 1


class Held(ByteTokenizer):
    """Notes each prompt in a folder, and waits with it until the folder says that it may go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def encode(self, text: str) -> list[int]:
        with self.folder.joinpath("begun").open("a") as file:
            file.write(f"{os.getpid()} {text}\n")
        while not self.folder.joinpath("go on").exists():
            time.sleep(0.01)
        return super().encode(text)


@attrs.frozen
class HeldTexts:
    """Processes that read no prompt before ``go_on`` is called."""

    texts: TextProcesses
    folder: Path

    @property
    def begun(self) -> list[tuple[int, str]]:
        """The prompts that are begun, each with the process that reads it."""
        lines = self.folder.joinpath("begun").read_text().splitlines()
        return [(int(process), text) for process, text in (line.split(" ", 1) for line in lines)]

    def go_on(self) -> None:
        self.folder.joinpath("go on").touch()


@pytest.fixture(scope="module")
def holding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldTexts]:
    folder = tmp_path_factory.mktemp("held")
    with closing(TextProcesses(partial(Held, folder), seconds=600.0)) as texts:
        yield HeldTexts(texts, folder)


@pytest.fixture
def held(holding: HeldTexts) -> Iterator[HeldTexts]:
    holding.folder.joinpath("begun").write_text("")
    holding.folder.joinpath("go on").unlink(missing_ok=True)
    yield holding
    holding.go_on()


def test_a_client_that_leaves_before_its_prompt_has_tokens_is_noticed(held: HeldTexts) -> None:
    with serving(texts=held.texts) as server, server.client() as client:
        requests = [posted(ask(text, 1500)) for text in ("first", "second")]
        size = sum(len(json.dumps(ask(text, 1500))) for text in ("first", "second"))
        with connected(server, requests[0]), connected(server, requests[1]):
            eventually(lambda: held.begun != [] and server.server.memory.used == size)
        eventually(lambda: server.server.memory.used == 0 and not server.http.server_state.tasks)
        held.go_on()
        assert client.post("/v1/completions", json=ask("b", 4)).status_code == 200
        assert len(held.begun) == 2, "one of the two was not worth beginning"
        assert server.server.worker.engine.counts.admitted == 1


def test_health_and_large_bodies_are_answered_while_a_small_one_is_read(
    held: HeldTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that never ends must not hold the event loop, or bodies of other kinds."""
    monkeypatch.setattr(processes, "HELD_SECONDS", 0.0)
    with (
        serving(texts=held.texts, limits=Limits(bodies=1 << 20)) as server,
        server.client() as client,
        connected(server, posted(ask("first", 4))),
    ):
        eventually(lambda: held.begun != [])
        assert held.begun[0][0] != os.getpid()
        told = client.get("/health")
        assert (told.status_code, told.json()["status"]) == (200, "degraded")
        assert "a body has been read for" in told.json()["text"]
        large = {"prompt": [1] * 40_000}
        assert client.post("/v1/completions", json=large).json()["error"]["code"] == "context_length_exceeded"
        held.go_on()
        eventually(lambda: client.get("/health").json() == {"status": "ok"})


def test_tenants_take_turns_and_none_holds_all_readers_of_large_bodies(held: HeldTexts) -> None:
    with serving(texts=held.texts, keys=KEYS) as server, server.client(ALICE) as alice, ExitStack() as left:
        size = 0
        for text, key in (("a", ALICE), ("b", ALICE), ("c", ALICE), ("d", BOB)):
            left.enter_context(connected(server, posted(ask(text, 2), key)))
            size += len(json.dumps(ask(text, 2)))
            eventually(lambda size=size: server.server.memory.used == size and held.begun != [])  # type: ignore[misc]
            alice.get("/health")  # by now the event loop has the body in line
        for number in range(3):
            with connected(server, posted(ask(str(number) * (64 << 10), 2), BOB)):
                eventually(lambda: server.server.memory.used > 64 << 10)
                alice.get("/health")
            eventually(lambda: server.server.memory.used == size)
        answer = alice.post("/v1/completions", json={"prompt": [1] * 40_000})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        held.go_on()
        lanes = held.texts._lanes
        eventually(lambda: not any(turn.locked() for lane in lanes for turn in lane.turns.values()))
        begun = [text[:1] for _, text in held.begun]
        assert [text for text in begun if text in "abcd"] == ["a", "d", "b", "c"]
        assert len(begun) <= 5, "who leaves has the next large body read once this one is"


def test_readers_serve_one_event_loop_after_another() -> None:
    bounds = Bounds("built-in", 260, 100, 10, 10, 1000)

    async def several() -> list[int]:
        asked = (byte_texts().read(CompletionAsked, b'{"prompt": "abc"}', bounds) for _ in range(4))
        return [len(each.prompts[0].tokens) for each in await asyncio.gather(*asked)]

    assert [asyncio.run(several()) for _ in range(2)] == [[3] * 4] * 2


def test_large_bodies_of_one_tenant_are_received_one_after_another_at_a_bounded_rate() -> None:
    answers: dict[str, int] = {}
    limits = Limits(body_seconds=20, body_rate=100_000)
    with serving(keys=KEYS, limits=limits) as server, server.client(ALICE) as alice, server.client(BOB) as bob:
        asking = threading.Thread(target=lambda: answers.update(bob=bob.post("/tokenize", content=LARGE).status_code))
        with connected(server, posted({}, BOB, length=200_000) + b"x" * 99_998):
            eventually(lambda: server.server.memory.used == 100_000)
            asking.start()
            eventually(lambda: server.server.memory.used > 100_000 + (64 << 10))
            begun = time.monotonic()
            assert alice.post("/tokenize", content=LARGE).status_code == 200
            assert time.monotonic() - begun > (len(LARGE) - (64 << 10)) / 100_000
            assert bob.post("/tokenize", content='{"prompt": "a"}').status_code == 200, "a small one waits for none"
            assert not answers
        asking.join()
        assert answers == {"bob": 200}
    with serving(keys=KEYS, limits=attrs.evolve(limits, body_seconds=0.3)) as server, server.client(BOB) as bob:
        assert bob.post("/tokenize", content=LARGE).status_code == 200, "the rate is no slowness of the client"


class Hostile(ByteTokenizer):
    """Does with a prompt what hostile ones can do to a tokenizer."""

    def encode(self, text: str) -> list[int]:
        if text == "hangs":
            re.match("(a|aa)*b", "a" * 100)
        elif text == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif text == "eats":
            return [len(b"x" * (1 << 30))]
        elif text == "is broken":
            raise RuntimeError("broken")
        return super().encode(text)


def test_what_reads_a_hostile_body_is_replaced() -> None:
    texts = TextProcesses(Hostile, seconds=3.0, memory=512 << 20)
    with closing(texts), serving(texts=texts) as server, server.client() as client:
        for text, status, code in (
            ("hangs", 400, "text_timeout"), ("dies", 503, "text_failed"), ("dies", 503, "text_failed"),
            ("eats", 400, "text_memory"), ("is broken", 500, None),
        ):  # fmt: skip
            if text == "eats" and not Path("/proc/self/statm").exists():
                continue  # the memory of a process is limited on Linux alone
            refused = client.post("/v1/completions", json=ask(text, 4))
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
            assert client.post("/v1/completions", json=ask("b", 4)).json()["choices"][0]["text"] == right("b", 4)
        assert server.server.memory.used == 0


def test_a_tokenizer_that_cannot_be_made_elsewhere_is_refused() -> None:
    with pytest.raises(InputError, match="give a function of a module that makes it, not <function"):
        TextProcesses(lambda: ByteTokenizer())


class Elsewhere(ByteTokenizer):
    """Is made in one process alone."""

    def __init__(self, process: int) -> None:
        if os.getpid() != process:
            raise RuntimeError("not here")


def test_a_server_without_a_process_for_text_says_so() -> None:
    texts = TextProcesses(partial(Elsewhere, os.getpid()))
    with closing(texts), serving(texts=texts) as server, server.client() as client:
        refused = client.post("/v1/completions", json=ask("b", 4))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "text_failed")
        assert "no process reads bodies" in client.get("/health").json()["text"]


def test_a_prompt_and_its_answer_are_bounded_by_the_context_that_is_asked() -> None:
    with serving(limits=Limits(context=100)) as server, server.client() as client:
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 100
        assert client.post("/v1/completions", json=ask("x" * 96, 4)).json()["usage"]["total_tokens"] <= 100
        for path, body in (("v1/completions", ask("x" * 97, 4)), ("tokenize", {"prompt": "x" * 101})):
            refused = client.post(f"/{path}", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_lists_and_fields_of_a_body_are_bounded_and_text_is_not(guarded: RunningServer) -> None:
    with guarded.client(ALICE) as client:
        for item in (b"[]", b'{"a":1}', b'{"\\"":1}'):
            many = b'{"prompt":"x","tools":[' + b",".join([item] * MOST_ITEMS) + b"]}"
            assert client.post("/v1/completions", content=many).json()["error"]["code"] == "too_many_items"
        for text in ("[" * MOST_ITEMS * 2, '\\"{:' * MOST_ITEMS, '"[' * MOST_ITEMS):
            told = client.post("/v1/completions", json=ask(text, 2)).json()
            assert told["error"]["code"] == "context_length_exceeded"
        endless = b'{"prompt":"' + b'[\\"' * MOST_ITEMS * 2
        assert client.post("/v1/completions", content=endless).json()["error"]["code"] == "invalid_json"


class Foreign(BaseModel):
    """A body that is none of the server's."""


def test_what_comes_back_from_a_reader_is_plain() -> None:
    """What has worked on a stranger's image may be the stranger's."""
    for wrong in (os.system, ByteTokenizer(), re.compile("x"), Limits(), Foreign()):
        with pytest.raises(pickle.UnpicklingError, match="is no part of what was read"):
            unwritten(pickle.dumps((wrong, [], [])))


# ---------------------------------------------------------------- connections


@pytest.mark.parametrize(
    "begin", [b"", b"POST /v1/completions HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-a: "]
)
def test_a_connection_on_which_no_request_comes_is_closed(begin: bytes) -> None:
    with serving(head_seconds=0.5) as server, connected(server, begin) as it:
        since = time.monotonic()
        told = all_of(it)
        assert 0.3 < time.monotonic() - since < 10
        if begin:
            head, error = head_and_error(told)
            assert head.startswith(b"HTTP/1.1 408 ") and "took more than 0.5 seconds" in error["message"]
        else:
            assert told == b""
        eventually(lambda: not server.http.server_state.connections)


def test_bytes_that_come_one_by_one_gain_no_time() -> None:
    """Neither for the first request of a connection, nor for a later one, nor for a body that was refused."""
    refused = HEAD % 5000 + b"x" * 3000
    with serving(head_seconds=0.6, limits=Limits(body=2000)) as server:
        for begin in (b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", refused):
            with connected(server, begin) as it:
                since = time.monotonic()
                try:
                    while time.monotonic() - since < 10:
                        it.sendall(b"x" if begin == refused else b"G")
                        time.sleep(0.1)
                except OSError:
                    pass
                assert time.monotonic() - since < 5, begin
        eventually(lambda: not server.http.server_state.connections)


def test_requests_one_after_the_other_may_take_longer_than_one_head() -> None:
    with serving(head_seconds=0.5) as server, connected(server) as it:
        for _ in range(5):
            it.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            told = b""
            while not told.endswith(b'{"status":"ok"}'):
                told += it.recv(1000)
            assert told.startswith(b"HTTP/1.1 200")
            time.sleep(0.15)
        body = json.dumps(ask("a", 50)).encode()
        it.sendall(HEAD % len(body))
        time.sleep(0.7)  # the time of a head is over, that of a body is not
        it.sendall(body)
        assert it.recv(1000).startswith(b"HTTP/1.1 200")


NO_HTTP = {
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "words": b"HELLO\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "length": b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
    "chunk": b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    "two lengths": HEAD.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n") % 4
    + b"0\r\n\r\nGET /health HTTP/1.1\r\n\r\n",
    "old": b"POST /tokenize HTTP/1.0\r\ntransfer-encoding: chunked\r\nconnection: keep-alive\r\n\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", NO_HTTP)
def test_what_is_no_http_is_refused_in_the_apis_own_shape(guarded: RunningServer, name: str) -> None:
    with connected(guarded, NO_HTTP[name].replace(b"\r\n\r\n", f"\r\nauthorization: Bearer {BOB}\r\n\r\n".encode(), 1)
                   if name == "chunk" else NO_HTTP[name]) as it:  # fmt: skip
        head, error = head_and_error(all_of(it))
    assert head.startswith(b"HTTP/1.1 400 ") and error["code"] == "invalid_http"
    eventually(lambda: not guarded.http.server_state.tasks)


def test_a_head_without_end_is_cut(guarded: RunningServer) -> None:
    with connected(guarded, b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ") as it, pytest.raises(OSError):
        for _ in range(1000):
            it.sendall(b"y" * 10_000)
    eventually(lambda: not guarded.http.server_state.connections)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_sends_nothing_more_is_answered_and_one_that_has_left_is_not(version: bytes) -> None:
    with serving(max_running=1) as server:
        for stream in (False, True):
            request = posted(ask("waits", 60, stream=stream))
            with connected(server, request) as first:  # so that the others wait in the queue
                with connected(server, request.replace(b"1.1", version)) as waiting:
                    waiting.shutdown(socket.SHUT_WR)
                    told = all_of(waiting)
                while told.startswith(b"HTTP/1.1 100 "):
                    told = told.partition(b"\r\n\r\n")[2]
                assert told.startswith(b"HTTP/1.1 200 ") and (b"data: [DONE]" in told) == stream
                assert first.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            eventually(lambda: server.server.worker.load == 0)
            decoded = server.server.worker.engine.counts.decoded
            if version == b"1.1":
                with connected(server, posted(ask("left", 1500, stream=stream))):
                    eventually(lambda: server.server.worker.load == 1)
                eventually(lambda: server.server.worker.load == 0)
                assert server.server.worker.engine.counts.decoded < decoded + 1500
        with connected(server, HEAD % 100) as unfinished:
            unfinished.shutdown(socket.SHUT_WR)
            assert all_of(unfinished) == b""


class SmallBuffer(Connection):
    """What the system takes to send is little, so that a test need not wait until that is full."""

    def connection_made(self, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport)


@pytest.mark.parametrize("system", [True, False], ids=["by the system", "without it"])
def test_a_client_that_reads_nothing_of_its_stream_is_cut(system: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not system:
        monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)
    elif not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("this system has no TCP_USER_TIMEOUT")
    with serving(stalled_seconds=0.5, connection=SmallBuffer) as server:
        body = ask("slow", 1500, stream=True, n=8, logprobs=20)
        with connected(server, posted(body), receives=4096):
            eventually(lambda: server.server.worker.load == 8)
            eventually(lambda: server.server.worker.load == 0 and not server.http.server_state.connections, 90)
            assert server.server.worker.engine.counts.decoded < 8 * 1499


# ---------------------------------------------------------------- browsers


EVIL = "http://evil.example"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, "unknown_host"),
        ({"host": "evil.example:8000"}, "unknown_host"),
        ({"host": "127.0.0.1.evil.example"}, "unknown_host"),
        ({"host": "10.0.0.1"}, "unknown_host"),
        ({"host": ""}, "unknown_host"),
        ({"host": "[::1"}, "unknown_host"),
        ({"origin": EVIL}, "foreign_origin"),
        ({"origin": "null"}, "foreign_origin"),
        ({"origin": "http://localhost:3000"}, "foreign_origin"),
        ({"origin": EVIL, "host": "localhost"}, "foreign_origin"),
        ({"sec-fetch-site": "cross-site", "sec-fetch-dest": "image"}, "foreign_origin"),
        ({"sec-fetch-site": "same-site", "sec-fetch-dest": "iframe"}, "foreign_origin"),
    ],
)
def test_a_page_of_another_site_may_not_use_the_server(
    guarded: RunningServer, headers: dict[str, str], code: str
) -> None:
    before = guarded.server.worker.engine.counts.admitted
    with guarded.client() as client:
        for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("OPTIONS", "/tokenize"), ("GET", "/"),
            ("POST", "/cache/flush"), ("GET", "/health"), ("GET", "/nothing")):  # fmt: skip
            told = client.request(method, path, headers=headers)
            assert (told.status_code, told.json()["error"]["code"]) == (403, code), path
    assert guarded.server.worker.engine.counts.admitted == before


def test_programs_own_pages_and_names_that_were_said_may_use_the_server() -> None:
    with serving(hosts=Hosts(more=frozenset({"llm.example"}))) as server, server.client() as client:
        for headers in (
            {}, {"host": "LocalHost:1"}, {"host": "[::1]:8000"}, {"host": "llm.example"}, {"origin": server.root},
            {"host": "localhost", "origin": "https://llm.example"}, {"sec-fetch-site": "same-origin"},
            {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"},
        ):  # fmt: skip
            assert client.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == 200, headers


LOOPBACK = {"127.0.0.1", "localhost", "::1"}


@pytest.mark.parametrize(
    ("bound", "more", "known"),
    [
        ("127.0.0.1", "", LOOPBACK),
        ("0.0.0.0", "", {*LOOPBACK, "10.0.0.5"}),
        ("::", "box", {*LOOPBACK, "10.0.0.5", "box"}),
        ("10.0.0.5", "", {"10.0.0.5"}),
        ("Box", "", {*LOOPBACK, "10.0.0.5", "box"}),
        ("::1", "*", {*LOOPBACK, "10.0.0.5", "box", "evil.example"}),
    ],
)
def test_a_server_is_known_by_where_it_listens(bound: str, more: str, known: set[str]) -> None:
    hosts = Hosts(bound, frozenset({more} - {""}))
    assert {name for name in (*LOOPBACK, "10.0.0.5", "box", "evil.example") if hosts.knows(name)} == known


@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain;charset=utf-8", "multipart/form-data; boundary=x", "x" * 9000]
)
def test_a_body_that_is_called_something_else_than_json_is_refused(guarded: RunningServer, kind: str) -> None:
    with guarded.client(ADMIN) as client:
        for method, path in (("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("PUT", "/cache/store"),
            ("POST", "/cache/explain"), ("POST", "/tokenize")):  # fmt: skip
            told = client.request(method, path, content=b'{"prompt": "a"}', headers={"content-type": kind})
            assert (told.status_code, told.json()["error"]["code"]) == (415, "unsupported_media_type")
            assert len(told.content) < 1000
        for right_kind in ("application/json; charset=utf-8", "application/x-www-form-urlencoded"):  # curl -d
            told = client.post("/tokenize", content=b'{"prompt": "a"}', headers={"content-type": right_kind})
            assert told.status_code == 200
