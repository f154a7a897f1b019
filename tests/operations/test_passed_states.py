"""Which states go first: those that a later one on their path has passed, unless prompts part between them."""

from __future__ import annotations

import random

import pytest

from prefixloom import Cache, Path, Point
from prefixloom.contract.policy import BUILT_IN
from tests.support.helpers import cache_of, held, part, serve, settle

A, B, C = ([name] * 64 for name in (1, 2, 3))


def with_states(slots: int, policy: str = "lru") -> Cache:
    return cache_of(part("path", Path()), part("state", Point()), tokens=4096, slots=slots, policy=policy)


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_long_prompt_costs_the_ends_of_others_nothing(policy: str) -> None:
    """Of its sixteen checkpoints all but the last are passed: five slots are enough."""
    cache = with_states(5, policy)
    for prompt in (A, B):
        serve(cache, prompt)
    serve(cache, [9] * 64, chunk=4)
    assert [held(cache, prompt) for prompt in (A, B, [9] * 64)] == [64, 64, 64]
    settle(cache)


def test_of_the_passed_the_one_goes_first_that_was_passed_first() -> None:
    cache = with_states(4)
    serve(cache, A, chunk=16)  # 16, 32, 48 are passed
    serve(cache, B)
    serve(cache, C)
    assert [held(cache, [*A[:n], 7]) for n in (16, 32, 48, 64)] == [0, 0, 48, 64]


def test_a_next_turn_passes_the_end_of_the_last_one() -> None:
    cache = with_states(3)
    for prompt in (A, B, [*B, *C], C):
        serve(cache, prompt)
    assert [held(cache, [*prompt, 7]) for prompt in (A, B, [*B, *C], C)] == [64, 0, 128, 64]


def test_where_prompts_part_the_state_above_is_not_passed() -> None:
    cache = with_states(3)
    serve(cache, A)
    serve(cache, [*A, *B])  # passes it
    serve(cache, [*A, *C])  # and here is another way to go on
    serve(cache, [4] * 64)
    assert [held(cache, [*prompt, 7]) for prompt in (A, [*A, *B], [*A, *C])] == [64, 64, 128]


def test_a_state_that_is_resumed_at_is_not_passed_any_more() -> None:
    cache = with_states(3)
    serve(cache, A, chunk=32)  # 32 is passed
    assert serve(cache, [*A[:32], *B]) == 32  # the prompts part here
    serve(cache, C)
    assert [held(cache, [*prompt, 7]) for prompt in (A, A[:32], [*A[:32], *B], C)] == [32, 32, 96, 64]


@pytest.mark.parametrize("seed", range(6))
def test_no_end_goes_while_a_passed_state_may(seed: int) -> None:
    """Conversations at random, their states known from the public side alone."""
    rng = random.Random(seed)
    cache = with_states(12)
    talks: list[list[int]] = [[name] * 8 for name in range(6)]
    for _ in range(60):
        talk = rng.choice(talks)
        talk += [rng.randrange(1000, 2000) for _ in range(4 * rng.randrange(1, 6))]
        serve(cache, talk, chunk=rng.choice([None, 8]))
        ends = [each for each in talks if len(each) > 8]
        assert [held(cache, each) for each in ends] == [len(each) for each in ends], "six ends fit into twelve slots"
    settle(cache)
