"""The file of a fleet: what is in it, and what is refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefixloom import InputError
from prefixloom.cli import main
from prefixloom_fleet.deploy.config import FleetConfig, fleet_of, read_fleet


def test_an_empty_file_is_a_fleet_of_two_replicas_of_the_built_in_model(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text("")
    config = read_fleet(path)
    assert config == FleetConfig()
    assert (config.least, config.most, config.policy) == (2, 2, "resumable")
    assert config.settings_of("whole").args.events == "tcp://127.0.0.1:0"
    assert config.settings_of("whole").numbers["max_queue"] == 16


def test_every_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(
        """
[fleet]
name = "chat"
replicas = [2, 8]
waiting = 10
surge = 50
[front]
host = "0.0.0.0"
port = 9000
count = 2
[routing]
policy = "prefix"
prefill = "least-loaded"
events = false
session = "x-conversation"
[ray]
cpus = 2
gpus = 0.5
[server]
model = "weights"
memory = "4GiB"
host-memory = "8GiB"
store = "redis://127.0.0.1:6379/0"
max_queue = 3
insight = false
[prefill]
replicas = 3
memory = "1GiB"
max-running = 2
"""
    )
    config = read_fleet(path)
    assert (config.name, config.least, config.most, config.waiting, config.surge) == ("chat", 2, 8, 10, 50)
    assert (config.host, config.port, config.fronts, config.policy) == ("0.0.0.0", 9000, 2, "prefix")
    assert (config.events, config.session, config.cpus, config.gpus) == (False, "x-conversation", 2, 0.5)
    assert (config.role, config.prefill, config.prefill_policy) == ("decode", 3, "least-loaded")
    settings = config.settings_of("decode")
    assert settings.args.model == str(tmp_path.resolve() / "weights") and settings.args.events is None
    assert settings.numbers["max_queue"] == 3 and settings.numbers["memory"] == 4 << 30
    assert settings.prefill == [], "the addresses come later"
    other = config.settings_of("prefill")
    assert other.args.model == settings.args.model and other.args.store == "redis://127.0.0.1:6379/0"
    assert (other.numbers["memory"], other.numbers["max_running"], other.numbers["max_queue"]) == (1 << 30, 2, 3)


def test_with_prefill_replicas_the_others_are_chosen_by_room_unless_the_file_says_how() -> None:
    assert (fleet_of({"prefill": {}}).policy, fleet_of({"prefill": {}}).prefill) == ("decode-room", 1)
    assert fleet_of({"prefill": {"replicas": 2}, "routing": {"policy": "resumable"}}).policy == "resumable"
    assert (fleet_of({}).policy, fleet_of({}).role) == ("resumable", "whole")


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        (
            {"fleets": {}},
            "there is no table [fleets]; there are [fleet], [front], [routing], [ray], [server], [prefill]",
        ),
        ({"fleet": 3}, "there is no table [fleet]"),
        ({"fleet": {"replica": 2}}, "[fleet] has no 'replica'; it has name, replicas"),
        ({"fleet": {"replicas": 0}}, "[fleet] replicas is a number from 1 to 1024"),
        ({"fleet": {"replicas": [4, 2]}}, "[fleet] replicas is a number from 1 to 1024, or the least and the most"),
        ({"fleet": {"replicas": [1, 2, 3]}}, "[fleet] replicas is a number"),
        ({"fleet": {"replicas": True}}, "[fleet] replicas is a whole number or a list, got True"),
        ({"fleet": {"waiting": "many"}}, "[fleet] waiting is a whole number, got 'many'"),
        ({"fleet": {"name": ""}}, "[fleet] name, [front] host and [routing] session are not empty"),
        ({"front": {"port": 70000}}, "[front] port is from 1 to 65535, got 70000"),
        ({"routing": {"policy": "best"}}, "[routing] policy 'best' is not known; there are"),
        ({"routing": {"events": 1}}, "[routing] events is true or false, got 1"),
        ({"ray": {"gpus": -1}}, "[ray] gpus is from 0 to 64, got -1"),
        ({"server": {"memory": "much"}}, "--memory"),
        ({"server": {"memories": "1GiB"}}, "[server]: unrecognized arguments: --memories=1GiB"),
        ({"server": {"port": 8000}}, "[server] cannot have 'port': [front] has it"),
        ({"server": {"events": "tcp://127.0.0.1:1"}}, "[server] cannot have 'events'"),
        ({"server": {"max-running": 0}}, "--max-running must be from 1 to 4096, got 0"),
        ({"server": {"store": "redis://127.0.0.1:6379/0"}}, "--store stands behind the host's memory"),
        ({"server": {"as_prefill": "tcp://127.0.0.1:1"}}, "[server] cannot have 'as_prefill': the table [prefill]"),
        ({"server": {"prefill-keys": "keys"}}, "--prefill-keys and --prefill-mover go with --prefill or --as-prefill"),
        ({"server": {"prefill-keys": "none"}, "prefill": {}}, "none has no keys for the client of a connection"),
        ({"server": {"keys": "keys", "events-in-clear": True}, "prefill": {}}, "give --prefill-keys FILE"),
        ({"server": {"keys": "keys"}}, "with --keys, events would tell every program"),
        ({"server": {"events-keys": "none"}}, "none has no keys for the server of a connection"),
        ({"prefill": 2}, "there is no table [prefill]"),
        ({"prefill": {"replicas": 0}}, "[prefill] replicas is from 1 to 1024, got 0"),
        ({"prefill": {"replicas": [1, 2]}}, "[prefill] replicas is a whole number, got [1, 2]"),
        ({"prefill": {"seed": 1}}, "[prefill] cannot have 'seed': all servers have that of [server]"),
        ({"prefill": {"page_size": 32}}, "[prefill] cannot have 'page_size'"),
        ({"prefill": {"memory": "much"}}, "--memory"),
        ({"prefill": {"memories": 1}}, "[prefill]: unrecognized arguments: --memories=1"),
        ({"routing": {"prefill": "best"}}, "[routing] prefill 'best' is not known; there are"),
        ({"server": {"model": ["a"]}}, "[server] model is a text, a number, true or false, got ['a']"),
    ],
)
def test_what_is_wrong_is_refused_with_a_sentence(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        fleet_of(tables)
    assert sentence in str(refused.value)


def test_the_command_says_what_is_wrong_with_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.toml"
    assert main(["fleet", "deploy", str(path)]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    path.write_text("[fleet")
    assert main(["fleet", "deploy", str(path)]) == 2
    assert "is no TOML" in capsys.readouterr().err
    path.write_text("[fleet]\nreplicas = 0")
    assert main(["fleet", "deploy", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("prefixloom: the fleet's file") and "replicas is a number" in error
