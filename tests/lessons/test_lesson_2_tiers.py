"""Lesson 2 again, with copies between tiers in flight: layers, loads and backups on streams of their own.

In every order: what the device and the host hold equals its key, what comes out is right, the race detector is silent,
nothing is lost, and a copy that fails ends only who read what it should have brought.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from prefixloom import CapacityError
from prefixloom.testing.schedules.explore import ScheduleRun as Run
from tests.support.schedules import FEW, KINDS, PROMPT, Runner, Steps, explored
from tests.support.schedules_tiers import TieredWorld

CACHED = PROMPT[:4]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def served(run: Run, kinds: str, *streams: str, **options: Any) -> TieredWorld:
    world = TieredWorld(run, kinds, *streams, **options)
    world.serve(CACHED)
    world.below(*CACHED)
    world.go()
    return world


def restoring(world: TieredWorld, stream: Any, found: list[Runner], count: int = 4, more: int = 2) -> Steps:
    """Open, restore, step on, publish, step again."""
    yield "open and restore"
    runner = world.open(PROMPT[: count + more])
    found.append(runner)
    told = runner.sequence.restore()
    assert told.ready == runner.sequence.ready
    yield "step"
    if runner.sequence.open:
        yield from world.prefill(stream, runner, runner.sequence.named - runner.sequence.reserved)
        runner.publish()


def polling(world: TieredWorld, times: int) -> Steps:
    for _ in range(times):
        yield "poll"
        world.cache.poll()


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("other", [False, True])
def test_a_step_and_another_sequence_read_what_a_load_has_yet_to_bring(kinds: str, other: bool) -> None:
    """The second finds on the device what the first one's load is still to write; on the same stream or on another."""

    def scenario(run: Run) -> None:
        world = served(run, kinds, "forward", "other")
        first: list[Runner] = []
        second: list[Runner] = []
        run.actor("first", restoring(world, world.streams[0], first))
        run.actor("second", restoring(world, world.streams[other], second))
        run.actor("poll", polling(world, 1))

        def check() -> None:
            ready = {first[0].sequence.ready, second[0].sequence.ready}
            assert ready in ({4}, {4, 6}), "one of them may find what the other has published since"
            assert world.cache.core.below.copies.restores == 1 or kinds == "M"  # type: ignore[union-attr]

        run.at_end(check)

    explored(scenario)


@pytest.mark.parametrize("kinds", KINDS)
def test_an_abort_while_a_load_runs_and_slots_that_go_to_another(kinds: str) -> None:
    """What the load still writes is nobody's, or the tree's: late copies hit nobody who got the slots."""

    def scenario(run: Run) -> None:
        world = served(run, kinds, "forward", tokens=8, slots=3)
        found: list[Runner] = []

        def first() -> Steps:
            yield "open and restore"
            found.append(world.open(PROMPT[:6]))
            found[0].sequence.restore()
            yield "abort"
            found[0].sequence.abort()
            yield "evict"
            world.cache.evict(dict.fromkeys(world.names, 3))

        def another() -> Steps:
            yield "open and grow"
            runner = world.open((0, 1, 2, 3), label="another")
            try:
                runner.sequence.grow(4)
            except CapacityError:
                return
            yield "step, and publish"
            yield from world.forward(world.stream, runner)
            runner.publish()

        run.actor("first", first())
        run.actor("another", another())

    explored(scenario)


@pytest.mark.parametrize("kinds", FEW)
@pytest.mark.parametrize("write", ["through", "back"])
def test_published_copied_down_evicted_and_restored_by_another_while_all_that_runs(kinds: str, write: str) -> None:
    def scenario(run: Run) -> None:
        world = TieredWorld(run, kinds, "forward", write=write, tokens=32, slots=6)
        found: list[Runner] = []

        def first() -> Steps:
            yield "step"
            runner = world.open(CACHED)
            yield from world.prefill(world.stream, runner, 4)
            runner.publish()
            yield "close and evict"
            runner.sequence.close()
            world.cache.evict(dict.fromkeys(world.names, 1000))

        def second() -> Steps:
            yield from restoring(world, world.stream, found)

        run.actor("first", first())
        run.actor("second", second())

    report = explored(scenario)
    assert len(report.outcomes) > 1


