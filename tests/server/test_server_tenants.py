"""A greedy tenant beside an honest one: thirty connections, the highest priority, more prompts than the cache holds."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from prefixloom import TierManifest
from prefixloom_engine.server.access import Tenant
from prefixloom_hicache import HostTier
from tests.support.servers import ALICE, BOB, KEYS, RunningServer, ask, eventually, right, serving, text_model

HIGHEST = 2**31 - 1
LONG = "what an honest tenant asks again and again; " * 13 + "hello"
GREEDY = 30


class Greedy:
    """Thirty connections of one tenant, each asking as soon as it is answered. ``statuses``: what they got."""

    def __init__(self, server: RunningServer, key: str) -> None:
        self.server, self.key = server, key
        self.statuses: Counter[int] = Counter()
        self.waits: set[str] = set()
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(number,)) for number in range(GREEDY)]

    def run(self, number: int) -> None:
        with self.server.client(self.key) as client:
            turn = 0
            while not self.over.is_set():
                turn += 1
                prompt = f"{number} {turn} " + "all that a greedy tenant asks " * 8
                body = ask(prompt, 24, priority=HIGHEST, cache_salt=f"{number % 3}", ignore_eos=True)
                got = client.post("/v1/completions", json=body)
                self.statuses[got.status_code] += 1
                if got.status_code == 429:
                    self.waits.add(got.headers["retry-after"])
                    self.over.wait(0.05)

    def __enter__(self) -> Greedy:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


def test_an_honest_tenant_keeps_its_hits_and_its_places_beside_a_greedy_one() -> None:
    tier = HostTier(TierManifest(capacity=4096), identity=text_model().identity)
    capacity = {"full": 2048, "swa": 2048, "mamba": 64}
    more: dict[str, Any] = {"max_running": 4, "most": 16, "debug": False, "capacity": capacity, "tier": tier}
    with serving(keys=KEYS, **more) as server, server.client(ALICE) as alice:
        body = ask(LONG, 2)

        def hit() -> int:
            answer = alice.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == right(LONG, 2)
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert hit() == 0
        with Greedy(server, BOB) as greedy:
            for round_ in range(2):
                eventually(lambda round_=round_: greedy.statuses[200] > 15 * (round_ + 1), 120)  # type: ignore[misc]
                assert hit() == 576
        shown = alice.get("/metrics").text
        told = alice.get("/insight").json()
        assert greedy.statuses.keys() == {200, 429} and all(int(each) >= 1 for each in greedy.waits)
        owners = told["stats"]["owners"]
        assert owners["alice"]["device"]["full"] >= 576 // 16
        assert owners["bob"]["device"]["full"] > 2048 // 16 // 2, "and what the honest one does not use is used"
        for text in (
            'tenant_requests{state="waiting",tenant="bob"}',
            'owner_pages{component="full",owner="alice",tier=',
        ):
            assert f"prefixloom:{text}" in shown
        assert ALICE not in shown and BOB not in shown and "greedy" not in shown


def test_a_tenant_beyond_its_part_of_the_queue_is_refused_while_others_are_taken() -> None:
    keys = {**KEYS, BOB: Tenant("bob", "bob", share=2.0)}
    with serving(keys=keys, max_running=2, most=10, debug=False) as server:
        held: list[threading.Thread] = []

        def hold(key: str, count: int) -> None:
            def post() -> None:
                with server.client(key) as client:
                    client.post("/v1/completions", json=ask("a" * 40, 1500, ignore_eos=True))

            for _ in range(count):
                held.append(threading.Thread(target=post))
                held[-1].start()

        worker = server.server.worker
        hold(BOB, 2 + 4)
        eventually(lambda: worker.load == 6)
        with server.client(BOB) as bob, server.client(ALICE) as alice:
            refused = bob.post("/v1/completions", json=ask("b", 1))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
            assert alice.post("/v1/completions", json=ask("b", 2)).status_code == 200
            assert alice.post("/v1/completions", json=ask("b", 2, n=4)).status_code == 200
            assert alice.post("/v1/completions", json=ask("b", 2, n=5)).json()["error"]["message"].endswith("4 at most")
        assert worker._loop is not None
        worker._loop.call_soon_threadsafe(worker.abort_all, RuntimeError("the test is over"))
        for thread in held:
            thread.join()


def test_a_priority_counts_as_the_highest_of_its_tenant() -> None:
    keys = {**KEYS, BOB: Tenant("bob", "bob", priority=5)}
    with serving(keys=keys) as server, server.client(BOB) as bob, server.client(ALICE) as alice:
        seen: list[int] = []
        add = server.server.worker.engine.add
        server.server.worker.engine.add = lambda request: seen.append(request.priority) or add(request)  # type: ignore
        for client in (bob, alice):
            for priority in (HIGHEST, 5, -3):
                client.post("/v1/completions", json=ask("b", 1, priority=priority))
        assert seen == [5, 5, -3, HIGHEST, 5, -3]
