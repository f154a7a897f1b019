"""A real fleet and its simulation serve the same requests: they compute nearly the same tokens."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest

from bench.serving.fleet_policies import CHUNK, RUNNING, real_outcome, shrunk, simulated_outcome, write_tokens
from prefixloom import Traffic

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
BLOCK, REQUESTS, USERS = 16, 150, 24


def conversations(path: Path) -> None:
    """A trace of blocks: users who go on with what they asked before, and begin anew now and then."""
    chance, ids = random.Random(28), iter(range(1, 1 << 20))
    told: dict[int, list[int]] = {}
    with path.open("w") as lines:
        for number in range(REQUESTS):
            user = chance.randrange(USERS)
            history = told.get(user, [0]) if chance.random() < 0.8 else [0]
            told[user] = history = [*history, *(next(ids) for _ in range(chance.randrange(4, 20)))]
            line = {"timestamp": 300 * number, "input_length": BLOCK * len(history), "output_length": 4}
            lines.write(json.dumps({**line, "hash_ids": history}) + "\n")


@pytest.mark.parametrize("policy", ["round-robin", "resumable"])
def test_a_simulated_fleet_computes_what_a_real_one_does(policy: str, tmp_path: Path) -> None:
    conversations(tmp_path / "blocks.jsonl")
    asked = shrunk(tmp_path / "blocks.jsonl", REQUESTS, BLOCK, 1.0)
    write_tokens(tmp_path / "tokens.jsonl", asked, 4)
    traffic = Traffic(RUNNING, 600, 4, 0.0, CHUNK)
    real = real_outcome(asked, policy, 2, "24MiB", traffic)
    paper = simulated_outcome(tmp_path / "tokens.jsonl", policy, 2, "24MiB", traffic, real.service)
    assert not real.failed
    assert paper.ideal < 0.9 * real.computed < 0.81 * paper.prompt, "both evictions and hits must count"
    assert paper.computed == pytest.approx(real.computed, rel=0.05)
