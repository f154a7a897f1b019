"""Bugs of steps in flight that the schedule explorer or its author found: each test failed before its repair."""

from __future__ import annotations

import contextlib

import pytest
import torch

from prefixloom import CapacityError, Path, PluginError, Point, ProtocolError, RaceError
from prefixloom.device.streams import Event
from prefixloom.testing.schedules.simulated import SimulatedStream, Simulation
from tests.support.helpers import cache_of, enqueue, held, part, run, settle

TOKENS = list(range(40))


@pytest.mark.parametrize("again", [False, True], ids=["ends", "commits nothing more"])
def test_a_state_that_the_device_chose_is_not_published_before_it_is_known_of_which_length_it_is(again: bool) -> None:
    """accept, and the request ends before rewind told how many were kept: the slot stands for an unknown length."""
    cache = cache_of(part("path", Path()), part("state", Point(), max_rewind=2), max_rewind=2)
    sequence = cache.open(TOKENS[:8])
    run(sequence, 5)
    sequence.grow(3)
    with cache.step([sequence]) as step:
        step.run_ops()
        step.accept(torch.tensor([1]))
    if again:
        sequence.commit()
    sequence.close()
    assert held(cache, TOKENS[:8]) == 0, "the state of 6 tokens was published for 8"


def test_of_several_sequences_none_publishes_a_state_that_the_device_chose() -> None:
    cache = cache_of(part("path", Path()), part("state", Point(), max_rewind=2), max_rewind=2, slots=12)
    prompts = TOKENS[:8], TOKENS[8:16]
    sequences = [cache.open(prompt) for prompt in prompts]
    for sequence in sequences:
        run(sequence, 5)
        sequence.grow(3)
    with cache.step(sequences) as step:
        step.run_ops()
        step.accept(torch.tensor([1, 1]))
    for sequence in sequences:
        sequence.close()
    assert [held(cache, prompt) for prompt in prompts] == [0, 0], "a state of 6 tokens was published for 8"


class Broken(Exception):
    """What a step's layers raise on their stream."""


def fail() -> None:
    raise Broken


@pytest.mark.parametrize("free", [0, 4])
def test_slots_that_retired_together_are_taken_early_by_one_owner_at_a_time(free: int) -> None:
    """Two take of what one abort gave back, on two streams: both come after the step that may still write it."""
    cache = cache_of(part("path", Path()), tokens=32 + free)
    sim = Simulation("a", "b", "c")
    first = cache.open(TOKENS)
    first.grow(32)
    enqueue(sim["a"], first)
    first.abort()
    others = [cache.open([9] * 8), cache.open([8] * 8)]
    for other, name in zip(others, "bc", strict=True):
        other.grow(8)
        enqueue(sim[name], other)  # the race detector is silent
        assert not sim[name].ready, "the step waits"
    assert [stream.name for stream in sim.ready] == ["a"]
    sim.drain()
    cache.poll()
    with cache.open([7] * 8) as last:
        last.grow(8)
        assert last.running.fence == 0, "what is free for good has no fence"


def test_a_failed_step_is_not_told_in_the_middle_of_another_call() -> None:
    """``open`` asks what is over, to have a slot; if that ended the lease that it had just taken, slots were lost."""
    cache = cache_of(part("path", Path()), part("state", Point()), slots=4)
    sim = Simulation("a")
    first = cache.open(TOKENS[:8])
    first.grow(4)
    enqueue(sim["a"], first, work=fail)
    first.publish()
    sim.drain()
    follower = cache.open(TOKENS)
    assert (follower.ready, follower.open, first.open) == (4, True, True)
    cache.poll()
    assert (follower.open, first.open) == (False, False)
    with pytest.raises(ProtocolError, match="ended when a step or copy failed") as failure:
        follower.grow(1)
    assert isinstance(failure.value.__cause__, Broken)
    settle(cache)
    assert cache.stats().components["state"].free == 4


