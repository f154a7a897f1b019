"""What clients that mean no good can take: time, memory and connections are bounded, and others are served."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefixloom_engine.server.app import Limits
from prefixloom_engine.server.connection import Connection
from prefixloom_engine.server.text_process import TextProcesses
from prefixloom_engine.threeway.text import ByteTokenizer
from tests.server.test_server_clients import ask, eventually, right
from tests.support.servers import RunningServer, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


@contextmanager
def connected(server: RunningServer, sends: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(server.root.rpartition(":")[2])), timeout=20) as it:
        it.sendall(sends)
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


def test_bodies_that_are_too_large_together_are_refused_for_a_while() -> None:
    with serving(limits=Limits(body=8000, bodies=10_000)) as server, server.client() as client:
        with connected(server, HEAD % 7999 + b"x" * 6000):
            eventually(lambda: server.server.memory.used == 6000)
            refused = client.post("/v1/completions", json=ask("y" * 5000, 2))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "too_many_bodies"
            assert client.post("/v1/completions", json=ask("b", 4)).json()["choices"][0]["text"] == right("b", 4)
        eventually(lambda: server.server.memory.used == 0)
        assert client.post("/v1/completions", json=ask("y" * 5000, 2)).json()["error"]["code"] == (
            "context_length_exceeded"
        )
        assert server.server.memory.used == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_is_given_back_once_the_engine_has_its_tokens(stream: bool) -> None:
    with serving(limits=Limits(bodies=10_000)) as server:
        body = json.dumps(ask("a" * 500, 1500, stream=stream)).encode()
        with connected(server, HEAD % len(body) + body):
            eventually(lambda: server.server.worker.load == 1)
            eventually(lambda: server.server.memory.used == 0)
            assert server.server.worker.load == 1
        eventually(lambda: server.server.worker.load == 0)


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


def test_a_client_that_leaves_before_its_prompt_has_tokens_is_noticed(tmp_path: Path) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    begun.touch()
    texts = TextProcesses(partial(Held, tmp_path))
    with closing(texts), serving(texts=texts) as server, server.client() as client:
        bodies = [json.dumps(ask(text, 1500)).encode() for text in ("first", "second")]
        with connected(server, HEAD % len(bodies[0]) + bodies[0]), connected(server, HEAD % len(bodies[1]) + bodies[1]):
            eventually(lambda: begun.read_text() != "" and server.server.memory.used == sum(map(len, bodies)))
        eventually(lambda: server.server.memory.used == 0 and not server.http.server_state.tasks)
        go_on.touch()
        assert client.post("/v1/completions", json=ask("b", 4)).status_code == 200
        asked = [line.partition(" ")[2] for line in begun.read_text().splitlines()]
        assert asked == ["first", "b"], "the second was not worth beginning"
        assert server.server.worker.engine.counts.admitted == 1


# ---------------------------------------------------------------- connections


@pytest.mark.parametrize("begin", [b"", b"POST /v1/completions HT", b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: "])
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
    begins = (
        b"",
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
        HEAD % 5000 + b"x" * 3000,
    )
    with serving(head_seconds=0.6, limits=Limits(body=2000)) as server:
        for begin in begins:
            with connected(server, begin) as it:
                since = time.monotonic()
                try:
                    while time.monotonic() - since < 10:
                        it.sendall(b"G" if begin != begins[2] else b"x")
                        time.sleep(0.1)
                except OSError:
                    pass
                assert time.monotonic() - since < 5, begin
        eventually(lambda: not server.http.server_state.connections)


def test_requests_one_after_the_other_may_take_longer_than_one_head() -> None:
    with serving(head_seconds=0.5) as server, connected(server) as it:
        for _ in range(8):
            it.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            told = b""
            while not told.endswith(b'{"status":"ok"}'):
                told += it.recv(1000)
            assert told.startswith(b"HTTP/1.1 200")
            time.sleep(0.15)
        body = json.dumps(ask("a", 400)).encode()
        it.sendall(HEAD % len(body))
        time.sleep(0.7)  # the time of a head is over, that of a body is not
        it.sendall(body)
        assert it.recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"HELLO\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["tls", "words", "no host", "length", "chunk"],
)
def test_what_is_no_http_is_refused_in_the_apis_own_shape(sent: bytes) -> None:
    with serving() as server, server.client() as client:
        with connected(server, sent) as it:
            head, error = head_and_error(all_of(it))
            assert head.startswith(b"HTTP/1.1 400 ") and error["code"] == "invalid_http"
        assert client.post("/v1/completions", json=ask("b", 4)).status_code == 200
        eventually(lambda: not server.http.server_state.tasks)


def test_a_head_without_end_is_cut() -> None:
    with serving() as server, connected(server, b"GET /health HTTP/1.1\r\nhost: x\r\nx: ") as it:
        with pytest.raises(OSError):
            for _ in range(1000):
                it.sendall(b"y" * 10_000)
        eventually(lambda: not server.http.server_state.connections)


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
        body = json.dumps(ask("slow", 1500, stream=True, n=8, logprobs=20)).encode()
        with socket.socket() as it:
            it.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            it.connect(("127.0.0.1", int(server.root.rpartition(":")[2])))
            it.sendall(HEAD % len(body) + body)
            eventually(lambda: server.server.worker.load == 8)
            eventually(lambda: server.server.worker.load == 0 and not server.http.server_state.connections, 90)
            assert server.server.worker.engine.counts.decoded < 8 * 1499
