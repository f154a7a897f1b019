"""Beside a worker that computes with several threads, the scheduling thread keeps none of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TASKS = Path("/proc/self/task")

SCRIPT = """
import os, sys, torch
torch.set_num_threads(3)
from tests.support.engines import cache_for, model, prompt
from prefixloom_engine import Engine, Request

def threads():
    return len(os.listdir("/proc/self/task"))

before = threads()
made, cache = model(), cache_for(model())
big = torch.zeros(1 << 22).add_(1)  # an op in parallel: this thread has a team now
print(threads() - before)
with Engine(made, cache, overlap=sys.argv[1] == "ahead") as engine:
    idle = threads()
    engine.add(Request(prompt(1, 4), 1))
    engine.step()
    engine.drain()
    print(threads() - idle)
    big.add_(1)
    print(threads() - idle)
"""


@pytest.mark.skipif(not TASKS.is_dir(), reason="counts threads where Linux lists them")
@pytest.mark.parametrize(("mode", "told"), [("ahead", [2, 2 - 2, 2]), ("not ahead", [2, 0, 0])])
def test_the_team_of_the_scheduling_thread_is_let_go_while_a_worker_computes(mode: str, told: list[int]) -> None:
    """The worker's comes, this one's goes, until it is asked for again. Were both there, more than there are cores,
    the worker's would sleep and wake for every op."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("OMP_NUM_THREADS", None)
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert [int(line) for line in ended.stdout.split()] == told