@pytest.mark.parametrize(("kinds", "fails"), [(kinds, nth + 1) for kinds in KINDS for nth in range(len(kinds))])
def test_a_load_that_fails_after_its_launch_ends_who_read_it_and_is_forgotten(kinds: str, fails: int) -> None:
    def scenario(run: Run) -> None:
        world = served(run, kinds, fails=[fails])
        world.may_fail = True
        found: list[Runner] = []
        run.actor("first", restoring(world, world.stream, found))
        run.actor("poll", polling(world, 2))

        def afterwards() -> None:
            assert found[0].sequence.running.failed is not None
            assert world.cache.core.below.copies.failed == 1  # type: ignore[union-attr]

        run.at_end(afterwards)

    explored(scenario)


@pytest.mark.parametrize("kinds", FEW)
def test_a_copy_down_that_fails_ends_nobody(kinds: str) -> None:
    """Write-through: who published and who reads on the device go on; the host has nothing of what failed."""

    def scenario(run: Run) -> None:
        world = TieredWorld(run, kinds, "forward", "other", write="through", fails=[1])
        world.may_fail = True
        world.go()
        runners: list[Runner] = []

        def first() -> Steps:
            yield "step and publish"
            runner = world.open(PROMPT[:6])
            runners.append(runner)
            if runner.sequence.ready < 4:
                yield from world.prefill(world.stream, runner, 4 - runner.sequence.ready)
                runner.publish()
            yield "step on"
            yield from world.prefill(world.stream, runner, 6 - runner.sequence.reserved)

        def second() -> Steps:
            yield "open and step"
            runners.append(world.open(PROMPT[:6]))
            yield from world.prefill(world.streams[1], runners[-1], 6 - runners[-1].sequence.ready)

        run.actor("first", first())
        run.actor("second", second())
        run.actor("poll", polling(world, 1))

        def afterwards() -> None:
            assert all(runner.sequence.running.failed is None for runner in runners)

        run.at_end(afterwards)

    explored(scenario)


@pytest.mark.parametrize("kinds", FEW)
def test_a_step_that_fails_takes_back_what_was_copied_of_it(kinds: str) -> None:
    """It was published and copied down before its failure was known; whoever loaded that ends as well."""

    def scenario(run: Run) -> None:
        world = TieredWorld(run, kinds, "forward", "other", write="through")
        world.may_fail = True
        found: list[Runner] = []

        def first() -> Steps:
            yield "step that fails, publish, close and evict"
            runner = world.open(CACHED)
            yield from world.prefill(world.stream, runner, 4, fails=True)
            runner.publish()
            runner.sequence.close()
            world.cache.evict(dict.fromkeys(world.names, 1000))

        run.actor("first", first())
        run.actor("second", restoring(world, world.streams[1], found))

    explored(scenario)


@pytest.mark.parametrize("kinds", FEW)
def test_a_load_while_the_host_slots_it_reads_are_given_to_others(kinds: str) -> None:
    """The host has no room but what the load reads: what goes there next waits for the load."""

    def scenario(run: Run) -> None:
        world = served(run, kinds, "forward", host=4 if kinds == "M" else 3, tokens=32)
        found: list[Runner] = []

        def second() -> Steps:
            yield "step and publish"
            runner = world.open((0, 1, 2, 3), label="another")
            yield from world.prefill(world.stream, runner, 4)
            yield "close and evict"
            runner.sequence.close()
            world.cache.evict(dict.fromkeys(world.names, 1000))

        run.actor("first", restoring(world, world.stream, found))
        run.actor("second", second())

    explored(scenario)


@pytest.mark.parametrize("kinds", ["M", "FM"])
@pytest.mark.parametrize("filled", [False, True])
def test_a_state_that_a_load_brings_is_filled_once(kinds: str, filled: bool) -> None:
    """A copy whose source is still loading is a second target of that load, unless the slot was filled already."""

    def scenario(run: Run) -> None:
        world = served(run, kinds, "forward", "other")

        def first() -> Steps:
            yield "open"
            runner = world.open(PROMPT[:6])
            if filled:
                yield "a step without tokens"
                yield from world.forward(world.streams[1], runner)
            yield "restore"
            assert runner.sequence.restore().ready == 4
            yield "step"
            yield from world.prefill(world.stream, runner, 2)

        run.actor("first", first())
        run.actor("poll", polling(world, 1))

    explored(scenario)
