"""Sequences that are computed outside of steps, on streams that run behind: who comes after what, and failures."""

from __future__ import annotations

import time

import pytest

from prefixloom import Path, Point, ProtocolError, Window
from prefixloom.device.streams import ThreadStream
from prefixloom.testing.schedules.simulated import Simulation
from tests.support.filling import DEBUG_OR_NOT, TOKENS, cached, content, hybrid
from tests.support.helpers import cache_of, enqueue, held, part, settle
from tests.support.stream_helpers import Gate
from tests.support.tiers import simulated, tiered


def broken() -> None:
    raise MemoryError


def test_on_a_stream_that_runs_behind_the_source_stays_until_the_copy_is_over() -> None:
    cache = hybrid(slots=2)
    cached(cache, TOKENS[:8], 5)
    stream = ThreadStream("layers")
    gate = Gate(stream)
    with cache.open(TOKENS, leave=1) as sequence:
        sequence.fill(stream)
        assert cache.evict({"state": 1}) == {"state": 1}, "it has been enqueued, so it may go"
        assert cache.pool("state").at_hand == 0, "but its slot is not free before the copy is over"
        gate.free.set()
        stream.record().synchronize()
        cache.poll()
        assert cache.pool("state").at_hand == 1
        assert (content(cache, sequence) == 5).all()
        sequence.grow(32)
        sequence.commit()
    stream.close()
    settle(cache)


def test_it_comes_after_the_step_that_wrote_what_it_copies() -> None:
    cache = hybrid()
    sim = Simulation("a", "b")
    first = cache.open(TOKENS[:8])
    first.grow(8)
    (slot,) = first.pages("state")
    enqueue(sim["a"], first, work=lambda: cache.pool("state").buffers["data"][:, slot].fill_(5))
    first.close()
    with cache.open(TOKENS, leave=1) as second:
        assert second.ready == 8
        second.fill(sim["b"])
        assert not sim["b"].ready, "the copy waits"
        sim.drain()
        cache.poll()
        assert (content(cache, second) == 5).all() and second.pages("state") != (slot,)
    settle(cache)


def test_layers_come_after_the_step_that_wrote_the_pages_that_they_read_also_without_states() -> None:
    cache = cache_of(part("path", Path()))
    sim = Simulation("a", "b")
    order: list[str] = []
    first = cache.open(TOKENS[:8])
    first.grow(8)
    enqueue(sim["a"], first, work=lambda: order.append("written"))
    first.close()
    with cache.open(TOKENS, leave=1) as second:
        assert second.ready == 8
        second.fill(sim["b"])
        sim["b"].run(lambda: order.append("read"))
        assert not sim["b"].ready, "the layers wait"
        sim.drain()
        assert order == ["written", "read"]
    settle(cache)


@DEBUG_OR_NOT
def test_a_state_that_a_load_brings_is_there_once_that_is_over(debug: bool) -> None:
    """The load fills it: no op is due, and what comes after the fill reads it all the same."""
    cache = tiered(part("path", Path()), part("state", Point()), write="through", debug=debug)
    cached(cache, TOKENS[:8], 5)
    cache.evict({"path": 64, "state": 8})
    cache.pool("state").buffers["data"].fill_(9)
    sim = simulated(cache)
    with cache.open(TOKENS, leave=1) as sequence:
        assert sequence.restore().ready == 8
        sequence.fill(sim["forward"])
        assert not sim["forward"].ready, "the layers wait"
        found = []
        sim["forward"].run(lambda: found.append(content(cache, sequence).clone()))
        sim.drain()
        assert (found[0] == 5).all()
        sequence.grow(32)
        sequence.commit()
    sim.drain()
    settle(cache)


