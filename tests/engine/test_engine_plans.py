"""Whatever an engine plans keeps the rules of a step: small chunks, guesses, ends of answers, and rows that decode."""

from __future__ import annotations

import random

import pytest

from prefixloom import Path, Window
from prefixloom_engine import Engine, Request
from prefixloom_engine.serving.admission import PageBudget
from tests.engine.test_engine_guessing import Known
from tests.support.engines import cache_for, model, nothing_left, plain, prompt, served, untracked
from tests.support.helpers import cache_of, part, run
from tests.support.planned_steps import watched

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


def test_a_decode_whose_states_the_engine_publishes_ends_on_each_boundary() -> None:
    """Right guesses of four tokens: without a rule, every second boundary would be passed."""
    requests = [Request(prompt(number, 60 + number), 80, speculate=4) for number in range(3)]
    guesser = Known(requests, plain(model(), requests), 0.0)
    cache = untracked(model())
    with watched(Engine(model(), cache, guesser=guesser)) as engine:
        answers = engine.generate(requests)
        assert engine.counts.accepted > 100
    for request, answer in zip(requests, answers, strict=True):
        text = [*request.tokens, *answer.tokens]
        assert cache.peek(text) == (len(text) - 1) // 64 * 64
    nothing_left(cache)


@pytest.mark.parametrize("seed", range(60))
def test_a_pool_of_as_many_pages_as_the_budget_says_is_enough_for_a_request_alone(seed: int) -> None:
    """Its prompt comes in chunks, and guesses as deep as may be taken back follow."""
    rng = random.Random(seed)
    page, rewind = rng.choice((1, 2, 4)), rng.randrange(7)
    chunk, length = page * rng.randrange(1, 6), rng.randrange(40, 90)
    window = part("window", Window(rng.randrange(1, 24)))
    options = {"page": page, "max_rewind": rewind}
    budget = PageBudget(cache_of(part("keys", Path()), window, **options), chunk)
    pages = budget.pages_held(length)["window"]
    cache = cache_of(part("keys", Path()), window, capacity={"window": pages * page}, **options)
    with cache.open(range(length)) as sequence:
        while sequence.reserved < length // 2:
            run(sequence, min(chunk, length // 2 - sequence.reserved))
        while sequence.reserved < length:
            guesses = min(rewind, length - sequence.reserved - 1)
            run(sequence, 1 + guesses)
            sequence.rewind(rng.randrange(guesses + 1))
            if guesses:
                sequence.append(range(sequence.named, length))


def test_prompts_as_long_as_a_row_of_guesses_are_computed_beside_it() -> None:
    """Both go through one pass, and of the guesses each needs its logits."""
    requests = [Request(prompt(0, 40), 60), *(Request(prompt(i, 5), 1) for i in range(1, 12))]
    expected = plain(model(), requests)
    guesser = Known(requests, expected, 0.0)
    out, engine = served(
        model(), requests, cache_for(model()), chunk=16, max_running=2, speculate=4, guesser=guesser, overlap=False
    )
    assert out == expected
    assert engine.counts.accepted > 20
