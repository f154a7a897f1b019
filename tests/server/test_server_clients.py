"""Many clients, impatient clients, tenants and administrators."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixloom import InputError, TierManifest, open_store
from prefixloom.cli import main
from prefixloom_engine.server.access import Tenant, read_tenants
from prefixloom_engine.server.app import Limits
from prefixloom_hicache import HostTier, MemoryBackend
from tests.support.servers import (
    ADMIN,
    ALICE,
    BOB,
    HEAD,
    KEYS,
    TEXT,
    RunningServer,
    ask,
    connected,
    eventually,
    posted,
    right,
    serving,
    spoiled,
    text_model,
)

# ---------------------------------------------------------------- many


def test_many_clients_at_once_get_their_own_answers() -> None:
    """With 150 connections, at pools that hold a few of them, and the queue for all."""
    prompts = [f"{'shared beginning ' * (number % 3 * 4)}number {number % 40}" for number in range(150)]

    async def all_of_them(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as client:

            async def one(prompt: str) -> str:
                body = ask(prompt, 6, stream=len(prompt) % 2 == 0)
                answer = await client.post("/completions", json=body)
                assert answer.status_code == 200, answer.text
                if not body["stream"]:
                    return str(answer.json()["choices"][0]["text"])
                events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
                return "".join(json.loads(event)["choices"][0]["text"] for event in events)

            return await asyncio.gather(*map(one, prompts))

    with serving(capacity={"full": 1024, "swa": 1024, "mamba": 40}, most=150, max_running=8) as server:
        assert asyncio.run(all_of_them(server.url)) == [right(prompt, 6) for prompt in prompts]


def test_a_full_queue_says_when_to_ask_again() -> None:
    with serving(most=2, max_running=1) as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json=ask("a", 300, stream=True)) as first:
            lines = first.iter_lines()
            next(lines)
            refused = client.post("/v1/completions", json=ask("b", 4, n=2))
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert client.post("/v1/completions", json=ask("b", 4)).status_code == 200
        eventually(lambda: server.server.worker.load == 0)
        assert client.post("/v1/completions", json=ask("b", 4, n=2)).status_code == 200


def test_a_slow_reader_does_not_slow_others() -> None:
    with serving() as server, server.client() as client:
        body = ask("slow", 300, stream=True, n=4, logprobs=5)
        with connected(server, posted(body), receives=4096) as slow:
            eventually(lambda: server.server.worker.load == 4)
            for number in range(5):
                told = client.post("/v1/completions", json=ask(f"quick {number}", 4)).json()
                assert told["choices"][0]["text"] == right(f"quick {number}", 4)
            eventually(lambda: server.server.worker.load == 0, 60)
            read = b""
            while b"[DONE]" not in read[-100:]:
                read += slow.recv(1 << 16)
        assert read.count(b'"finish_reason":"length"') == 4


def test_what_takes_too_long_or_is_too_large_ends_with_an_error() -> None:
    with serving(limits=Limits(body=2000, body_seconds=0.3, seconds=0.2)) as server, server.client() as client:
        late = client.post("/v1/completions", json=ask("a", 1500))
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        eventually(lambda: server.server.worker.load == 0)
        assert server.server.worker.engine.counts.decoded < 1400, "its answer was aborted"
        streamed = client.post("/v1/completions", json=ask("a", 1500, stream=True)).text
        assert '"code":"timeout"' in streamed and "[DONE]" not in streamed
        assert client.post("/v1/completions", json=ask("a" * 3000, 4)).status_code == 413
        with connected(server, HEAD % 100 + b"{") as dawdling:
            assert b"408" in dawdling.recv(1000)
        assert client.post("/v1/completions", json=ask("a", 2)).status_code == 200


def test_malformed_bodies_get_an_error_and_harm_nobody() -> None:
    rng = random.Random(1)
    good = [
        json.dumps(ask("x", 2)),
        json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_tokens": 2}),
    ]
    with serving() as server, server.client() as client:
        for number in range(300):
            answer = client.post(
                rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize")), content=spoiled(rng, good)
            )
            assert answer.status_code in (200, 400, 404), (number, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
        assert client.post("/v1/completions", json=ask("b", 4)).json()["choices"][0]["text"] == right("b", 4)


def test_what_a_request_says_it_does_not_need_goes_first() -> None:
    """By its priority it would go last. The engine is idle when its time comes."""
    prompts = {ttl: f"prompt number {number} " * 8 for number, ttl in enumerate((None, 0, 0.2, 3600))}
    with serving() as server, server.client() as client:
        for ttl, prompt in prompts.items():
            more = {} if ttl is None else {"ttl": ttl, "priority": 9}
            assert client.post("/v1/completions", json=ask(prompt, 2, **more)).status_code == 200
        time.sleep(0.5)
        cache = server.server.worker.engine.cache

        def evict() -> list[Any]:
            cache.evict(256)
            return [ttl for ttl, prompt in prompts.items() if cache.peek(TEXT.encode(prompt), namespace=space)]

        space = server.server.worker.engine.namespace("")
        assert asyncio.run(asyncio.wait_for(called(server, evict), 20)) == [None, 3600]


async def called(server: RunningServer, what: Callable[[], Any]) -> Any:
    """Run something in the thread of the engine."""
    return await server.server.worker.call(what)


# ---------------------------------------------------------------- tenants


def test_tenants_share_nothing_and_salts_keep_apart() -> None:
    prompt = "the same long prompt " * 8

    def hit(client: httpx.Client, **more: Any) -> int:
        told = client.post("/v1/completions", json=ask(prompt, 2, **more))
        assert told.json()["choices"][0]["text"] == right(prompt, 2)
        return int(told.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    shared = {**KEYS, "carol-key-0123456789": Tenant("carol", "alice")}
    with serving(keys=shared) as server, server.client() as nobody:
        assert nobody.post("/v1/completions", json=ask(prompt, 2)).json()["error"]["code"] == "missing_api_key"
        assert nobody.get("/v1/models").status_code == 401
        assert nobody.get("/health").status_code == 200
        with server.client("wrong-key-0123456789") as wrong:
            assert wrong.post("/v1/completions", json=ask(prompt, 2)).json()["error"]["code"] == "invalid_api_key"
        with server.client(ALICE) as alice, server.client(BOB) as bob, server.client("carol-key-0123456789") as carol:
            assert hit(alice) == 0
            assert hit(bob) == 0
            assert hit(alice) == hit(bob) == hit(carol) == len(prompt) // 64 * 64
            assert hit(alice, cache_salt="s") == 0
            assert hit(bob, cache_salt="s") == 0
            assert hit(alice, cache_salt="s") > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no tenant"),
        ("x", "is no TOML"),
        ('[a]\nkey = "short"', "at least 16 printable characters"),
        ('[a]\nkey = "0123456789abcdef"\nrole = "x"', "gives 'a' 'role'"),
        ('["a/b"]\nkey = "0123456789abcdef"', "letters, digits"),
        ('[a]\nkey = "0123456789abcdef"\nnamespace = "a/b"', "a namespace that is none"),
        ('[a]\nkey = "0123456789abcdef"\nadmin = 1', "admin = 1"),
        ('[a]\nkey = "0123456789abcdef"\nshare = 0', "share = 0: it is a number above 0"),
        ('[a]\nkey = "0123456789abcdef"\nshare = nan', "share = nan: it is a number above 0"),
        ('[a]\nkey = "0123456789abcdef"\nshare = true', "share = True: it is a number above 0"),
        ('[a]\nkey = "0123456789abcdef"\npriority = 1.5', "priority = 1.5: it is a whole number"),
        ('[a]\nkey = "0123456789abcdef"\n[b]\nkey = "0123456789abcdef"', "the same key"),
    ],
)
def test_a_wrong_file_of_keys_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(InputError, match=says):
        read_tenants(path)


@pytest.mark.skipif(os.name != "posix", reason="files have no modes here")
def test_a_file_of_keys_that_others_may_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[a]\nkey = "0123456789abcdef"')
    for mode in range(0o1000):
        path.chmod(mode | 0o400)
        if mode & 0o027:  # others may use it, or a group may write it
            with pytest.raises(InputError, match="others may read or change it: chmod 600"):
                read_tenants(path)
        else:
            assert read_tenants(path).keys


# ---------------------------------------------------------------- administrators


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "http://[::1", "http://a b", "http://127.0.0.1:x"])
def test_an_address_that_is_none_is_told_in_one_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a prompt", "--server", address]) == 2
    said = capsys.readouterr().err
    assert address in said and said.count("\n") == 1


def test_an_administrator_sees_flushes_and_drops(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompt = "something to keep " * 8
    key = tmp_path / "key"
    key.write_text(f"{ADMIN}\n")

    def command(*words: str) -> Any:
        code = main(["cache", *words, "--server", server.root, "--key-file", str(key)])
        out, err = capsys.readouterr()
        return json.loads(out) if code == 0 else err

    tier = HostTier(TierManifest(capacity=4096), identity=text_model().identity)
    with serving(keys=KEYS, tier=tier) as server, server.client(ALICE) as alice:
        assert alice.post("/cache/flush").status_code == 403
        alice.post("/v1/completions", json=ask(prompt, 2, cache_salt="s/t"))
        kept = command("namespaces")["namespaces"]["alice/s/t"]
        assert kept["full device"] == kept["full host"] == len(prompt) // 64 * 64
        assert command("stats")["components"]["full"]["cached"] == len(prompt) // 64 * 4
        assert command("drop", "alice/s/t") == {"dropped": "alice/s/t"}
        assert command("namespaces") == {"namespaces": {}}
        alice.post("/v1/completions", json=ask(prompt, 2))
        assert command("flush")["flushed"] > 0
        assert command("namespaces") == {"namespaces": {}}
        folder = tmp_path / "store"
        url = f"file:{folder}?capacity=16MiB"
        assert command("attach", url) == {"store": url}
        assert "is attached already" in command("attach", url)
        second = MemoryBackend(1 << 20)
        with pytest.raises(InputError, match="is attached already"):  # as where two come at once
            server.store.take(second, "memory:")
        assert second._closed
        alice.post("/v1/completions", json=ask(prompt, 2))
        eventually(lambda: command("stats")["tier"]["to_store"] == 0)
        assert command("detach") == {"store": None}
        assert "no store is attached" in command("detach")
        assert "did you mean 'file'" in command("attach", "fil:x").lower()
    store = open_store(f"file:{folder}?read_only=1")
    assert store.status().records > 0
    store.close()


def test_what_a_server_kept_is_found_by_the_next_one(tmp_path: Path) -> None:
    prompt = "a prompt that outlives its process " * 6

    def run(running: RunningServer) -> dict[str, Any]:
        with running.client() as client:
            told = client.post("/v1/completions", json=ask(prompt, 4)).json()
        assert told["choices"][0]["text"] == right(prompt, 4)
        return dict(told["usage"]["prompt_tokens_details"])

    for hit in (0, len(prompt) // 64 * 64):
        tier = HostTier(TierManifest(capacity=4096), identity=text_model().identity, fetch="wait")
        with serving(tier=tier) as server:
            server.store.attach(f"file:{tmp_path / 'store'}?capacity=16MiB")
            assert run(server) == {"cached_tokens": hit}
