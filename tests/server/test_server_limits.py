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
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefixloom import InputError
from prefixloom_engine.server.access import Hosts
from prefixloom_engine.server.app import Limits
from prefixloom_engine.server.connection import Connection
from prefixloom_engine.server.endpoints.completions import CompletionAsked
from prefixloom_engine.server.reading import processes
from prefixloom_engine.server.reading.bodies import MOST_ITEMS, Bounds, unwritten
from prefixloom_engine.server.reading.processes import TextProcesses
from prefixloom_engine.threeway.text import ByteTokenizer
from tests.server.test_server_clients import ask, eventually, right
from tests.support.servers import ADMIN, ALICE, BOB, KEYS, RunningServer, byte_texts, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"

LARGE = b'{"prompt": "a"%b}' % (b" " * 120_000)


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


def test_the_bodies_of_one_tenant_leave_as_much_to_others() -> None:
    with serving(keys=KEYS, limits=Limits(body=8000, bodies=10_000)) as server:
        head = HEAD.replace(b"\r\n\r\n", b"\r\nauthorization: Bearer %s\r\n\r\n" % BOB.encode())
        with server.client(ALICE) as alice, server.client(BOB) as bob:
            with connected(server, head % 7999 + b"x" * 4000):
                eventually(lambda: server.server.memory.used == 4000)
                assert bob.post("/v1/completions", json=ask("y" * 2500, 1)).status_code == 503
                assert alice.post("/v1/completions", json=ask("y" * 2500, 1)).status_code == 400, "read, and too long"
            eventually(lambda: server.server.memory.used == 0)
            assert bob.post("/v1/completions", json=ask("y" * 2500, 1)).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_is_given_back_once_the_engine_has_its_tokens(stream: bool) -> None:
    with serving(limits=Limits(bodies=30_000)) as server:
        body = json.dumps(ask("a" * 500, 1500, stream=stream)).encode()
        with connected(server, HEAD % len(body) + body):
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


