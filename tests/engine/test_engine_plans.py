"""Whatever an engine plans keeps the rules of a step: small chunks, guesses, ends of answers, and rows that decode."""

from __future__ import annotations

import random

import pytest

from prefixloom_engine import Request
from tests.engine.test_engine_guessing import Known
from tests.support.engines import cache_for, model, plain, prompt, served

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


@pytest.mark.parametrize("seed", range(4))
def test_every_planned_step_keeps_its_rules(seed: int) -> None:
    """``served`` watches the plans. Right guesses want to pass each boundary and the end of each answer."""
    rng = random.Random(seed)
    requests = [
        Request(prompt(rng.randrange(4), rng.randrange(1, 40)) + prompt(i, rng.randrange(30)), rng.randrange(1, 40))
        for i in range(9)
    ]
    expected = plain(model(), requests)
    guesser = Known(requests, expected, 0.1)
    out, engine = served(
        model(), requests, cache_for(model()), chunk=rng.choice((16, 32, 48)), max_running=rng.choice((3, 9)),
        speculate=4, guesser=guesser, overlap=seed % 2 == 0,
    )  # fmt: skip
    assert out == expected
    assert engine.counts.accepted > 20
