"""A fleet in which some replicas compute prompts and others decode, whatever becomes of one of either."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.fleets import OneServer, RunningFleet, running_fleet, said, text

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.xdist_group("fleet"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    tables: dict[str, Any] = {"fleet": {"replicas": 2}, "prefill": {"replicas": 2, "memory": "48MiB"}}
    with running_fleet(tmp_path_factory.mktemp("fleet"), **tables) as running:
        connected(running)
        yield running


@pytest.fixture(scope="module")
def one_server() -> Iterator[OneServer]:
    with OneServer() as server:
        yield server


def of_role(fleet: RunningFleet, role: str) -> dict[str, dict[str, Any]]:
    return {name: each for name, each in fleet.replicas().items() if each.get("role") == role}


def total(fleet: RunningFleet, name: str) -> float:
    return sum(fleet.figures(f"prefixloom:prefill_{name}_total").values())


def connected(fleet: RunningFleet, besides: frozenset[str] = frozenset(), seconds: float = 120) -> None:
    """Wait until two replicas of either kind answer, and both that decode have agreed with both others."""
    until = time.monotonic() + seconds
    fleet.wait(4, besides=besides, seconds=seconds)
    while (agreed := peers(fleet)) != [2, 2]:
        assert time.monotonic() < until, agreed
        time.sleep(0.2)


def peers(fleet: RunningFleet) -> list[int]:
    """Of each replica that decodes, with how many others it has agreed."""
    lines = fleet.http.get("/metrics").text.splitlines()
    return [
        int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith("prefixloom:prefill_peers{") and 'state="agreed"' in line
    ]


def test_nothing_counts_at_a_replica_once_all_is_answered(fleet: RunningFleet) -> None:
    """Nor does what the fleet asks of its own accord, to learn who is there."""
    assert fleet.ask(text("counted", 300)).status_code == 200
    until = time.monotonic() + 10
    while counted := {name: each["under_way"] for name, each in fleet.replicas().items() if each["under_way"]}:
        assert time.monotonic() < until, counted
        time.sleep(0.2)


def test_prompts_are_computed_by_prefill_replicas_and_the_answers_are_those_of_one_server(
    fleet: RunningFleet, one_server: OneServer
) -> None:
    assert len(of_role(fleet, "prefill")) == len(of_role(fleet, "decode")) == 2
    prompts = [text(f"apart {number}", 200 + 37 * number) for number in range(8)]
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(fleet.ask, prompts))
    assert [said(each) for each in answers] == [one_server(prompt) for prompt in prompts]
    assert {each.headers["x-prefixloom-replica"] for each in answers} <= of_role(fleet, "decode").keys()
    assert total(fleet, "handed_over") >= 8
    assert total(fleet, "computed_here") == total(fleet, "lost") == 0
    served = fleet.figures("prefixloom:prefill_served_total")
    assert served.keys() == {"prefill-0", "prefill-1"} and min(served.values()) > 0


def test_a_prompt_goes_to_the_prefill_replica_that_can_resume_it(fleet: RunningFleet) -> None:
    """Turn by turn on any replica that decodes, the beginning is computed once."""
    name = "prefixloom:hit_tokens_total"
    for number in range(3):
        prompt = text(f"resumes {number}", 900)
        fleet.ask(prompt)
        time.sleep(1)  # events travel
        before = fleet.figures(name)
        for decode in range(2):
            said(fleet.ask(f"{prompt} and more {decode}" + text("of its own", 80)))
        after = fleet.figures(name)
        hits = {rank: after[rank] - before[rank] for rank in after if rank.startswith("prefill-")}
        assert max(hits.values()) >= 2 * 880, hits


def test_health_tells_of_both_kinds(fleet: RunningFleet) -> None:
    told = fleet.http.get("/health").json()
    assert told["status"] == "ok"
    assert set(told["replicas"]) == of_role(fleet, "decode").keys()
    assert set(told["prefill"]) == of_role(fleet, "prefill").keys()


def test_a_prefill_replica_killed_with_prompts_under_way_fails_no_request(
    fleet: RunningFleet, one_server: OneServer
) -> None:
    connected(fleet)
    prompts = [text(f"killed {number}", 1500 + 8 * number) for number in range(8)]
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(fleet.ask, prompt) for prompt in prompts]
        until = time.monotonic() + 30
        while not (busy := [each for each in of_role(fleet, "prefill").values() if each["insight"]["running"]]):
            assert time.monotonic() < until, "no prompt was under way"
        fleet.kill(busy[0]["name"])
        answers = [each.result() for each in asked]
    assert [said(each) for each in answers] == [one_server(prompt) for prompt in prompts]
    assert total(fleet, "lost") > 0
    connected(fleet, besides=frozenset({busy[0]["name"]}))
    before = total(fleet, "handed_over")
    assert said(fleet.ask(text("after the kill", 400))) == one_server(text("after the kill", 400))
    assert total(fleet, "handed_over") == before + 1


def test_a_decoding_replica_killed_in_the_midst_of_answers_costs_no_answer(
    fleet: RunningFleet, one_server: OneServer
) -> None:
    connected(fleet)
    prompts = [text(f"decoding {number}", 300) for number in range(8)]
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(fleet.ask, prompt, max_tokens=60) for prompt in prompts]
        time.sleep(0.8)
        victim = max(of_role(fleet, "decode").values(), key=lambda each: each["insight"]["running"])
        fleet.kill(victim["name"])
        answers = [each.result() for each in asked]
    assert victim["insight"]["running"] > 0, "nothing ran there, so that nothing was tried"
    assert [said(each) for each in answers] == [one_server(prompt, 60) for prompt in prompts]
    connected(fleet, besides=frozenset({victim["name"]}))


def test_without_any_prefill_replica_prompts_are_computed_where_they_are_answered(
    fleet: RunningFleet, one_server: OneServer
) -> None:
    """Both are stopped, so that nobody takes their place for a while."""
    connected(fleet)
    gone = of_role(fleet, "prefill")
    pids = [each["pid"] for each in gone.values()]
    for pid in pids:
        fleet.kill_process(pid)
    prompts = [text(f"alone {number}", 300) for number in range(4)]
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(fleet.ask, prompts))
    assert [said(each) for each in answers] == [one_server(prompt) for prompt in prompts]
    connected(fleet, besides=frozenset(gone))


def test_a_prefill_replica_that_hangs_delays_its_prompts_and_fails_none(
    fleet: RunningFleet, one_server: OneServer
) -> None:
    connected(fleet)
    name, victim = next(iter(of_role(fleet, "prefill").items()))
    fleet.kill_process(victim["pid"], signal.SIGSTOP)
    try:
        prompts = [text(f"hangs {number}", 300) for number in range(4)]
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(fleet.ask, prompts))
        assert [said(each) for each in answers] == [one_server(prompt) for prompt in prompts]
    finally:
        fleet.kill_process(victim["pid"])
    connected(fleet, besides=frozenset({name}))


def test_update_replaces_both_kinds_and_prompts_are_handed_over_again(fleet: RunningFleet) -> None:
    """Meanwhile the two kinds have different weights: prompts are computed where they are answered."""
    connected(fleet)
    before = fleet.replicas()
    changed = fleet.path.with_suffix(".new.toml")
    changed.write_text(fleet.path.read_text().replace("[server]", "[server]\nseed = 1"))
    command = [sys.executable, "-m", "prefixloom", "fleet", "update", str(changed), "--address", fleet.ray]
    with OneServer(seed=1) as new, OneServer() as old, subprocess.Popen(command, stdout=subprocess.DEVNULL) as updating:
        right = {each["fingerprint"]: old for each in before.values()}
        answers = []
        while updating.poll() is None:
            prompt = text(f"update {len(answers)}", 300)
            answers.append((prompt, fleet.ask(prompt)))
        assert updating.returncode == 0
        for prompt, answer in answers:
            server = right.get(answer.json()["system_fingerprint"], new)
            assert said(answer) == server(prompt)
        connected(fleet, besides=frozenset(before))
        assert before.keys() & fleet.replicas().keys() == set()
        handed = total(fleet, "handed_over")
        assert said(fleet.ask(text("after the update", 400))) == new(text("after the update", 400))
        assert total(fleet, "handed_over") == handed + 1