def test_health_and_large_bodies_are_answered_while_a_small_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that never ends must not hold the event loop, or bodies of other kinds."""
    monkeypatch.setattr(processes, "HELD_SECONDS", 0.0)
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    begun.touch()
    texts = TextProcesses(partial(Held, tmp_path))
    with closing(texts), serving(texts=texts, limits=Limits(bodies=1 << 20)) as server, server.client() as client:
        body = json.dumps(ask("first", 4)).encode()
        with connected(server, HEAD % len(body) + body):
            eventually(lambda: begun.read_text() != "")
            assert int(begun.read_text().split()[0]) != os.getpid()
            told = client.get("/health")
            assert (told.status_code, told.json()["status"]) == (200, "degraded")
            assert "a body has been read for" in told.json()["text"]
            large = {"prompt": [1] * 40_000}
            assert client.post("/v1/completions", json=large).json()["error"]["code"] == "context_length_exceeded"
            go_on.touch()
            eventually(lambda: client.get("/health").json() == {"status": "ok"})


def sent(text: str, key: str) -> bytes:
    body = json.dumps(ask(text, 2)).encode()
    return b"%b\r\nauthorization: Bearer %b\r\n\r\n%b" % ((HEAD % len(body)).strip(), key.encode(), body)


def test_tenants_take_turns(tmp_path: Path) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    begun.touch()
    texts = TextProcesses(partial(Held, tmp_path))
    with closing(texts), serving(texts=texts, keys=KEYS) as server, server.client(ALICE) as client, ExitStack() as left:
        for number, (text, key) in enumerate([("a", ALICE), ("b", ALICE), ("c", ALICE), ("d", BOB)]):
            left.enter_context(connected(server, sent(text, key)))
            size = len(json.dumps(ask(text, 2)))
            eventually(lambda number=number, size=size: server.server.memory.used == size * (number + 1))
            eventually(lambda: begun.read_text() != "")
            client.get("/health")  # by now the event loop has the body in line
        go_on.touch()
        eventually(lambda: len(begun.read_text().splitlines()) == 4)
        assert [line.split()[1] for line in begun.read_text().splitlines()] == ["a", "d", "b", "c"]


def test_readers_serve_one_event_loop_after_another() -> None:
    bounds = Bounds("built-in", 260, 100, 10, 10, 1000)

    async def several() -> list[int]:
        asked = (byte_texts().read(CompletionAsked, b'{"prompt": "abc"}', bounds) for _ in range(4))
        return [len(each.prompts[0].tokens) for each in await asyncio.gather(*asked)]

    assert [asyncio.run(several()) for _ in range(2)] == [[3] * 4] * 2


def test_no_tenant_holds_all_readers_of_large_bodies(tmp_path: Path) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    begun.touch()
    texts = TextProcesses(partial(Held, tmp_path), seconds=600.0)
    with closing(texts), serving(texts=texts, keys=KEYS) as server, server.client(ALICE) as alice:
        for number in range(3):
            with connected(server, sent(str(number) * (64 << 10), BOB)):
                eventually(lambda: begun.read_text() != "" and server.server.memory.used > 64 << 10)
                alice.get("/health")  # by now the event loop has the body in line
            eventually(lambda: server.server.memory.used == 0)
        answer = alice.post("/v1/completions", json={"prompt": [1] * 40_000})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        go_on.touch()
        eventually(lambda: not any(turn.locked() for lane in texts._lanes for turn in lane.turns.values()))
        assert len(begun.read_text().splitlines()) == 1, "who leaves has the next body read once this one is"


def test_large_bodies_of_one_tenant_are_received_one_after_another() -> None:
    answers: dict[str, int] = {}
    with serving(keys=KEYS) as server, server.client(ALICE) as alice, server.client(BOB) as bob:
        head = (HEAD % 200_000).replace(b"\r\n\r\n", b"\r\nauthorization: Bearer %s\r\n\r\n" % BOB.encode())
        asking = threading.Thread(target=lambda: answers.update(bob=bob.post("/tokenize", content=LARGE).status_code))
        with connected(server, head + b"x" * 100_000):
            eventually(lambda: server.server.memory.used == 100_000)
            asking.start()
            eventually(lambda: server.server.memory.used > 100_000 + (64 << 10))
            assert alice.post("/tokenize", content=LARGE).status_code == 200
            assert bob.post("/tokenize", content='{"prompt": "a"}').status_code == 200, "a small one waits for none"
            assert not answers
        asking.join()
        assert answers == {"bob": 200}


def test_large_bodies_of_a_tenant_are_received_at_a_bounded_rate() -> None:
    with serving(keys=KEYS, limits=Limits(body_seconds=0.3, body_rate=100_000)) as server, server.client(BOB) as bob:
        begun = time.monotonic()
        assert bob.post("/tokenize", content=LARGE).status_code == 200, "the rate is no slowness of the client"
        assert time.monotonic() - begun > (len(LARGE) - (64 << 10)) / 100_000


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


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("hangs", 400, "text_timeout"), ("dies", 503, "text_failed"), ("eats", 400, "text_memory"),
        ("is broken", 500, None),
    ],
)  # fmt: skip
def test_what_reads_a_hostile_body_is_replaced(text: str, status: int, code: str | None) -> None:
    if text == "eats" and not Path("/proc/self/statm").exists():
        pytest.skip("the memory of a process is limited on Linux alone")
    texts = TextProcesses(Hostile, seconds=5.0, memory=512 << 20)
    with closing(texts), serving(texts=texts) as server, server.client() as client:
        for _ in range(2):
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


def test_prompts_count_as_what_they_are_in_memory() -> None:
    with serving(limits=Limits(bodies=10_000)) as server, server.client() as client:
        refused = client.post("/v1/completions", json=ask("x" * 1000, 2))
        assert refused.json()["error"]["code"] == "too_many_bodies"
        assert server.server.memory.used == 0


def test_a_prompt_and_its_answer_are_bounded_by_the_context_that_is_asked() -> None:
    with serving(limits=Limits(context=100)) as server, server.client() as client:
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 100
        assert client.post("/v1/completions", json=ask("x" * 96, 4)).json()["usage"]["total_tokens"] <= 100
        for path, body in (("v1/completions", ask("x" * 97, 4)), ("tokenize", {"prompt": "x" * 101})):
            refused = client.post(f"/{path}", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_lists_and_fields_of_a_body_are_bounded_and_text_is_not() -> None:
    with serving() as server, server.client() as client:
        for item in (b"[]", b'{"a":1}', b'{"\\"":1}'):
            many = b'{"prompt":"x","tools":[' + b",".join([item] * MOST_ITEMS) + b"]}"
            assert client.post("/v1/completions", content=many).json()["error"]["code"] == "too_many_items"
        for text in ("[" * MOST_ITEMS * 2, '\\"{:' * MOST_ITEMS, '"[' * MOST_ITEMS):
            told = client.post("/v1/completions", json=ask(text, 2)).json()
            assert told["error"]["code"] == "context_length_exceeded"
        endless = b'{"prompt":"' + b'[\\"' * MOST_ITEMS * 2
        assert client.post("/v1/completions", content=endless).json()["error"]["code"] == "invalid_json"


def test_what_comes_back_from_a_reader_is_plain() -> None:
    """What has worked on a stranger's image may be the stranger's."""
    for wrong in (os.system, ByteTokenizer(), re.compile("x")):
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
    begins = (
        b"",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
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
            it.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
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
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n") % 4
        + b"0\r\n\r\nGET /health HTTP/1.1\r\n\r\n",
        b"POST /tokenize HTTP/1.0\r\ntransfer-encoding: chunked\r\nconnection: keep-alive\r\n\r\n0\r\n\r\n",
    ],
    ids=["tls", "words", "no host", "length", "chunk", "two lengths", "old"],
)
def test_what_is_no_http_is_refused_in_the_apis_own_shape(sent: bytes) -> None:
    with serving() as server, server.client() as client:
        with connected(server, sent) as it:
            head, error = head_and_error(all_of(it))
            assert head.startswith(b"HTTP/1.1 400 ") and error["code"] == "invalid_http"
        assert client.post("/v1/completions", json=ask("b", 4)).status_code == 200
        eventually(lambda: not server.http.server_state.tasks)


def test_a_head_without_end_is_cut() -> None:
    with serving() as server, connected(server, b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ") as it:
        with pytest.raises(OSError):
            for _ in range(1000):
                it.sendall(b"y" * 10_000)
        eventually(lambda: not server.http.server_state.connections)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_a_client_that_sends_nothing_more_is_answered_and_one_that_has_left_is_not(
    stream: bool, version: bytes
) -> None:
    body = json.dumps(ask("waits", 60, stream=stream)).encode()
    request = HEAD.replace(b"1.1", version) % len(body) + body
    with serving(max_running=1) as server:
        with connected(server, HEAD % len(body) + body) as first:  # so that the others wait in the queue
            with connected(server, request) as waiting:
                waiting.shutdown(socket.SHUT_WR)
                told = all_of(waiting)
            while told.startswith(b"HTTP/1.1 100 "):
                told = told.partition(b"\r\n\r\n")[2]
            assert told.startswith(b"HTTP/1.1 200 ") and (b"data: [DONE]" in told) == stream
            assert first.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        long = json.dumps(ask("left", 1500, stream=stream)).encode()
        if version == b"1.1":
            with connected(server, HEAD % len(long) + long):
                eventually(lambda: server.server.worker.load == 1)
            eventually(lambda: server.server.worker.load == 0)
            assert server.server.worker.engine.counts.decoded < 1500
        with connected(server, HEAD % len(long)) as unfinished:
            unfinished.shutdown(socket.SHUT_WR)
            assert all_of(unfinished) == b""


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
def test_a_page_of_another_site_may_not_use_the_server(headers: dict[str, str], code: str) -> None:
    with serving(keys=KEYS) as server, server.client() as client:
        for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("OPTIONS", "/tokenize"), ("GET", "/"),
            ("POST", "/cache/flush"), ("GET", "/health"), ("GET", "/nothing")):  # fmt: skip
            told = client.request(method, path, headers=headers)
            assert (told.status_code, told.json()["error"]["code"]) == (403, code), path
        assert server.server.worker.engine.counts.admitted == 0


def test_programs_own_pages_and_names_that_were_said_may_use_the_server() -> None:
    with serving(hosts=Hosts(more=frozenset({"llm.example"}))) as server, server.client() as client:
        for headers in (
            {}, {"host": "LocalHost:1"}, {"host": "[::1]:8000"}, {"host": "llm.example"}, {"origin": server.root},
            {"host": "localhost", "origin": "https://llm.example"}, {"sec-fetch-site": "same-origin"},
            {"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"},
        ):  # fmt: skip
            assert client.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == 200, headers


@pytest.mark.parametrize(
    ("bound", "more", "known"),
    [
        ("127.0.0.1", "", {"127.0.0.1", "localhost", "::1"}),
        ("0.0.0.0", "", {"127.0.0.1", "localhost", "::1", "10.0.0.5"}),
        ("::", "box", {"127.0.0.1", "localhost", "::1", "10.0.0.5", "box"}),
        ("10.0.0.5", "", {"10.0.0.5"}),
        ("Box", "", {"127.0.0.1", "localhost", "::1", "10.0.0.5", "box"}),
        ("::1", "*", {"127.0.0.1", "localhost", "::1", "10.0.0.5", "box", "evil.example"}),
    ],
)
def test_a_server_is_known_by_where_it_listens(bound: str, more: str, known: set[str]) -> None:
    hosts = Hosts(bound, frozenset({more} - {""}))
    names = ("127.0.0.1", "localhost", "::1", "10.0.0.5", "box", "evil.example")
    assert {name for name in names if hosts.knows(name)} == known


@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain;charset=utf-8", "multipart/form-data; boundary=x", "x" * 9000]
)
def test_a_body_that_is_called_something_else_than_json_is_refused(kind: str) -> None:
    with serving(keys=KEYS) as server, server.client(ADMIN) as client:
        for method, path in (("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("PUT", "/cache/store"),
            ("POST", "/cache/explain"), ("POST", "/tokenize")):  # fmt: skip
            told = client.request(method, path, content=b'{"prompt": "a"}', headers={"content-type": kind})
            assert (told.status_code, told.json()["error"]["code"]) == (415, "unsupported_media_type")
            assert len(told.content) < 1000
        for right_kind in ("application/json; charset=utf-8", "application/x-www-form-urlencoded"):  # curl -d
            told = client.post("/tokenize", content=b'{"prompt": "a"}', headers={"content-type": right_kind})
            assert told.status_code == 200


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
