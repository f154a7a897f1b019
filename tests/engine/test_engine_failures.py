"""Forward passes that fail, and a scheduling thread that never looks at a tensor."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from prefixloom.cache.sequence import Sequence
from prefixloom_engine import Engine
from prefixloom_engine.forward.stream import LaunchedStep
from prefixloom_engine.threeway import BoundThreeWay
from tests.operations.test_no_reads import no_reading
from tests.support.engines import CAPACITY, cache_for, mixed, model, nothing_left, plain, prompt

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


class Broken(RuntimeError):
    """A kernel that fails."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the forward passes of these numbers fail half-way, after they have written what they write."""

    def install(*numbers: int) -> None:
        honest, count = BoundThreeWay.forward, iter(range(1 << 30))

        def forward(self: BoundThreeWay, batch: Any) -> torch.Tensor:
            logits = honest(self, batch)
            if next(count) in numbers:
                raise Broken("half-way")
            return logits

        monkeypatch.setattr(BoundThreeWay, "forward", forward)

    return install


@pytest.mark.parametrize(
    ("numbers", "overlap"), [((0,), True), ((2,), False), ((5, 6), True), ((9, 30, 31), False), ((9, 30, 31), True)]
)
def test_a_step_that_fails_costs_a_recompute_and_nothing_else(
    failing: Any, caplog: pytest.LogCaptureFixture, numbers: tuple[int, ...], overlap: bool
) -> None:
    requests = mixed(6)
    expected = plain(model(), requests)
    cache = cache_for(model(), CAPACITY)
    failing(*numbers)
    with caplog.at_level(logging.WARNING), Engine(model(), cache, chunk=128, overlap=overlap, speculate=2) as engine:
        answers = engine.generate(requests)
    assert [answer.tokens for answer in answers] == expected
    assert engine.counts.failed > 0
    assert "failed: Broken('half-way')" in caplog.text
    nothing_left(cache)


class Late:
    """A restore that brings nothing, and takes a few steps for it."""

    asked = 0

    @property
    def over(self) -> bool:
        self.asked += 1
        return self.asked > 4


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])
def test_what_is_computed_again_alone_waits_for_its_restore(
    failing: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    requests = mixed(6)
    expected = plain(model(), requests)
    cache = cache_for(model(), CAPACITY)
    failing(5)
    monkeypatch.setattr(Sequence, "restore", lambda sequence: Late())
    with Engine(model(), cache, chunk=128, overlap=overlap) as engine:
        answers = engine.generate(requests)
    assert [answer.tokens for answer in answers] == expected
    assert engine.counts.failed > 0
    nothing_left(cache)


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])
def test_a_model_that_always_fails_is_told_to_the_client_and_nothing_is_left(failing: Any, overlap: bool) -> None:
    cache = cache_for(model())
    failing(*range(1000))
    with Engine(model(), cache, overlap=overlap) as engine:
        answers = engine.generate(mixed(2))
        assert [answer.reason for answer in answers] == ["error"] * 2
        assert all(isinstance(answer.error, Broken) for answer in answers)
        with pytest.raises(Broken):
            next(engine.stream(prompt(1, 20)))
        engine.drain()
        nothing_left(cache)
    nothing_left(cache)


def test_the_scheduling_thread_reads_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """But what a step that is over has brought to the host: that is read in one place."""
    cache = cache_for(model(), CAPACITY, debug=False)
    requests = mixed(6, speculate=2)
    expected = plain(model(), requests)
    honest = LaunchedStep.wait
    with Engine(model(), cache, chunk=128) as engine, no_reading(monkeypatch) as names:

        def wait(self: LaunchedStep) -> None:
            with monkeypatch.context() as patch:
                for name, method in real.items():
                    patch.setattr(torch.Tensor, name, method)
                honest(self)

        monkeypatch.setattr(LaunchedStep, "wait", wait)
        answers = engine.generate(requests)
    assert [answer.tokens for answer in answers] == expected
    assert names, "nothing was seen"
    assert {name for name in names if not name.startswith(LOOKS)} == set()


LOOKS = ("aten.empty", "aten.slice", "aten.select", "aten.zeros", "aten.alias", "aten.detach", "aten.lift_fresh",
         "aten.unsqueeze", "aten.view", "aten.cat")  # fmt: skip
"""``cat`` gathers the samples of the weights, once a request, before it is planned."""
real = {name: getattr(torch.Tensor, name) for name in ("tolist", "item", "__int__", "__index__")}
