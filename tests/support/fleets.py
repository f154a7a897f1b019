"""Fleets for tests: ``prefixloom fleet deploy`` in a process of its own, on free ports of loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import httpx
import torch

from prefixloom import compose
from prefixloom_engine import Engine, ThreeWay
from prefixloom_engine.server.insight import FRESH_SECONDS
from prefixloom_engine.threeway.text import ByteTokenizer, text_sizes

SERVER = {"memory": "32MiB", "max-running": 4, "max-queue": 4, "dtype": "float64", "threads": 1, "chunk": 128}
"""A small server. In float64 an answer does not depend on what else is in its step."""
READY_SECONDS = 240.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def toml_of(tables: Mapping[str, Mapping[str, Any]]) -> str:
    def told(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')

    return "\n".join(
        line
        for name, table in tables.items()
        for line in (f"[{name}]", *(f"{key} = {told(value)}" for key, value in table.items()))
    )


@attrs.define
class RunningFleet:
    """``root``: its address. ``path``: its file. ``process``: of ``prefixloom fleet deploy``."""

    root: str
    path: Path
    process: subprocess.Popen[str]
    ray: str = ""

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.root, timeout=120, trust_env=False)

    def ask(self, prompt: str, **more: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more}
        headers = {"x-session-id": body.pop("session")} if "session" in body else {}
        return self.http.post("/v1/completions", json=body, headers=headers)

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Return by name what the fleet tells of each replica."""
        return {each["name"]: each for each in self.http.get("/fleet").json()["replicas"]}

    def figures(self, name: str) -> dict[str, float]:
        """Return by replica a figure of ``/metrics`` that has no other labels, as it is now."""
        time.sleep(1.2 * FRESH_SECONDS)
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(f'{name}{{replica="')]
        return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in lines}

    def wait(
        self, count: int, besides: set[str] | frozenset[str] = frozenset(), seconds: float = 120
    ) -> dict[str, Any]:
        """Wait until so many replicas other than ``besides`` answer, whose events are followed."""
        until = time.monotonic() + seconds
        while True:
            found = {name: each for name, each in self.replicas().items() if name not in besides and each.get("pid")}
            if len(found) >= count and all(each["events"] == "followed" for each in found.values()):
                return found
            assert time.monotonic() < until, f"{len(found)} of {count} replicas answer"
            time.sleep(0.2)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.kill_process(self.replicas()[name]["pid"], number)

    def kill_process(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process of this fleet, if it still lives."""
        assert pid in descendants(self.process.pid) or not Path(f"/proc/{pid}").exists()
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def running_fleet(
    folder: Path, *, environment: Mapping[str, str] = {}, **tables: Mapping[str, Any]
) -> Iterator[RunningFleet]:
    """Run a fleet of this file in the block. In the end no process of it is left."""
    port = free_port()
    tables = {"server": SERVER, **tables, "front": {**tables.get("front", {}), "port": port}}
    path = folder / f"fleet-{port}.toml"
    path.write_text(toml_of(tables))
    log = (folder / f"fleet-{port}.log").open("w")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": "/tmp", **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", "prefixloom", "fleet", "deploy", str(path)],
        stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    known: set[int] = set()
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert "prefixloom serves a fleet" in said, f"{said}{Path(log.name).read_text()[-3000:]}"
        ray = process.stdout.readline().split()[-1]
        known = descendants(process.pid)
        fleet = RunningFleet(f"http://127.0.0.1:{port}", path, process, ray)
        with fleet.http:
            yield fleet
        known |= descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        code = process.wait(90)
        assert code == 0, f"{code}: {Path(log.name).read_text()[-3000:]}"
        until = time.monotonic() + 20
        while (left := {pid for pid in known if Path(f"/proc/{pid}").exists()}) and time.monotonic() < until:
            time.sleep(0.2)
        assert not left, f"processes are left: {[Path(f'/proc/{pid}/cmdline').read_text() for pid in left]}"
    finally:
        if process.poll() is None:
            known |= descendants(process.pid)
            process.kill()
            process.wait()
            for pid in known:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert process.stdout is not None
        process.stdout.close()
        log.close()


def descendants(pid: int) -> set[int]:
    """Return all processes that a process started, and those that these started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


# ---------------------------------------------------------------- what tests ask, and what comes


def text(name: str, length: int = 700) -> str:
    """Return a prompt of so many tokens that begins with ``name``."""
    return (f"{name} tells of the sea and of ships, " * (length // 8))[:length]


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def cached(answer: httpx.Response) -> int:
    """Return how many tokens of the prompt hit."""
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def told_by(answer: httpx.Response) -> str:
    """Return the replica that answered."""
    return answer.headers["x-prefixloom-replica"]


class OneServer:
    """What one engine answers at temperature 0, without a fleet. ``seed``: of the model's weights."""

    def __init__(self, seed: int = 0) -> None:
        torch.set_num_threads(1)  # a second one waits long where the machine is busy
        self._text = ByteTokenizer()
        model = ThreeWay(text_sizes(), dtype="float64", seed=seed)
        cache = compose(model.config, capacity={"full": 4096, "swa": 4096, "mamba": 64})
        self._engine = Engine(model, cache, overlap=False)

    def __call__(self, prompt: str, count: int = 6) -> str:
        (answer,) = self._engine.generate([self._text.encode(prompt)], max_tokens=count)
        return self._text.decode(answer.tokens)

    def __enter__(self) -> OneServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close()
