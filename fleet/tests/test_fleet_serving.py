"""A fleet of two replicas on Ray Serve, asked over HTTP: the answers of one server, whatever becomes of a replica."""

from __future__ import annotations

import importlib.util
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleets import SERVER, OneServer, RunningFleet, cached, running_fleet, said, text, told_by

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.xdist_group("fleet"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), fleet={"replicas": 2, "waiting": 8}) as running:
        running.wait(2)
        yield running


@pytest.fixture(scope="module")
def one_server() -> Iterator[OneServer]:
    with OneServer() as server:
        yield server


def test_the_answers_are_those_of_one_server(fleet: RunningFleet, one_server: OneServer) -> None:
    prompts = [text(f"answer {number}", 60 + 37 * number) for number in range(6)]
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(fleet.ask, prompts))
    assert [said(each) for each in answers] == [one_server(prompt) for prompt in prompts]
    assert len({told_by(each) for each in answers}) == 2


def test_a_page_of_another_site_may_not_use_the_fleet(fleet: RunningFleet) -> None:
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
        for path in ("/health", "/fleet", "/metrics", "/v1/models"):
            assert fleet.http.get(path, headers=headers).status_code == 403, path


def test_a_second_turn_hits_and_goes_to_the_same_replica(fleet: RunningFleet) -> None:
    for number in range(3):
        prompt = text(f"second turn {number}", 900)
        first = fleet.ask(prompt)
        time.sleep(1)  # events travel
        second = fleet.ask(prompt + said(first) + " and so on, and on")
        assert told_by(second) == told_by(first)
        assert cached(second) >= 800


def test_a_stream_comes_in_pieces_and_ends(fleet: RunningFleet, one_server: OneServer) -> None:
    prompt = text("stream", 100)
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": True}
    with fleet.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(pieces) == one_server(prompt) and len(pieces) > 1


def test_what_a_replica_refuses_is_refused_in_its_words(fleet: RunningFleet) -> None:
    answer = fleet.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 0})
    assert answer.status_code == 400 and "max_tokens" in answer.json()["error"]["message"]
    answer = fleet.http.post("/v1/completions", content=b"{")
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"
    assert fleet.http.get("/nothing").status_code == 404
    assert fleet.http.get("/cache/stats").status_code == 403


def test_metrics_of_all_replicas_have_the_replica_as_a_label(fleet: RunningFleet) -> None:
    fleet.ask(text("metrics", 50))
    lines = fleet.http.get("/metrics").text.splitlines()
    asked = [line for line in lines if line.startswith("vllm:prompt_tokens_total")]
    assert [f'replica="{rank}"' in line for rank, line in enumerate(asked)] == [True, True]
    assert any(line.startswith('prefixloom:fleet_requests_total{outcome="ok"}') for line in lines)