@DEBUG_OR_NOT
def test_after_a_flush_who_gets_its_slots_comes_after_its_layers(debug: bool) -> None:
    cache = cache_of(part("path", Path()), debug=debug)
    sim = Simulation("a", "b")
    order: list[str] = []
    first = cache.open(TOKENS[:8])
    first.grow(8)
    first.fill(sim["a"])
    sim["a"].run(lambda: order.append("the layers of the first"))
    cache.flush()
    assert cache.pool("path").at_hand == 0, "its layers may still write any slot that it had"
    with cache.open(TOKENS, leave=1) as second:
        second.grow(4)
        enqueue(sim["b"], second, work=lambda: order.append("what the second writes"))
        assert not sim["b"].ready, "it waits for layers that were in no step"
        sim.drain()
    assert order == ["the layers of the first", "what the second writes"]
    first.close()
    settle(cache)


@DEBUG_OR_NOT
def test_what_a_failure_takes_from_a_sequence_is_not_free_before_its_layers_are_over(debug: bool) -> None:
    """A step of its own fails while its next layers are being enqueued on another stream."""
    cache = cache_of(part("path", Path()), debug=debug)
    stream, sim = ThreadStream("a"), Simulation("b")
    sequence = cache.open(TOKENS[:8])
    sequence.grow(8)

    enqueue(stream, sequence, work=broken)
    stream.record().synchronize()
    sequence.grow(4)
    sequence.fill(sim["b"])
    ran: list[bool] = []
    sim["b"].run(lambda: ran.append(True))
    cache.poll()
    assert isinstance(sequence.failed, MemoryError)
    pool = cache.pool("path")
    while not ran:
        assert pool.at_hand < pool.capacity, "its layers may still write what it had"
        sim["b"].advance()
        cache.poll()
    sim.drain()
    cache.poll()
    assert pool.at_hand == pool.capacity
    stream.close()
    settle(cache)


def test_after_a_flush_a_sequence_is_told_that_its_layers_failed() -> None:
    cache = cache_of(part("path", Path()))
    stream = ThreadStream("layers")
    first = cache.open(TOKENS[:8])
    first.grow(8)
    first.fill(stream)

    stream.run(broken)
    cache.flush()
    stream.record().synchronize()
    cache.poll()
    assert isinstance(first.failed, MemoryError)
    stream.close()
    settle(cache)


@DEBUG_OR_NOT
def test_who_reads_what_it_computed_comes_after_its_layers(debug: bool) -> None:
    cache = cache_of(part("path", Path()), debug=debug)
    sim = Simulation("a", "b")
    order: list[str] = []
    with cache.open(TOKENS[:8]) as first:
        first.grow(8)
        first.fill(sim["a"])
        sim["a"].run(lambda: order.append("written"))
        first.commit()
    with cache.open(TOKENS, leave=1) as second:
        assert second.ready == 8
        second.grow(4)
        enqueue(sim["b"], second, work=lambda: order.append("read"))
        assert not sim["b"].ready, "it waits for layers that were in no step"
        sim.drain()
    assert order == ["written", "read"]
    cache.poll()
    settle(cache)


@DEBUG_OR_NOT
def test_a_copy_to_a_tier_comes_after_the_layers(debug: bool) -> None:
    cache = tiered(part("path", Path()), part("state", Point()), write="through", debug=debug)
    sim = simulated(cache)
    with cache.open(TOKENS[:9], leave=1) as sequence:
        sequence.grow(8)
        sequence.fill(sim["forward"])
        state = content(cache, sequence)
        sim["forward"].run(lambda: state.fill_(5))
        sequence.commit()
    sim["forward"].advance()
    while sim["down"].ready:
        sim["down"].advance()
    assert sim["down"].pending, "the fill is over, and the layers are not"
    sim.drain()
    cache.poll()
    cache.evict({"path": 64, "state": 8})
    with cache.open(TOKENS[:9], leave=1) as again:
        assert again.restore().ready == 8
        again.fill(sim["forward"])
        sim.drain()
        assert (content(cache, again) == 5).all()
    sim.drain()
    settle(cache)


