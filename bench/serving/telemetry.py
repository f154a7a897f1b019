"""What spans of OpenTelemetry cost a server: the same requests over HTTP with spans for each (``--otlp``), and without.

``python -m bench.serving.telemetry [--size small] [--clients 4] [--rounds 5]``

One engine answers at two addresses, one of which has the spans. Clients are a process of their own, and so is the
collector, which reads what the SDK sends and drops it. In turns each address is asked the same, from a flushed cache.
Figures are the CPU time of the server's process, medians over the rounds. Their difference is often within the noise.
So the time is taken as well that passes in the event loop's calls for the spans, and on the SDK's thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import attrs
import torch
import uvicorn

from bench.serving.server import ANSWER, PROMPT, measured, prompts
from prefixloom import compose
from prefixloom_engine import Engine, ThreeWay
from prefixloom_engine.server.access import Access
from prefixloom_engine.server.app import Limits, Server, make_app
from prefixloom_engine.server.reading.processes import TextProcesses
from prefixloom_engine.server.telemetry import Telemetry, batches_to
from prefixloom_engine.server.worker import EngineWorker
from prefixloom_engine.threeway import SIZES
from prefixloom_engine.threeway.text import BYTE_VOCABULARY, ByteTokenizer


class Collector(BaseHTTPRequestHandler):
    """Takes what comes."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


def collect() -> None:
    """In the collector's process: print the port, and serve until the process is ended."""
    collector = HTTPServer(("127.0.0.1", 0), Collector)
    print(collector.server_port, flush=True)
    collector.serve_forever()


class TimedTelemetry(Telemetry):
    """Sums up the CPU seconds that the end of requests takes in the event loop."""

    spent = 0.0
    told = 0

    def ended(self, ticket: Any) -> None:
        begun = time.thread_time()
        super().ended(ticket)
        self.spent += time.thread_time() - begun
        self.told += 1


def listening(app: Any, lifespan: Any) -> tuple[uvicorn.Server, threading.Thread, str]:
    http = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False, lifespan=lifespan))
    thread = threading.Thread(target=http.run)
    thread.start()
    while not http.started:
        time.sleep(0.01)
    return http, thread, f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}/v1"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=sorted(SIZES))
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.collect:
        collect()
        return 0
    torch.set_num_threads(1)
    model = ThreeWay(attrs.evolve(SIZES[args.size], vocabulary=BYTE_VOCABULARY))

    def make() -> Engine:
        tokens = 2 * args.clients * (PROMPT + ANSWER + 64)
        cache = compose(model.config, capacity={"full": tokens, "swa": tokens, "mamba": 12 * args.clients})
        return Engine(model, cache, max_running=args.clients)

    collector = subprocess.Popen(
        [sys.executable, "-m", "bench.serving.telemetry", "--collect"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert collector.stdout is not None
        endpoint = f"http://127.0.0.1:{int(collector.stdout.readline())}"
        worker = EngineWorker(make, 4 * args.clients, lambda error: None)
        server = Server(worker, TextProcesses(ByteTokenizer), Access(), Limits(), "model", "fp")
        threads = {*threading.enumerate()}
        telemetry = TimedTelemetry(worker, "model", [batches_to(endpoint)])
        (sender,) = {*threading.enumerate()} - threads
        clock = time.pthread_getcpuclockid(sender.ident or 0)
        app = make_app(server)
        plain, plain_thread, plain_url = listening(app, "on")
        traced, traced_thread, traced_url = listening(telemetry.around(app), "off")
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()

        def ask(url: str) -> None:
            command = [sys.executable, "-m", "bench.serving.server", "--ask", url, "--clients", str(args.clients)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

        def asking(url: str) -> Callable[[], None]:
            return lambda: ask(url)

        took: dict[str, list[float]] = {"without": [], "with": []}
        sides = {"without": plain_url, "with": traced_url}
        count = len(prompts(args.clients))
        for number in range(args.rounds + 1):
            if number == 1:  # the first round warms up
                telemetry.spent, telemetry.told, sent = 0.0, 0, time.clock_gettime(clock)
            for name in sorted(sides, reverse=bool(number % 2)):
                asyncio.run_coroutine_threadsafe(worker.call(worker.engine.cache.flush), loop).result()
                cpu, _ = measured(asking(sides[name]))
                if number:
                    took[name].append(cpu / count)
        time.sleep(6)  # the SDK sends every five seconds
        sending = (time.clock_gettime(clock) - sent) / (args.rounds * count)
        ending = telemetry.spent / (args.rounds * count)
        for http, thread in ((traced, traced_thread), (plain, plain_thread)):
            http.should_exit = True
            thread.join()
        telemetry.close()
    finally:
        collector.terminate()
        collector.wait()
    turn, with_ = (statistics.median(took[name]) for name in ("without", "with"))
    told = {
        "parameters": model.parameters, "requests": count, "ms a request": 1e3 * turn, "with spans": 1e3 * with_,
        "difference, %": 100 * (with_ / turn - 1), "us in the event loop": 1e6 * ending,
        "us on the sender's thread": 1e6 * sending, "both, % of a request": 100 * (ending + sending) / turn,
    }  # fmt: skip
    print(json.dumps(told, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
