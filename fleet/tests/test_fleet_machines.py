"""A fleet on two machines, of which the second one is a network of its own on this one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prefixloom.connections import write_keys
from tests.support.fleets import SERVER, OneServer, RunningFleet, cached, free_port, said, text, told_by, toml_of
from tests.support.machines import can_make_machines, ray_on_two_machines

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.outside("ip", "unshare", "nsenter"),
    pytest.mark.skipif(not can_make_machines(), reason="to make a network, one has to be root on Linux"),
    pytest.mark.xdist_group("fleet"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. Each machine has room for one replica of one CPU."""
    with ray_on_two_machines(tmp_path_factory.mktemp("cluster"), cpus=1) as address:
        yield address


FLEET = [sys.executable, "-m", "prefixloom", "fleet"]


@contextmanager
def fleet_on(cluster: str, folder: Path, **tables: Any) -> Iterator[RunningFleet]:
    """A fleet in this cluster, by the commands of an operator."""
    port, path = free_port(), folder / "fleet.toml"
    tables = {"server": SERVER, **tables, "front": {"port": port}, "ray": {"address": cluster}}
    path.write_text(toml_of(tables))
    deploy = subprocess.Popen([*FLEET, "deploy", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said, errors = deploy.communicate(timeout=240)
        assert deploy.returncode == 0, said + errors
        fleet = RunningFleet(f"http://127.0.0.1:{port}", path, deploy)
        with fleet.http:
            yield fleet
    finally:
        deploy.kill()
        subprocess.run([*FLEET, "stop", str(path)], check=True, capture_output=True, timeout=120)


def refused(cluster: str, folder: Path, port: int) -> str:
    """What is said of a second fleet in this cluster."""
    path = folder / "other.toml"
    path.write_text(toml_of({"fleet": {"name": "other"}, "front": {"port": port}, "ray": {"address": cluster}}))
    done = subprocess.run([*FLEET, "deploy", str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    return done.stderr


def test_events_come_from_both_machines(cluster: str, tmp_path: Path) -> None:
    """A second turn goes to where the first one was computed, on whichever machine that is."""
    write_keys(tmp_path / "keys")
    server = {**SERVER, "events-keys": str(tmp_path / "keys")}
    with fleet_on(cluster, tmp_path, fleet={"replicas": 2}, server=server) as fleet, OneServer() as one_server:
        fleet.wait(2)
        homes = set()
        for number in range(8):
            prompt = text(f"machines {number}", 900)
            first = fleet.ask(prompt)
            second = fleet.ask(prompt + said(first) + " and so on, and on")
            assert said(first) == one_server(prompt)
            assert told_by(second) == told_by(first) and cached(second) >= 800
            homes.add(told_by(first))
        assert len(homes) == 2
        port = int(fleet.root.rpartition(":")[2])
        assert f"takes requests at {fleet.root[7:]}: say so in [front]" in refused(cluster, tmp_path, free_port())
        assert "the application 'prefixloom' takes the requests in this cluster" in refused(cluster, tmp_path, port)
        assert said(fleet.ask(text("still there"))) == one_server(text("still there"))


def test_a_prompt_is_computed_on_one_machine_and_answered_on_the_other(cluster: str, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys")
    server = {**SERVER, "prefill-keys": str(tmp_path / "keys"), "events-in-clear": True}
    tables: dict[str, Any] = {"fleet": {"replicas": 1}, "prefill": {"replicas": 1}, "server": server}
    with fleet_on(cluster, tmp_path, **tables) as fleet, OneServer() as one_server:
        fleet.wait(2)
        prompts = [text(f"machines apart {number}", 500) for number in range(4)]
        assert [said(fleet.ask(prompt)) for prompt in prompts] == [one_server(prompt) for prompt in prompts]
        assert fleet.figures("prefixloom:prefill_handed_over_total") == {"0": 4.0}
