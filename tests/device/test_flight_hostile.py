"""Steps in flight, used badly or in odd orders: each test failed before what it is about was repaired."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from prefixloom import (
    Buffer,
    Codec,
    Component,
    InputError,
    Manifest,
    Path,
    Point,
    ProtocolError,
    Window,
)  # fmt: skip
from prefixloom.cache.cache import Cache
from prefixloom.device.streams import ThreadStream
from prefixloom.testing.inside.backdoor import page_table_tensors
from prefixloom.testing.schedules.simulated import SimulatedStream, Simulation
from tests.device.test_flight_regressions import TOKENS, Broken, enqueue, fail
from tests.support.helpers import cache_of, held, part, run, settle


def cached(cache: Cache) -> dict[str, int]:
    return {name: figures.cached for name, figures in cache.stats().components.items()}


def goes_on(stream: SimulatedStream) -> bool:
    """Whether all that is enqueued runs without another stream."""
    while stream.ready:
        stream.advance()
    return not stream.pending


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
