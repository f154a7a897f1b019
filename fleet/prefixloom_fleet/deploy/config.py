"""The file of a fleet, ``fleet.toml``: read and checked before anything is started.

Names and values that are not known are refused with a sentence. The table ``[server]`` has the options of
``prefixloom serve`` by their names, checked by the server's own parser.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from prefixloom import InputError, PrefixloomError
from prefixloom_engine.server.access import read_toml
from prefixloom_engine.server.command import ServeSettings, add_arguments, settings_of

from ..routing import POLICIES

MOST_REPLICAS = 1024
DEFAULT_QUEUE = 16
"""Requests that may wait at one replica. More of them wait in front of all replicas, for the first that has room."""
NOT_HERE = {
    "host": "[front] has it",
    "port": "[front] has it",
    "events": "each replica publishes its events at a port of its own",
    "trace": "all replicas would write one file",
    "record": "all replicas would write one file",
    "prefill": "the table [prefill] starts the servers that compute prompts",
    "as-prefill": "the table [prefill] starts the servers that compute prompts",
}
"""Options of a server that a fleet cannot have, and why."""
ALIKE = ("model", "dtype", "seed", "page-size", "name", "keys", "prefill-keys", "prefill-mover")
"""Options in which prefill servers must not differ from the others, or these could not use what they compute."""
Role = Literal["whole", "prefill", "decode"]
"""What a replica does: all, or one of the two."""


@attrs.frozen
class FleetConfig:
    """A fleet.

    ``name``      of the application in Ray
    ``least``, ``most``  how many replicas there are; Ray scales between the two by load
    ``waiting``   requests that wait in front of full replicas; further ones get a 429
    ``surge``     while replicas are replaced, how many percent more of them there may be. 0: each ends before its
                  successor begins, so that no further device is needed
    ``host``, ``port``, ``fronts``  where requests come in, and how many processes take them
    ``policy``    of routing, by its name
    ``events``    whether the router follows the replicas' events
    ``session``   the header by which a client names its conversation
    ``address``   of a Ray cluster; "": one of our own on this machine
    ``cpus``, ``gpus``  of one replica, as Ray counts them
    ``options``   of each server, as on the command line of ``prefixloom serve``
    ``prefill``   how many replicas compute prompts for the others; 0: each computes its own
    ``prefill_options``  of their servers
    ``prefill_policy``   by which one of them is chosen
    """

    name: str = "prefixloom"
    least: int = 2
    most: int = 2
    waiting: int = 256
    surge: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    fronts: int = 1
    policy: str = "resumable"
    events: bool = True
    session: str = "x-session-id"
    address: str = ""
    cpus: float = 1.0
    gpus: float = 0.0
    options: tuple[str, ...] = ()
    prefill: int = 0
    prefill_options: tuple[str, ...] = ()
    prefill_policy: str = "resumable"

    def options_of(self, role: Role) -> list[str]:
        """Return the options of a server that does this, without those of ``listening``."""
        if role == "prefill":
            return [*self.prefill_options]
        return [*self.options, *(["--prefill="] if role == "decode" else [])]

    @property
    def role(self) -> Role:
        """What the replicas do that answer clients."""
        return "decode" if self.prefill else "whole"

    def settings_of(self, role: Role) -> ServeSettings:
        """Return the settings of a server that does this. ``InputError``: an option has a wrong value."""
        options = [*self.options_of(role), *listening(role, self.events)]
        return server_settings(options, "[prefill]" if role == "prefill" else "[server]")


def listening(role: Role, events: bool, host: str = "127.0.0.1") -> list[str]:
    """Return the options by which a server listens for the rest of the fleet, at free ports of its machine ``host``."""
    options = [f"--events=tcp://{host}:0"] if events else []
    return [*options, f"--as-prefill=tcp://{host}:0"] if role == "prefill" else options


def server_settings(options: list[str], table: str = "[server]") -> ServeSettings:
    """Return the settings that ``prefixloom serve`` makes of these options."""
    parser = OptionParser(prog=table, add_help=False, allow_abbrev=False)
    add_arguments(parser)
    try:
        return settings_of(parser.parse_args([f"--max-queue={DEFAULT_QUEUE}", *options]))
    except PrefixloomError as error:
        raise InputError(f"{table}: {str(error).removeprefix(f'{table}: ')}") from error


class OptionParser(argparse.ArgumentParser):
    """A parser whose mistakes are errors, and not the end of the process."""

    def error(self, message: str) -> Any:
        raise InputError(f"{self.prog}: {message}")


# ---------------------------------------------------------------- from the file

FIELDS: Mapping[str, Mapping[str, tuple[str, type | tuple[type, ...]]]] = {
    "fleet": {
        "name": ("name", str),
        "replicas": ("replicas", (int, list)),
        "waiting": ("waiting", int),
        "surge": ("surge", int),
    },
    "front": {"host": ("host", str), "port": ("port", int), "count": ("fronts", int)},
    "routing": {
        "policy": ("policy", str),
        "prefill": ("prefill_policy", str),
        "events": ("events", bool),
        "session": ("session", str),
    },
    "ray": {"address": ("address", str), "cpus": ("cpus", (int, float)), "gpus": ("gpus", (int, float))},
}
"""By table and name: the field of ``FleetConfig`` that it is, and its type."""
RANGES: Mapping[str, tuple[int, int]] = {
    "prefill": (1, MOST_REPLICAS),
    "waiting": (1, 1 << 20),
    "surge": (0, 100),
    "port": (1, 65535),
    "fronts": (1, 64),
    "cpus": (0, 1024),
    "gpus": (0, 64),
}
WORDS = {str: "a text", int: "a whole number", bool: "true or false", list: "a list"}


def read_fleet(path: Path) -> FleetConfig:
    """Read a file. ``InputError``: it cannot be read, or something in it is wrong."""
    where = f"the fleet's file {str(path)!r}"
    tables = read_toml(path, where)
    try:
        return fleet_of(tables, path.parent)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def fleet_of(tables: Mapping[str, Any], folder: Path = Path()) -> FleetConfig:
    """Return the fleet of these tables. Relative paths are seen from ``folder``."""
    found: dict[str, Any] = {}
    for table, values in tables.items():
        if table not in (*FIELDS, *SERVERS) or not isinstance(values, dict):
            names = ", ".join(f"[{each}]" for each in (*FIELDS, *SERVERS))
            raise InputError(f"there is no table [{table}]; there are {names}")
        if table in SERVERS:
            continue
        for name, value in values.items():
            if name not in FIELDS[table]:
                raise InputError(f"[{table}] has no {name!r}; it has {', '.join(FIELDS[table])}")
            field, kind = FIELDS[table][name]
            found[field] = checked(f"[{table}] {name}", field, value, kind)
    found["options"] = options_of(tables.get("server", {}), folder)
    if "prefill" in tables:
        found |= prefill_fields(tables["prefill"], tables.get("server", {}), folder)
    if "replicas" in found:
        found["least"], found["most"] = bounds_of(found.pop("replicas"))
    config = FleetConfig(**{"policy": "decode-room" if "prefill" in tables else "resumable", **found})
    for name, policy in (("policy", config.policy), ("prefill", config.prefill_policy)):
        if policy not in POLICIES:
            raise InputError(f"[routing] {name} {policy!r} is not known; there are {', '.join(sorted(POLICIES))}")
    if not config.name or not config.host or not config.session:
        raise InputError("[fleet] name, [front] host and [routing] session are not empty")
    config.settings_of(config.role)
    if config.prefill:
        config.settings_of("prefill")
    return config


SERVERS = ("server", "prefill")
"""The tables that have options of servers."""


def prefill_fields(values: Mapping[str, Any], server: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the table ``[prefill]``: how many servers compute prompts, and in what they differ from the others."""
    more = dict(values)
    count = checked("[prefill] replicas", "prefill", more.pop("replicas", 1), int)
    for name in more:
        if name.replace("_", "-") in ALIKE:
            raise InputError(f"[prefill] cannot have {name!r}: all servers have that of [server]")
    options_of(more, folder, "[prefill]")
    return {"prefill": count, "prefill_options": options_of({**server, **more}, folder)}


