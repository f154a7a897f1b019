"""Lesson 2, overlap_race, of those who read what is not written yet, and of steps that fail: see the first part.

Content is published with the step that writes it, so a request may match and read what is only enqueued. It comes after
that step, on whatever stream; and if the step fails, all that was built on it goes.
"""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom.testing.schedules.explore import ScheduleRun as Run
from tests.support.schedules import FEW, KINDS, MORE, PROMPT, Runner, Steps, World, explored


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("other", [False, True])
def test_a_request_that_follows_at_once_does_not_miss_by_a_step(kinds: str, other: bool) -> None:
    """It matches what a running step has yet to write, and comes after it, on the same stream and on another."""
    ready = []

    def scenario(run: Run) -> None:
        world = World(run, kinds, "forward", "other", every=0)
        first = world.open(PROMPT[:8])

        def scheduler() -> Steps:
            yield "step to 4, and publish"
            yield from world.prefill(world.stream, first, 4)
            first.publish()
            yield "step to 8, and close"
            yield from world.prefill(world.stream, first, 4)
            first.sequence.close()

        def follower() -> Steps:
            yield "follow", lambda: first.sequence.published >= 4
            runner = world.open(PROMPT)
            ready.append(runner.sequence.ready)
            assert runner.sequence.ready == first.sequence.published
            yield "step of the follower"
            yield from world.prefill(world.streams[other], runner, 12 - runner.sequence.reserved, inside=MORE)
            runner.publish()

        def polling() -> Steps:
            yield "poll"
            world.cache.poll()

        run.actor("scheduler", scheduler())
        run.actor("follower", follower())
        run.actor("polling", polling())

    explored(scenario)
    assert set(ready) == {4, 8}


@pytest.mark.parametrize("kinds", FEW)
@pytest.mark.parametrize("other", [False, True])
def test_two_that_compute_the_same_at_once_read_one_of_them_afterwards(kinds: str, other: bool) -> None:
    """The second to publish gives its duplicates back, and reads what the other's step may still be writing."""

    def scenario(run: Run) -> None:
        world = World(run, kinds, "forward", "other", every=0, tokens=24)
        runners = [world.open(PROMPT, label=name) for name in ("one", "two")]

        def scheduler(runner: Runner, stream: Any) -> Steps:
            yield "step to 4"
            yield from world.prefill(stream, runner, 4)
            yield "publish"
            runner.publish()
            yield "step to 8"
            yield from world.prefill(stream, runner, 4)

        run.actor("one", scheduler(runners[0], world.stream))
        run.actor("two", scheduler(runners[1], world.streams[other]))

    explored(scenario)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("kinds", FEW)
@pytest.mark.parametrize(("other", "failing"), [(False, 0), (True, 1), *([(False, 1), (True, 0)] if MORE else [])])
def test_a_step_that_fails_is_taken_back_while_somebody_reads_it(kinds: str, other: bool, failing: int) -> None:
    """It was published with its step; a follower matched it, stepped, and perhaps published on top of it."""

    def scenario(run: Run) -> None:
        world = World(run, kinds, "forward", "other", every=0, tokens=24, slots=8)
        world.may_fail = True
        first = world.open(PROMPT[:8], label="first")

        def scheduler() -> Steps:
            for number in range(2):
                yield f"step {number}"
                if first.sequence.open:
                    yield from world.prefill(world.stream, first, 4, fails=number == failing)
                    first.publish()

        def follower() -> Steps:
            yield "follow", lambda: bool(first.steps) or not first.sequence.open
            runner = world.open(PROMPT, label="follower")
            yield "step of the follower"
            if runner.sequence.open:
                yield from world.prefill(world.streams[other], runner, 12 - runner.sequence.reserved)
            yield "the follower publishes"
            runner.publish()

        def polling() -> Steps:
            yield "poll"
            world.cache.poll()

        run.actor("scheduler", scheduler())
        run.actor("follower", follower())
        run.actor("polling", polling())

    explored(scenario)


@pytest.mark.parametrize("kinds", KINDS)
def test_duplicates_are_given_back_inside_of_the_step_that_was_to_read_them(kinds: str) -> None:
    """Between run_ops and the layers the table comes to name pages that another stream is still writing."""

    def scenario(run: Run) -> None:
        world = World(run, kinds, "forward", "other", tokens=24)
        one, two = (world.open(PROMPT, label=name) for name in ("one", "two"))
        for runner, stream in ((two, world.streams[1]), (one, world.stream)):
            for _ in world.prefill(stream, runner, 4):
                pass
        one.publish()

        def scheduler() -> Steps:
            yield "plan the step to 8"
            yield from world.prefill(world.streams[1], two, 4, inside=True)

        def publisher() -> Steps:
            yield "publish"
            two.publish(4)

        run.actor("scheduler", scheduler())
        run.actor("publisher", publisher())

    explored(scenario)
