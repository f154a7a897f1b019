"""A part of the KL check of ``ThreeWay``; the whole is ``python -m tests.random.kl --requests 200``."""

from __future__ import annotations

import pytest
import torch

from tests.random.kl import Traffic
from tests.support.divergence import divergence

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


def test_what_is_said_with_the_cache_is_what_is_said_without() -> None:
    told = Traffic("threeway", seed=2).run(24)
    assert told.sound(), told
    assert min(told.hit, told.restored, told.evicted) > 0, told
    assert told.agreed == told.tokens


def test_the_divergence_is_zero_of_the_same_and_never_below() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    assert float(divergence(logits, logits).max()) == 0
    other = logits.clone()
    other[2, 3] += 1.0
    assert [bool(value > 1e-3) for value in divergence(other, logits)] == [False, False, True, False, False]