@pytest.mark.parametrize("way", ["abort", "close", "rewind"])
@DEBUG_OR_NOT
def test_what_is_given_back_is_not_free_before_the_layers_are_over(debug: bool, way: str) -> None:
    cache = cache_of(part("path", Path()), debug=debug)
    stream = ThreadStream("layers")
    gate = Gate(stream)
    sequence = cache.open(TOKENS)
    sequence.grow(8)
    sequence.fill(stream)
    pool = cache.pool("path")
    before = pool.at_hand
    getattr(sequence, way)(*[8] * (way == "rewind"))
    assert (pool.at_hand, pool.retiring) == (before, 2)
    gate.free.set()
    stream.record().synchronize()
    cache.poll()
    assert (pool.at_hand, pool.retiring) == (before + 2, 0)
    sequence.close()
    stream.close()
    settle(cache)


@DEBUG_OR_NOT
def test_a_duplicate_is_not_free_before_the_layers_are_over_that_read_it(debug: bool) -> None:
    cache = cache_of(part("path", Path()), debug=debug)
    stream = ThreadStream("layers")
    gate = Gate(stream)
    first, second = cache.open(TOKENS), cache.open(TOKENS)
    for sequence in (first, second):
        sequence.grow(8)
        sequence.fill()
        sequence.commit()
    first.close()
    second.fill(stream)
    pool = cache.pool("path")
    before = pool.at_hand
    second.close()
    assert (pool.at_hand, pool.retiring) == (before, 2), "the tree has its pages already, and its layers read its own"
    gate.free.set()
    stream.record().synchronize()
    cache.poll()
    assert (pool.at_hand, pool.retiring) == (before + 2, 0)
    stream.close()
    settle(cache)


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "behind"])
@DEBUG_OR_NOT
def test_a_flush_ends_no_step_whose_block_is_open(debug: bool, behind: bool) -> None:
    cache = cache_of(part("path", Path()), debug=debug)
    sim = Simulation("a")
    pool = cache.pool("path")
    first = cache.open(TOKENS)
    first.grow(8)
    with cache.step([first]) as step:
        step.run_ops(sim["a"] if behind else None)
        cache.flush()
        sim.drain()
        cache.poll()
        assert pool.at_hand == 0, "its layers, which are enqueued now, may still write any slot that it had"
        sim["a"].run(lambda: None)
    sim.drain()
    cache.poll()
    assert pool.at_hand == pool.capacity
    settle(cache)


def test_slots_that_went_to_another_owner_are_not_taken_back_from_it() -> None:
    """Of every component that published: their slots were taken early from a step that fails."""
    cache = cache_of(part("path", Path()), part("near", Window(40)), tokens=16)
    sim = Simulation("a", "b")
    first = cache.open(TOKENS[:16])
    first.grow(16)
    enqueue(sim["a"], first, work=broken)
    first.close()
    assert cache.evict(16) == {"path": 4, "near": 4}
    second = cache.open([9] * 16)
    second.grow(16)
    sim.drain()
    cache.poll()
    assert isinstance(first.failed, MemoryError) and second.failed is None
    enqueue(sim["b"], second)
    second.close()
    sim.drain()
    cache.poll()
    assert held(cache, [9] * 16) == 16
    settle(cache)


