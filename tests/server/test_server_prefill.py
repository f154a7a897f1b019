"""``prefixloom serve`` with prompts computed by other servers: processes, and what becomes of them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from prefixloom.cli import main
from prefixloom_engine.server.insight import FRESH_SECONDS
from tests.server.test_serve_command import process

pytest.importorskip("zmq")
LIKE = ("--dtype", "float64", "--memory", "160MiB")
"""In float64 an answer does not depend on what else is in its step."""
PROMPTS = [f"prompt {number} of the sea and of ships " * 6 for number in range(6)]


@contextmanager
def prefill(address: str, *options: str) -> Iterator[tuple[Any, httpx.Client]]:
    with process(*LIKE, "--as-prefill", address, *options) as (server, client):
        yield server, client


@contextmanager
def decode(*addresses: str, options: tuple[str, ...] = ()) -> Iterator[tuple[Any, httpx.Client]]:
    """A server that has prompts computed at these addresses, once it has agreed with all of them."""
    with process(*LIKE, "--prefill", ",".join(addresses), *options) as (server, client):
        until = time.monotonic() + 60
        while set(client.get("/health").json()["prefill"].values()) != {"agreed"}:
            assert time.monotonic() < until, client.get("/health").text
            time.sleep(0.05)
        yield server, client


def addresses(folder: Path, count: int) -> list[str]:
    return [f"ipc://{folder}/{number}" for number in range(count)]


def ask(client: httpx.Client, prompt: str, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
    return client.post("/v1/completions", json=body, headers=headers)


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def figure(client: httpx.Client, name: str) -> int:
    time.sleep(FRESH_SECONDS)  # younger figures are told again
    lines = client.get("/metrics").text.splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith(f"prefixloom:prefill_{name} "))


@pytest.fixture(scope="module")
def right() -> dict[str, str]:
    """The answers of one server alone."""
    with process(*LIKE) as (_, client):
        return {prompt: said(ask(client, prompt)) for prompt in PROMPTS}


def test_a_router_names_the_server_that_computes_a_prompt(tmp_path: Path, right: dict[str, str]) -> None:
    first, second = addresses(tmp_path, 2)
    with ExitStack() as stack:
        others = [stack.enter_context(prefill(each))[1] for each in (first, second)]
        _, client = stack.enter_context(decode(first, second))
        for prompt in PROMPTS:
            assert said(ask(client, prompt, headers={"x-prefixloom-prefill": second})) == right[prompt]
        assert [figure(each, "served_total") for each in others] == [0, 6]
        assert (figure(client, "handed_over_total"), figure(client, "computed_here_total")) == (6, 0)
        assert figure(client, "received_bytes_total") > 6 * 1000
        assert client.get("/cache/stats").status_code == 403
        alone = said(ask(others[0], PROMPTS[0]))
        assert alone == right[PROMPTS[0]], "a prefill server answers clients as well"


def test_streams_likely_tokens_stops_and_choices_are_those_of_one_server(tmp_path: Path) -> None:
    (address,) = addresses(tmp_path, 1)
    asked: list[dict[str, Any]] = [
        {"logprobs": 3}, {"n": 2, "seed": 5, "temperature": 0.8}, {"stop": ["\x00", "a"], "max_tokens": 40},
        {"logprobs": 0},
    ]  # fmt: skip
    told: list[list[Any]] = []
    with ExitStack() as stack:
        stack.enter_context(prefill(address))
        for _, client in (stack.enter_context(decode(address)), stack.enter_context(process(*LIKE))):
            told.append([ask(client, PROMPTS[0], **each).json()["choices"] for each in asked])
            body = {"prompt": PROMPTS[1], "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = [line for line in stream.iter_lines() if line]
            assert lines[-1] == "data: [DONE]" and len(lines) > 3
            pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
            told[-1].append([{"text": "".join(pieces)}])
    mine, alone = ([[each["text"] for each in choices] for choices in each] for each in told)
    assert mine == alone
    first, second = (choices[0][0]["logprobs"]["token_logprobs"] for choices in told)
    assert first == pytest.approx(second)


def test_killed_hung_and_absent_prefill_servers_fail_no_request(tmp_path: Path, right: dict[str, str]) -> None:
    """One is killed with prompts under way, and one is stopped. Clients that leave leave nothing behind."""
    first, second = addresses(tmp_path, 2)
    with ExitStack() as stack:
        killed, _ = stack.enter_context(prefill(first))
        stopped, _ = stack.enter_context(prefill(second))
        _, client = stack.enter_context(decode(first, second))
        stopped.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(4) as clients:
            asked = [
                clients.submit(ask, client, prompt, headers={"x-prefixloom-prefill": (first, second)[at % 2]})
                for at, prompt in enumerate(PROMPTS[:4])
            ]
            time.sleep(0.05)
            killed.kill()
            gone = time.monotonic()
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json={"prompt": PROMPTS[5], "max_tokens": 9}, timeout=0.5)
            stopped.kill()
            answers = [each.result() for each in asked]
            assert time.monotonic() < gone + 25, "nobody waited for the patience"
        assert [said(each) for each in answers] == [right[prompt] for prompt in PROMPTS[:4]]
        assert said(ask(client, PROMPTS[4])) == right[PROMPTS[4]]
        assert set(client.get("/health").json()["prefill"].values()) == {"away"}
        assert client.get("/health").status_code == 200
        until = time.monotonic() + 10
        while client.get("/insight").json()["running"] or client.get("/insight").json()["waiting"]:
            assert time.monotonic() < until, "a request is left"
        with prefill(first):
            until = time.monotonic() + 60
            while client.get("/health").json()["prefill"][first] != "agreed":
                assert time.monotonic() < until
                time.sleep(0.05)
            before = figure(client, "handed_over_total")
            assert said(ask(client, "another prompt " * 20))
            assert figure(client, "handed_over_total") == before + 1


def test_other_weights_are_told_and_not_used(tmp_path: Path, right: dict[str, str]) -> None:
    (address,) = addresses(tmp_path, 1)
    with prefill(address, "--seed", "1"), process(*LIKE, "--prefill", address) as (server, client):
        until = time.monotonic() + 60
        while client.get("/health").json()["prefill"] != {address: "other"}:
            assert time.monotonic() < until, client.get("/health").text
            time.sleep(0.05)
        assert said(ask(client, PROMPTS[0])) == right[PROMPTS[0]]
        assert (figure(client, "handed_over_total"), figure(client, "computed_here_total")) == (0, 1)
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        assert "computes something else: weights is" in server.stderr.read()


def test_a_prefill_server_that_is_to_end_sends_what_it_owes(tmp_path: Path) -> None:
    (address,) = addresses(tmp_path, 1)
    long = "a long prompt of many words and of ships at sea " * 100
    with prefill(address, "--chunk", "64") as (server, other), decode(address) as (_, client):
        with ThreadPoolExecutor(1) as clients:
            asked = clients.submit(ask, client, long, max_tokens=2)
            until = time.monotonic() + 30
            while not other.get("/insight").json()["running"]:
                assert time.monotonic() < until
            server.send_signal(signal.SIGTERM)
            assert said(asked.result())
        assert server.wait(40) in (0, -signal.SIGTERM)
        assert (figure(client, "handed_over_total"), figure(client, "lost_total")) == (1, 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prefill", "127.0.0.1:1"], "an address is tcp://HOST:PORT"),
        (["--prefill", "tcp://127.0.0.1:1,tcp://10.0.0.7:1"], "tcp://10.0.0.7:1 can be reached from other machines"),
        (["--as-prefill", "tcp://0.0.0.0:1"], "without keys anybody there may read prompts"),
        (["--as-prefill", "tcp://127.0.0.1:1", "--prefill", "tcp://127.0.0.1:2"], "give one"),
        (["--prefill-keys", "keys"], "go with --prefill or --as-prefill"),
        (["--prefill", "tcp://10.0.0.7:1", "--prefill-keys", "/nowhere"], "has no keys for the client of a connection"),
    ],
)
def test_what_cannot_be_is_refused_at_once(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *options]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
