"""A fleet with a shared store: a replica that joins finds there what a dead one computed, and a drain loses nothing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleets import SERVER, OneServer, cached, running_fleet, said
from tests.support.store_servers import redis_server

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.outside("redis-server"),
]
LONG = "The tide comes in twice a day, and takes with it what nobody has tied. " * 6


def test_the_store_warms_a_replica_that_joins_and_may_go(tmp_path: Path) -> None:
    server = redis_server("--maxmemory", "256mb")
    store = {"host-memory": "32MiB", "store": f"redis://127.0.0.1:{server.port}/0"}
    tables: dict[str, Any] = {"fleet": {"replicas": 1}, "server": {**SERVER, **store}}
    try:
        with OneServer() as alone, running_fleet(tmp_path, **tables) as fleet:
            (first,) = fleet.wait(1)
            right = alone(LONG)
            assert said(fleet.ask(LONG)) == right
            time.sleep(2)  # until the store has it
            fleet.kill(first)
            fleet.wait(1, besides={first})
            warm = fleet.ask(LONG)
            assert said(warm) == right
            assert cached(warm) >= 256, "the new replica has found it in the store"

            server.kill()
            for number in range(3):
                prompt = f"{number} without a store. {LONG}"
                assert said(fleet.ask(prompt)) == alone(prompt)

            answers: list[httpx.Response] = []
            asking = threading.Thread(target=lambda: answers.append(fleet.ask("a long answer", max_tokens=150)))
            asking.start()
            time.sleep(0.7)
            command = [sys.executable, "-m", "prefixloom", "fleet", "stop", str(fleet.path)]
            elsewhere = {**os.environ, "RAY_ADDRESS": "127.0.0.9:1"}  # of a cluster that others have
            stopped = subprocess.run(command, capture_output=True, text=True, timeout=120, env=elsewhere)
            assert stopped.returncode == 0, stopped.stderr
            assert fleet.process.wait(60) == 0
            asking.join()
            assert said(answers[0]) == alone("a long answer", 150), "what ran when the fleet was stopped is answered"
    finally:
        server.kill()