def test_layers_that_fail_behind_take_back_what_was_published(caplog: pytest.LogCaptureFixture) -> None:
    cache = hybrid()
    stream = ThreadStream("layers")
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        sequence.fill(stream)
        stream.run(lambda: 1 // 0)
        sequence.commit()
    assert held(cache, TOKENS) == 8
    stream.record().synchronize()
    cache.poll()
    assert isinstance(sequence.failed, ZeroDivisionError) and "the layers of" in caplog.text
    assert held(cache, TOKENS) == 0
    stream.close()
    settle(cache)


def test_into_a_slot_that_an_open_step_may_still_write_it_is_refused_and_stays_due() -> None:
    cache = hybrid(slots=2)
    cached(cache, TOKENS[:8], 5)
    first = cache.open([9] * 8)
    first.grow(8)
    with cache.step([first]) as step:
        step.run_ops()
        first.abort()
        second = cache.open(TOKENS, leave=1)
        with pytest.raises(ProtocolError, match="whose block is open"):
            second.fill()
    second.fill()
    assert (content(cache, second) == 5).all()
    second.grow(32)
    second.commit()
    second.close()
    settle(cache)


def test_a_copy_that_fails_behind_ends_the_sequence_and_takes_nothing_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = hybrid()
    cached(cache, TOKENS[:8], 5)
    stream = ThreadStream("layers")
    sequence = cache.open(TOKENS, leave=1)

    def fail() -> None:
        raise ValueError("no copy")

    with monkeypatch.context() as patch:
        patch.setattr(type(cache.core.shape.lane("state")), "work", lambda *_: fail)
        sequence.fill(stream)
    sequence.grow(32)
    sequence.commit()
    assert sequence.publish() == 40
    stream.record().synchronize()
    cache.poll()
    assert isinstance(sequence.failed, ValueError) and not sequence.open
    with pytest.raises(ProtocolError, match="ended when a step or copy failed"):
        sequence.fill()
    assert (held(cache, TOKENS), held(cache, TOKENS[:8])) == (8, 8), "what was built on it has gone with it"
    stream.close()
    settle(cache)


@DEBUG_OR_NOT
@pytest.mark.parametrize("how", ["fill", "step"])
def test_what_is_refused_does_not_stand_for_the_step_before_it(how: str, debug: bool) -> None:
    """What the step in flight has yet to write is published with that, not with what never came after it."""
    cache = cache_of(part("path", Path()), tokens=32, debug=debug)
    sim = Simulation("a", "b", "c")
    other = cache.open([9] * 12)
    other.grow(12)
    with cache.step([other]) as step:
        step.run_ops(sim["a"])
        first = cache.open(TOKENS)
        first.grow(12)
        enqueue(sim["a"], first)
        other.abort()
        first.grow(16)  # of what the open step may still write
        with pytest.raises(ProtocolError, match="whose block is open"):
            if how == "fill":
                first.fill(sim["b"])
            else:
                enqueue(sim["b"], first)
        cache.poll()
        first.close()
        second = cache.open(TOKENS, leave=1)
        assert second.ready == 12
    enqueue(sim["c"], second)
    assert not sim["c"].ready, "it reads what the first step has yet to write"
    sim.drain()
    second.close()
    settle(cache)


@DEBUG_OR_NOT
def test_on_another_stream_it_comes_after_the_layers_on_the_one_before(debug: bool) -> None:
    cache = hybrid(debug=debug)
    stream = ThreadStream("layers")
    order: list[str] = []
    with cache.open(TOKENS) as sequence:
        sequence.fill()
        sequence.grow(8)
        sequence.fill(stream)
        stream.run(lambda: (time.sleep(0.05), order.append("layers")))
        sequence.fill()
        order.append("after")
        sequence.commit()
    assert order == ["layers", "after"]
    stream.close()
    settle(cache)


@DEBUG_OR_NOT
def test_a_fill_that_is_refused_changes_nothing(debug: bool) -> None:
    cache = cache_of(part("path", Path()), part("state", Point()), tokens=32, debug=debug)
    sim = Simulation("a")
    other = cache.open([9] * 16)
    other.grow(16)
    with cache.step([other]) as step:
        step.run_ops(sim["a"])
        sequence = cache.open(TOKENS)
        sequence.grow(8)
        sequence.fill()
        sequence.commit()
        other.abort()
        sequence.grow(12)  # of what the open step may still write
        with pytest.raises(ProtocolError, match="whose block is open"):
            sequence.fill(sim["a"])
        sequence.close()
    sim.drain()
    cache.poll()
    assert held(cache, TOKENS[:8]) == 8, "the state of 8 was published all the same"
    settle(cache)


@DEBUG_OR_NOT
def test_a_flush_ends_a_step_that_was_dropped(debug: bool, caplog: pytest.LogCaptureFixture) -> None:
    cache = cache_of(part("path", Path()), debug=debug)
    pool = cache.pool("path")
    sequence = cache.open(TOKENS)
    sequence.grow(8)
    step = cache.step([sequence])
    step.__enter__()
    step.run_ops()
    del step
    cache.flush()
    cache.poll()
    assert pool.at_hand == pool.capacity, "nobody will end it any more"
    settle(cache)
