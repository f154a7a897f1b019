"""What nobody wants any more is the next to go, under every policy and on every tier, until it is used again."""

from __future__ import annotations

import math
from typing import Any

import pytest

from prefixloom import InputError, Path, Point, Window, compose
from prefixloom.contract.policy import BUILT_IN
from tests.support.helpers import cache_of, held, part, path_cache, run, serve, settle
from tests.support.tiers import tiered

LONG = 16


def prompt(number: int) -> list[int]:
    return [number] * LONG


def left(cache: Any, *numbers: int) -> list[int]:
    """Which of these prompts hit as a whole."""
    return [number for number in numbers if held(cache, prompt(number)) == LONG]


def mark(cache: Any, tokens: list[int]) -> None:
    """Mark a prefix as used just now, without saying until when it is wanted."""
    cache.lease(cache.match(tokens)).release()


@pytest.mark.parametrize("policy", BUILT_IN)
def test_what_nobody_wants_goes_first_under_every_policy(policy: str) -> None:
    cache = path_cache(policy=policy)
    for number, until in ((1, 50.0), (2, math.inf), (3, 50.0), (4, math.inf), (5, 200.0)):
        for _ in range(2):
            serve(cache, prompt(number), until=until, priority=number)
    cache.expire(100)
    assert left(cache, 1, 2, 3, 4, 5) == [1, 2, 3, 4, 5]
    cache.evict(2 * LONG)
    assert left(cache, 1, 2, 3, 4, 5) == [2, 4, 5]
    settle(cache)


SERVED = {
    "nothing goes earlier": ([1, (2, 50.0), "expire 49.9"], 1, [2]),
    "wanted for ever by its last user": ([2, (1, 50.0), (1, math.inf), "expire 100"], 1, [1]),
    "wanted for longer by its last user": ([2, (1, 50.0), (1, 200.0), "expire 100"], 1, [1]),
    "wanted too short by its last user": ([2, (1, 50.0), (1, 90.0), "expire 100"], 1, [2]),
    "used after its time it is as any other": (
        [(1, 50.0), (2, 50.0), 3, "expire 100", 1, "expire 101"], 2, [1],
    ),
    "a flush forgets all times": ([(1, 50.0), "flush", 1, 2, "expire 100"], 1, [2]),
    "many times that come later": (
        [(1, 50.0), 2, *((3, 100.0 + number) for number in range(200)), "mark 1", "expire 50"], 1, [2, 3],
    ),
}  # fmt: skip
"""Prompts that are served, some with a time until which they are wanted; how many are evicted, and which are left."""


@pytest.mark.parametrize("case", SERVED)
def test_prompt_goes_first_when_its_last_user_wants_it_no_more(case: str) -> None:
    cache = path_cache()
    script, evicted, expected = SERVED[case]
    for each in script:
        verb, _, at = each.partition(" ") if isinstance(each, str) else ("serve", "", "")
        if verb == "expire":
            cache.expire(float(at))
        elif verb == "flush":
            cache.flush()
        elif verb == "mark":
            mark(cache, prompt(int(at)))
        else:
            number, until = each if isinstance(each, tuple) else (each, math.inf)
            serve(cache, prompt(number), until=until)
    cache.evict(evicted * LONG)
    assert left(cache, *range(1, 4)) == expected
    settle(cache)


def test_every_component_gives_first_what_nobody_wants() -> None:
    cache = cache_of(part("path", Path()), part("window", Window(10)), part("state", Point()), slots=12)
    serve(cache, prompt(1))
    serve(cache, prompt(2), until=50, chunk=8)
    cache.expire(50)
    cache.evict({"state": 2})
    assert left(cache, 1, 2) == [1]
    serve(cache, prompt(3), until=60)
    cache.expire(60)
    cache.evict({"window": 3})
    assert left(cache, 1, 3) == [1]


def test_a_prefix_is_wanted_as_long_as_anything_below_it() -> None:
    """Turns of a conversation go whole once the last is not wanted any more, and a prefix of others stays."""
    cache = path_cache()
    shared = [9] * 8
    serve(cache, [7] * LONG)
    serve(cache, [*shared, *[8] * 8])
    for turns in (1, 2, 3):
        serve(cache, [*shared, *prompt(1)[:8] * turns], until=50.0 * turns)
    cache.expire(100)
    cache.evict(8)
    assert held(cache, [*shared, *[1] * 24]) == 32 and held(cache, [7] * LONG) == 0, "the last turn is wanted"
    serve(cache, [7] * LONG)
    mark(cache, [*shared, *[1] * 8])
    cache.expire(150)
    cache.evict(24)
    assert held(cache, [*shared, *[1] * 24]) == 8 and held(cache, [7] * LONG) == LONG
    assert held(cache, [*shared, *[8] * 8]) == LONG
    settle(cache)


def test_the_rest_of_a_path_goes_first_where_its_end_has_gone_already() -> None:
    cache = path_cache(tokens=64)
    serve(cache, prompt(1), chunk=8, until=50)
    serve(cache, prompt(2))
    cache.evict(8)
    mark(cache, prompt(1))
    assert held(cache, prompt(1)) == 8
    cache.expire(50)
    cache.evict(8)
    assert (held(cache, prompt(1)), held(cache, prompt(2))) == (0, LONG)


def test_a_time_may_be_set_while_a_sequence_runs() -> None:
    cache = path_cache()
    serve(cache, prompt(1))
    with cache.open(prompt(2), until=10) as sequence:
        run(sequence, LONG)
        sequence.publish()
        assert sequence.until == 10
        sequence.until = 50
    cache.expire(40)
    cache.evict(LONG)
    assert left(cache, 1, 2) == [2]
    cache.expire(50)
    serve(cache, prompt(3))
    cache.evict(LONG)
    assert left(cache, 2, 3) == [3]


