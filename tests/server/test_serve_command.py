"""``prefixloom serve`` as a process: how it begins, what it refuses, and how it ends."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import http.server
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from prefixloom.cli import main
from prefixloom_engine.server.app import Limits
from prefixloom_engine.server.command import ServeSettings, add_arguments, assembled, settings_of
from prefixloom_events import EventFollower
from tests.support.traces import read_trace

BODY: dict[str, Any] = {"prompt": "a prompt that outlives its process " * 6, "max_tokens": 4, "temperature": 0}


@contextmanager
def process(*options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server in a process of its own, on a free port."""
    command = [sys.executable, "-m", "prefixloom", "serve", "--port", "0", "--memory", "64MiB", "--threads", "1"]
    it = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert it.stdout is not None and it.stderr is not None
        first = it.stdout.readline()
        found = re.search(r"prefixloom serves \S+ \(.*\) at (http://127.0.0.1:\d+)/v1", first)
        assert found is not None, first + it.stderr.read()
        with httpx.Client(base_url=found[1], timeout=60, trust_env=False) as client:
            yield it, client
    finally:
        it.kill()
        it.communicate()


def test_a_signal_lets_answers_end_and_refuses_new_clients() -> None:
    with process("--drain", "30") as (server, client):
        told: list[Any] = []
        begun = threading.Event()

        def read() -> None:
            with client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 200, "stream": True}) as answer:
                for line in answer.iter_lines():
                    begun.set()
                    told.append(line)

        reading = threading.Thread(target=read)
        reading.start()
        assert begun.wait(30)
        server.send_signal(signal.SIGTERM)
        reading.join(60)
        assert told[-2] == "data: [DONE]"
        assert server.wait(30) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            client.get("/health")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the files of another process")
def test_without_descriptors_the_log_says_so_once_and_clients_wait() -> None:
    import resource

    with process("--max-running", "2") as (server, client):
        assert client.get("/health").status_code == 200
        most = len(os.listdir(f"/proc/{server.pid}/fd")) + 8
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (most, most))
        address = (client.base_url.host, client.base_url.port or 0)
        others = [socket.create_connection(address) for _ in range(40)]
        assert server.stderr is not None
        assert "no connection can be accepted now" in server.stderr.readline()
        time.sleep(2.5)  # asyncio tries each second
        for each in others:
            each.close()
        with httpx.Client(base_url=client.base_url, timeout=60, trust_env=False) as late:
            assert late.get("/health").status_code == 200
        server.terminate()
        assert server.stderr.read() == ""


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
def test_answers_that_the_end_cuts_say_so(signals: list[signal.Signals]) -> None:
    """After the drain, or at the second Ctrl-C, whoever waits gets an error."""
    with process("--drain", "1" if len(signals) == 1 else "60", "--max-running", "2") as (server, client):
        body = {**BODY, "max_tokens": 3000, "n": 8, "ignore_eos": True}
        told: list[httpx.Response] = []

        def ask(stream: bool) -> None:
            told.append(client.post("/v1/completions", json={**body, "stream": stream}))

        asking = [threading.Thread(target=ask, args=[stream]) for stream in (True, False)]
        for each in asking:
            each.start()
        time.sleep(1)
        for each in signals:
            server.send_signal(each)
            time.sleep(0.3)
        for each in asking:
            each.join(30)
        assert sorted(answer.status_code for answer in told) == [200, 503]
        assert all('"code":"server_ends"' in answer.text for answer in told)
        assert server.wait(30) in (0, -signals[0], 128 + signals[0])
        assert server.stderr is not None
        assert len(signals) == 2 or "Traceback" not in server.stderr.read()


