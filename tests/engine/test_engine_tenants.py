"""Tenants of one engine: whatever one asks, another gets its part of what runs, its turn, and what it had cached."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import attrs
import pytest

from prefixloom_engine import Engine, Observer, Request
from prefixloom_engine.disaggregation.messages import Question, decode_question, encode_question
from prefixloom_engine.serving.scheduler import Scheduler
from tests.support.engines import cache_for, model, nothing_left, plain, prompt

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
HIGHEST = 2**31 - 1


def of(tenant: str, seed: int, length: int, most: int, **more: Any) -> Request:
    return Request(prompt(seed, length), most, tenant=tenant, namespace=tenant, **more)


def running(engine: Engine) -> Counter[str]:
    return Counter(job.request.tenant for job in engine._scheduler.running)


class Admitted(Observer):
    """In which order jobs were admitted, each at its first time."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def admitted(self, number: int, hit: int) -> None:
        if number not in self.numbers:
            self.numbers.append(number)


@pytest.mark.parametrize(("share", "overlap"), [(1.0, True), (3.0, False)])
def test_a_tenant_that_comes_late_gets_its_part_of_the_rows_and_no_more(overlap: bool, share: float) -> None:
    greedy = [of("greedy", seed, 40, 60, priority=HIGHEST) for seed in range(12)]
    honest = [of("honest", 100 + seed, 40, 20) for seed in range(5)]
    cache = cache_for(model(), shares={})
    shares = {"honest": share}
    options: dict[str, Any] = {"max_running": 4, "policy": "priority", "overlap": overlap, "shares": shares}
    with Engine(model(), cache, **options) as engine:
        first = [engine.add(request) for request in greedy]
        for _ in range(6):
            engine.step()
        assert running(engine) == {"greedy": 4}, "alone it has all"
        second = [engine.add(request) for request in honest]
        part = 2 if share == 1 else 3
        for _ in range(4):
            engine.step()
        assert running(engine) == {"greedy": 4 - part, "honest": part}
        assert engine.counts.retracted == part
        while not all(answer.done for answer in second):
            engine.step()
            assert running(engine)["honest"] <= part or len(engine._scheduler.waiting) == 0
        for _ in range(4):
            engine.step()
        assert running(engine) == {"greedy": 4}
        assert engine.counts.retracted == part, "nobody was set back twice"
        while not all(answer.done for answer in first):
            engine.step()
    assert [answer.tokens for answer in (*first, *second)] == plain(model(), [*greedy, *honest])
    nothing_left(cache)


def test_tenants_are_admitted_in_turn_and_each_in_the_order_of_its_own_priorities() -> None:
    admitted = Admitted()
    requests = [of("greedy", seed, 30, 4, priority=HIGHEST - seed % 2) for seed in range(8)]
    requests += [of("honest", 10 + seed, 30, 4, priority=-seed % 3) for seed in range(3)]
    requests += [of("third", 20, 30, 4)]
    cache = cache_for(model())
    with Engine(model(), cache, max_running=1, policy="priority", observers=[admitted]) as engine:
        engine.generate(requests)
    whose = [requests[number].tenant for number in admitted.numbers]
    assert whose[:6] == ["greedy", "honest", "third", "greedy", "honest", "greedy"]
    for tenant in ("greedy", "honest"):
        mine = [number for number in admitted.numbers if requests[number].tenant == tenant]
        assert mine == sorted(mine, key=lambda number: (-requests[number].priority, number))


def test_a_short_prompt_is_computed_between_the_chunks_of_long_ones_of_another_tenant() -> None:
    cache = cache_for(model())
    with Engine(model(), cache, chunk=64, policy="priority", overlap=False) as engine:
        long = [engine.add(of("greedy", seed, 640, 2, priority=HIGHEST)) for seed in range(4)]
        engine.step()
        answer = engine.add(of("honest", 9, 150, 1))
        steps = 0
        while not answer.done:
            engine.step()
            steps += 1
        assert steps <= 8 and not any(each.done for each in long), "three chunks, every second step one"


def test_who_comes_back_has_saved_no_turns() -> None:
    """Otherwise a tenant that was away would delay all others until it has been served as much as they."""
    cache = cache_for(model())
    admitted = Admitted()
    with Engine(model(), cache, max_running=1, policy="priority", observers=[admitted]) as engine:
        engine.generate([of("honest", 1, 30, 2)])
        engine.generate([of("busy", seed, 300, 2) for seed in range(8)])
        requests = [of("busy", 20 + at, 60, 2) for at in range(3)] + [of("honest", 40 + at, 60, 2) for at in range(3)]
        engine.generate(requests)
    whose = [requests[number - 9].tenant for number in admitted.numbers[9:]]
    assert whose in (["busy", "honest"] * 3, ["busy", "honest", "honest", "busy", "busy", "honest"])


