"""Steps in flight that fail, end late, change place or are used badly: counter-examples, each smaller than a schedule.

Most were found by the explorer of schedules. What no schedule does (a stream that ends while it is asked, an interrupt,
a hook that raises in the middle, other tables) was found by hand.
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

from prefixloom import (
    Buffer,
    CapacityError,
    Codec,
    Component,
    InputError,
    Manifest,
    Path,
    PluginError,
    Point,
    ProtocolError,
    RaceError,
    Window,
)
from prefixloom.cache.cache import Cache
from prefixloom.device.streams import Event, ThreadStream
from prefixloom.testing.inside.backdoor import page_table_tensors
from prefixloom.testing.schedules.simulated import SimulatedStream, Simulation
from tests.support.helpers import cache_of, enqueue, held, part, run, settle

TOKENS = list(range(40))


class Broken(Exception):
    """What a step's layers raise on their stream."""


def fail() -> None:
    raise Broken


def cached(cache: Cache) -> dict[str, int]:
    return {name: figures.cached for name, figures in cache.stats().components.items()}


def goes_on(stream: SimulatedStream) -> bool:
    """Whether all that is enqueued runs without another stream."""
    while stream.ready:
        stream.advance()
    return not stream.pending


# ---------------------------------------------------------------- states


@pytest.mark.parametrize("again", [False, True], ids=["ends", "commits nothing more"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_state_that_the_device_chose_is_not_published_before_its_length_is_known(count: int, again: bool) -> None:
    """accept, and the request ends before rewind told how many were kept: the slot stands for an unknown length."""
    cache = cache_of(part("path", Path()), part("state", Point(), max_rewind=2), max_rewind=2, slots=12)
    prompts = [TOKENS[:8], TOKENS[8:16]][:count]
    sequences = [cache.open(prompt) for prompt in prompts]
    for sequence in sequences:
        run(sequence, 5)
        sequence.grow(3)
    with cache.step(sequences) as step:
        step.run_ops()
        step.accept(torch.tensor([1] * count))
    for sequence in sequences:
        if again:
            sequence.commit()
        sequence.close()
    assert not any(held(cache, prompt) for prompt in prompts), "a state of 6 tokens was published for 8"


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
    assert cached(cache) == {"path": 0, "state": 0}
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


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("leased", [False, True])
def test_of_a_tombstone_that_a_failed_step_refilled_only_the_refill_goes(leased: bool) -> None:
    """The cell held good pages as well, so it stayed as it was, and page 0 was matched with what never was written."""
    cache = cache_of(part("window", Window(10)))
    sim = Simulation("a")
    first, late = cache.open(TOKENS[:17]), cache.open(TOKENS[:17])
    run(first, 16)
    first.close()
    cache.evict({"window": 1})  # page 0, which no boundary from 16 on needs
    lease = cache.lease(cache.match(TOKENS[:17])) if leased else None
    late.grow(16)
    enqueue(sim["a"], late, work=fail)
    late.publish()
    assert cached(cache) == {"window": 4}
    sim.drain()
    cache.poll()
    assert cached(cache) == {"window": 3}
    assert (held(cache, TOKENS[:4]), held(cache, TOKENS[:16])) == (0, 16)
    if lease is not None:
        lease.release()
    settle(cache)


@pytest.mark.parametrize("other", [Window(6), Point()], ids=repr)
def test_what_the_caller_computed_from_a_step_that_failed_goes_too(other: Any) -> None:
    """A reader's step ran inline; it was over at once, so what it published was not known to hang on anything."""
    cache = cache_of(part("path", Path()), part("other", other))
    sim = Simulation("a")
    first = cache.open(TOKENS)
    first.grow(8)
    enqueue(sim["a"], first, work=fail)
    first.publish()
    reader = cache.open(TOKENS)
    assert reader.ready == 8
    run(reader, 12)
    reader.publish()
    cache.poll()
    assert not reader.open
    assert cached(cache) == {"path": 0, "other": 0}
    settle(cache)


def test_steps_of_the_caller_do_not_pile_up_behind_an_open_one() -> None:
    cache = cache_of(part("path", Path()))
    outer, inner = cache.open(TOKENS), cache.open([5] * 40)
    outer.grow(4)
    with cache.step([outer]):
        for _ in range(5):
            run(inner, 4)
    run(inner, 4)
    assert (cache.core.flight.works, cache.core.flight.stamp) == ([], 0)


def test_a_sequence_that_reads_what_replaced_failed_content_outlives_the_next_failure() -> None:
    """What a failed step published was still told to be in flight, while an older step was."""
    cache = cache_of(part("path", Path()), part("state", Point()))
    sim = Simulation("a", "b")
    old, good, bad, keeper = cache.open([5] * 8), *(cache.open(TOKENS[:8]) for _ in range(3))
    run(good, 4)
    good.close()
    cache.evict({"state": 1})  # the node stays, and the state there is published anew, twice
    old.grow(4)
    enqueue(sim["a"], old)
    bad.grow(4)
    enqueue(sim["b"], bad, work=fail)
    bad.publish()
    bad.grow(4)
    enqueue(sim["b"], bad, work=fail)
    sim["b"].advance(), sim["b"].advance(), sim["b"].advance()
    cache.poll()
    assert not bad.open
    run(keeper, 4)
    keeper.publish()
    reader = cache.open(TOKENS)
    assert (reader.ready, reader.running.fence) == (4, 0)
    while sim["b"].ready:
        sim["b"].advance()
    cache.poll()
    assert reader.open and keeper.open
    sim.drain()


def test_a_lease_that_ended_with_a_step_says_so() -> None:
    cache = cache_of(part("path", Path()))
    sim = Simulation("a")
    sequence = cache.open(TOKENS)
    sequence.grow(8)
    enqueue(sim["a"], sequence, work=fail)
    sequence.publish()
    lease = cache.lease(cache.match(TOKENS))
    sim.drain()
    cache.poll()
    with pytest.raises(ProtocolError, match="a step or copy failed") as failure:
        lease.release()
    assert isinstance(failure.value.__cause__, Broken)


# ---------------------------------------------------------------- order


def test_a_step_does_not_forget_what_its_sequence_took_over_while_it_was_open() -> None:
    """A nested step's slots were taken early inside of the block; its end set the fence back to its own number."""
    cache = cache_of(part("path", Path()), tokens=32)
    sim = Simulation("a", "b")
    outer, inner = cache.open(TOKENS), cache.open([5] * 40)
    outer.grow(8)
    inner.grow(24)
    with cache.step([outer]) as step:
        step.run_ops(sim["a"])
        enqueue(sim["b"], inner)
        inner.abort()
        outer.grow(16)
    enqueue(sim["a"], outer)  # the race detector is silent
    assert not goes_on(sim["a"])
    sim.drain()


@pytest.mark.parametrize("late", [False, True])
def test_what_is_read_since_a_publication_in_the_block_is_waited_for(late: bool) -> None:
    """The tree had the pages already, from a step that runs on another stream: the layers read those now."""
    cache = cache_of(part("path", Path()))
    sim = Simulation("a", "b")
    sequence, other = cache.open(TOKENS), cache.open(TOKENS)
    run(sequence, 8)
    other.grow(8)
    sequence.grow(8)
    with cache.step([sequence]) as step:
        if late:
            step.run_ops(sim["a"])
        enqueue(sim["b"], other)
        other.publish()
        sequence.publish()
        if not late:
            step.run_ops(sim["a"])
        table = step.table("path")
    assert not goes_on(sim["a"])
    sim.drain()
    assert table.tolist() == [sequence.pages("path")]
    assert sequence.pages("path")[:2] == other.pages("path")


def test_a_step_without_ops_comes_after_nothing_that_is_over() -> None:
    """Its sequence had been on a stream once, and others still are: it was told to run its ops, and has none."""
    cache = cache_of(part("path", Path()))
    sim = Simulation("a")
    sequence, other = cache.open(TOKENS), cache.open([5] * 8)
    sequence.grow(4)
    enqueue(sim["a"], sequence)
    sim.drain()
    cache.poll()
    other.grow(4)
    enqueue(sim["a"], other)
    sequence.grow(4)
    with cache.step([sequence]):
        pass
    assert sequence.committed == 8
    sim.drain()


def test_a_state_at_rest_that_would_come_after_an_open_step_is_left_out() -> None:
    """Its slots were taken early from that step; publishing raised half-way."""
    codec = Codec("int8", tolerance=0.004)
    state = Component("state", Manifest([Buffer("data", (2,), "float32")], stored_as=codec), Point())
    cache = cache_of(part("path", Path()), state, max_running=3, tokens=32)
    sim = Simulation("a", "b")
    one, other = cache.open(TOKENS), cache.open([4] * 20)
    one.grow(24)
    other.grow(8)
    enqueue(sim["b"], other)
    with cache.step([one]) as step:
        step.run_ops(sim["a"])
        one.abort()
        other.grow(8)
        assert other.publish() == 8
    assert (cached(cache), cache.stats().skipped_checkpoints) == ({"path": 2, "state": 0}, 1)
    sim.drain()
    other.close()
    sim.drain()
    settle(cache)


# ---------------------------------------------------------------- tables


def test_the_rows_of_sequences_that_were_flushed_are_nobodys() -> None:
    """They kept their numbers, which are others' in the new tables, and cleared them."""
    cache = cache_of(part("path", Path()))
    olds = [cache.open(TOKENS), cache.open([5] * 40)]
    for old in olds:
        run(old, 8)
    with cache.step(olds) as step:
        step.table("path")
    late = cache.step(olds)
    cache.flush()
    new = cache.open(TOKENS)
    new.grow(8)
    with cache.step([new]) as mine, late:
        mine.run_ops()
        late.run_ops()
        table = mine.table("path")
        assert tuple(late.table("path").shape) == (2, 0)
        assert table.tolist() == [new.pages("path")]


def test_a_table_is_not_written_under_a_step_that_reads_it() -> None:
    """Before run_ops it is not known on which stream; after the step nobody would wait."""
    cache = cache_of(part("window", Window(6)))
    sim = Simulation("a")
    sequence = cache.open(TOKENS)
    sequence.grow(16)
    with cache.step([sequence]) as step:
        step.run_ops(sim["a"])
        table, pages = step.table("window"), sequence.pages("window")
    with pytest.raises(ProtocolError, match="into the step's with block"):
        step.table("window")
    sim.drain()
    sequence.grow(8)
    cache.reclaim()
    with cache.step([sequence]) as step:
        with pytest.raises(ProtocolError, match="call run_ops first"):
            step.table("window")
        assert table.tolist() == [pages]
        step.run_ops(sim["a"])
        step.table("window")


def test_a_row_that_could_not_be_written_is_written_by_the_next_step() -> None:
    """It counted as written: the next step read what was there before."""
    cache = cache_of(part("path", Path()))
    closed = ThreadStream("closed")
    closed.close()
    with cache.open([5] * 40) as other:
        run(other, 16)
        with cache.step([other]) as step:
            step.run_ops()
            step.table("path")
    sequence = cache.open(TOKENS)
    sequence.grow(8)
    with pytest.raises(InputError, match="closed"), cache.step([sequence]) as step:
        step.run_ops(closed)
        step.table("path")
    sequence.grow(1)
    with cache.step([sequence]) as step:
        step.run_ops()
        assert step.table("path").tolist() == [sequence.pages("path")]
    assert page_table_tensors(cache)["path"][0][0].tolist() == [*sequence.pages("path"), *[-1] * 5]


# ---------------------------------------------------------------- memory


def test_steps_on_streams_leave_no_cyclic_garbage_and_hold_no_sequence_that_has_ended() -> None:
    """A sequence knows its last step, and a step its sequences: who idled kept all that had been in a step with it."""
    cache = cache_of(part("path", Path()), part("state", Point()), debug=False)
    sim = Simulation("a")

    def turn() -> None:
        sequences = [cache.open([k] * 20) for k in range(3)]
        for sequence in sequences:
            sequence.grow(8)
        enqueue(sim["a"], *sequences)
        for sequence in sequences:
            sequence.publish()
        sim.drain()
        cache.poll()
        for sequence in sequences:
            sequence.close()

    turn()
    while gc.collect():  # what other tests have dropped: its finalizers run first
        pass
    gc.disable()
    try:
        turn()
        assert gc.collect() == 0
    finally:
        gc.enable()
