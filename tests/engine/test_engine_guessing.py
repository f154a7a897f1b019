"""Guessing ahead: the same tokens as one by one, in all components, and fewer passes where guesses are right."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import pytest

from prefixloom_engine import PromptLookup, Request
from tests.support.engines import CAPACITY, cache_for, mixed, model, plain, prompt, served

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
CALM = {"mixing": 0.1}
"""Of a model that soon repeats itself."""


class Known:
    """Guesses from the right answers, some of them made wrong."""

    def __init__(self, requests: Sequence[Request], answers: Sequence[list[int]], wrong: float) -> None:
        self.texts = [[*r.tokens, *answer] for r, answer in zip(requests, answers, strict=True)]
        self.wrong, self.rng = wrong, random.Random(1)

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        for text in self.texts:
            if text[: len(tokens)] == list(tokens):
                ahead = text[len(tokens) : len(tokens) + most]
                return [(t + 1) % 512 if self.rng.random() < self.wrong else t for t in ahead]
        return []


@pytest.mark.parametrize("overlap", [True, False], ids=["ahead", "not ahead"])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tokens", [1, 4])
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
    from prefixloom_engine import Engine

    with Engine(model(), cache_for(model()), guesser=guesser) as engine:
        guessed, plainly = engine.generate(requests)
    assert 0 < guessed.accepted < guessed.drafted == engine.counts.drafted
    assert (plainly.accepted, plainly.drafted) == (0, 0)


def test_guesses_that_cross_a_stop_end_the_answer_there() -> None:
    (whole,) = plain(model(), [Request(prompt(4, 90), 40)])
    stop = whole[20]
    requests = [Request(prompt(4, 90), 40, stops=[stop])]
    guesser = Known(requests, [whole], 0.0)
    (out,), _ = served(model(), requests, cache_for(model()), speculate=4, guesser=guesser)
    assert out == whole[: whole.index(stop) + 1]


def test_a_conversation_whose_answers_were_guessed_hits_at_its_full_length() -> None:
    requests = [Request(prompt(4, 90), 150)]
    expected = plain(model(), requests)
    cache = cache_for(model())
    served(model(), requests, cache, speculate=4, guesser=Known(requests, expected, 0.3))
    text = [*prompt(4, 90), *expected[0]]
    assert cache.peek([*text, 1], leave=1) == (len(text) - 1) // 64 * 64
    (after,), engine = served(model(), [Request([*text, 5], 30)], cache)
    assert engine.counts.prefilled == len(text) + 1 - (len(text) - 1) // 64 * 64
    assert [after] == plain(model(), [Request([*text, 5], 30)])


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