@pytest.mark.parametrize("call", ["grow", "publish", "step"])
def test_a_sequence_does_not_end_in_the_middle_of_a_call(call: str) -> None:
    parts = part("path", Path()), part("state", Point(), checkpoint_every=4)
    cache = cache_of(*parts, tokens=16, slots=4)
    sim = Simulation("a")
    sequence = cache.open(TOKENS)
    sequence.grow(4 if call != "grow" else 12)
    enqueue(sim["a"], sequence, work=fail)
    sim.drain()
    if call == "grow":
        with cache.open([5] * 8) as other, pytest.raises(CapacityError):
            other.grow(8)
    elif call == "publish":
        sequence.publish()
    else:
        sequence.grow(4)
        enqueue(sim["a"], sequence)
        sim.drain()
    assert sequence.open
    cache.poll()
    assert not sequence.open
    settle(cache)
    assert {name: c.free for name, c in cache.stats().components.items()} == {"path": 4, "state": 4}


def test_who_has_closed_is_told_what_failed_that_it_read() -> None:
    """An engine that gave a sequence back has its tokens still to come: it must not take them."""
    cache = cache_of(part("path", Path()))
    sim = Simulation("a", "b")
    first, fine = cache.open(TOKENS[:8]), cache.open([5] * 8)
    for sequence, name in ((first, "a"), (fine, "b")):
        sequence.grow(8)
        enqueue(sim[name], sequence, work=fail if sequence is first else int)
    first.publish()
    follower = cache.open(TOKENS)
    assert follower.ready == 8
    follower.grow(8)
    enqueue(sim["a"], follower)
    for sequence in (first, follower, fine):
        sequence.close()
        assert sequence.failed is None, "nobody knows yet"
    sim.drain()
    cache.poll()
    assert isinstance(first.failed, Broken)
    assert follower.failed is first.failed
    assert fine.failed is None
    assert (held(cache, TOKENS), held(cache, [5] * 8)) == (0, 8)


@pytest.mark.parametrize("late", [False, True])
def test_what_was_built_on_a_step_that_failed_goes_with_it_also_if_it_is_published_after_that(late: bool) -> None:
    """Somebody short of slots finds both steps over; the reader publishes; and only then the failure is told."""
    cache = cache_of(part("path", Path()), part("state", Point()))
    sim = Simulation("a", "b")
    first = cache.open(TOKENS[:8])
    first.grow(8)
    enqueue(sim["a"], first, work=fail)
    first.publish()
    follower = cache.open(TOKENS)
    assert follower.ready == 8
    follower.grow(8)
    enqueue(sim["b" if late else "a"], follower)
    sim.drain()
    other = cache.open([5] * 4)  # asks what is over
    follower.publish()
    assert held(cache, TOKENS) == 16
    cache.poll()
    assert {name: figures.cached for name, figures in cache.stats().components.items()} == {"path": 0, "state": 0}
    assert not follower.open
    other.close()
    settle(cache)


class Sudden(SimulatedStream):
    """Once ``armed``, all that is enqueued runs right after the first question whether some of it is over."""

    __slots__ = ("armed",)

    def reached(self, event: Event) -> bool:
        answer = super().reached(event)
        while self.pending and self.armed:
            self.advance()
        return answer


def test_steps_that_end_while_they_are_asked_for_are_not_told_before_those_that_they_come_after() -> None:
    """A step is over that came after one of which it was asked a moment before whether it is: that one failed."""
    cache = cache_of(part("state", Point()))
    stream = Sudden("a")
    stream.armed = False
    first = cache.open(TOKENS[:8])
    first.grow(8)
    enqueue(stream, first, work=fail)
    first.publish()
    follower = cache.open(TOKENS)
    follower.grow(8)
    enqueue(stream, follower)
    stream.armed = True
    cache.poll()
    with contextlib.suppress(ProtocolError):
        follower.publish()
    cache.poll()
    assert held(cache, TOKENS) == 0
    settle(cache)


