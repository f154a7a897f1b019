"""A fleet under traffic while its replicas are killed: every answer is right or an error, and nothing is left.

Conversations of several turns are asked over HTTP of ``prefixloom fleet deploy``, from many clients at once. After
every ``--every`` requests a replica is killed (SIGKILL). Answers at temperature 0 are compared with one engine alone.
In the end no request runs, and no process is left.

``python -m tests.random.fleet [--requests 10000] [--every 500] [--policy NAME] [--replicas 2] [--prefill 0]``: about
20 minutes on two cores. ``--every 0`` kills nothing. With ``--store`` all replicas share a Redis server, and a replica
may be killed in the midst of a write or a read there. With ``--prefill N`` so many replicas compute prompts for the
others, and replicas of both kinds are killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import httpx

from tests.support.fleets import SERVER, OneServer, RunningFleet, running_fleet
from tests.support.store_servers import redis_server

CLIENTS = 8
SYSTEMS, SYSTEM = 3, 320
"""Prompts of systems that conversations share, and their length in tokens (bytes)."""
TURNS, ANSWER = 5, 8
PAGE = 16
RECOVERY_SECONDS = 180.0


@attrs.define
class Turn:
    """One answer. ``seconds``: until its first token. ``cached``, ``prompt``: tokens."""

    prompt: str
    answer: str
    seconds: float
    cached: int


@attrs.define
class Traffic:
    """The clients, what they got, and what must not be (``wrong``)."""

    fleet: RunningFleet
    requests: int
    every: int
    rng: random.Random
    counts: Counter[str] = attrs.field(factory=Counter)
    turns: list[Turn] = attrs.field(factory=list)
    wrong: list[str] = attrs.field(factory=list)
    begun: int = 0
    recoveries: list[float] = attrs.field(factory=list)
    gaps: list[float] = attrs.field(factory=list)
    last: float = 0.0
    ideal: int = 0
    seen: set[str] = attrs.field(factory=set)
    prefill: Counter[str] = attrs.field(factory=Counter)
    killed: Counter[str] = attrs.field(factory=Counter)

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.fleet.root, timeout=120, trust_env=False, limits=limits) as http:
            await self.replicas(http)  # before any request, so that the front asks a replica of its own accord
            self.last = time.monotonic()
            killing = asyncio.create_task(self.kills(http))
            await asyncio.gather(*(self.client(http, number) for number in range(CLIENTS)))
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
            await self.settle(http)
            await self.note_prefill(http)

    async def client(self, http: httpx.AsyncClient, number: int) -> None:
        while self.begun < self.requests:
            system = self.rng.randrange(SYSTEMS)
            prompt = (f"system {system}: " + "you answer briefly and well. " * 40)[:SYSTEM]
            session = f"{number}-{self.rng.randrange(1 << 30)}"
            for _ in range(self.rng.randrange(2, TURNS + 1)):
                if self.begun >= self.requests:
                    return
                self.begun += 1
                prompt += "".join(self.rng.choices("abcdefgh ", k=self.rng.randrange(40, 160)))
                answer = await self.ask(http, prompt, session)
                if answer is None:
                    break
                prompt += answer

    async def ask(self, http: httpx.AsyncClient, prompt: str, session: str) -> str | None:
        """Ask for one turn. Return None if it was cut or refused: an error that the client is told."""
        body = {
            "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        began, first, text, usage = time.monotonic(), 0.0, "", None
        try:
            async with http.stream("POST", "/v1/completions", json=body, headers={"x-session-id": session}) as got:
                if got.status_code != 200:
                    error = json.loads(await got.aread())["error"]
                    self.counts[f"status {got.status_code}"] += 1
                    if got.status_code not in (429, 503) or not error["message"]:
                        self.wrong.append(f"{got.status_code}: {error}")
                    await asyncio.sleep(float(got.headers.get("retry-after", "1")))
                    return None
                done = False
                async for line in got.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line:
                        event = json.loads(line[6:])
                        if "error" in event:
                            self.counts["cut by a death"] += 1
                            return None
                        first = first or time.monotonic()
                        text += "".join(each["text"] for each in event["choices"])
                        usage = event.get("usage") or usage
        except httpx.HTTPError as error:
            self.counts[f"no answer: {type(error).__name__}"] += 1
            return None
        if not done or usage is None:
            self.wrong.append(f"a stream ended without an error, and without its end: {text!r}")
            return None
        now = time.monotonic()
        self.gaps.append(now - self.last)
        self.last = now
        self.counts["answered"] += 1
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.turns.append(Turn(prompt, text, first - began, cached))
        self.note(prompt)
        return text

    def note(self, prompt: str) -> None:
        """Count what an endless cache in one place would have computed of a prompt."""
        pages = range(PAGE, len(prompt) + 1, PAGE)
        known = max((end for end in pages if prompt[:end] in self.seen), default=0)
        self.ideal += len(prompt) - known
        self.seen.update(prompt[:end] for end in pages)

    async def kills(self, http: httpx.AsyncClient) -> None:
        """Kill a replica after every so many requests, and measure until the fleet is whole again."""
        count = len((await self.replicas(http)) or ())
        for number in range(1, self.requests // self.every if self.every else 0):
            while self.begun < number * self.every:
                await asyncio.sleep(0.05)
            found = await self.replicas(http)
            if not found:
                self.wrong.append("the fleet tells of no replica")
                return
            victim = self.rng.choice(sorted(found))
            self.fleet.kill_process(found[victim]["pid"])
            self.counts["killed"] += 1
            self.killed[found[victim].get("role", "")] += 1
            began = time.monotonic()
            while len((await self.replicas(http)).keys() - {victim}) < count:
                if time.monotonic() - began > RECOVERY_SECONDS:
                    self.wrong.append(f"after {RECOVERY_SECONDS:g} s the fleet is not whole again")
                    return
                await asyncio.sleep(0.2)
            self.recoveries.append(time.monotonic() - began)

    async def replicas(self, http: httpx.AsyncClient) -> dict[str, Any]:
        try:
            told = (await http.get("/fleet")).json()["replicas"]
        except (httpx.HTTPError, KeyError, ValueError):
            return {}
        return {each["name"]: each for each in told if each.get("pid")}

    async def settle(self, http: httpx.AsyncClient) -> None:
        for _ in range(100):
            replicas = await self.replicas(http)
            busy = {
                name: (each["insight"]["running"], each["insight"]["waiting"], each["under_way"])
                for name, each in replicas.items()
                if each["insight"]["running"] or each["insight"]["waiting"] or each["under_way"]
            }
            if not busy:
                return
            await asyncio.sleep(0.1)
        self.wrong.append(f"requests are left, by replica: running, waiting, and by the router's count: {busy}")

    def check(self, count: int) -> int:
        """Compare so many answers with one engine alone."""
        some = self.rng.sample(self.turns, min(count, len(self.turns)))
        with OneServer() as alone:
            for turn in some:
                right = alone(turn.prompt, ANSWER)
                if turn.answer != right:
                    self.wrong.append(f"answered {turn.answer!r}, and {right!r} is right")
        return len(some)

    async def note_prefill(self, http: httpx.AsyncClient) -> None:
        """Add up what the replicas that live say of prompts that were computed elsewhere."""
        for line in (await http.get("/metrics")).text.splitlines():
            for name in ("handed_over", "lost", "computed_here"):
                if line.startswith(f"prefixloom:prefill_{name}_total{{"):
                    self.prefill[name] += int(float(line.rpartition(" ")[2]))

    def figures(self) -> str:
        computed = sum(len(turn.prompt) - turn.cached for turn in self.turns)
        firsts = sorted(turn.seconds for turn in self.turns)
        failed = sum(count for what, count in self.counts.items() if what not in ("answered", "killed"))
        text = (
            f"{self.begun} requests, {failed} failed: {dict(self.counts)}\n"
            f"tokens computed: {computed}, {computed / max(self.ideal, 1):.2f} times the ideal of {self.ideal}; "
            f"first token: median {1000 * firsts[len(firsts) // 2]:.0f} ms, "
            f"p90 {1000 * firsts[len(firsts) * 9 // 10]:.0f} ms"
        )
        if self.recoveries:
            text += (
                f"\nwhole again after {min(self.recoveries):.1f} to {max(self.recoveries):.1f} s; "
                f"longest time without any answer {max(self.gaps):.1f} s"
            )
        if self.prefill:
            text += f"\nof the replicas that lived: {dict(self.prefill)}; killed: {dict(self.killed)}"
        return text


def run(args: argparse.Namespace) -> list[str]:
    """Return what was wrong."""
    with ExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory())
        server: dict[str, Any] = {**SERVER, "max-queue": 8}
        if args.store:
            redis = redis_server("--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru")
            ending.callback(redis.kill)
            server |= {"host-memory": "32MiB", "store": f"redis://127.0.0.1:{redis.port}/0"}
        tables: dict[str, Any] = {"fleet": {"replicas": args.replicas}, "server": server}
        if args.policy:
            tables["routing"] = {"policy": args.policy}
        if args.prefill:
            tables["prefill"] = {"replicas": args.prefill}
        with running_fleet(Path(folder), **tables) as fleet:
            fleet.wait(args.replicas + args.prefill)
            traffic = Traffic(fleet, args.requests, args.every, random.Random(args.seed))
            began = time.monotonic()
            asyncio.run(traffic.run())
            took = time.monotonic() - began
        compared = traffic.check(args.checked)
        kinds = f"{args.replicas} replicas" + (f" and {args.prefill} that compute prompts" if args.prefill else "")
        print(f"{args.policy or 'the usual policy'}, {kinds}, {took:.0f} s: {traffic.figures()}")
        print(f"{len(traffic.wrong)} wrong; {compared} answers were compared; no process is left", flush=True)
        return traffic.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500, help="requests from one kill to the next; 0: none")
    parser.add_argument("--checked", type=int, default=500)
    parser.add_argument("--policy", default="", help="of routing (default: that of an empty file)")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--prefill", type=int, default=0, help="replicas that compute prompts for the others")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", action="store_true", help="all replicas share a store on a Redis server")
    wrong = run(parser.parse_args())
    for each in wrong[:5]:
        print(f"wrong: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
