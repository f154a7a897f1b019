"""What the policies do in a cache: whole conversations, loops, what came back, and what it costs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from prefixloom import Buffer, Component, EvictionPolicy, Manifest, Path, Point, Window, compose
from prefixloom.cache.cache import Cache
from prefixloom_policies.adaptive import AdaptiveQueue
from prefixloom_policies.ages import Ages, Visit
from tests.contract.test_policy_cost import lines_run


def cache_of(policy: Any, tokens: int, page: int = 16, debug: bool = False) -> Cache:
    kv = Component("kv", Manifest([Buffer("data", (1,), "int64")]), Path())
    return compose(None, plugins=[kv], page_size=page, capacity=tokens, device="meta", policy=policy, debug=debug)


def serve(cache: Cache, tokens: list[int], **options: Any) -> int:
    with cache.open(tokens, **options) as sequence:
        hit = sequence.ready
        if len(tokens) > hit:
            sequence.grow(len(tokens) - hit)
            with cache.step([sequence]) as step:
                step.run_ops()
    return hit


def text(name: int, count: int) -> list[int]:
    chance = random.Random(name)
    return [chance.randrange(1 << 17) for _ in range(count)]


def hits(policy: Any, prompts: list[list[int]], tokens: int) -> float:
    cache = cache_of(policy, tokens)
    return sum(serve(cache, prompt) for prompt in prompts) / sum(map(len, prompts))


def test_a_cache_with_debug_mode_serves_chats_that_share_and_part(caplog: pytest.LogCaptureFixture) -> None:
    """Debug mode checks all books after every operation, and a queue that fails is logged, which is an error here."""
    cache = compose(
        None,
        plugins=[
            Component(name, Manifest([Buffer("data", (1,), "int64")]), reach)
            for name, reach in (("path", Path()), ("window", Window(20)), ("state", Point()))
        ],
        page_size=4, capacity={"path": 400, "window": 300, "state": 6}, policy="adaptive", debug=True,
    )  # fmt: skip
    chance = random.Random(3)
    chats = [text(each % 3, 24) + text(each, 30) for each in range(9)]
    for turn in range(150):
        chat = chance.choice(chats)
        if len(chat) > 120:
            del chat[40:]
        chat += text(1000 + turn, chance.randrange(1, 20))
        serve(cache, list(chat))
    assert cache.stats().components["path"].evicted > 0
    assert "eviction policy" not in caplog.text, "no queue failed"


def test_a_loop_that_does_not_fit_hits_with_what_is_learned() -> None:
    loop = [text(each, 64) for each in range(40)] * 60
    lru, adaptive = (hits(policy, loop, 64 * 20) for policy in ("lru", "adaptive"))
    assert lru == 0
    assert adaptive > 0.25


@pytest.mark.parametrize("kind", ["popular", "scan", "chats"])
def test_adaptive_is_hardly_worse_than_least_recently_used(kind: str) -> None:
    """At most 0.2 points. The next turn of the chats follows recency alone."""
    chance = random.Random(11)
    prompts: list[list[int]] = []
    chats: list[list[int]] = []
    for number in range(2500):
        if kind == "popular":
            prompts.append(text(int(chance.paretovariate(0.6)) % 3000, 64))
        elif kind == "scan":
            prompts.append(text(number if number % 4 else number % 80, 64))
        else:
            if len(chats) < 30 or chance.random() < 0.3:
                chats.append(text(number, 64))
            at = int(len(chats) - chance.paretovariate(0.8)) % len(chats)
            chats[at] = chats[at] + text(10_000 + number, 32)
            prompts.append(chats[at])
    lru, adaptive = (hits(policy, prompts, 64 * 60) for policy in ("lru", "adaptive"))
    assert adaptive > lru - 0.002


def test_a_queue_knows_about_how_many_tokens_there_are_though_paths_part_while_they_run() -> None:
    """A path that was divided before the queue knew it stands for its inner part as well."""
    chance = random.Random(4)
    known = cached = 0
    for _ in range(6):
        made: list[Any] = []
        policy = EvictionPolicy("seen", make=lambda: made.append(AdaptiveQueue()) or made[-1])  # noqa: B023
        cache = cache_of(policy, 10_000, page=4)
        prompts = [text(chance.randrange(1 << 20), 80) for _ in range(3)]
        running: list[Any] = []
        for name in range(60):
            prompt = chance.choice(prompts)[: chance.randrange(4, 80, 4)] + text(name, chance.randrange(4, 40, 4))
            sequence = cache.open(prompt)
            sequence.grow(len(prompt) - sequence.ready)
            with cache.step([sequence]) as step:
                step.run_ops()
            sequence.publish()
            running.append(sequence)
            if len(running) == 8:
                running.pop(chance.randrange(8)).close()
        for sequence in running:
            sequence.close()
        known += made[-1].tokens
        cached += 4 * cache.stats().components["kv"].cached
    assert known == pytest.approx(cached, rel=0.03)


def test_rates_are_those_of_the_visits() -> None:
    """Half of the visits of a class are used again after 1,000 tokens, the others never; the young do not count yet."""
    ages = Ages(2, belief=1e-6, shared=1e-6, doubt=1e-6)
    open_: list[Visit] = []
    for number in range(4000):
        ages.now += 10
        while open_ and ages.now - open_[0].at >= 1000:
            visit = open_.pop(0)
            if visit.turn:
                ages.end(visit, True)
        visit = Visit(0, ages.now, number % 2, 1)
        ages.begin(visit)
        open_.append(visit)
    index = ages.index()[0]
    at = next(each for each in range(len(index)) if ages.bounds[each + 1] > 1000)
    used = sum(rate * width for rate, width in zip(ages.rates()[0][: at + 1], ages.widths, strict=False))
    seen = ((1000 - ages.bounds[at]) + ages.widths[at]) / 2  # of the range by the one half and the other, on average
    assert used == pytest.approx(ages.widths[at] / 2 / seen, abs=0.03)
    assert max(range(len(index)), key=lambda each: index[each]) == at
    assert index[at + 2] < index[at] / 5


def test_visits_that_are_over_count_the_same_however_wide_slices_of_time_became() -> None:
    """Slices become wider while visits go on. Each visit is in one slice until it is over."""
    chance = random.Random(5)
    fine, wide = Ages(2, first=4), Ages(2, first=4)
    old = [[Visit(at % 2, at, 1) for at in range(0, 100_000, 25)] for _ in range(2)]
    for visit in old[0]:
        wide.begin(visit)
    open_: list[tuple[Visit, Visit]] = []
    for _ in range(3000):
        fine.now = wide.now = fine.now + chance.randrange(20)
        kind = chance.randrange(2)
        open_.append((Visit(kind, fine.now, 1), Visit(kind, fine.now, 1)))
        fine.begin(open_[-1][0])
        wide.begin(open_[-1][1])
        for one, other in chance.sample(open_, min(len(open_), 2)):
            if not chance.randrange(3):
                open_.remove((one, other))
                fine.end(one, used := bool(chance.randrange(2)))
                wide.end(other, used)
    for one, other in open_:
        fine.end(one, False)
        wide.end(other, False)
    fine.now = wide.now = 200_000
    for one, other in zip(*old, strict=True):
        wide.end(one, False)
        fine.begin(other)
        fine.end(other, False)
    assert fine.rates() == wide.rates()


def test_it_is_learned_that_a_first_turn_is_used_again_and_a_second_is_not() -> None:
    """Each conversation has two turns, and 20 others begin between them, whose first turns fill the pool."""
    prompts = []
    for number in range(600):
        prompts.append(text(number, 64))
        if number >= 20:
            prompts.append(text(number - 20, 64) + text(10_000 + number, 64))
    lru, adaptive = (hits(policy, prompts, 64 * 24) for policy in ("lru", "adaptive"))
    assert lru < 0.01
    assert adaptive > 0.15, "0.33 would be all, and a third of the prompts is served by last use"


def test_a_request_and_an_eviction_cost_about_the_same_in_a_tree_of_any_size() -> None:
    """Work is counted, not timed. Queues clean up once in a while, so it is the least of several that is compared.

    A cell moves on by range of ages, and there are more ranges where more is kept: a few more moves for a request.
    """
    costs = []
    for prompts in (30, 2000):
        cache = cache_of("adaptive", 16 * prompts)
        for each in range(prompts):
            serve(cache, text(each, 16))
        fresh = iter(range(100_000, 200_000))
        costs.append(min(lines_run(lambda: serve(cache, text(next(fresh), 16))) for _ in range(9)))  # noqa: B023
    assert costs[1] <= 1.5 * costs[0], costs
