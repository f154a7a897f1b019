"""Adaptive: what it knows of an LRU pool, and what it learns."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from plugins.policies.tests.test_policies_in_a_cache import cache_of, serve, text
from prefixloom import EvictionPolicy
from prefixloom_policies.adaptive import AdaptiveQueue
from prefixloom_policies.ages import Ages, Visit, falling_fit
from prefixloom_policies.cells import Prints
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


@attrs.define(eq=False)
class PlainNode:
    """An edge of a tree, as a queue sees it."""

    key: bytes
    end: int
    parent: Any
    children: tuple[Any, ...] = ()


@pytest.mark.parametrize("code", ["i", "q"])
def test_prints_differ_where_only_the_last_bytes_of_a_printed_element_do(code: str) -> None:
    """An element has as many bytes as a token, and with a lookahead those of several."""
    root = PlainNode(b"", 0, None)
    last = 8 * (struct.calcsize(code) - 1)
    keys = [struct.pack(f"<128{code}", *([first << last] * 128)) for first in (1, 2)]
    marks = [Prints().marks(PlainNode(key, 128, root), 0) for key in keys]
    assert [depth for depth, _ in marks[0]] == [depth for depth, _ in marks[1]] == [128, 64]
    assert not {found for _, found in marks[0]} & {found for _, found in marks[1]}


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
