"""Lesson 2, overlap_race: a state was snapshotted while the forward pass was still writing it.

The scheduler is a step or more ahead of the streams. The invariant: slot content is read, copied or cleared only after
its producer and before its next writer; deferred work runs exactly once. Every test runs a scenario in every order in
which its actors' actions and the pieces on its streams may come, up to what commutes. In each: what is published equals
its key, what comes out is right, the race detector is silent, and all slots are back at the end.
"""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import CapacityError
from prefixloom.testing.schedules.explore import ScheduleRun as Run
from tests.support.sampling import only
from tests.support.schedules import FEW, KINDS, MORE, PROMPT, Runner, Steps, World, explored

# ---------------------------------------------------------------- chunked prefill, decode


def chunks(world: World, runner: Runner, *ends: int, **options: Any) -> Steps:
    """forward N, N + 1, ...: one action each."""
    for end in ends:
        yield f"schedule the step to {end}"
        yield from world.prefill(world.stream, runner, end - runner.sequence.reserved, **options)


def checkpoints(world: World, runner: Runner, steps: int) -> Steps:
    """checkpoint N: publish what the last step committed, at any time after it was enqueued."""
    for step in range(steps):
        yield f"checkpoint {step}", lambda step=step: len(runner.steps) > step
        runner.publish()


def results(world: World, runner: Runner, steps: int) -> Steps:
    """result N: the scheduler sees that step N is over."""
    for step in range(steps):
        yield f"result {step}", runner.result(step)
        world.cache.poll()


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("how", ["whole", "split", "inside"])
def test_a_chunked_prefill_that_is_published_while_it_runs(kinds: str, every: int, how: str) -> None:
    """With and without extra buffer for tracked states; with layers in one piece, layer by layer, and with others
    acting while a step is planned and open."""
    ends = (4, 8, 12) if MORE else (4, 8)

    def scenario(run: Run) -> None:
        world = World(run, kinds, every=every)
        runner = world.open(PROMPT)
        run.actor("scheduler", chunks(world, runner, *ends, split=how == "split", inside=how == "inside"))
        run.actor("checkpointer", checkpoints(world, runner, len(ends)))
        if how != "inside":
            run.actor("results", results(world, runner, len(ends)))

    explored(scenario)


@pytest.mark.parametrize("kinds", FEW)
@pytest.mark.parametrize("every", [0, 2])
def test_decoding_one_step_ahead_of_the_tokens(kinds: str, every: int) -> None:
    """A slot is taken before its token is known: step N + 1 is enqueued, and only then comes result N."""
    steps = 4 if MORE else 3

    def scenario(run: Run) -> None:
        world = World(run, kinds, every=every)
        runner = world.open(PROMPT[:3], more=PROMPT[3 : 3 + steps])

        def scheduler() -> Steps:
            yield "prefill"
            yield from world.prefill(world.stream, runner, 3)
            for step in range(steps):
                yield f"schedule step {step}"
                yield from world.prefill(world.stream, runner, 1)
            yield "close, when the last token came", lambda: runner.sequence.named == 3 + steps
            runner.sequence.close()

        def tokens() -> Steps:
            for step in range(steps):
                yield f"result {step}", runner.result(step)
                runner.sequence.append(PROMPT[3 + step : 4 + step])
                if step % 2:
                    world.cache.poll()
                    runner.publish()

        run.actor("scheduler", scheduler())
        run.actor("results", tokens())

    explored(scenario)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("other", [False, True])
def test_a_draft_step_between_two_steps_reads_what_they_wrote_and_runs_no_ops(kinds: str, other: bool) -> None:
    """The draft model on the same stream, and on one of its own."""

    def scenario(run: Run) -> None:
        world = World(run, kinds, "forward", "draft", every=2)
        world.serve(PROMPT[:4])
        runner = world.open(PROMPT)

        def scheduler() -> Steps:
            yield "step to 6"
            yield from world.prefill(world.stream, runner, 2)
            yield "draft"
            yield from world.forward(world.streams[other], runner, role="draft", inside=MORE)
            yield "step to 10"
            yield from world.prefill(world.stream, runner, 4)

        run.actor("scheduler", scheduler())
        run.actor("checkpointer", checkpoints(world, runner, 3))
        run.at_end(lambda: _drafts(runner))

    def _drafts(runner: Runner) -> None:
        assert [length for length, _ in runner.drafts] == [6] * len(kinds)

    explored(scenario)


