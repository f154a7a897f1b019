"""Fleets whose events come an hour late, or lie: answers stay right, none fails, and the router notices."""

from __future__ import annotations

import importlib.util
import itertools
import time
from pathlib import Path
from typing import Any

import pytest

import tests.support
from tests.support.fleets import SERVER, OneServer, RunningFleet, cached, running_fleet, said, text, told_by

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.xdist_group("fleet"),
]
TABLES: dict[str, Any] = {
    "fleet": {"replicas": 2},
    "server": {**SERVER, "traffic": "prompt=900,output=10,shared=0"},  # memory for some such prompts
}


@pytest.fixture(autouse=True)
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of fleets that start from now on may have faults in their events."""
    monkeypatch.setenv("PYTHONPATH", str(Path(tests.support.__file__).parent / "faulty_events"), prepend=":")


def doubts(fleet: RunningFleet) -> dict[str, str]:
    """By the name of a replica, what the router says of its events."""
    return {name: each["events"] for name, each in fleet.replicas().items()}


def test_without_events_for_an_hour_the_router_goes_by_what_it_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_EVENTS", "late")
    tables = {**TABLES, "server": {**TABLES["server"], "memory": "96MiB"}}  # for all of them at one replica
    with OneServer() as one_server, running_fleet(tmp_path, **tables) as fleet:
        both = fleet.wait(2)
        prompts = [text(f"late {number}", 900) for number in range(6)]
        firsts = [fleet.ask(prompt) for prompt in prompts]
        until = time.monotonic() + 60
        while doubts(fleet) != dict.fromkeys(both, "its events are late"):
            assert time.monotonic() < until, doubts(fleet)
            time.sleep(0.2)
        seconds = [
            fleet.ask(prompt + said(first) + " and so on") for prompt, first in zip(prompts, firsts, strict=True)
        ]
        assert [said(each) for each in firsts] == [one_server(prompt) for prompt in prompts]
        assert {told_by(each) for each in firsts} == both.keys(), "one replica alone would hit without a router"
        assert [told_by(each) for each in seconds] == [told_by(each) for each in firsts]
        assert min(map(cached, seconds)) >= 800, list(map(cached, seconds))


def test_a_replica_that_says_it_has_what_it_evicted_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of more tokens than the replicas hold, again and again: the liar promises all of them and has few."""
    liar = tmp_path / "liar"
    monkeypatch.setenv("FLEET_EVENTS", "lies")
    monkeypatch.setenv("FLEET_LIAR", str(liar))
    with OneServer() as one_server, running_fleet(tmp_path, **TABLES) as fleet:
        both = fleet.wait(2)
        prompts = [text(f"lies {number}", 900) for number in range(60)]
        answers = [(prompt, fleet.ask(prompt)) for prompt in prompts]
        until = time.monotonic() + 120
        for prompt in itertools.cycle(prompts):
            answers.append((prompt, fleet.ask(prompt)))
            told = doubts(fleet)
            if set(told.values()) != {"followed"}:
                break
            assert time.monotonic() < until, "nobody is doubted"
        named = {each["pid"]: name for name, each in both.items()}[int(liar.read_text())]
        assert told == {**dict.fromkeys(both, "followed"), named: "requests hit less than its events promised"}
        assert [said(answer) for _, answer in answers[::5]] == [one_server(prompt) for prompt, _ in answers[::5]]
        assert {answer.status_code for _, answer in answers} == {200}
