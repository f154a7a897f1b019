"""Clients of a server under pressure and faults: every answer is right or an error, and nothing is left.

Conversations of several turns are asked over HTTP, from many clients at once, at pools of 30% of what they need.
Meanwhile clients vanish, send malformed bodies and read slowly, forward passes fail, and the store behind the host's
memory stalls, fails and comes back. They are of two tenants, of which one asks with the highest priority. What is
answered at temperature 0 is compared with the model without any cache.

``python -m tests.random.serving [--requests 10000]``: about 15 minutes on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import resource
import sys
import time
from collections import Counter
from typing import Any

import anyio
import httpx
import torch

from prefixloom import TierManifest
from prefixloom_engine import Engine
from prefixloom_engine.server.app import Limits
from prefixloom_engine.threeway.text import ByteTokenizer
from prefixloom_hicache import GuardLimits, HostTier, MemoryBackend
from tests.random.engine_traffic import Failing
from tests.support.servers import ALICE, BOB, KEYS, RunningServer, greedy, serving, spoiled, text_model

TEXT = ByteTokenizer()
CLIENTS = 24
CONVERSATIONS, TURNS, ANSWER = 20, 4, 6
SHARE = 0.3
"""How much of what all conversations need the device holds."""


class MoodyStore(MemoryBackend):
    """A store that is well, stalls, or fails, as it is told."""

    mood = "well"

    def _be(self) -> None:
        if self.mood == "stalls":
            time.sleep(0.5)
        elif self.mood == "fails":
            raise OSError("the store is gone")

    def get(self, keys: Any, into: Any = None) -> Any:
        self._be()
        return super().get(keys, into)

    def put(self, records: Any) -> Any:
        self._be()
        return super().put(records)

    def exists(self, keys: Any) -> Any:
        self._be()
        return super().exists(keys)


class Clients:
    """The clients of one run. ``wrong`` says what must not be."""

    def __init__(self, seed: int, requests: int) -> None:
        self.rng = random.Random(seed)
        self.requests = requests
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        rng = self.rng
        system = "".join(rng.choices("abcdefgh ", k=100))
        self.prompts: list[tuple[str, str]] = []
        for _ in range(CONVERSATIONS):
            prompt = system[: rng.choice((0, 100))]
            for _ in range(TURNS):
                prompt += "".join(rng.choices("abcdefgh ", k=rng.randrange(10, 60)))
                tokens = greedy(TEXT.encode(prompt), ANSWER, ends=False)
                self.prompts.append((prompt, TEXT.decode(tokens)))
                prompt += TEXT.decode(tokens)
        self.store = MoodyStore(capacity=1 << 24)
        self.tokens = sum(len(prompt) + ANSWER for prompt, _ in self.prompts[TURNS - 1 :: TURNS])
        self.sizes: list[int] = []

    def prepare(self, engine: Engine) -> None:
        engine._forward.runner = Failing(engine._forward.runner, random.Random(1), 0.01)
        self.engine = engine

    def run(self) -> list[str]:
        least = max(len(prompt) for prompt, _ in self.prompts) + 128
        device = max(int(self.tokens * SHARE), least) // 64 * 64
        capacity = {"full": device, "swa": device, "mamba": 24 + device // 128}
        tier = HostTier(TierManifest(capacity=device), identity=text_model().identity, limits=GuardLimits(0.2))
        print(f"{self.tokens} tokens of conversations, {device} on the device", flush=True)
        limits = Limits(body_seconds=5.0, seconds=60.0)
        more: dict[str, Any] = {"most": 4 * CLIENTS, "max_running": 8, "debug": False, "prepare": self.prepare}
        with serving(keys=KEYS, capacity=capacity, tier=tier, limits=limits, **more) as server:
            tier.attach(self.store)
            asyncio.run(self.all(server))
            self.counts["restarts after failed passes"] = self.engine.counts.failed
            if server.http.server_state.connections or server.http.server_state.tasks:
                time.sleep(1)
            left = len(server.http.server_state.connections), len(server.http.server_state.tasks)
            if any(left):
                self.wrong.append(f"{left[0]} connections and {left[1]} tasks are left")
        settled = self.sizes[len(self.sizes) // 4]
        growth = self.sizes[-1] - settled
        print(f"memory: {settled / 1024:.0f} MiB after a quarter, {growth / 1024:+.1f} MiB since then")
        if growth > 48 * 1024:
            self.wrong.append(f"memory grew by {growth / 1024:.1f} MiB")
        return self.wrong

    async def all(self, server: RunningServer) -> None:
        left = iter(range(self.requests))
        async with httpx.AsyncClient(
            base_url=server.root, timeout=120, trust_env=False, limits=httpx.Limits(max_connections=None)
        ) as client:

            async def one_client(number: int) -> None:
                headers = {"authorization": f"Bearer {BOB if number % 4 else ALICE}"}
                for number in left:
                    self.weather(number)
                    try:
                        await self.one(client, server, headers)
                    except Exception as error:
                        self.wrong.append(f"request {number}: {error!r}")

            await asyncio.gather(*(one_client(number) for number in range(CLIENTS)))
            for _ in range(200):
                if server.server.worker.load == 0:
                    return
                await asyncio.sleep(0.05)
            self.wrong.append(f"{server.server.worker.load} requests are left")

    def weather(self, number: int) -> None:
        if number % 50 == 0:
            self.store.mood = self.rng.choice(("well", "well", "stalls", "fails"))
            self.sizes.append(resident())
        if number % 1000 == 0:
            print(f"{number} requests: {dict(self.counts)}, {resident() / 1024:.0f} MiB", flush=True)

    async def one(self, client: httpx.AsyncClient, server: RunningServer, headers: dict[str, str]) -> None:
        rng = self.rng
        kind = rng.random()
        prompt, answer = rng.choice(self.prompts)
        body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        body["ttl"] = rng.choice((None, None, 0, 0.1, 60))
        body["priority"] = 2**31 - 1 if headers["authorization"].endswith(BOB) else 0
        if kind < 0.1:
            good = [json.dumps(body)]
            got = await client.post("/v1/completions", content=spoiled(rng, good), headers=headers)
            self.count(got, None)
        elif kind < 0.25:
            await self.vanish(client, {**body, "max_tokens": 200, "stream": rng.random() < 0.5}, headers)
        elif kind < 0.5:
            got = await client.post("/v1/completions", json={**body, "stream": True}, headers=headers)
            if got.status_code != 200:
                self.count(got, None)
                return
            lines = got.text.split("\n\n")
            if "[DONE]" not in lines[-2]:
                self.counts["error within a stream"] += 1
                if '"error"' not in lines[-2]:
                    self.wrong.append(f"a stream ended without an error: {lines[-2]}")
                return
            pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2]]
            self.check("".join(pieces), answer)
        elif kind < 0.6:
            body = {**body, "temperature": 1, "n": 2, "cache_salt": rng.choice(("", "a", "b"))}
            self.count(await client.post("/v1/completions", json=body, headers=headers), None)
        else:
            self.count(await client.post("/v1/completions", json=body, headers=headers), answer)

    async def vanish(self, client: httpx.AsyncClient, body: Any, headers: dict[str, str]) -> None:
        try:
            with anyio.fail_after(self.rng.random() * 0.3):
                async with client.stream("POST", "/v1/completions", json=body, headers=headers) as got:
                    async for _ in got.aiter_lines():
                        pass
        except (TimeoutError, httpx.HTTPError):
            self.counts["vanished"] += 1

    def count(self, got: httpx.Response, answer: str | None) -> None:
        if got.status_code != 200:
            self.counts[f"status {got.status_code}"] += 1
            if not got.json()["error"]["message"] or got.status_code not in (400, 413, 429, 500, 503, 504):
                self.wrong.append(f"{got.status_code}: {got.text}")
            return
        told = got.json()
        used = told["usage"]
        if used["prompt_tokens_details"]["cached_tokens"] >= used["prompt_tokens"]:  # the last token is never cached
            self.wrong.append(f"more is cached than was asked: {used}")
        if answer is not None:
            self.check(told["choices"][0]["text"], answer)
        else:
            self.counts["drawn"] += 1

    def check(self, told: str, answer: str) -> None:
        self.counts["checked"] += 1
        if told != answer:
            self.wrong.append(f"answered {told!r}, and {answer!r} is right")


def resident() -> int:
    """KiB of memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("prefixloom").setLevel(logging.CRITICAL)
    clients = Clients(args.seed, args.requests)
    wrong = clients.run()
    for each in wrong[:5]:
        print(f"wrong: {each}")
    print(f"{args.requests} requests: {dict(clients.counts)}; {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
