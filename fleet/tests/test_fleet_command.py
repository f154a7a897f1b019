"""The command ``fleet simulate``: its table, its JSON, its page, what it refuses; and commands without a cluster."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

import pytest

from prefixloom.cli import main

PROFILE = """
page_size = 16
[[components]]
kind = "full"
options = {layers = [0], kv_heads = 1, k_dim = 4, v_dim = 4, dtype = "float32"}
[[components]]
kind = "mamba"
options = {conv = [4, 4], recurrent = [4, 4]}
"""
TRAFFIC = ["--traffic", "prompt=600,output=60,shared=0.3,users=10,turns=4,requests=40"]
SIZE = ["--capacity", "full=6000,mamba=40", "--max-running", "8"]


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    (tmp_path / "model.toml").write_text(PROFILE)
    return ["--model", str(tmp_path / "model.toml")]


def test_a_table_has_a_row_for_each_fleet_and_a_page_its_pictures_without_ray(
    model: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    page = tmp_path / "fleet.html"
    more = ["--replicas", "1,3", "--fail", "0@5+5", "--store", "1GiB", "--report", str(page)]
    assert main(["fleet", "simulate", *TRAFFIC, *SIZE, *model, *more]) == 0
    told = capsys.readouterr()
    rows = [line.split()[:2] for line in told.out.splitlines() if re.match(r"(round|least|prefix|resumable)", line)]
    assert rows == [[name, n] for n in "13" for name in ("round-robin", "least-loaded", "prefix", "resumable")]
    assert "The store read at most" in told.out
    assert told.err == ""
    text = page.read_text()
    assert text.count("<svg") == 3
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)", text)


def test_json_has_all_figures_and_scale_gives_each_replica_as_much_to_do(
    model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--replicas", "1,2", "--routing", "prefix", "--scale", "--late", "never", "--json"]
    assert main(["fleet", "simulate", *TRAFFIC, *SIZE, *model, *more]) == 0
    one, two = json.loads(capsys.readouterr().out)["fleets"]
    assert (one["requests"], two["requests"], two["trace"]) == (40, 80, "2 x synthetic traffic")
    assert two["ideal"] == 2 * one["ideal"]
    assert sum(each["computed"] for each in two["replicas"]) == two["computed"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--replicas", "0"], "replicas are a whole number from 1 up, got 0"),
        (["--replicas", "two"], "--replicas has a number where it has 'two'"),
        (["--routing", "best"], "routing policies are"),
        (["--late", "-1"], "after 0 seconds or more"),
        (["--fail", "2@1"], "replica 2 cannot fail: there are 2"),
        (["--fail", "soon"], "an outage is REPLICA@SECOND+SECONDS"),
        (["--in-turn"], "a fleet needs a service"),
        (["--store", "1GiB", "--latency", "-1"], "a store has a memory"),
        (["--copies", "0"], "copies of a trace"),
    ],
)
def test_what_is_wrong_is_told_and_ends_with_2(
    more: list[str], expected: str, model: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "simulate", *TRAFFIC, *SIZE, *model, "--replicas", "2", *more]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere"])
@pytest.mark.parametrize("command", ["deploy", "stop", "update"])
def test_where_no_cluster_answers_it_is_said_at_once(
    command: str, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray.serve", reason="Ray is not installed")
    file = tmp_path / "fleet.toml"
    file.write_text(f'[ray]\naddress = "{address}"')
    assert main(["fleet", command, str(file)]) == 2
    assert f"no Ray cluster answers at {address}: " in capsys.readouterr().err


def test_a_port_that_another_fleet_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ray's servers would share it, and requests would go to either fleet."""
    pytest.importorskip("ray.serve", reason="Ray is not installed")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        file = tmp_path / "fleet.toml"
        file.write_text(f"[front]\nport = {other.getsockname()[1]}")
        assert main(["fleet", "deploy", str(file)]) == 2
    assert "the fleet cannot take requests at 127.0.0.1:" in capsys.readouterr().err


def test_an_unknown_sub_command_and_an_unknown_option_show_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["fleet"], ["fleet", "fly"], ["fleet", "simulate", *TRAFFIC, *SIZE, "--model", "x", "--wings"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "usage: prefixloom fleet" in capsys.readouterr().err