def test_what_runs_when_its_time_comes_goes_first_at_its_end() -> None:
    cache = path_cache()
    for ends in ("close", "abort"):
        sequence = cache.open(prompt(2), until=50)
        run(sequence, LONG)
        sequence.publish()
        cache.expire(60)
        getattr(sequence, ends)()
        serve(cache, prompt(1))
        mark(cache, prompt(2))
        cache.expire(60)
        cache.evict(LONG)
        assert left(cache, 1, 2) == [1]


def test_a_split_half_is_wanted_as_long_as_the_whole_was() -> None:
    cache = path_cache()
    serve(cache, prompt(1), until=50)
    serve(cache, [*prompt(1)[:8], 5, 5, 5, 5, 5, 5, 5, 5], until=20)
    serve(cache, prompt(2))
    mark(cache, prompt(1)[:8])
    cache.expire(50)
    cache.evict(24)
    assert held(cache, prompt(1)) == 0 and left(cache, 2) == [2]


@pytest.mark.parametrize("write", ["through", "back"])
def test_the_tier_below_gives_it_first_as_well(write: str) -> None:
    cache = tiered(part("path", Path()), host=2 * LONG, write=write, capacity={"path": 2 * LONG})
    serve(cache, prompt(1))
    serve(cache, prompt(2), until=50)
    if write == "back":
        cache.evict(2 * LONG)
        cache.poll()
    cache.expire(50)
    serve(cache, prompt(3))
    cache.evict(3 * LONG)
    cache.poll()
    found = []
    for number in (1, 2, 3):
        with cache.open(prompt(number)) as sequence:
            found.append(sequence.restore().ready)
            sequence.abort()
    assert found == [LONG, 0, LONG]


def test_what_is_restored_is_wanted_as_long_as_who_restored_it_says() -> None:
    cache = tiered(part("path", Path()), host=256, write="through", capacity={"path": 2 * LONG})
    serve(cache, prompt(1), until=10)
    cache.evict(LONG)
    cache.expire(20)
    with cache.open(prompt(1), until=90) as sequence:
        assert sequence.restore().ready == LONG
    serve(cache, prompt(2))
    cache.expire(80)
    mark(cache, prompt(1))
    cache.expire(80)
    assert left(cache, 1, 2) == [1, 2]
    cache.expire(90)
    cache.evict(LONG)
    assert left(cache, 1, 2) == [2]


def test_what_was_restored_is_wanted_on_every_tier_while_its_sequence_runs() -> None:
    cache = tiered(part("path", Path()), host=2 * LONG, write="through", capacity={"path": 2 * LONG})
    serve(cache, prompt(2))
    serve(cache, prompt(1), until=50)
    cache.evict(2 * LONG)
    with cache.open(prompt(1), until=90) as sequence:
        assert sequence.restore().ready == LONG
        cache.expire(60)
    cache.evict(LONG)
    serve(cache, prompt(3))
    found = []
    for number in (1, 2):
        with cache.open(prompt(number)) as sequence:
            found.append(sequence.restore().ready)
            sequence.abort()
    assert found == [LONG, 0]


def test_an_engine_that_lends_its_slots_says_it_too() -> None:
    path = part("path", Path())
    cache = compose(None, plugins=[path], page_size=4, capacity=256, slots="lent", device="meta", debug=True)
    for number, until in ((1, math.inf), (2, 50.0)):
        assert cache.insert(prompt(number), {"path": range(4 * number, 4 * number + 4)}, until=until).length == LONG
    cache.expire(50)
    cache.evict(LONG)
    assert cache.take_back()["path"].tolist() == [8, 9, 10, 11]
    assert left(cache, 1, 2) == [1]


def test_lower_priority_goes_first() -> None:
    cache = path_cache(policy="priority")
    serve(cache, prompt(1))
    serve(cache, prompt(2), priority=-1)
    cache.evict(LONG)
    assert left(cache, 1, 2) == [1]


def test_who_computes_what_is_cached_with_a_higher_priority_raises_it() -> None:
    cache = path_cache(policy="priority")
    low, high = cache.open(prompt(1)), cache.open(prompt(1), priority=1)
    for sequence in (low, high):
        run(sequence, LONG)
        sequence.close()
    serve(cache, prompt(2))
    cache.evict(LONG)
    assert left(cache, 1, 2) == [1]


def test_times_that_are_no_times_are_refused() -> None:
    cache = path_cache()
    for wrong in (math.nan, -math.inf, "soon", None, True):
        with pytest.raises(InputError, match="until is a number on the engine's clock"):
            cache.open(prompt(1), until=wrong)
        with pytest.raises(InputError, match="now is a number on the engine's clock"):
            cache.expire(wrong)
        with cache.open(prompt(1)) as sequence, pytest.raises(InputError, match="until is a number"):
            sequence.until = wrong
    with pytest.raises(InputError, match="now is a number on the engine's clock"):
        cache.expire(math.inf)


def test_the_times_of_many_requests_take_no_more_memory_than_the_tree() -> None:
    """Each request that leaves something has a time of its own, and none comes."""
    cache = path_cache(tokens=128, debug=False)
    for number in range(3000):
        serve(cache, [number % 40, *prompt(1)], until=1e9 + number)
    expiries = cache.core.index.expiries
    assert expiries is not None and 0 < len(expiries) <= 2 * cache.stats().nodes + 64
    cache.expire(2e9)
    assert len(expiries) == 0