def test_a_running_state_is_not_rewound_under_a_step_that_is_open() -> None:
    """The step brings the state to its end, whatever is taken back meanwhile: it would stand for another length."""
    cache = cache_of(part("path", Path()), part("state", Point(), max_rewind=2, checkpoint_every=4), max_rewind=2)
    with cache.open(TOKENS) as sequence:
        run(sequence, 5)
        sequence.grow(3)
        with cache.step([sequence]) as step:
            step.run_ops()
            sequence.grow(2)
            sequence.rewind(2)  # what the step does not compute
            with pytest.raises(ProtocolError, match="cannot rewind to 7: an open step computes up to 8"):
                sequence.rewind(1)
        sequence.rewind(1)
        run(sequence, 1)
    settle(cache)


def test_a_state_that_is_rewound_twice_before_the_next_step_is_copied_once() -> None:
    """Two copies into one slot in one batch: which of them is the last is a matter of the kernel."""
    cache = cache_of(part("path", Path()), part("state", Point(), max_rewind=2), max_rewind=2)
    with cache.open(TOKENS) as sequence:
        run(sequence, 4)
        run(sequence, 3)
        sequence.rewind(1)
        sequence.rewind(1)
        sequence.grow(1)
        with cache.step([sequence]) as step:
            (op,) = step.ops
            assert [*op.src, *op.dst] == [sequence.rewind_slots("state")[0], *sequence.pages("state")]
            step.run_ops()
    settle(cache)


def test_what_a_publication_between_plan_and_run_asks_to_be_copied_runs_with_the_step() -> None:
    """The scheduler asked for the step, publishes the one before, and then enters: the state went to the tree."""
    cache = cache_of(part("path", Path()), part("state", Point()))
    with cache.open(TOKENS) as sequence:
        run(sequence, 4)
        sequence.grow(4)
        step = cache.step([sequence])
        sequence.publish()
        with step:
            assert [op.kind for op in step.ops] == ["copy"]
            step.run_ops()
        assert sequence.committed == 8
    settle(cache)


def test_a_step_computes_what_is_reserved_when_its_block_is_entered() -> None:
    cache = cache_of(part("path", Path()), part("state", Point(), max_rewind=2), max_rewind=2)
    with cache.open(TOKENS) as sequence:
        run(sequence, 4)
        sequence.grow(3)
        shorter, longer = cache.step([sequence]), cache.step([sequence])
        sequence.rewind(1)
        with shorter:
            pass
        assert sequence.committed == 6
        sequence.grow(2)
        with longer:
            pass
        assert sequence.committed == 8
        assert not cache.core.flight.works
    settle(cache)


def test_a_step_whose_checkpoint_fails_is_not_in_flight_and_has_lost_its_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What makes the search for a checkpoint's slot fail must not leave a step behind that never ends."""
    cache = cache_of(part("path", Path()), part("state", Point(), checkpoint_every=4))
    sequence = cache.open(TOKENS)
    sequence.grow(4)

    def failing(*args: object, **more: object) -> None:
        raise PluginError("a hook")

    with monkeypatch.context() as patch:
        patch.setattr("prefixloom.operations.ops.make_room", failing)
        with pytest.raises(PluginError), cache.step([sequence]) as step:
            step.run_ops()
    assert not cache.core.flight.works
    assert sequence.committed == 0
    with pytest.raises(ProtocolError, match="may have written half a state"):
        cache.step([sequence])
    sequence.abort()
    settle(cache)


def test_a_step_whose_end_was_interrupted_is_in_flight_until_its_stream_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = cache_of(part("path", Path()))
    sim = Simulation("a")
    sequence = cache.open(TOKENS)
    sequence.grow(8)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedStream, "record", interrupted)
        with pytest.raises(KeyboardInterrupt):
            enqueue(sim["a"], sequence)
    cache.flush()
    assert cache.stats().in_flight == 1
    sim.drain()
    cache.poll()
    assert cache.stats().in_flight == 0
    settle(cache)


