"""A part of the KL check (``kl.py`` runs it whole): mixed traffic in float32 says what a run without a cache says."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the extra hf is not installed")

import torch

from tests.random.kl_hf import Traffic
from tests.support.divergence import divergence
from tests.support.hf_models import MATRIX
from tests.support.sampling import sampled

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", sampled(MATRIX, 3))
def test_mixed_traffic_says_what_a_run_without_a_cache_says(name: str) -> None:
    told = Traffic(name).run(24)
    assert told.sound(), told
    assert told.agreed == told.tokens
    assert told.hit > told.asked // 3
    assert min(told.evicted, told.aborted) > 0


def test_the_divergence_is_zero_of_the_same_and_never_below() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    assert float(divergence(logits, logits).max()) == 0
    other = logits.clone()
    other[2, 3] += 1.0
    assert [bool(value > 1e-3) for value in divergence(other, logits)] == [False, False, True, False, False]
