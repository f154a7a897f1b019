"""Filling running states outside of steps: content, what may go afterwards, who comes after what, and failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from prefixloom import (
    Buffer,
    Claim,
    Codec,
    Component,
    Manifest,
    Op,
    Path,
    Point,
    ProtocolError,
    Window,
    WorkError,
    hookimpl,
)
from prefixloom.testing.schedules.simulated import Simulation
from tests.support.helpers import cache_of, enqueue, held, part, run, settle
from tests.support.tiers import simulated, tiered

TOKENS = list(range(40))
DEBUG_OR_NOT = pytest.mark.parametrize("debug", [True, False], ids=["debug", "plain"])


def hybrid(**options: Any) -> Any:
    return cache_of(part("path", Path()), part("window", Window(10)), part("state", Point()), **options)


def content(cache: Any, sequence: Any, name: str = "state") -> torch.Tensor:
    slot = sequence.pages(name)[0]
    found: torch.Tensor = cache.pool(name).buffers["data"][:, slot]
    return found


def cached(cache: Any, tokens: list[int], value: int) -> None:
    """A state for all of ``tokens``, which holds ``value``."""
    with cache.open(tokens) as sequence:
        run(sequence, len(tokens) - sequence.reserved)
        content(cache, sequence).fill_(value)


@DEBUG_OR_NOT
def test_what_was_copied_from_may_go_as_soon_as_that_is_done(debug: bool) -> None:
    cache = hybrid(debug=debug)
    cached(cache, TOKENS[:8], 5)
    with cache.open(TOKENS, leave=1) as sequence:
        assert cache.stats().components["state"].leased == 1
        assert cache.evict({"state": 8}) == {"state": 0}
        sequence.fill()
        assert cache.stats().components["state"].leased == 0
        assert cache.evict({"state": 8}) == {"state": 1}
        assert (content(cache, sequence) == 5).all()
    settle(cache)


def test_what_rests_in_another_form_is_decoded() -> None:
    manifest = Manifest([Buffer("data", (8,), "float32")], stored_as=Codec("int8", tolerance=0.004))
    states = [Component(name, manifest, Point()) for name in ("state", "other")]
    cache = cache_of(part("path", Path()), *states, slots=12, max_running=2)
    values = torch.linspace(-1, 1, 8)
    with cache.open(TOKENS[:8]) as first:
        first.grow(8)
        first.fill()
        for name in ("state", "other"):
            content(cache, first, name)[:] = values
        first.commit()
    with cache.open(TOKENS, leave=1) as second:
        assert second.ready == 8
        second.fill()
        for name in ("state", "other"):
            assert (content(cache, second, name) - values).abs().max() < 0.01
    settle(cache)


@DEBUG_OR_NOT
def test_a_state_that_layers_may_write_is_not_handed_to_the_tree(debug: bool) -> None:
    cache = hybrid(debug=debug)
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        sequence.fill()
        content(cache, sequence).fill_(8)
        sequence.commit()
        sequence.grow(8)
        sequence.fill()
        content(cache, sequence).fill_(16)
        assert sequence.publish() == 8, "pages, and not the state, which is one of 16 by now"
        sequence.commit()
    assert [held(cache, TOKENS[:end]) for end in (8, 16)] == [0, 16]
    with cache.open(TOKENS, leave=1) as again:
        again.fill()
        assert (content(cache, again) == 16).all()
    settle(cache)


def test_between_fill_and_commit_a_state_cannot_be_rewound() -> None:
    cache = cache_of(part("path", Path()), part("state", Point(), max_rewind=3), max_rewind=3, slots=12)
    with cache.open(TOKENS) as sequence:
        sequence.grow(12)
        sequence.rewind(4)  # nobody may have written it yet
        sequence.fill()
        with pytest.raises(ProtocolError, match="layers may have written the state of component 'state'"):
            sequence.rewind(4)
        assert sequence.reserved == 8
        sequence.commit()
    settle(cache)


class Adding(Component):
    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> Any:
        return (Op("clear", self.name, dst=(0,), sequence=0),)


class Claiming(Component):
    @hookimpl
    def finalize_match_result(self, walk: Any) -> Claim:
        return Claim(ops=(Op("clear", self.name, dst=(0,)),))


@pytest.mark.parametrize("kind", [Adding, Claiming])
def test_where_a_plugin_has_ops_of_its_own_a_step_has_to_run_them(kind: type[Component]) -> None:
    cache = cache_of(part("path", Path()), part("mine", Point(), kind=kind))
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        with pytest.raises(ProtocolError, match="component 'mine' has ops of its own, which run in steps alone"):
            sequence.fill()
        with cache.step([sequence]) as step:
            step.run_ops()
        assert sequence.committed == 8
        if kind is Claiming:
            sequence.publish()
            sequence.fill()  # they have run, and were asked for once
    settle(cache)


@DEBUG_OR_NOT
def test_what_cannot_be_filled_is_refused(debug: bool) -> None:
    cache = hybrid(debug=debug)
    sequence = cache.open(TOKENS)
    sequence.grow(8)
    with cache.step([sequence]) as step:
        with pytest.raises(ProtocolError, match="in a step whose block is open"):
            sequence.fill()
        step.run_ops()
    sequence.grow(8)
    with pytest.raises(ZeroDivisionError), cache.step([sequence]) as step:
        step.run_ops()
        _ = 1 // 0
    with pytest.raises(ProtocolError, match="half a state of component 'state'"):
        sequence.fill()
    sequence.abort()
    with pytest.raises(ProtocolError, match="is closed"):
        sequence.fill()
    late = cache.open(TOKENS)
    cache.flush()
    with pytest.raises(ProtocolError, match="before the cache was flushed"):
        late.fill()
    settle(cache)


@DEBUG_OR_NOT
def test_an_op_that_fails_is_still_due(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = hybrid(debug=debug)
    cached(cache, TOKENS[:8], 5)
    sequence = cache.open(TOKENS, leave=1)
    lane = cache.core.shape.lane("state")

    def broken(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(lane.live), "copy", broken)
        with pytest.raises(WorkError, match="copy of state raised MemoryError"):
            sequence.fill()
    with pytest.raises(ProtocolError, match="ops that have not run"):
        sequence.commit()
    assert cache.evict({"state": 8}) == {"state": 0}, "it is covered until it was copied"
    sequence.fill()
    assert (content(cache, sequence) == 5).all()
    sequence.close()
    settle(cache)


@DEBUG_OR_NOT
def test_what_a_device_chose_in_a_step_is_past_once_more_is_computed_alone(debug: bool) -> None:
    cache = cache_of(part("path", Path()), part("state", Point(), max_rewind=3), max_rewind=3, slots=12, debug=debug)
    with cache.open(TOKENS) as sequence:
        run(sequence, 8)
        sequence.grow(3)
        with cache.step([sequence]) as step:
            step.run_ops()
            step.accept(torch.tensor([3]))
        sequence.grow(2)
        sequence.fill()
        for count, slot in enumerate(sequence.rewind_slots("state")[:2], 12):
            cache.pool("state").buffers["data"][:, slot] = count
        content(cache, sequence).fill_(13)
        sequence.commit()
        sequence.rewind(1)
        sequence.fill()
        assert sequence.committed == 12 and (content(cache, sequence) == 12).all()
    settle(cache)


def test_of_a_sequence_that_a_step_computes_nothing_of_the_device_chooses_nothing() -> None:
    cache = cache_of(part("path", Path()), part("state", Point(), max_rewind=2), max_rewind=2, slots=12)
    with cache.open(TOKENS[:9]) as grows, cache.open([7] * 8) as waits:
        for sequence in (grows, waits):
            run(sequence, 8)
        grows.grow(1)
        for sequence in (grows, waits):
            content(cache, sequence).fill_(5)
            for slot in sequence.rewind_slots("state"):
                cache.pool("state").buffers["data"][:, slot] = 9
        with cache.step([grows, waits]) as step:
            step.run_ops()
            step.accept(torch.tensor([1, 1]))
        assert (content(cache, grows) == 9).all() and (content(cache, waits) == 5).all()
        grows.rewind(0)
        assert waits.publish() == 8
    assert held(cache, [7] * 8) == 8
    settle(cache)


def test_after_a_step_that_failed_before_its_ops_every_state_is_published_as_before() -> None:
    """A publication inside of its block held the states back, since its layers might have written them."""
    cache = cache_of(part("path", Path()), part("one", Point()), part("two", Point()))
    first, second = cache.open(TOKENS[:8]), cache.open([9] * 8)
    for sequence in (first, second):
        sequence.grow(8)
    with cache.step([first]) as step:
        step.run_ops()
    with pytest.raises(KeyError), cache.step([first, second]):
        assert first.publish(4) == 4
        raise KeyError("before the ops of the second")
    assert first.publish() == 8
    assert held(cache, TOKENS[:8]) == 8
    first.close()
    second.close()
    settle(cache)


# ---------------------------------------------------------------- on streams that run behind


def broken() -> None:
    raise MemoryError


def launch(how: str, sequence: Any, stream: Any, work: Callable[[], object]) -> None:
    """Enqueue the layers of what a sequence has reserved, in a step or outside of steps."""
    if how == "step":
        enqueue(stream, sequence, work=work)
    else:
        sequence.fill(stream)
        stream.run(work)
        sequence.commit()


# ---------------------------------------------------------------- order


@pytest.mark.parametrize(("first", "second"), [("step", "fill"), ("fill", "step"), ("fill", "fill")])
@pytest.mark.parametrize("states", [False, True])
@DEBUG_OR_NOT
def test_whoever_reads_comes_after_the_step_or_the_layers_that_wrote_it(
    debug: bool, states: bool, first: str, second: str
) -> None:
    cache = hybrid(debug=debug) if states else cache_of(part("path", Path()), debug=debug)
    sim, order = Simulation("a", "b"), []
    with cache.open(TOKENS[:8]) as one:
        one.grow(8)
        state = content(cache, one) if states else None
        launch(first, one, sim["a"], lambda: order.append("written") or (states and state.fill_(5)))
    with cache.open(TOKENS, leave=1) as two:
        assert two.ready == 8
        two.grow(4)
        launch(second, two, sim["b"], lambda: order.append("read"))
        assert not sim["b"].ready, "its copies and its layers wait"
        sim.drain()
        cache.poll()
        assert order == ["written", "read"]
        assert not states or (content(cache, two) == 5).all()
    settle(cache)


@DEBUG_OR_NOT
def test_on_another_stream_it_comes_after_the_layers_on_the_one_before(debug: bool) -> None:
    cache, sim, order = hybrid(debug=debug), Simulation("a", "b"), []
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        for name in ("a", "b"):
            sequence.fill(sim[name])
            sim[name].run(lambda name=name: order.append(name))
        assert not sim["b"].ready
        sim.drain()
        assert order == ["a", "b"]
        sequence.commit()
    settle(cache)


def test_on_a_stream_that_runs_behind_the_source_stays_until_the_copy_is_over() -> None:
    cache, sim = hybrid(slots=2), Simulation("a")
    cached(cache, TOKENS[:8], 5)
    with cache.open(TOKENS, leave=1) as sequence:
        sequence.fill(sim["a"])
        assert cache.evict({"state": 1}) == {"state": 1}, "it has been enqueued, so it may go"
        assert cache.pool("state").at_hand == 0, "but its slot is not free before the copy is over"
        sim.drain()
        cache.poll()
        assert cache.pool("state").at_hand == 1
        assert (content(cache, sequence) == 5).all()
        sequence.grow(32)
        sequence.commit()
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


# ---------------------------------------------------------------- slots that layers still use


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


@pytest.mark.parametrize("way", ["abort", "close", "rewind", "duplicate"])
@DEBUG_OR_NOT
def test_what_is_given_back_is_not_free_before_the_layers_are_over(debug: bool, way: str) -> None:
    """A duplicate is given back since the tree has its pages already, and the layers read the sequence's own."""
    cache, sim = cache_of(part("path", Path()), debug=debug), Simulation("a")
    first, second = (cache.open(TOKENS) for _ in range(2))
    for sequence in (first, second)[way != "duplicate" :]:
        sequence.grow(8)
        sequence.fill()
        sequence.commit()
    first.close()
    if way != "duplicate":
        second.grow(8)
    second.fill(sim["a"])
    sim["a"].run(lambda: None)
    pool = cache.pool("path")
    before = pool.at_hand
    second.rewind(8) if way == "rewind" else second.abort() if way == "abort" else second.close()
    given = {"abort": 4, "close": 2, "rewind": 2, "duplicate": 2}[way]
    assert (pool.at_hand, pool.retiring) == (before, given)
    sim.drain()
    cache.poll()
    assert (pool.at_hand, pool.retiring) == (before + given, 0)
    second.close()
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


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("flushed", [False, True])
def test_layers_that_fail_behind_take_back_what_was_published(flushed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Also after a flush the sequence is told."""
    cache, sim = hybrid(), Simulation("a")
    sequence = cache.open(TOKENS)
    sequence.grow(8)
    launch("fill", sequence, sim["a"], broken)
    if flushed:
        cache.flush()
    else:
        sequence.close()
        assert held(cache, TOKENS) == 8
    sim.drain()
    cache.poll()
    assert isinstance(sequence.failed, MemoryError) and "the layers of" in caplog.text
    assert held(cache, TOKENS) == 0
    settle(cache)


@DEBUG_OR_NOT
def test_what_a_failure_takes_from_a_sequence_is_not_free_before_its_layers_are_over(debug: bool) -> None:
    """A step of its own fails while its next layers are being enqueued on another stream."""
    cache = cache_of(part("path", Path()), debug=debug)
    sim = Simulation("a", "b")
    sequence = cache.open(TOKENS[:8])
    sequence.grow(8)

    enqueue(sim["a"], sequence, work=broken)
    sim.drain()
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


def test_a_copy_that_fails_behind_ends_the_sequence_and_takes_nothing_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = hybrid()
    cached(cache, TOKENS[:8], 5)
    sim = Simulation("a")
    sequence = cache.open(TOKENS, leave=1)
    with monkeypatch.context() as patch:
        patch.setattr(type(cache.core.shape.lane("state")), "work", lambda *_: broken)
        sequence.fill(sim["a"])
    sequence.grow(32)
    sequence.commit()
    assert sequence.publish() == 40
    sim.drain()
    cache.poll()
    assert isinstance(sequence.failed, MemoryError) and not sequence.open
    with pytest.raises(ProtocolError, match="ended when a step or copy failed"):
        sequence.fill()
    assert (held(cache, TOKENS), held(cache, TOKENS[:8])) == (8, 8), "what was built on it has gone with it"
    settle(cache)
