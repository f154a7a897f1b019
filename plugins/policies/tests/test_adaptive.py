"""Adaptive: what it knows of an LRU pool, and what it does with states."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from plugins.policies.tests.test_policies_in_a_cache import cache_of, serve, text
from prefixloom import Buffer, Component, EvictionPolicy, Manifest, Point, compose
from prefixloom.cache.cache import Cache
from prefixloom_policies.adaptive import PASSED, AdaptiveQueue, AdaptiveStateQueue
from prefixloom_policies.ages import Ages, Visit, falling_fit
from prefixloom_policies.memory import PathMemory


def watched(make: Callable[[], Any]) -> tuple[EvictionPolicy, list[Any]]:
    """A policy, and the queues that it makes. The first one only shows ``compose`` that it can."""
    made: list[Any] = []
    return EvictionPolicy("watched", make=lambda: made.append(make()) or made[-1]), made


def chats(seed: int, count: int) -> list[list[int]]:
    """Prompts of conversations that go on, mostly the latest, and that all share their beginning."""
    chance = random.Random(seed)
    said: list[list[int]] = []
    prompts = []
    for number in range(count):
        if len(said) < 20 or chance.random() < 0.2:
            said.append(text(1, 128) + text(number + 2, chance.randrange(64, 1024)))
        at = int(len(said) - chance.paretovariate(0.7)) % len(said)
        said[at] = said[at] + text(100_000 + number, chance.randrange(16, 512))
        prompts.append(said[at])
    return prompts


def test_it_knows_what_an_lru_pool_of_its_size_would_have_hit() -> None:
    class Comparing(AdaptiveQueue):
        hit = with_lru = 0

        def judge(self, asked: int, turn: int, hit: int, with_lru: int) -> None:
            super().judge(asked, turn, hit, with_lru)
            self.hit, self.with_lru = self.hit + hit, self.with_lru + with_lru

    prompts = chats(3, 900)
    asked = sum(map(len, prompts))
    policy, made = watched(Comparing)
    hits = [
        sum(serve(cache, prompt) for prompt in prompts) for cache in (cache_of(policy, 16_000), cache_of("lru", 16_000))
    ]
    assert made[-1].hit == pytest.approx(hits[0], abs=0.03 * asked)
    assert made[-1].with_lru == pytest.approx(hits[1], abs=0.03 * asked)
    assert made[-1].hit - made[-1].with_lru == pytest.approx(hits[0] - hits[1], abs=0.01 * asked)


def test_a_queue_knows_how_many_tokens_there_are_of_paths_that_were_published_in_pieces() -> None:
    policy, made = watched(AdaptiveQueue)
    cache = cache_of(policy, 8_000)
    for prompt in chats(4, 300):
        with cache.open(prompt) as sequence:
            while sequence.reserved < len(prompt):
                sequence.grow(min(128, len(prompt) - sequence.reserved))
                with cache.step([sequence]) as step:
                    step.run_ops()
                sequence.publish()
    assert cache.stats().components["kv"].evicted
    assert made[-1].tokens == 16 * cache.stats().components["kv"].cached


def test_the_latest_marks_are_an_lru_pool_in_small() -> None:
    ages = Ages(1)
    memory = PathMemory(ages)
    visits = [Visit(0, 0, 1, 64 * depth) for depth in (3, 2, 4)]
    for visit in visits:
        ages.begin(visit)
    first, second, third = ([(64 * at, 10 * name + at) for at in range(3, 0, -1)] for name in range(3))
    memory.use(first, visits[0])
    memory.use(second, visits[1])
    memory.shrink(4)
    assert [memory.recent(each) for each in (first, second, third)] == [64, 192, 0], "the end of a path goes first"
    memory.use(third, visits[2])
    memory.shrink(4)
    assert [memory.recent(each) for each in (first, second, third)] == [0, 64, 192]
    assert memory.seen(first) == (192, visits[0]), "what has left is remembered"
    memory.put_first(third, visits[2])
    memory.shrink(3)
    assert [memory.recent(each) for each in (second, third)] == [64, 128]


def test_what_nothing_remembers_any_more_ends_its_visit() -> None:
    ages = Ages(1)
    memory = PathMemory(ages)
    visit, other = Visit(0, 0, 1, 64), Visit(0, 0, 1, 64)
    for each in (visit, other):
        ages.begin(each)
    memory.use([(64, 1)], visit)
    memory.use([(64, 1), (32, 2)], other)
    assert visit.over
    memory.shrink(0)
    assert other.over


def test_rates_fall_as_near_to_those_seen_as_falling_rates_can() -> None:
    assert falling_fit([4.0, 3.0, 1.0], [1.0] * 3) == pytest.approx([4, 3, 1])
    assert falling_fit([1.0, 3.0, 2.0, 5.0], [1.0] * 4) == pytest.approx([2.75] * 4)
    assert falling_fit([5.0, 1.0, 3.0], [1.0, 3.0, 1.0]) == pytest.approx([5, 1.5, 1.5], rel=1e-3)


# ------------------------------------------------------------ states
def states_of(policy: Any, slots: int) -> Cache:
    part = Component("state", Manifest([Buffer("data", (1,), "int64")]), Point())
    return compose(
        None, plugins=[part], page_size=16, capacity={"state": slots}, device="meta", policy=policy, debug=False
    )


def serve_in_chunks(cache: Cache, tokens: list[int], chunk: int = 64) -> int:
    with cache.open(tokens) as sequence:
        hit = sequence.ready
        while sequence.reserved < len(tokens):
            sequence.grow(min(chunk, len(tokens) - sequence.reserved))
            with cache.step([sequence]) as step:
                step.run_ops()
            sequence.publish()
    return hit


def test_a_state_that_its_own_sequence_copies_is_not_used_by_it() -> None:
    policy, made = watched(AdaptiveStateQueue)
    cache = states_of(policy, 20)
    serve_in_chunks(cache, text(1, 512))
    visits = [record.key for record in made[-1].known.values()]
    assert len(visits) == 8
    assert {visit.turn for visit in visits} == {1}
    assert [visit.kind == PASSED for visit in sorted(visits, key=lambda visit: visit.end)] == 7 * [True] + [False]
    serve_in_chunks(cache, text(3, 64))
    assert serve_in_chunks(cache, text(1, 512) + text(2, 64)) == 512
    assert max(record.key.turn for record in made[-1].known.values()) == 2


def test_long_prompts_that_come_once_do_not_push_out_the_ends_of_chats() -> None:
    """Their states are passed, but for the last one, and go first with either policy."""
    chance = random.Random(5)
    prompts = []
    talks = [text(name, 256) for name in range(12)]
    for number in range(1500):
        if number % 4 == 0:
            prompts.append(text(10_000 + number, 1024))
        else:
            at = chance.randrange(12)
            talks[at] = (talks[at] if len(talks[at]) < 1500 else text(50_000 + number, 256)) + text(90_000 + number, 64)
            prompts.append(talks[at])
    rates = {}
    for policy in ("lru", "adaptive"):
        cache = states_of(policy, 60)
        rates[policy] = sum(serve_in_chunks(cache, prompt) for prompt in prompts) / sum(map(len, prompts))
    assert min(rates.values()) > 0.65, rates


def test_a_policy_may_have_another_queue_for_states() -> None:
    made: list[str] = []

    class Told(AdaptiveQueue):
        def __init__(self) -> None:
            super().__init__()
            made.append("pages")

    class ToldStates(AdaptiveStateQueue):
        def __init__(self) -> None:
            super().__init__()
            made.append("states")

    cache = states_of(EvictionPolicy("told", make=Told, make_states=ToldStates), 8)
    assert made == ["pages", "states", "states"], "one of each shows that it can"
    cache.flush()
    assert made[3:] == ["states"]
