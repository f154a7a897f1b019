"""Requests with a time to live: what they leave goes first once it is over, and not what others need longer."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import Cache
from prefixloom_engine import Engine, Request
from tests.support.engines import cache_for, model, nothing_left, prompt

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
CAPACITY = {"full": 2048, "swa": 2048, "mamba": 64}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Served:
    """An engine whose clock stands still until a test says so."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.cache: Cache = cache_for(model(), CAPACITY)
        self.engine = Engine(model(), self.cache, clock=self.clock)

    def ask(self, number: int, ttl: float | None = None, **options: Any) -> None:
        (answer,) = self.engine.generate([Request(prompt(number, 200), 4, ttl=ttl, **options)])
        assert answer.reason == "length"

    def later(self, seconds: float) -> None:
        self.clock.now += seconds
        self.engine.step()

    def left(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.cache.peek(prompt(number, 200)) >= 192]


@pytest.fixture
def served() -> Any:
    it = Served()
    with it.engine:
        yield it
    nothing_left(it.cache)


def test_what_a_request_leaves_goes_first_when_its_time_is_over(served: Served) -> None:
    served.ask(1)
    served.ask(2, ttl=60)
    served.later(59)
    served.ask(3, ttl=0)
    served.later(0)
    served.cache.evict(192)
    assert served.left(1, 2, 3) == [1, 2]
    served.later(2)
    served.cache.evict(192)
    assert served.left(1, 2) == [1]


def test_what_another_request_needs_longer_stays(served: Served) -> None:
    served.ask(3)
    served.ask(1, ttl=10)
    served.ask(2, ttl=10)
    served.ask(1)
    served.later(20)
    served.cache.evict(192)
    assert served.left(1, 2, 3) == [1, 3]


def test_the_time_is_counted_from_the_end_of_an_answer(served: Served) -> None:
    """Also where all that it leaves was published before its end."""
    served.ask(1)
    answer = served.engine.add(Request(prompt(2, 193), 8, ttl=10))
    while len(answer.tokens) < 4:
        served.engine.step()
    served.clock.now += 9
    while not answer.done:
        served.engine.step()
    served.later(9)
    served.cache.evict(192)
    assert served.left(1) == [] and served.cache.peek(prompt(2, 193)) >= 192
    served.ask(3)
    served.later(2)
    served.cache.evict(192)
    assert served.left(3) == [3] and served.cache.peek(prompt(2, 193)) == 0


def test_an_aborted_request_counts_from_its_end_as_well(served: Served) -> None:
    served.ask(1)
    answer = served.engine.add(Request(prompt(2, 200), 50, ttl=10))
    while len(answer.tokens) < 4:
        served.engine.step()
    served.clock.now += 9
    served.engine.abort(answer)
    served.later(9)
    served.cache.evict(192)
    assert served.left(1, 2) == [2]
