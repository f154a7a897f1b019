"""Guessing ahead: the same tokens as one by one, in all components, and fewer passes where guesses are right."""

from __future__ import annotations

import attrs
import pytest

from prefixloom_engine import Engine, PromptLookup, Request
from tests.support.engines import CAPACITY, Known, cache_for, mixed, model, plain, prompt, served

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
CALM = {"mixing": 0.1}
"""Of a model that soon repeats itself."""


@pytest.mark.parametrize(
    ("tokens", "wrong", "overlap"), [(1, 0.0, True), (4, 0.3, True), (4, 0.3, False), (4, 1.0, False), (1, 1.0, True)]
)
def test_guesses_right_or_wrong_change_no_token(tokens: int, wrong: float, overlap: bool) -> None:
    requests = mixed(8)
    expected = plain(model(), requests)
    guesser = Known(requests, expected, wrong)
    cache = cache_for(model(), CAPACITY)
    out, engine = served(model(), requests, cache, speculate=tokens, guesser=guesser, overlap=overlap)
    assert out == expected
    counts = engine.counts
    assert counts.drafted > 0
    if wrong == 0:
        assert counts.accepted == counts.drafted
    elif wrong == 1:
        assert counts.accepted == 0
    else:
        assert 0 < counts.accepted < counts.drafted


def test_right_guesses_save_passes() -> None:
    requests = [Request(prompt(1, 60), 100)]
    guesser = Known(requests, plain(model(), requests), 0.0)
    _, with_guesses = served(model(), requests, cache_for(model()), speculate=4, guesser=guesser)
    _, without = served(model(), requests, cache_for(model()))
    assert with_guesses.counts.steps <= 1 + 100 / 5 + 3 < without.counts.steps


def test_prompt_lookup_finds_what_a_model_repeats() -> None:
    it = model(**CALM)  # type: ignore[arg-type]
    requests = [Request(prompt(i, 60), 100) for i in range(6)]
    cache = cache_for(it)
    out, engine = served(it, requests, cache, speculate=4)
    assert out == plain(it, requests)
    assert engine.counts.accepted > 0.5 * engine.counts.drafted > 0


def test_an_answer_tells_what_was_guessed_for_it() -> None:
    requests = [Request(prompt(1, 60), 50, speculate=3), Request(prompt(2, 60), 50)]
    guesser = Known(requests, plain(model(), requests), 0.5)
    with Engine(model(), cache_for(model()), guesser=guesser) as engine:
        guessed, plainly = engine.generate(requests)
    assert 0 < guessed.accepted < guessed.drafted == engine.counts.drafted
    assert (plainly.accepted, plainly.drafted) == (0, 0)


def test_prompt_lookup() -> None:
    lookup = PromptLookup(longest=3, shortest=2)
    assert lookup.guess([1, 2, 3, 4, 9, 2, 3, 4], 2) == [9, 2]
    assert lookup.guess([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8], "the last time counts"
    assert lookup.guess([5, 1, 2, 3, 9, 1, 2, 8, 0, 1, 2, 3], 1) == [9], "the longest match wins"
    assert lookup.guess([4, 5, 4, 5], 5) == [4, 5, 4, 5, 4], "a circle goes on"
    assert lookup.guess([1, 2, 3], 4) == []
    assert lookup.guess([1, 1, 1], 0) == []
    assert lookup.guess([3], 4) == []
    assert attrs.fields(Request).speculate.default is None
