"""A draft beside the model: the same tokens, right guesses, and a memory of its own that is always complete."""

from __future__ import annotations

from functools import cache as remembered
from typing import Any

import attrs
import pytest
import torch

from prefixloom import Cache
from prefixloom_engine import Drafter, Engine, Request, ThreeWay
from prefixloom_engine.threeway import SIZES
from tests.support.engines import cache_for, mixed, model, plain, prompt, served

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
SMALL = {"full": 1200, "swa": 900, "mamba": 60, "draft": 1200}
AMPLE = {"full": 4096, "swa": 4096, "mamba": 64, "draft": 4096}


@remembered
def drafted(mixing: float = 1.0) -> ThreeWay:
    return ThreeWay(attrs.evolve(SIZES["tiny"], mixing=mixing), dtype="float64", draft=True)


@pytest.mark.parametrize(
    ("mixing", "tokens", "overlap"), [(1.0, 4, True), (0.1, 4, False), (0.1, 1, True), (0.1, 0, True)]
)
def test_answers_are_those_without_a_cache_and_without_a_draft(mixing: float, tokens: int, overlap: bool) -> None:
    requests = mixed(12)
    out, engine = served(
        drafted(mixing), requests, cache_for(drafted(mixing), SMALL), speculate=tokens, overlap=overlap
    )
    assert out == plain(model(mixing=mixing), requests)
    counts = engine.counts
    if not tokens:
        assert counts.drafted == 0
    elif mixing == 1.0:
        assert 0 <= counts.accepted < 0.2 * counts.drafted
    else:
        assert counts.accepted > 0.3 * counts.drafted


def entries(cache: Cache, tokens: list[int]) -> torch.Tensor:
    """The draft's cached keys and values of a prefix."""
    plan = cache.match(tokens, leave=1)
    assert plan.ready > 0
    with cache.lease(plan):
        pages = torch.tensor(plan.pages("draft")[: plan.ready // 16])
        return torch.cat([cache.pool("draft").buffers[name][0][pages].flatten() for name in ("k", "v")])


@pytest.mark.parametrize(("chunk", "overlap"), [(64, True), (512, False)])
def test_whatever_was_guessed_the_draft_remembers_what_a_plain_pass_makes_of_the_same_tokens(
    chunk: int, overlap: bool
) -> None:
    it = drafted(0.3)
    requests = [Request(prompt(i, 100), 150, speculate=s) for i, s in enumerate((0, 1, 3, 4))]
    cache, other = cache_for(it, AMPLE), cache_for(it, AMPLE)
    with Engine(it, cache, chunk=chunk, overlap=overlap) as engine:
        answers = engine.generate(requests)
    assert 0 < engine.counts.accepted < engine.counts.drafted
    for answer in answers:
        text = [*answer.request.tokens, *answer.tokens]
        assert cache.peek(text, leave=1) == len(text) // 64 * 64 - 64 * (len(text) % 64 == 0)
        with Engine(it, other, chunk=1024, overlap=False) as engine:
            engine.generate([Request([*text, 1, 2, 3], 1)])  # one pass over the same tokens
        made, plainly = entries(cache, text), entries(other, text)
        assert made.shape == plainly.shape
        assert (made - plainly).abs().max() < 1e-10


def test_a_draft_that_loses_its_memory_guesses_worse_and_answers_the_same() -> None:
    """So that the guesses do come from what it remembers; nothing else depends on it."""
    it = drafted(0.3)
    request = Request(prompt(1, 200), 60, speculate=4)
    rates: dict[bool, Any] = {}
    for lose in (False, True):
        cache = cache_for(it, AMPLE)
        with Engine(it, cache) as engine:
            answers = [engine.add(request)]
            while engine.step():
                if lose:
                    engine.drain()
                    for buffer in cache.pool("draft").buffers.values():
                        buffer.normal_(0, 30)
        rates[lose] = (engine.counts.accepted, answers[0].tokens)
    assert rates[True][1] == rates[False][1]
    assert rates[True][0] < rates[False][0]


def test_a_model_says_whether_it_has_a_draft() -> None:
    assert model().bind(cache_for(model())).drafter is None
    assert isinstance(drafted().bind(cache_for(drafted(), AMPLE)).drafter, Drafter)