def test_a_client_that_leaves_ends_its_answer(fleet: RunningFleet) -> None:
    body = {"prompt": text("leaves", 40), "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "stream": True}
    with fleet.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    until = time.monotonic() + 10
    while busy := [each for each in fleet.replicas().values() if each["insight"]["running"]]:
        assert time.monotonic() < until, f"{len(busy)} replicas still answer nobody"
        time.sleep(0.1)


def test_full_queues_are_told_with_429_and_when_to_ask_again(fleet: RunningFleet) -> None:
    """Two replicas take 8 each, 8 wait in front of them: of 60 at once some are told to come later."""
    body: dict[str, Any] = {"max_tokens": 40}
    with ThreadPoolExecutor(60) as clients:
        answers = list(clients.map(lambda number: fleet.ask(text(f"full {number}", 60), **body), range(60)))
    counts = {code: sum(each.status_code == code for each in answers) for code in (200, 429)}
    assert counts[200] >= 16 and counts[429] >= 1 and counts[200] + counts[429] == 60, counts
    refused = next(each for each in answers if each.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert said(fleet.ask(text("after full", 50)))


def test_a_replica_killed_in_the_midst_of_answers_costs_no_answer(fleet: RunningFleet, one_server: OneServer) -> None:
    before = fleet.wait(2)
    prompts = [text(f"kill {number}", 300) for number in range(8)]
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(fleet.ask, prompt, max_tokens=400) for prompt in prompts]
        time.sleep(0.5)  # no answer of 400 tokens is ready yet
        victim = max(fleet.replicas().values(), key=lambda each: each["insight"]["running"])
        fleet.kill(victim["name"])
        answers = [each.result() for each in asked]
    assert victim["insight"]["running"] > 0, "nothing ran there, so that nothing was tried"
    assert [said(each) for each in answers] == [one_server(prompt, 400) for prompt in prompts]
    assert {told_by(each) for each in answers} == before.keys() - {victim["name"]}
    joined = fleet.wait(2, besides={victim["name"]})
    assert len(joined) == 2


def test_a_stream_whose_replica_dies_ends_with_an_error_and_without_done(fleet: RunningFleet) -> None:
    fleet.wait(2)
    body = {"prompt": text("cut", 60), "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
    with fleet.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        name = answer.headers["x-prefixloom-replica"]
        fleet.kill(name)
        rest = [line for line in lines if line]
    assert json.loads(rest[-1][6:])["error"]["code"] == "replica_died"
    fleet.wait(2, besides={name})


def test_a_replica_that_hangs_is_replaced(fleet: RunningFleet) -> None:
    before = fleet.wait(2)
    name = next(iter(before))
    fleet.kill(name, signal.SIGSTOP)
    try:
        fleet.wait(2, besides={name}, seconds=150)
    finally:
        fleet.kill_process(before[name]["pid"])


def test_update_replaces_all_replicas_under_load_without_one_wrong_answer(fleet: RunningFleet) -> None:
    """The new weights have another fingerprint: each answer must be that of the weights that it names."""
    before = fleet.wait(2)
    old = {each["fingerprint"] for each in before.values()}
    changed = fleet.path.with_suffix(".new.toml")
    changed.write_text(fleet.path.read_text().replace("[server]", "[server]\nseed = 1"))
    answers: list[tuple[str, httpx.Response]] = []
    ending = threading.Event()

    def client(number: int) -> None:
        prompt = first = text(f"update {number}", 200)
        while not ending.wait(0.2):
            answer = fleet.ask(prompt)
            answers.append((prompt, answer))
            prompt += said(answer) + " more"
            prompt = prompt if len(prompt) < 1000 else first

    with ThreadPoolExecutor(3) as clients:
        running = [clients.submit(client, number) for number in range(3)]
        try:
            command = [sys.executable, "-m", "prefixloom", "fleet", "update", str(changed), "--address", fleet.ray]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr
            after = fleet.wait(2, besides=set(before))
            time.sleep(2)
        finally:
            ending.set()
        for each in running:
            each.result()
    new = {each["fingerprint"] for each in after.values()}
    with OneServer(0) as before_it, OneServer(1) as after_it:
        servers = {**dict.fromkeys(old, before_it), **dict.fromkeys(new, after_it)}
        for prompt, answer in answers:
            assert said(answer) == servers[answer.json()["system_fingerprint"]](prompt)
    assert len(servers) == 2
    assert {answer.json()["system_fingerprint"] for _, answer in answers} == servers.keys()


def test_status_tells_of_each_replica(fleet: RunningFleet, capsys: pytest.CaptureFixture[str]) -> None:
    from prefixloom.cli import main

    names = fleet.wait(2)
    assert main(["fleet", "status", "--server", fleet.root]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in names) and "events: followed" in out


def test_a_fleet_without_events_and_insight_answers_as_well(
    tmp_path: Path, one_server: OneServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does it join a cluster that Ray would find, here one that is not there any more."""
    from prefixloom.cli import main

    server = {**SERVER, "insight": False}
    tables: dict[str, Any] = {"fleet": {"replicas": 2}, "routing": {"events": False}, "server": server}
    with running_fleet(tmp_path, environment={"RAY_ADDRESS": "127.0.0.9:1"}, **tables) as fleet:
        prompt = text("no events", 900)
        first = fleet.ask(prompt)
        second = fleet.ask(prompt + said(first) + " and so on, and on")
        assert said(first) == one_server(prompt)
        assert told_by(second) == told_by(first) and cached(second) >= 800, "what was sent there counts"
        assert {each["events"] for each in fleet.replicas().values()} == {"it publishes no events"}
        assert main(["fleet", "status", "--server", fleet.root]) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in fleet.replicas()) and "tokens hit" not in out


def test_the_number_of_replicas_follows_the_load(tmp_path: Path, one_server: OneServer) -> None:
    tables: dict[str, Any] = {"fleet": {"replicas": [1, 2]}, "server": {**SERVER, "max-running": 2, "max-queue": 8}}
    with running_fleet(tmp_path, **tables) as fleet:
        (first,) = fleet.wait(1)
        ending = threading.Event()
        answers: list[tuple[str, httpx.Response]] = []

        def client(number: int) -> None:
            for turn in itertools.count():
                if ending.is_set():
                    return
                prompt = text(f"load {number} {turn}", 100)
                answers.append((prompt, fleet.ask(prompt, max_tokens=40)))

        with ThreadPoolExecutor(6) as clients:
            running = [clients.submit(client, number) for number in range(6)]
            try:
                both = fleet.wait(2, seconds=120)
                until = time.monotonic() + 60
                while len({told_by(answer) for _, answer in answers}) < 2:
                    assert time.monotonic() < until, "the second replica answers nobody"
                    time.sleep(0.2)
            finally:
                ending.set()
            for each in running:
                each.result()
        assert first in both
        for prompt, answer in answers[:: max(len(answers) // 20, 1)]:
            assert said(answer) == one_server(prompt, 40)
        until = time.monotonic() + 150
        while len(fleet.replicas()) > 1:
            assert time.monotonic() < until, "without load there are still two replicas"
            time.sleep(1)
        assert said(fleet.ask(text("after", 60))) == one_server(text("after", 60))


def test_all_fronts_know_what_replicas_have(tmp_path: Path, one_server: OneServer) -> None:
    """Each front hears the events of all replicas, so whichever one sends a second turn, it hits, even at its first."""
    tables: dict[str, Any] = {"fleet": {"replicas": 2}, "front": {"count": 4}}
    with running_fleet(tmp_path, **tables) as fleet:
        fleet.wait(2)
        for number in range(6):
            prompt = text(f"fronts {number}", 900)
            first = fleet.ask(prompt)
            time.sleep(1)
            second = fleet.ask(prompt + said(first) + " and so on, and on")
            assert said(first) == one_server(prompt)
            assert told_by(second) == told_by(first) and cached(second) >= 800
