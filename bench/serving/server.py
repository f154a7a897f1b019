"""What the server adds to the engine: the same requests asked of the engine itself, and over HTTP by many clients.

``python -m bench.serving.server [--size medium] [--clients 16] [--rounds 3]``

Each client asks one request after the other, streamed. Clients are a process of their own; the server's process is
measured: its CPU time, of all threads, and how long it took. In between, the same requests go to ``Engine.generate`` in
the same process, as many at once. Each round begins with a flushed cache. Figures are medians over the rounds.
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

import attrs
import httpx
import torch
import uvicorn

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


def ask(url: str, clients: int) -> None:
    """In the clients' process: ask everything, and print how long it took."""

    async def one(client: httpx.AsyncClient, mine: list[str]) -> None:
        for prompt in mine:
            body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True}
            async with client.stream("POST", f"{url}/completions", json=body) as answer:
                lines = [line async for line in answer.aiter_lines()]
            assert "data: [DONE]" in lines[-3:], lines[-3:]

    async def everything() -> None:
        asked = prompts(clients)
        async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
            await asyncio.gather(*(one(client, asked[at::clients]) for at in range(clients)))

    started = time.perf_counter()
    asyncio.run(everything())
    print(time.perf_counter() - started)


def measured(what: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds of this process, and seconds."""
    cpu, started = time.process_time(), time.perf_counter()
    what()
    return time.process_time() - cpu, time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="medium", help=f"of the built-in model: {', '.join(SIZES)}")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ask", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        ask(args.ask, args.clients)
        return 0
    torch.set_num_threads(1)
    model = ThreeWay(attrs.evolve(SIZES[args.size], vocabulary=BYTE_VOCABULARY))

    def make() -> Engine:
        tokens = 2 * args.clients * (PROMPT + ANSWER + 64)
        cache = compose(model.config, capacity={"full": tokens, "swa": tokens, "mamba": 12 * args.clients})
        return Engine(model, cache, max_running=args.clients)

    worker = EngineWorker(make, 4 * args.clients, lambda error: None)
    engine = worker.engine
    server = Server(worker, TextProcesses(ByteTokenizer), Access(), Limits(), "model", "fp")
    http = uvicorn.Server(uvicorn.Config(make_app(server), port=0, log_level="warning", access_log=False))
    thread = threading.Thread(target=http.run)
    thread.start()
    while not http.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}/v1"
    requests = [Request(list(prompt.encode()), ANSWER, stops=[]) for prompt in prompts(args.clients)]
    command = [sys.executable, "-m", "bench.serving.server", "--ask", url, "--clients", str(args.clients)]

    def on_worker(what: Callable[[], object]) -> None:
        asyncio.run_coroutine_threadsafe(worker.call(what), loop).result()

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def directly() -> None:
        on_worker(lambda: engine.generate(requests))

    def over_http() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    found: dict[str, list[tuple[float, float]]] = {"engine": [], "server": []}
    for number in range(args.rounds + 1):
        for name, how in (("engine", directly), ("server", over_http)):
            on_worker(engine.cache.flush)
            figures = measured(how)
            if number:  # the first round warms up
                found[name].append(figures)
    http.should_exit = True
    thread.join()
    cpu, seconds = (
        {name: statistics.median(each[at] for each in rows) for name, rows in found.items()} for at in (0, 1)
    )
    told = {
        "size": args.size, "clients": args.clients, "requests": len(requests), "cpu seconds": cpu, "seconds": seconds,
        "cpu ratio": cpu["server"] / cpu["engine"], "ratio": seconds["server"] / seconds["engine"],
    }  # fmt: skip
    print(json.dumps(told, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