WRONG = 5


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("accepted", [(3, 2), (1, 3)])
@pytest.mark.parametrize("ends", [False, True])
def test_speculation_with_the_accepted_count_on_the_device(kinds: str, accepted: tuple[int, ...], ends: bool) -> None:
    """Verify three tokens, keep some: the state follows on the device, the scheduler hears of it a step later.

    The guesses are named, as a request may end (``ends``) before it is known which of them hold.
    """

    def scenario(run: Run) -> None:
        world = World(run, kinds, every=2, rewind=2, slots=12)
        runner = world.open(PROMPT[:5], more=PROMPT[5:])

        def scheduler() -> Steps:
            yield "prefill"
            yield from world.prefill(world.stream, runner, 5)
            for number, kept in enumerate(accepted):
                yield f"verify {number}"
                yield from verify(world, runner, kept)
                yield f"result {number}", runner.steps[-1]
                if not runner.sequence.open:
                    return
                runner.sequence.rewind(3 - kept)
                runner.guesses.clear()
                runner.out = {at: value for at, value in runner.out.items() if at < runner.sequence.reserved}

        def other() -> Steps:
            yield "publish", lambda: len(runner.steps) > 0
            if not runner.guesses:
                runner.publish()
            if ends:
                yield "close", lambda: len(runner.steps) > 1
                runner.tokens = tuple(runner.guesses.get(at, token) for at, token in enumerate(runner.tokens))
                runner.sequence.close()

        run.actor("scheduler", scheduler())
        run.actor("other", other())

    explored(scenario)


def verify(world: World, runner: Runner, kept: int) -> Steps:
    """A step over three tokens that are guessed, of which the first ``kept`` will turn out right."""
    if not runner.sequence.open:
        return
    at = runner.sequence.reserved
    runner.guesses = {at + number: WRONG for number in range(kept, 3)}
    runner.sequence.append([runner.guesses.get(at + number, runner.tokens[at + number]) for number in range(3)])
    yield from world.prefill(world.stream, runner, 3, kept=[kept])


# ---------------------------------------------------------------- abort, eviction, recycled slots


def aborting(world: World, runner: Runner) -> Steps:
    yield "abort"
    runner.sequence.abort()
    yield "poll"
    world.cache.poll()


def another(world: World, stream: Any, tokens: tuple[int, ...], planned: list[int]) -> Steps:
    """Somebody else, who gets whatever slots there are; who steps when no other step is open."""
    yield "open and grow"
    runner = world.open(tokens, label="another")
    try:
        runner.sequence.grow(len(tokens))
    except CapacityError:  # before the abort there is no room
        return
    yield "step, and publish", lambda: bool(planned)
    yield from world.forward(stream, runner)
    runner.publish()


@pytest.mark.parametrize("kinds", only(FEW, "M"))
@pytest.mark.parametrize("other", [False, True])
def test_an_abort_between_plan_and_run_and_while_the_step_runs(kinds: str, other: bool) -> None:
    """Another sequence gets the slots, on the same stream or on another; late writes of the aborted step hit nobody."""

    def scenario(run: Run) -> None:
        world = World(run, kinds, "forward", "other", tokens=8, slots=2, every=0)
        runner, planned = world.open(PROMPT), []
        runner.sequence.grow(6)
        step = world.forward(world.stream, runner, inside=True)
        first = next(step)

        def scheduler() -> Steps:
            yield first
            yield from step
            planned.append(1)

        run.actor("scheduler", scheduler())
        run.actor("aborting", aborting(world, runner))
        run.actor("another", another(world, world.streams[other], (0, 1, 2, 3), planned))

    explored(scenario)


@pytest.mark.parametrize("kinds", KINDS)
def test_slots_that_retire_together_and_are_taken_by_two_on_two_streams(kinds: str) -> None:
    """One abort gives back what two others take, one after the other: both come after the step that still writes."""

    def scenario(run: Run) -> None:
        world = World(run, kinds, "forward", "second", "third", tokens=8, slots=3)
        runner = world.open(PROMPT)

        def scheduler() -> Steps:
            yield "step"
            yield from world.prefill(world.stream, runner, 8)
            yield "abort"
            runner.sequence.abort()
            for number, stream in enumerate(world.streams[1:]):
                yield f"open and step {number}"
                one = world.open(range(10 * number, 10 * number + 4))
                yield from world.prefill(stream, one, 4)

        run.actor("scheduler", scheduler())

    explored(scenario)


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("what", ["plan", "open"])
def test_an_eviction_between_plan_and_run(kinds: str, what: str) -> None:
    """Of what was matched (the plan is stale then), and of what is leased and not copied yet (it stays)."""

    def scenario(run: Run) -> None:
        world = World(run, kinds, "forward", "other", tokens=24, slots=6)
        world.serve(PROMPT[:8], 4, 8)
        made = [world.cache.match(PROMPT)] if what == "plan" else [world.open(PROMPT)]

        def scheduler() -> Steps:
            yield "open"
            runner = world.open_plan(made[0], PROMPT) if what == "plan" else made[0]
            yield "grow"
            runner.sequence.grow(10 - runner.sequence.reserved)
            yield from world.forward(world.stream, runner, inside=True)

        def evicting() -> Steps:
            yield "evict"
            for name in world.names:
                world.cache.evict({name: 8})
            yield "take what is free"
            one = world.open((0, 1, 2, 3), label="another")
            yield from world.prefill(world.streams[1], one, 4)

        run.actor("scheduler", scheduler())
        run.actor("evicting", evicting())

    explored(scenario)