def test_a_server_finds_the_prefixes_of_one_before_it_and_writes_what_it_did(tmp_path: Path) -> None:
    """The first one writes out what it has before it ends. What the second one does is followed in three ways."""
    store = ("--host-memory", "16MiB", "--store", f"file:{tmp_path / 'store'}?capacity=64MiB")
    with process(*store) as (server, client):
        first = client.post("/v1/completions", json=BODY).json()
        server.terminate()
        assert server.wait(60) in (0, -signal.SIGTERM)
    came: list[Any] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            came.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    endpoint, trace = f"ipc://{tmp_path}/events", tmp_path / "trace"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        watched = ("--trace", str(trace), "--otlp", f"http://127.0.0.1:{collector.server_port}", "--events", endpoint)
        with process(*store, *watched) as (server, client), EventFollower(endpoint, f"{endpoint}.replay") as follower:
            told = [client.post("/v1/completions", json=BODY).json() for _ in range(2)]
            tokens = client.post("/tokenize", json={"prompt": BODY["prompt"]}).json()["tokens"]
            cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in told]
            assert cached == [len(tokens) // 64 * 64] * 2
            assert {each["choices"][0]["text"] for each in told} == {first["choices"][0]["text"]}
            until = time.monotonic() + 60
            while follower.cache.boundary(tokens) < cached[0]:
                assert time.monotonic() < until, follower.counts
                follower.catch_up()
            assert follower.cache.faults == []
            server.terminate()
            assert server.wait(60) in (0, -signal.SIGTERM)
        collector.shutdown()
    spans = read_trace(trace).spans("request")
    values = [[span.values[name] for name in ("hit", "prompt", "reason")] for span in spans]
    assert values == [[hit, len(tokens), "length"] for hit in cached]
    assert {path for path, _ in came} == {"/v1/traces"}
    sent = [span for _, each in came for one in each.resource_spans for two in one.scope_spans for span in two.spans]
    assert sorted(span.name for span in sent) == sorted(
        ["text_completion prefixloom-threeway", "decode", "prefill", "queue"] * 2
    )
    assert b"outlives" not in b"".join(each.SerializeToString() for _, each in came)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--port", "x"], "--port takes a whole number, got 'x'"),
        (["--port", "70000"], "--port must be from 0 to 65535"),
        (["--memory", "lots"], "--memory='lots' is no size"),
        (["--memory", "10KiB"], "memory"),
        (["--store", "file:/tmp/x"], "give --host-memory as well"),
        (["--store", "fil:/tmp/x", "--host-memory", "16MiB"], "Did you mean 'file'"),
        (["--model", "/nowhere"], "is not there"),
        (["--keys", "/nowhere"], "cannot be read"),
        (
            ["--keys", "/nowhere", "--as-prefill", "ipc:///tmp/x"],
            "with --keys, every program of this machine could read",
        ),
        (["--keys", "/nowhere", "--prefill", "tcp://127.0.0.1:1"], "give --prefill-keys FILE"),
        (["--keys", "/nowhere", "--events", "tcp://127.0.0.1:0"], "with --keys, events would tell every program"),
        (["--events", "tcp://0.0.0.0:0"], "without keys anybody there may read the tokens of all prompts"),
        (["--events-in-clear"], "go with --events"),
        (["--events", "ipc:///tmp/x", "--events-keys", "/nowhere"], "has no keys for the server of a connection"),
        (["--dtype", "float8"], "float8"),
        (["--device", "gpu"], "cannot be put on device 'gpu'"),
        (["--device", "cuda:99"], "cannot be put on device 'cuda:99'"),
        (["--events", "nonsense"], "tcp://127.0.0.1:5557"),
        (["--trace", "/no/folder"], "the trace cannot be written"),
        (["--prefill", "127.0.0.1:1"], "an address is tcp://HOST:PORT"),
        (["--prefill", "tcp://127.0.0.1:1,tcp://10.0.0.7:1"], "tcp://10.0.0.7:1 can be reached from other machines"),
        (["--as-prefill", "tcp://0.0.0.0:1"], "without keys anybody there may read prompts"),
        (["--as-prefill", "tcp://127.0.0.1:1", "--prefill", "tcp://127.0.0.1:2"], "give one"),
        (["--prefill-keys", "keys"], "go with --prefill or --as-prefill"),
        (["--prefill", "tcp://10.0.0.7:1", "--prefill-keys", "/nowhere"], "has no keys for the client of a connection"),
        (["--traffic", "prompts=4"], "traffic: its numbers are prompt, output, shared; got 'prompts'"),
        (["--traffic", "prompt=many"], "prompt is a number, got 'many'"),
        (["--traffic", "prompt=0.5"], "prompt must be a whole number of at least 1, got 0.5"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *options]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def parsed(*options: str) -> ServeSettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings_of(parser.parse_args(options))


def test_limits_are_by_default_those_of_a_server_in_python() -> None:
    told, limits = parsed(), Limits()
    assert (told.numbers["max_body"], told.numbers["max_bodies"]) == (limits.body, limits.bodies)
    assert [told.numbers[name] for name in ("timeout", "max_answer", "drain")] == [
        limits.seconds, limits.answer, limits.drain_seconds,
    ]  # fmt: skip


def test_memory_is_divided_for_the_requests_that_are_said_to_come() -> None:
    """For long prompts windows are few."""
    windows = []
    for traffic in ("", "prompt=160,output=2,shared=0"):
        made = assembled(parsed("--traffic", traffic, "--memory", "32MiB", "--max-running", "4"), pytest.fail)
        windows.append(made.server.worker.engine.cache.stats().components["swa"].capacity)
        asyncio.run(made.server.worker.stop(0))
    assert windows[1] > 2 * windows[0]
