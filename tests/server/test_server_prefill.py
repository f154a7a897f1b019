"""``prefixloom serve`` with prompts computed by other servers: processes, and what becomes of them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

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


def waited(true: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def state(client: httpx.Client, address: str) -> str:
    return str(client.get("/health").json()["prefill"][address])


def every_kind(client: httpx.Client) -> list[Any]:
    """The texts and log-probabilities of requests of every kind."""
    kinds: list[dict[str, Any]] = [
        {"logprobs": 3}, {"n": 2, "seed": 5, "temperature": 0.8}, {"stop": ["\x00", "a"], "max_tokens": 40},
    ]  # fmt: skip
    told = [ask(client, PROMPTS[0], **each).json()["choices"] for each in kinds]
    body = {"prompt": PROMPTS[1], "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and len(lines) > 3
    streamed = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    likely = [pytest.approx(each) for each in told[0][0]["logprobs"]["token_logprobs"]]
    return [[[each["text"] for each in choices] for choices in told], streamed, likely]


def test_prompts_are_computed_where_a_router_says_and_no_request_fails_with_a_server_that_does(tmp_path: Path) -> None:
    """One server is killed with prompts under way, and one is stopped. Clients that leave leave nothing behind."""
    first, second = addresses(tmp_path, 2)
    with ExitStack() as stack:
        killed, one = stack.enter_context(prefill(first))
        stopped, other = stack.enter_context(prefill(second))
        _, client = stack.enter_context(decode(first, second))
        right = {prompt: said(ask(one, prompt)) for prompt in PROMPTS}  # a prefill server answers clients as well
        served = [figure(each, "served_total") for each in (one, other)]
        for prompt in PROMPTS[3:]:
            assert said(ask(client, prompt, headers={"x-prefixloom-prefill": second})) == right[prompt]
        assert [figure(each, "served_total") for each in (one, other)] == [served[0], served[1] + 3]
        assert (figure(client, "handed_over_total"), figure(client, "computed_here_total")) == (3, 0)
        assert figure(client, "received_bytes_total") > 3 * 1000
        assert every_kind(client) == every_kind(one)
        assert client.get("/cache/stats").status_code == 403

        stopped.send_signal(signal.SIGSTOP)
        fresh = [f"{prompt} once more" for prompt in PROMPTS[:4]]
        expected = [said(ask(one, prompt)) for prompt in fresh]
        with ThreadPoolExecutor(4) as clients:
            asked = [
                clients.submit(ask, client, prompt, headers={"x-prefixloom-prefill": (first, second)[at % 2]})
                for at, prompt in enumerate(fresh)
            ]
            time.sleep(0.05)
            killed.kill()
            gone = time.monotonic()
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json={"prompt": "left " * 50, "max_tokens": 9}, timeout=0.5)
            stopped.kill()
            answers = [each.result() for each in asked]
            assert time.monotonic() < gone + 25, "nobody waited for the patience"
        assert [said(each) for each in answers] == expected
        assert said(ask(client, PROMPTS[4])) == right[PROMPTS[4]]
        assert {state(client, each) for each in (first, second)} == {"away"}
        insight = lambda: client.get("/insight").json()  # noqa: E731
        waited(lambda: not insight()["running"] and not insight()["waiting"], "a request is left")

        with prefill(first):
            waited(lambda: state(client, first) == "agreed", "it has come back")
            before = figure(client, "handed_over_total")
            assert said(ask(client, "another prompt " * 20))
            assert figure(client, "handed_over_total") == before + 1


def test_a_server_that_is_to_end_sends_what_it_owes_and_one_of_other_weights_is_not_used(tmp_path: Path) -> None:
    alike, other = addresses(tmp_path, 2)
    long = "a long prompt of many words and of ships at sea " * 40
    with (
        prefill(alike, "--chunk", "64") as (ending, one),
        prefill(other, "--seed", "1"),
        process(*LIKE, "--prefill", f"{alike},{other}") as (server, client),
    ):
        waited(lambda: client.get("/health").json()["prefill"] == {alike: "agreed", other: "other"}, "known")
        assert said(ask(client, PROMPTS[0], headers={"x-prefixloom-prefill": other})) == said(ask(one, PROMPTS[0]))
        before = figure(client, "handed_over_total")
        with ThreadPoolExecutor(1) as clients:
            asked = clients.submit(ask, client, long, max_tokens=2)
            waited(lambda: bool(one.get("/insight").json()["running"]), "it is computed")
            ending.send_signal(signal.SIGTERM)
            assert said(asked.result())
        assert ending.wait(40) in (0, -signal.SIGTERM)
        assert (figure(client, "handed_over_total"), figure(client, "lost_total")) == (before + 1, 0)
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        assert "computes something else: weights is" in server.stderr.read()
