"""Content that depends on later tokens is published once a step has had them: which steps have which tokens."""

from __future__ import annotations

import pytest

from prefixloom import InputError, Path, Point, ProtocolError
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from tests.support.helpers import cache_of, finish, part, run, settle

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


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_token_that_is_named_while_a_step_is_open_counts_for_the_next(role: str) -> None:
    cache = looking()
    with cache.open(TOKENS[:8]) as sequence:
        if role == "draft":
            finish(sequence)
        sequence.grow(8 - sequence.reserved)
        with cache.step([sequence], role) as program:  # type: ignore[arg-type]
            program.run_ops()
            sequence.append([8])
        assert sequence.publishable == 4
        draft(cache, sequence)
        assert sequence.publishable == 8


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


def test_layers_have_the_tokens_that_they_compute_before_the_host_names_them() -> None:
    """As where a step is launched before the one before it has been read."""
    cache = looking()
    with cache.open(TOKENS[:8]) as sequence:
        finish(sequence)
        step(cache, sequence, 1)  # of the token at 8, which only the device knows
        assert sequence.publishable == 4
        sequence.append([8])
        assert sequence.publish() == 8
    assert cache.peek(TOKENS) == 8


def test_layers_that_choose_the_next_token_write_with_it() -> None:
    cache = cache_of(part("draft", Path(), lookahead=1), part("state", Point()))
    with cache.open(TOKENS[:8]) as sequence:
        step(cache, sequence, 8, ahead=1)
        assert sequence.publishable == 4, "its key needs the token"
        sequence.append([8])
        assert sequence.publish() == 8, "with the running state"
    assert cache.peek(TOKENS) == 8


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_so_many_tokens_as_the_layers_choose_count(ahead: int) -> None:
    cache = looking(2)
    with cache.open(TOKENS[:8]) as sequence:
        step(cache, sequence, 8, ahead=ahead)
        sequence.append(TOKENS[8:11])
        assert sequence.publishable == (8 if ahead >= 2 else 4)


@pytest.mark.parametrize(("role", "ahead"), [("target", -1), ("target", 1.0), ("target", True), ("draft", 1)])
def test_another_number_of_chosen_tokens_is_refused(role: str, ahead: object) -> None:
    cache = looking()
    with cache.open(TOKENS[:8]) as sequence, pytest.raises(InputError, match="ahead takes a number of tokens"):
        cache.step([sequence], role, ahead=ahead)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ahead", "named", "complete"), [(1, False, 12), (0, False, 8), (1, True, 8), (0, True, 8)])
def test_a_guess_that_is_taken_back(ahead: int, named: bool, complete: int) -> None:
    """The last entry that stays is complete where the layers wrote it with their own choice, and not with the guess."""
    cache = looking()
    with cache.open(TOKENS[:9]) as sequence:
        step(cache, sequence, 8)
        sequence.append(TOKENS[9:12])
        if named:
            sequence.append([98, 99])
        step(cache, sequence, 6, ahead=ahead)  # 12 named ones, of which 8 were computed, and two guesses
        sequence.rewind(2)
        sequence.append([12])
        assert sequence.publish() == complete
        draft(cache, sequence)
        assert sequence.publish() == 12


def test_what_follows_is_taken_back_before_the_step_ends() -> None:
    cache = looking()
    with cache.open(TOKENS[:9]) as sequence:
        sequence.grow(9)
        with cache.step([sequence], ahead=1) as program:
            program.run_ops()
            sequence.rewind(1)
            sequence.append([88])
        assert (sequence.committed, sequence.publishable) == (8, 4)


def test_taking_back_nothing_changes_nothing() -> None:
    cache = looking()
    with cache.open(TOKENS) as sequence:
        run(sequence, 16)
        sequence.rewind(0)
        assert sequence.publishable == 16


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


def test_what_a_hit_brings_is_complete() -> None:
    cache = looking()
    with cache.open(TOKENS[:17]) as sequence:
        finish(sequence)
    with cache.open(TOKENS[:18]) as sequence:
        assert (sequence.ready, sequence.publishable) == (16, 16)
