"""Tokens that are appended with extra keys are published under them, and a sequence's tokens keep them."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import InputError, Path
from tests.support.helpers import cache_of, finish, part, path_cache, settle

PROMPT = [1, 2, 3, 4, 5]
IMAGE = [9] * 7
WHOLE = [*PROMPT, *IMAGE, 6]
CAT = [(5, 12, "cat")]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("first", [(), [(1, 3, "sun")]], ids=["plain", "with another before"])
def test_what_is_appended_with_an_extra_key_is_published_under_it(lookahead: int, first: Any) -> None:
    cache = cache_of(part("path", Path(), lookahead=lookahead), page=1)
    with cache.open(PROMPT, extra=first) as sequence:
        finish(sequence)
        sequence.append(IMAGE, extra=[(0, 7, "cat")])
        sequence.append([6])
        finish(sequence)
        assert sequence.tokens.extra == (*first, *CAT)
    assert cache.peek(WHOLE, extra=[*first, *CAT]) == 13 - lookahead
    assert cache.peek(WHOLE, extra=[*first, (5, 12, "dog")]) == 5 - lookahead
    assert cache.peek(WHOLE, extra=first) == 5 - lookahead
    assert cache.peek(WHOLE, extra=[*first, (6, 12, "cat")]) == 5 - lookahead
    settle(cache)


@pytest.mark.parametrize("span", [(0, 8, "k"), (-1, 2, "k"), (3, 3, "k"), (4, 2, "k")])
def test_a_span_outside_of_what_is_appended_is_refused_and_nothing_is_named(span: tuple[int, int, str]) -> None:
    with path_cache().open(PROMPT) as sequence:
        with pytest.raises(InputError, match="lies outside of the 7 tokens"):
            sequence.append(IMAGE, extra=[span])
        assert (sequence.named, sequence.tokens.extra) == (5, ())


@pytest.mark.parametrize("extra", [5, [(0, 7)], [(0, 7.0, "k")], [(0, 7, ["a list"])]])
def test_extra_keys_of_the_wrong_form_are_refused(extra: Any) -> None:
    with path_cache().open(PROMPT) as sequence:
        with pytest.raises(InputError, match="extra"):
            sequence.append(IMAGE, extra=extra)
        assert sequence.named == 5


def test_a_sequences_tokens_are_the_next_turns_prompt_with_their_keys() -> None:
    cache = path_cache()
    with cache.open(WHOLE, extra=CAT) as sequence:
        finish(sequence)
        sequence.append([*IMAGE, 7, 8, 9], extra=[(0, 7, "dog")])
        finish(sequence)
        tokens = sequence.tokens
    assert tokens.extra == (*CAT, (13, 20, "dog"))
    assert cache.peek(tokens) == cache.match(tokens).ready == 20
    assert cache.peek(tokens, extra=tokens.extra) == 20, "what is said twice counts once"
    assert cache.peek(tokens.tolist()) == 4
    with cache.open(tokens.extended([4] * 5), extra=[(23, 25, "sun")]) as sequence:
        assert sequence.ready == 20
        assert sequence.tokens.extra == (*tokens.extra, (23, 25, "sun"))
    with cache.open(PROMPT) as sequence:
        sequence.append(tokens.part(5))
        assert sequence.tokens.extra == tokens.extra
        finish(sequence)
    assert cache.stats().components["path"].cached == 5, "what it published was there"


def test_numbers_that_nothing_uses_are_forgotten_when_tokens_are_appended() -> None:
    cache = path_cache()
    for tenant in "abc":
        with cache.open([9] * 4, namespace=tenant, extra=[(0, 4, tenant)]) as sequence:
            finish(sequence)
    for number in range(3000):
        with cache.open(PROMPT) as sequence:
            sequence.append(IMAGE, extra=[(0, 7, number)])
    with cache.open(PROMPT) as sequence:
        sequence.append(IMAGE, extra=[(0, 7, "cat")])
        assert len(cache.core.keys.meant) <= 3 * 1024
        finish(sequence)
    assert cache.peek([*PROMPT, *IMAGE], extra=CAT) == 12
    assert [cache.peek([9] * 4, namespace=tenant, extra=[(0, 4, tenant)]) for tenant in "abc"] == [4, 4, 4]


def test_a_span_that_cannot_be_read_breaks_no_cache() -> None:
    def spans() -> Any:
        yield (0, 1, "a")
        raise RuntimeError("mine")

    cache = path_cache()
    with cache.open(PROMPT) as sequence:
        with pytest.raises(RuntimeError, match="mine"):
            sequence.append([1, 2], extra=spans())
        finish(sequence)
    assert cache.peek(PROMPT) == 4
    settle(cache)
