"""What the server adds to the engine, and what spans of OpenTelemetry add to the server.

``server`` asks the same requests of the engine itself (``Engine.generate``, as many at once), and over HTTP by many
clients. ``telemetry`` asks the same over HTTP of two addresses of one engine, one of which has spans for each request
(``--otlp``). Each client asks one request after the other, streamed. Clients are a process of their own, and so is the
collector, which reads what the SDK sends and drops it. Each round begins with a flushed cache. Figures are the CPU time
of the server's process, of all threads, as medians over the rounds.

The difference that spans make is often within the noise. So the time is taken as well that passes in the event loop's
calls for the spans, and on the SDK's thread.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import attrs
import httpx
import torch
import uvicorn

from bench.runner.figures import Rows, in_turn
from prefixloom import compose
from prefixloom_engine import Engine, Request, ThreeWay
from prefixloom_engine.server.access import Access
from prefixloom_engine.server.app import Limits, Server, make_app
from prefixloom_engine.server.reading.processes import TextProcesses
from prefixloom_engine.server.worker import EngineWorker
from prefixloom_engine.threeway import SIZES
from prefixloom_engine.threeway.text import BYTE_VOCABULARY, ByteTokenizer

PROMPT, ANSWER, EACH = 200, 64, 2
"""Tokens of a prompt and of an answer, and how many requests each client asks."""


def prompts(clients: int) -> list[str]:
    return [f"{number:04d}" * (PROMPT // 4) for number in range(clients * EACH)]


async def ask(url: str, clients: int) -> None:
    """Ask everything, in the clients' process."""

    async def one(client: httpx.AsyncClient, mine: list[str]) -> None:
        for prompt in mine:
            body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True}
            async with client.stream("POST", f"{url}/completions", json=body) as answer:
                lines = [line async for line in answer.aiter_lines()]
            assert "data: [DONE]" in lines[-3:], lines[-3:]

    asked = prompts(clients)
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        await asyncio.gather(*(one(client, asked[at::clients]) for at in range(clients)))


class Collector(BaseHTTPRequestHandler):
    """Takes what is sent."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def collect() -> None:
    """Print the port, and serve until the process is ended."""
    collector = HTTPServer(("127.0.0.1", 0), Collector)
    print(collector.server_port, flush=True)
    collector.serve_forever()


class ServedOverHTTP:
    """A worker with its engine, whose answers are asked for over HTTP."""

    def __init__(self, size: str, clients: int) -> None:
        torch.set_num_threads(1)
        self.clients = clients
        model = ThreeWay(attrs.evolve(SIZES[size], vocabulary=BYTE_VOCABULARY))

        def make() -> Engine:
            tokens = 2 * clients * (PROMPT + ANSWER + 64)
            cache = compose(model.config, capacity={"full": tokens, "swa": tokens, "mamba": 12 * clients})
            return Engine(model, cache, max_running=clients)

        self.worker = EngineWorker(make, 4 * clients, lambda error: None)
        self.app = make_app(Server(self.worker, TextProcesses(ByteTokenizer), Access(), Limits(), "model", "fp"))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    @contextmanager
    def listening(self, app: Any, lifespan: Any = "on") -> Iterator[str]:
        """Serve an app at an address, which is returned."""
        http = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False, lifespan=lifespan))
        thread = threading.Thread(target=http.run)
        thread.start()
        while not http.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}/v1"
        finally:
            http.should_exit = True
            thread.join()

    def on_worker(self, call: Callable[[], object]) -> None:
        asyncio.run_coroutine_threadsafe(self.worker.call(call), self._loop).result()

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the CPU seconds of a call, from a flushed cache."""
        self.on_worker(self.worker.engine.cache.flush)
        begun = time.process_time()
        call()
        return time.process_time() - begun

    def asked(self, url: str) -> float:
        command = [sys.executable, "-m", "bench.serving.server", url, str(self.clients)]
        return self.seconds(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))


def server(size: str = "medium", clients: int = 16, times: int = 3) -> Rows:
    serving = ServedOverHTTP(size, clients)
    engine = serving.worker.engine
    requests = [Request(list(prompt.encode()), ANSWER, stops=[]) for prompt in prompts(clients)]

    def directly() -> float:
        return serving.seconds(lambda: serving.on_worker(lambda: engine.generate(requests)))

    with serving.listening(serving.app) as url:
        took = in_turn({"engine": directly, "server": lambda: serving.asked(url)}, times)
    cpu = {name: statistics.median(each) for name, each in took.items()}
    return {
        "engine, CPU seconds": [cpu["engine"]], "server, CPU seconds": [cpu["server"]],
        "server over engine": [cpu["server"] / cpu["engine"]],
        "more of a streamed token, ms": [1e3 * (cpu["server"] - cpu["engine"]) / (len(requests) * ANSWER)],
    }  # fmt: skip


def telemetry(size: str = "small", clients: int = 4, times: int = 5) -> Rows:
    from prefixloom_engine.server.telemetry import Telemetry, batches_to

    class Timed(Telemetry):
        """Sums up the CPU seconds that the end of requests takes in the event loop."""

        spent = 0.0

        def ended(self, ticket: Any) -> None:
            begun = time.thread_time()
            super().ended(ticket)
            self.spent += time.thread_time() - begun

    command = [sys.executable, "-m", "bench.serving.server", "--collect"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as collector:
        try:
            assert collector.stdout is not None
            endpoint = f"http://127.0.0.1:{int(collector.stdout.readline())}"
            serving = ServedOverHTTP(size, clients)
            threads = {*threading.enumerate()}
            spans = Timed(serving.worker, "model", [batches_to(endpoint)])
            (sender,) = {*threading.enumerate()} - threads
            clock = time.pthread_getcpuclockid(sender.ident or 0)
            with serving.listening(serving.app) as plain, serving.listening(spans.around(serving.app), "off") as traced:
                took = in_turn({"without": lambda: serving.asked(plain), "with": lambda: serving.asked(traced)}, times)
                time.sleep(6)  # the SDK sends every five seconds
                sending, ending = time.clock_gettime(clock), spans.spent
            spans.close()
        finally:
            collector.terminate()
    count = clients * EACH
    without, with_ = (statistics.median(took[name]) / count for name in ("without", "with"))
    each = [seconds / ((times + 1) * count) for seconds in (ending, sending)]
    return {
        "request without spans, ms": [1e3 * without], "request with spans, ms": [1e3 * with_],
        "in the event loop, us": [1e6 * each[0]], "on the sender's thread, us": [1e6 * each[1]],
        "both, % of a request": [100 * sum(each) / without],
    }  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "--collect":
        collect()
    else:
        asyncio.run(ask(sys.argv[1], int(sys.argv[2])))
