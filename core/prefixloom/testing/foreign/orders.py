"""Runs a few requests in every order: of the scheduler's actions among themselves, and of these and the device's work.

The scheduler's actions are interleaved in all ways that keep each request's own order. For each interleaving the
schedule explorer lets the device be as far behind as the scheduler allows it. The same things are checked as in a
script, and at the end every finished prompt is asked for again: nothing was evicted, so the same prompt must hit the
same number of tokens after any order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ...device.streams import Event
from ...script import Failure
from ..schedules.explore import FailingSchedule, Program, ScheduleRun, explore
from .forward import ForeignRequest
from .player import PATIENCE, ForeignPlayer, MakeForeign

FEW = 6
"""The most interleavings of the scheduler's actions that are run; if there are more, a sample of this size is."""
SCHEDULES = 8
"""The most schedules of the device for one interleaving."""


@attrs.frozen
class RequestPlan:
    """One request of an exploration: its prompt is computed in ``chunk`` tokens at a time, and then it samples."""

    tokens: tuple[int, ...]
    chunk: int
    sampled: int = 2
    salt: int = 0
    aborted: bool = False

    @property
    def actions(self) -> int:
        """How many actions the scheduler takes for it: it comes, goes on a few times, and ends."""
        return 1 - (-len(self.tokens) // self.chunk) + self.sampled + 1


@attrs.define
class OrdersReport:
    """What was explored. ``outcomes``: the different lists of hits in the end."""

    interleavings: int = 0
    schedules: int = 0
    complete: bool = True
    outcomes: dict[tuple[int, ...], Sequence[int]] = attrs.field(factory=dict)

    def __str__(self) -> str:
        part = "" if self.complete else ", a part of all"
        return f"{self.interleavings} interleavings, {self.schedules} schedules{part}"


def interleavings(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every order in which the actions of several requests can come; each is named by its request's number."""
    if not any(lengths):
        yield ()
    for number, length in enumerate(lengths):
        if length:
            rest = [each - (at == number) for at, each in enumerate(lengths)]
            for following in interleavings(rest):
                yield (number, *following)


def sampled_interleavings(lengths: Sequence[int]) -> tuple[list[tuple[int, ...]], bool]:
    """Return all orders if they are few, or a sample of them; and whether these are all."""
    found: list[tuple[int, ...]] = []
    for order in interleavings(lengths):
        found.append(order)
        if len(found) > FEW:
            break
    else:
        return found, True
    chance = random.Random(str(lengths))
    one_after_another = tuple(number for number, length in enumerate(lengths) for _ in range(length))
    sample = {one_after_another}
    while len(sample) < FEW:
        shuffled = list(one_after_another)
        chance.shuffle(shuffled)
        sample.add(tuple(shuffled))
    return sorted(sample), False


def explore_orders(make: MakeForeign, plans: Sequence[RequestPlan], schedules: int = SCHEDULES) -> OrdersReport:
    """Run some requests in every order. Failure: an order fails, or hits depend on the order."""
    report = OrdersReport()
    orders, report.complete = sampled_interleavings([plan.actions for plan in plans])
    for order in orders:
        try:
            found = explore(lambda run, order=order: _scenario(run, make, plans, order), budget=schedules)  # type: ignore[misc]
        except FailingSchedule as failing:
            topic = failing.error.topic if isinstance(failing.error, Failure) else "raised"
            raise Failure(topic, str(failing)) from failing
        report.interleavings += 1
        report.schedules += found.classes
        report.complete &= found.complete
        for outcome in found.outcomes:
            if isinstance(outcome, tuple):
                report.outcomes.setdefault(outcome, order)
    if len(report.outcomes) > 1:
        said = "; ".join(f"{list(hits)} after the order {list(order)}" for hits, order in report.outcomes.items())
        raise Failure("order", f"what hits in the end depends on the order: {said}")
    return report


def _scenario(run: ScheduleRun, make: MakeForeign, plans: Sequence[RequestPlan], order: Sequence[int]) -> None:
    player = ForeignPlayer(make, run.stream("device"))
    requests: dict[int, ForeignRequest] = {}

    def results(limit: int) -> Program:
        """Process results until at most ``limit`` passes wait for theirs. The device must have come so far."""
        while len(player.unprocessed) > limit:
            oldest = player.unprocessed[0]
            yield f"result of {oldest}", Event(player.stream, oldest.tick)
            player.apply(("result",))

    def scheduler() -> Program:
        done = [0] * len(plans)
        for number in order:
            plan, request = plans[number], requests.get(number)
            done[number] += 1
            if request is None:
                yield f"request {number} comes"
                player.apply(("open", plan.tokens, "", plan.salt))
                requests[number] = player.requests[-1]
            elif done[number] < plan.actions and not request.over:
                yield from goes_on(request, plan.chunk)
            elif plan.aborted and not request.over:
                yield f"{request.label} is aborted"
                player.apply(("abort", player.requests.index(request)))
            else:
                request.ending = player.awaits_a_sample(request)
        for request in requests.values():
            for _ in range(PATIENCE):
                if not request.over and player.awaits_a_sample(request):
                    request.ending = True
                    yield from results(0)
                elif not request.over:
                    yield from goes_on(request, len(request.text))
        yield from results(0)

    def goes_on(request: ForeignRequest, count: int) -> Program:
        yield from results(player.cache.ahead)
        if not request.over:
            yield f"{request.label} goes on"
            player.apply(("pass", ((player.requests.index(request), count),)))

    def again() -> None:
        """Ask for every finished prompt again."""
        while player.stream.pending:
            player.do_device()
        hits = []
        for number, request in sorted(requests.items()):
            if not plans[number].aborted:
                hits.append(player.ask((*request.text[: request.prompt], 9), request.namespace))
        player.finish()
        if not any(plan.aborted for plan in plans):
            run.outcome = tuple(hits)

    run.actor("scheduler", scheduler())
    run.at_end(again)


def plans_of(page: int) -> dict[str, list[RequestPlan]]:
    """Return the explorations of one cache, by what they are about."""
    text: Any = tuple(random.Random("orders").randrange(2) for _ in range(9 * page))
    forked = (*text[: 2 * page], *(2 for _ in range(2 * page)))
    twice = RequestPlan(text[: 3 * page + 1], page)
    midway = RequestPlan(text[: 4 * page + 1], page, sampled=0, aborted=True)
    return {
        "the same prompt twice, in chunks": [twice, twice],
        "two prompts that begin alike": [RequestPlan(text[: 4 * page], 2 * page), RequestPlan(forked, 4 * page)],
        "one is aborted midway": [midway, RequestPlan(text[: 4 * page + 1], 2 * page)],
    }