def test_the_race_detector_hears_which_state_a_draft_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(part("state", Point()))
    sim = Simulation("a", "b")
    sequence = cache.open(TOKENS)
    sequence.grow(4)
    enqueue(sim["a"], sequence)
    monkeypatch.setattr("prefixloom.device.flight.Flight.order", lambda *args: None)
    with (
        pytest.raises(RaceError, match=r"layers of <draft step 2.*reads slot"),
        cache.step([sequence], "draft") as step,
    ):
        step.run_ops(sim["b"])


def test_the_race_detector_hears_what_the_layers_of_a_failed_step_may_have_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = cache_of(part("path", Path()))
    sim = Simulation("a", "b")
    sequence = cache.open(TOKENS)
    sequence.grow(4)
    with pytest.raises(ZeroDivisionError), cache.step([sequence]) as step:
        step.run_ops(sim["a"])
        raise ZeroDivisionError
    monkeypatch.setattr("prefixloom.device.flight.Flight.order", lambda *args: None)
    with pytest.raises(RaceError, match="without being ordered after 'the layers of <step 1"):
        enqueue(sim["b"], sequence)


def test_a_step_that_is_entered_and_lost_does_not_hold_up_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_of(part("path", Path()), part("state", Point()))
    with cache.open(list(range(40))) as sequence, cache.open([7] * 40) as other:
        sequence.grow(8)
        cache.step([sequence]).__enter__().run_ops()  # and nobody keeps it
        assert cache.stats().in_flight == 1
        run(other, 8)
        assert "entered and dropped before its end" in caplog.text
        assert (cache.stats().in_flight, sequence.committed, other.committed) == (0, 0, 8)
        with pytest.raises(ProtocolError, match="half a state"):
            cache.step([sequence])
    settle(cache)


def test_a_state_is_what_it_was_if_a_step_failed_before_its_ops() -> None:
    """The layers cannot have run, since the copies that they need had not: the state is still published."""
    cache = cache_of(part("path", Path()), part("state", Point()))
    first, second = cache.open(list(range(16))), cache.open([9] * 16)
    run(first, 8)
    for sequence in (first, second):
        sequence.grow(4)
    with pytest.raises(ZeroDivisionError), cache.step([first, second]):
        raise ZeroDivisionError
    first.close()
    assert held(cache, list(range(16))) == 8
    second.abort()
    settle(cache)


def test_an_opening_that_is_refused_makes_no_free_slot_wait_for_a_step() -> None:
    cache = cache_of(part("a", Point()), part("b", Point()), capacity={"a": 6, "b": 2})
    simulation = Simulation("forward")
    sequence, other = cache.open(range(8)), cache.open(range(8))
    sequence.grow(4)
    enqueue(simulation["forward"], sequence)
    with pytest.raises(CapacityError, match="b: needs 1"):
        cache.open(range(3))
    pool = cache.pool("a")
    assert (len(pool.free_ids()), pool.retiring) == (4, 0)
    simulation["forward"].advance()
    sequence.abort()
    other.abort()
    settle(cache)


def test_what_hangs_below_a_publication_that_is_taken_back_leaves_no_bare_node() -> None:
    """Its owner's own step was over long ago: it is no publication in flight, and goes with what it hangs from."""
    cache = cache_of(part("path", Path()))
    sim = Simulation("a", "b")
    first, second = cache.open(TOKENS[:8]), cache.open(TOKENS[:16])
    for sequence, name, work in ((second, "a", lambda: None), (first, "b", fail)):
        sequence.grow(sequence.named)
        enqueue(sim[name], sequence, work=work)
        if sequence is second:
            sim.drain()
            cache.poll()
    first.publish()
    second.publish()
    assert held(cache, TOKENS) == 16
    sim.drain()
    cache.poll()  # the second set of books is read
    assert (first.open, second.open, held(cache, TOKENS)) == (False, False, 0)
    settle(cache)
