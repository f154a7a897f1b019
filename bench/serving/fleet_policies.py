"""Routing policies on a real fleet, beside the simulation of the same fleet on the same requests.

A trace's prompts are too long for replicas on a CPU. So each block of the trace becomes ``block`` bytes, which are
tokens of the built-in model; an answer has ``answer`` tokens, and time goes ``speed`` times as fast. Requests are
sent when they arrive, whatever is still unanswered. Each number of replicas and each policy has a fleet of its own.

Before the requests, other prompts measure how fast the replicas compute and decode while all of them do, and the caches
are flushed. These are the speeds of the simulation, whose replicas have the same model, pools and steps.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import attrs
import httpx

from bench.runner.figures import Rows
from prefixloom import Traffic
from prefixloom.lab import BlockPrompt, Service, Setup, read_trace
from prefixloom_engine.threeway import ThreeWay
from prefixloom_engine.threeway.text import END, text_sizes
from prefixloom_fleet.routing import USUAL
from prefixloom_fleet.simulation import FleetOutcome, FleetSetup, RepeatedTrace, simulate

PAGE, RUNNING, QUEUE, CHUNK = 16, 4, 64, 64
READY_SECONDS = 240.0
KEY = "only-for-this-fleet"
HEARD_SECONDS = 0.1
"""Until the simulated router hears what a replica has cached."""
MEASURED, TIMES, DECODED = 1024, 4, 32
"""Tokens of the prompts that measure the speed, how many each replica gets, and the tokens of their answers."""


@attrs.frozen
class TimedRequest:
    """A request. ``at``: seconds from the beginning. ``prompt``: its tokens. ``session``: its conversation, or ""."""

    at: float
    prompt: list[int]
    session: str = ""


@attrs.frozen
class TimedAnswer:
    """``first``: seconds until the first token. ``computed``: tokens of the prompt that did not hit."""

    first: float
    computed: int


@attrs.frozen
class ServedTrace:
    """One run of a real fleet. ``failed``: requests without an answer, by what was told."""

    answered: list[TimedAnswer]
    failed: Counter[str]
    service: Service

    @property
    def computed(self) -> int:
        return sum(each.computed for each in self.answered)

    def first_token(self, part: float) -> float:
        return sorted(each.first for each in self.answered)[int(part * (len(self.answered) - 1))]


def shrunk(path: Path, limit: int, block: int, speed: float) -> list[TimedRequest]:
    """Return the first requests of a trace of blocks, each whole block as so many bytes that only its id decides.

    The part of a block at a prompt's end is left out: the next turn goes on from it in the text, and has another id.
    """
    asked = []
    for request in read_trace(path, limit=limit):
        whole = request.prompt
        if not isinstance(whole, BlockPrompt):
            raise SystemExit(f"{path}: this wants a trace of blocks")
        ids = whole.ids[: max(whole.count // whole.size, 1)]
        prompt = [token for each in ids for token in random.Random(each).choices(range(END), k=block)]
        asked.append(TimedRequest(request.at / speed, prompt, request.session))
    return asked


# ---------------------------------------------------------------- a real fleet


async def answer(
    http: httpx.AsyncClient, prompt: list[int], count: int, failed: Counter[str], session: str = ""
) -> TimedAnswer | None:
    """Ask until a replica has room. None: there is no answer, and ``failed`` says why."""
    body = {
        "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"x-session-id": session} if session else {}
    began, first, cached = time.monotonic(), 0.0, None
    while True:
        try:
            async with http.stream("POST", "/v1/completions", json=body, headers=headers) as got:
                if got.status_code == 429:
                    await asyncio.sleep(float(got.headers["retry-after"]))
                    continue
                if got.status_code != 200:
                    failed[f"status {got.status_code}"] += 1
                    return None
                async for line in got.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        failed[event["error"]["message"]] += 1
                        return None
                    first = first or time.monotonic()
                    if event.get("usage"):
                        cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        except httpx.HTTPError as error:
            failed[type(error).__name__] += 1
            return None
        if cached is None:
            failed["no usage"] += 1
            return None
        return TimedAnswer(first - began, len(prompt) - cached)


async def speeds(http: httpx.AsyncClient, replicas: int) -> Service:
    """Measure how fast replicas compute prompts and decode while all of them do, by the median of several."""
    prefills, decodes = [], []
    for number in range(TIMES):
        own = [random.Random(f"{number} {each}").choices(range(END), k=MEASURED) for each in range(replicas)]
        began = time.monotonic()
        found = await asyncio.gather(*(answer(http, each, DECODED, Counter()) for each in own))
        seconds = time.monotonic() - began
        firsts = [each.first for each in found if each is not None]
        prefills += [MEASURED / first for first in firsts]
        decodes.append((DECODED - 1) / (seconds - statistics.mean(firsts)))
    return Service(statistics.median(prefills), statistics.median(decodes), RUNNING, CHUNK)


async def served(root: str, asked: list[TimedRequest], replicas: int, count: int) -> ServedTrace:
    limits = httpx.Limits(max_connections=None)
    failed: Counter[str] = Counter()
    key = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=root, timeout=600, trust_env=False, limits=limits, headers=key) as http:
        await ready(http, replicas)
        service = await speeds(http, replicas)
        (await http.post("/cache/flush")).raise_for_status()
        await asyncio.sleep(2)  # until routers have heard of it
        began = time.monotonic()

        async def one(request: TimedRequest) -> TimedAnswer | None:
            await asyncio.sleep(began + request.at - time.monotonic())
            return await answer(http, request.prompt, count, failed, request.session)

        found = await asyncio.gather(*map(one, asked))
    return ServedTrace([each for each in found if each is not None], failed, service)


async def ready(http: httpx.AsyncClient, replicas: int) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        told = (await http.get("/fleet")).json()["replicas"]
        if len([each for each in told if each.get("pid") and each["events"] == "followed"]) == replicas:
            return
        await asyncio.sleep(0.5)
    raise SystemExit(f"{replicas} replicas were not ready after {READY_SECONDS:g} s")


def real_outcome(asked: list[TimedRequest], policy: str, replicas: int, memory: str, traffic: Traffic) -> ServedTrace:
    """Start a fleet, serve the requests, and end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fleet.toml"
        keys = path.parent / "keys.toml"
        keys.touch(0o600)
        keys.write_text(f'[bench]\nkey = "{KEY}"\nadmin = true\n')
        path.write_text(
            f'[fleet]\nreplicas = {replicas}\n[front]\nport = {port}\n[routing]\npolicy = "{policy}"\n'
            f'[server]\nmemory = "{memory}"\nmax-running = {RUNNING}\nmax-queue = {QUEUE}\nchunk = {CHUNK}\n'
            f'page-size = {PAGE}\nthreads = 1\nkeys = "keys.toml"\nevents-in-clear = true\n'
            f'traffic = "prompt={traffic.prompt},output={traffic.output},shared={traffic.shared}"\n'
        )
        command = [sys.executable, "-m", "prefixloom", "fleet", "deploy", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                assert process.stdout is not None
                if "serves a fleet" not in process.stdout.readline():
                    raise SystemExit(f"the fleet did not start: {' '.join(command)}")
                return asyncio.run(served(f"http://127.0.0.1:{port}", asked, replicas, traffic.output))
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(120)


# ---------------------------------------------------------------- the same, simulated


def simulated_outcome(
    trace: Path, policy: str, replicas: int, memory: str, traffic: Traffic, service: Service
) -> FleetOutcome:
    setup = Setup(
        ThreeWay(text_sizes()).config, page_size=PAGE, memory=memory, traffic=traffic,
        policy="priority", service=service, closely=1 << 30,
    )  # fmt: skip
    return simulate(FleetSetup(setup, replicas, policy, late=HEARD_SECONDS), RepeatedTrace(read_trace(trace)))


def write_tokens(path: Path, asked: list[TimedRequest], answer: int) -> None:
    """Write requests as a trace of tokens."""
    with path.open("w") as lines:
        for each in asked:
            told = {"tokens": each.prompt, "at": each.at, "output": answer, "session": each.session}
            lines.write(json.dumps(told) + "\n")


def fleet_policies(
    trace: str, limit: int = 1000, block: int = 16, speed: float = 2.0, answer: int = 4, memory: str = "32MiB",
    replicas: str = "2,4", policies: str = ",".join(USUAL),
) -> Rows:  # fmt: skip
    """Return what real and simulated fleets compute, as multiples of the ideal. ``memory``: of one replica's pools."""
    asked = shrunk(Path(trace), limit, block, speed)
    tokens = sum(len(each.prompt) for each in asked)
    traffic = Traffic(RUNNING, tokens // len(asked), answer, 0.0, CHUNK)
    found: Rows = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / Path(trace).name.removesuffix(".gz")
        write_tokens(path, asked, answer)
        for count in map(int, str(replicas).split(",")):
            for policy in policies.split(","):
                real = real_outcome(asked, policy, count, memory, traffic)
                paper = simulated_outcome(path, policy, count, memory, traffic, real.service)
                rows = {
                    "x ideal": real.computed / paper.ideal, "x ideal, simulated": paper.multiple,
                    "simulated over real": paper.computed / real.computed, "p90, s": real.first_token(0.9),
                    "p90, simulated, s": paper.first_token(0.9), "failed requests": sum(real.failed.values()),
                    "prefilled in a second": real.service.prefill, "decoded in a second": real.service.decode,
                }  # fmt: skip
                found |= {f"{policy}, {count} replicas: {row}": [float(figure)] for row, figure in rows.items()}
                print(f"{policy}, {count} replicas:", rows, *real.failed.items())
    return found
