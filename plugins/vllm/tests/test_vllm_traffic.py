"""Random traffic through both sides of the connector, with an oracle of bytes (tests.random.vllm_traffic)."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from tests.random.vllm_traffic import SETUPS, run


@pytest.mark.parametrize("name", SETUPS)
def test_loads_bring_what_was_computed_and_no_slot_is_lost(name: str, tmp_path: Path) -> None:
    assert run(name, "short", 400, tmp_path)["loaded tokens"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("name", SETUPS)
def test_copies_on_a_gpu_wait_for_what_they_copy(name: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # memory of a disk's file cannot be page-locked
        assert run(name, "cuda", 400, Path(folder), "cuda")["loaded tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_long_traffic(name: str, tmp_path: Path) -> None:
    for seed in range(20):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        run(name, seed, 800, folder)