def test_nobody_waits_for_a_row_that_another_has_beyond_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are no matter here. And what is answered is what is answered without a cache."""
    draw = random.Random(1)
    shares = {"a": 2.0, "b": 1.0, "c": 0.5}
    requests = [
        attrs.evolve(of(draw.choice("aabc"), number, draw.randrange(5, 60), draw.randrange(1, 30)), priority=number % 3)
        for number in range(30)
    ]
    plan, looked = Scheduler.plan, 0

    def checked(self: Scheduler) -> Any:
        nonlocal looked
        planned = plan(self)
        having = Counter(job.request.tenant for job in self.running)
        for job in self.waiting:
            if job.unread_passes == 0 and not job.apart_until:
                mine = job.request.tenant
                looked += 1
                for other, count in having.items():
                    if other != mine:
                        assert (count - 1) / shares[other] < (having[mine] + 1) / shares[mine], (having, mine)
        return planned

    monkeypatch.setattr(Scheduler, "plan", checked)
    cache = cache_for(model(), shares=shares)
    with Engine(model(), cache, max_running=5, chunk=4096, policy="priority", shares=shares) as engine:
        answers = []
        for request in requests:
            answers.append(engine.add(request))
            for _ in range(draw.randrange(4)):
                engine.step()
        while not all(answer.done for answer in answers):
            engine.step()
    assert looked > 100 and [answer.tokens for answer in answers] == plain(model(), requests)
    nothing_left(cache)


@pytest.mark.parametrize("kept", [True, False], ids=["while it asks", "when it asks no more"])
def test_what_a_tenant_has_cached_is_not_taken_for_running_requests_of_another(kept: bool) -> None:
    now = [0.0]
    cache = cache_for(model(), {"full": 640, "swa": 640, "mamba": 40}, shares={})
    mine = of("honest", 1, 200, 2)
    with Engine(model(), cache, max_running=8, policy="priority", clock=lambda: now[0]) as engine:
        engine.generate([mine])
        now[0] = 0.0 if kept else 10_000.0
        requests = [of("greedy", 10 + seed, 60, 40, priority=HIGHEST) for seed in range(8)]
        answers = [engine.add(request) for request in requests]
        most = 0
        while not all(answer.done for answer in answers):
            engine.step()
            most = max(most, running(engine)["greedy"])
        assert [answer.tokens for answer in answers] == plain(model(), requests)
        (again,) = engine.generate([mine])
    assert (again.hit == 192) is kept
    assert 2 <= most < 8 if kept else most >= 4
    nothing_left(cache)


def test_when_pages_are_short_the_tenant_that_has_most_of_them_is_set_back() -> None:
    back: list[str] = []
    retract = Scheduler.retract

    class Watched(Scheduler):
        def retract(self, job: Any) -> None:
            back.append(job.request.tenant)
            retract(self, job)

    requests = [of("greedy", seed, 100, 90, priority=HIGHEST) for seed in range(4)]
    late = [of("honest", 20 + seed, 60, 60) for seed in range(2)]
    cache = cache_for(model(), {"full": 720, "swa": 720, "mamba": 64})
    with Engine(model(), cache, policy="priority") as engine:
        engine._scheduler.__class__ = Watched
        answers = [engine.add(request) for request in requests]
        for _ in range(30):
            engine.step()
        answers += [engine.add(request) for request in late]
        while not all(answer.done for answer in answers):
            engine.step()
    assert back and set(back) == {"greedy"}
    assert [answer.tokens for answer in answers] == plain(model(), [*requests, *late])
    nothing_left(cache)


def test_a_prefill_process_is_told_whose_prompt_it_computes() -> None:
    """Else it compares the priorities of all tenants, and the greediest comes first there."""
    cache = cache_for(model())
    with Engine(model(), cache) as engine:
        assert engine.identity is not None
        asked = Question(of("greedy", 1, 40, 1, priority=HIGHEST), 0, engine.identity)
        frames = [memoryview(each) for each in encode_question(asked, cache)]
        assert decode_question(engine, frames).request.tenant == "greedy"
