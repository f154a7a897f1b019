"""Which states go first: those that a later one on their path has passed, unless prompts part between them."""

from __future__ import annotations

import random

import pytest

from prefixloom import Cache, Claim, Component, NodeView, Path, Point, Tier, hookimpl
from prefixloom.contract.policy import BUILT_IN
from prefixloom.testing.schedules.simulated import Simulation
from tests.support.helpers import cache_of, held, part, run, serve, settle

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


def test_state_is_not_passed_any_more_when_the_step_fails_that_wrote_the_one_below() -> None:
    cache, sim = with_states(3), Simulation("forward")
    for prompt in (B, A[:32]):
        serve(cache, prompt)
    sequence = cache.open([*A[:32], *B[:32]])
    sequence.grow(32)
    with cache.step([sequence]) as step:
        step.run_ops(sim["forward"])
        sim["forward"].run(lambda: 1 / 0)
    sequence.close()  # it passes 32
    sim.drain()
    cache.poll()
    assert isinstance(sequence.failed, ZeroDivisionError)
    for prompt in (C, [9] * 64):
        serve(cache, prompt)
    assert [held(cache, [*prompt, 7]) for prompt in (B, A[:32], C)] == [0, 32, 64]


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_passed_state_that_is_computed_again_is_as_good_as_others(policy: str) -> None:
    cache = with_states(8, policy)
    late = cache.open(A)
    serve(cache, A, chunk=32)  # 32 is passed
    run(late, 32)
    late.publish()
    run(late, 32)
    late.close()
    serve(cache, B, chunk=8)
    assert [held(cache, [*prompt, 7]) for prompt in (A, B)] == [64, 64]
    settle(cache)


def test_prompts_that_part_later_take_it_back() -> None:
    cache = with_states(8)
    serve(cache, A)
    both = [cache.open([*A, *more]) for more in (B, C)]
    for sequence in both:
        run(sequence, 64)
    for sequence in both:  # the first passes the end of A, the second parts from it there
        sequence.close()
    serve(cache, [4] * 64)
    cache.evict({"state": 2})
    assert [held(cache, [*prompt, 7]) for prompt in (A, [*A, *C], [4] * 64)] == [64, 64, 64]
    settle(cache)


def test_when_the_later_one_goes_the_state_is_not_passed_any_more() -> None:
    cache = with_states(8)
    serve(cache, A)
    serve(cache, [*A, *B], until=1.0)
    serve(cache, C)
    cache.expire(2.0)
    cache.evict({"state": 2})
    assert [held(cache, [*prompt, 7]) for prompt in (A, [*A, *B], C)] == [64, 64, 0]
    settle(cache)


class Keeps32(Component):
    @hookimpl
    def evict_component(self, node: tuple[NodeView, ...], tier: Tier) -> Claim:
        return Claim(keep=tuple(at for at, each in enumerate(node) if each.end == 32))


def test_a_passed_state_that_a_plugin_keeps_stays_while_others_may_go() -> None:
    cache = cache_of(part("path", Path()), part("state", Point(), kind=Keeps32), slots=4)
    serve(cache, B)
    serve(cache, C)
    serve(cache, A, chunk=32)
    cache.evict({"state": 1})
    assert [held(cache, [*prompt, 7]) for prompt in (A[:32], A, B, C)] == [32, 64, 0, 64]
    settle(cache)


@pytest.mark.parametrize("seed", range(6))
def test_no_end_and_nothing_resumed_at_goes_while_a_passed_state_may(seed: int) -> None:
    """Conversations at random, their states known from the public side alone."""
    rng = random.Random(seed)
    cache = with_states(12)
    talks: list[list[int]] = [[name] * 8 for name in range(6)]
    resumed = 0
    for _ in range(60):
        talk = rng.choice(talks)
        talk += [rng.randrange(1000, 2000) for _ in range(4 * rng.randrange(1, 6))]
        serve(cache, talk, chunk=rng.choice([None, 8]))
        ends = [each for each in talks if len(each) > 8]
        assert [held(cache, each) for each in ends] == [len(each) for each in ends], "six ends fit into twelve slots"
        passed = [talk[:n] for n in range(4, len(talk), 4) if held(cache, [*talk[:n], 7]) == n]
        if passed and rng.random() < 0.3:
            again = rng.choice(passed)
            cache.open([*again, 7]).abort()
            count = cache.stats().components["state"].cached - len(ends)
            assert cache.evict({"state": count}) == {
                "state": count
            }  # all that are passed, and the end used longest ago
            assert held(cache, [*again, 7]) == len(again), "it was used last"
            resumed += 1
            for each in talks:
                if held(cache, each) < len(each):
                    each[:] = [rng.randrange(1000, 2000) for _ in range(8)]
    assert resumed > 3
    settle(cache)


def test_a_state_that_the_tree_has_is_not_evicted_for_a_copy_when_it_is_published_again() -> None:
    cache = with_states(3)
    first, second = (cache.open(range(16)) for _ in range(2))
    for sequence in (first, second):
        run(sequence, 8)
    first.publish()
    run(first, 4)  # it has copied the state that it handed over
    second.publish()
    assert cache.stats().components["state"].evicted == 0
    for sequence in (first, second):
        sequence.close()
    assert cache.peek([*range(8), 99]) == 8
