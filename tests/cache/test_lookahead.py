"""Content that depends on later tokens is published once a step has had them: which steps have which tokens."""

from __future__ import annotations

import pytest

from prefixloom import InputError, Path, Point, ProtocolError
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from tests.support.helpers import cache_of, finish, part, settle

TOKENS = list(range(40))


def looking(lookahead: int = 1, **options: int) -> Cache:
    return cache_of(part("path", Path()), part("draft", Path(), lookahead=lookahead), **options)


def step(cache: Cache, sequence: Sequence, count: int, ahead: int = 0) -> None:
    """Compute ``count`` more tokens, whether they are named or not, by layers that choose ``ahead`` behind them."""
    sequence.grow(count)
    with cache.step([sequence], ahead=ahead) as program:
        program.run_ops()


def draft(cache: Cache, sequence: Sequence) -> None:
    with cache.step([sequence], role="draft") as program:
        program.run_ops()


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_token_that_is_named_after_the_step_completes_nothing(lookahead: int) -> None:
    cache = looking(lookahead)
    with cache.open(TOKENS[:8]) as sequence:
        finish(sequence)
        assert sequence.publishable == 4
        sequence.append(TOKENS[8 : 8 + lookahead])
        assert sequence.publishable == 4
        with pytest.raises(ProtocolError, match=f"committed 8, of which {8 - lookahead} complete, lookahead"):
            sequence.publish(8)
    assert cache.peek(TOKENS) == 4
    settle(cache)


@pytest.mark.parametrize("how", ["step", "draft", "empty step"])
def test_the_next_step_completes_it(how: str) -> None:
    """Whatever its role: it has the token, and writes again what waited for it."""
    cache = looking()
    with cache.open(TOKENS[:8]) as sequence:
        finish(sequence)
        sequence.append([8])
        if how == "draft":
            draft(cache, sequence)
        else:
            step(cache, sequence, 1 if how == "step" else 0)
        assert sequence.publish() == 8
    assert (cache.peek(TOKENS[:9]), cache.peek(TOKENS[:8])) == (8, 4)
    settle(cache)


def test_a_step_that_fails_completes_nothing() -> None:
    cache = looking()
    with cache.open(TOKENS[:8]) as sequence:
        finish(sequence)
        sequence.append([8])
        for role in ("target", "draft"):
            with pytest.raises(ZeroDivisionError), cache.step([sequence], role) as program:  # type: ignore[arg-type]
                program.run_ops()
                raise ZeroDivisionError
        assert sequence.publishable == 4


def test_layers_that_choose_the_next_token_write_with_it() -> None:
    cache = cache_of(part("draft", Path(), lookahead=1), part("state", Point()))
    with cache.open(TOKENS[:8]) as sequence:
        step(cache, sequence, 8, ahead=1)
        assert sequence.publishable == 4, "its key needs the token"
        sequence.append([8])
        assert sequence.publish() == 8, "with the running state"
    assert cache.peek(TOKENS) == 8


@pytest.mark.parametrize(("role", "ahead"), [("target", -1), ("target", 1.0), ("target", True), ("draft", 1)])
def test_another_number_of_chosen_tokens_is_refused(role: str, ahead: object) -> None:
    cache = looking()
    with cache.open(TOKENS[:8]) as sequence, pytest.raises(InputError, match="ahead takes a number of tokens"):
        cache.step([sequence], role, ahead=ahead)  # type: ignore[arg-type]


@pytest.mark.parametrize(("when", "published"), [("before", 8), ("after fill", 4), ("after", 4)])
def test_a_sequence_alone_has_what_is_named_when_it_is_filled(when: str, published: int) -> None:
    cache = looking()
    with cache.open(TOKENS[:8]) as sequence:
        sequence.grow(8)
        if when == "before":
            sequence.append([8])
        sequence.fill()
        if when == "after fill":
            sequence.append([8])
        sequence.commit()
        if when == "after":
            sequence.append([8])
        assert sequence.publish() == published
        sequence.fill()
        sequence.commit()
        assert sequence.publish() == (8 if sequence.named > 8 else 4)