def checked(where: str, field: str, value: Any, kind: type | tuple[type, ...]) -> Any:
    """Return the value, if it has its type and lies in its range."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        words = " or ".join(WORDS.get(each, "a number") for each in kinds)
        raise InputError(f"{where} is {words}, got {value!r}")
    low, high = RANGES.get(field, (0, 0))
    number: Any = value
    if field in RANGES and not low <= number <= high:
        raise InputError(f"{where} is from {low} to {high}, got {value!r}")
    return value


def bounds_of(replicas: int | list[Any]) -> tuple[int, int]:
    both = [replicas, replicas] if isinstance(replicas, int) else replicas
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in both)
    if len(both) != 2 or not whole or not 1 <= both[0] <= both[1] <= MOST_REPLICAS:
        raise InputError(
            f"[fleet] replicas is a number from 1 to {MOST_REPLICAS}, or the least and the most such as [2, 8], got "
            f"{replicas!r}"
        )
    return both[0], both[1]


PATHS = ("model", "keys", "prefill-keys", "events-keys")


def options_of(values: Mapping[str, Any], folder: Path, table: str = "[server]") -> tuple[str, ...]:
    """Return a table of a server's options as those of the command line."""
    options: list[str] = []
    for name, value in values.items():
        if name.replace("_", "-") in NOT_HERE:
            raise InputError(f"{table} cannot have {name!r}: {NOT_HERE[name.replace('_', '-')]}")
        option = f"--{name.replace('_', '-')}"
        if value is True:
            options.append(option)
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            text = str(folder.resolve() / str(value)) if name.replace("_", "-") in PATHS else str(value)
            options.append(f"{option}={text}")
        elif value is not False:
            raise InputError(f"{table} {name} is a text, a number, true or false, got {value!r}")
    return tuple(options)
