"""A second machine for tests: a network of its own on this one, joined by a cable, which needs root on Linux.

What listens on 127.0.0.1 of one machine does not hear the other. Files, memory and processors are shared.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from .fleets import READY_SECONDS, descendants, free_port

OWN, OTHER = "198.18.77.1", "198.18.77.2"
"""Addresses at both ends of the cable, of the range for trials of networks (RFC 2544)."""
AGAIN = "---- another machine\n"


@functools.cache
def can_make_machines() -> bool:
    if sys.platform != "linux" or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        return False
    cable = ["ip", "link", "add", "one", "type", "veth", "peer", "name", "two"]
    return subprocess.run(["unshare", "--net", *cable], capture_output=True).returncode == 0


@contextmanager
def second_machine() -> Iterator[list[str]]:
    """Yields what a command begins with that runs on the second machine. It ends with the block."""
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)  # it ends with this process
    there = ["nsenter", "--target", str(holder.pid), "--net"]
    cable = f"machine{holder.pid}"
    own = os.readlink("/proc/self/ns/net")
    try:
        while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
            time.sleep(0.01)
        for command in (
            ["ip", "link", "add", cable, "type", "veth", "peer", "name", "cable", "netns", str(holder.pid)],
            ["ip", "address", "add", f"{OWN}/30", "dev", cable],
            ["ip", "link", "set", cable, "up"],
            [*there, "ip", "address", "add", f"{OTHER}/30", "dev", "cable"],
            [*there, "ip", "link", "set", "cable", "up"],
            [*there, "ip", "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True)
        yield there
    finally:
        holder.kill()
        holder.communicate()
        subprocess.run(["ip", "link", "delete", cable], stderr=subprocess.DEVNULL)


@contextmanager
def ray_on_two_machines(folder: Path, cpus: int) -> Iterator[str]:
    """Run a Ray cluster with so many CPUs on this machine and as many on a second one. Yield its address.

    Meanwhile the environment has the token by which processes join it.
    """
    port = free_port()
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={cpus}"]
    quiet = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> None:
        variables = {**os.environ, **quiet}
        started.append(
            subprocess.Popen(command, stdout=log, stderr=log, text=True, env=variables, start_new_session=True)
        )
        while "Ray runtime started" not in (told := path.read_text()).rpartition(AGAIN)[2]:
            assert started[-1].poll() is None and time.monotonic() < until, told[-3000:]
            time.sleep(0.2)
        log.write(AGAIN)
        log.flush()

    path, until = folder / "ray.log", time.monotonic() + READY_SECONDS
    # of a short path, since sockets lie in it
    short = TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True)
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    secret = patch.dict(os.environ, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
    with second_machine() as there, path.open("a") as log, short as where, secret:
        try:
            head = [*ray, "--head", f"--node-ip-address={OWN}", f"--port={port}", "--include-dashboard=false"]
            start(*head, f"--temp-dir={where}")  # Ray writes there which cluster is the last one that began
            start(*there, *ray, f"--address={OWN}:{port}", f"--node-ip-address={OTHER}")
            yield f"{OWN}:{port}"
        finally:
            known = {pid for each in started for pid in descendants(each.pid)}
            for each in reversed(started):
                each.terminate()
                with suppress(subprocess.TimeoutExpired):
                    each.wait(20)
                each.kill()
                each.wait()
            for pid in known:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
