"""Filling running states outside of steps: content, what may go, streams that run behind, refusals, failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import cache_of, enqueue, held, part, run, settle
from prefixloom import Buffer, Claim, Codec, Component, Manifest, Op, Path, Point, ProtocolError, Window, hookimpl
from prefixloom.streams import ThreadStream
from prefixloom.testing.simulated import Simulation
from stream_helpers import Gate
from tiers import simulated, tiered

TOKENS = list(range(40))
FUSED = pytest.mark.parametrize("debug", [True, False], ids=["sources", "made"])


def hybrid(**options: Any) -> Any:
    return cache_of(part("path", Path()), part("window", Window(10)), part("state", Point()), **options)


def content(cache: Any, sequence: Any) -> torch.Tensor:
    slot = sequence.pages("state")[0]
    found: torch.Tensor = cache.pool("state").buffers["data"][:, slot]
    return found


def cached(cache: Any, tokens: list[int], value: int) -> None:
    """A state for all of ``tokens``, which holds ``value``."""
    with cache.open(tokens) as sequence:
        run(sequence, len(tokens) - sequence.reserved)
        content(cache, sequence).fill_(value)


@FUSED
def test_a_fresh_state_is_zeros_and_a_hit_is_a_copy(debug: bool) -> None:
    cache = hybrid(debug=debug)
    cache.pool("state").buffers["data"].fill_(9)
    with cache.open(TOKENS[:8]) as first:
        first.grow(8)
        first.fill()
        assert not content(cache, first).any()
        content(cache, first).fill_(5)
        first.commit()
    with cache.open(TOKENS) as second:
        assert second.ready == 8
        second.fill()
        assert (content(cache, second) == 5).all()
        content(cache, second).fill_(6)
        second.grow(32)
        second.commit()
        assert (second.committed, second.publish()) == (40, 40)
    assert held(cache, TOKENS) == 40
    with cache.open(TOKENS[:9], leave=1) as third:
        third.fill()
        assert (content(cache, third) == 5).all(), "what was copied from is still what it was"
    settle(cache)


@FUSED
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


@FUSED
def test_a_second_time_there_is_nothing_to_do(debug: bool) -> None:
    cache = hybrid(debug=debug)
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        sequence.fill()
        content(cache, sequence).fill_(5)
        sequence.fill()
        assert (content(cache, sequence) == 5).all()
        with cache.step([sequence]) as step:
            assert step.ops == ()
            step.run_ops()
        assert sequence.committed == 8
    settle(cache)


@FUSED
def test_after_a_publication_the_copy_of_what_was_handed_over_is_due(debug: bool) -> None:
    cache = hybrid(debug=debug)
    with cache.open(TOKENS) as sequence:
        for end, before in ((8, 0), (16, 8), (40, 16)):
            sequence.grow(end - sequence.reserved)
            with pytest.raises(ProtocolError, match=r"call sequence\.fill\(\) first"):
                sequence.commit()
            sequence.fill()
            assert (content(cache, sequence) == before).all()
            content(cache, sequence).fill_(end)
            sequence.commit()
            sequence.publish()
    assert [held(cache, TOKENS[:end]) for end in (8, 16, 40)] == [8, 16, 40]
    settle(cache)


def test_without_states_there_is_nothing_to_fill() -> None:
    cache = cache_of(part("path", Path()))
    with cache.open(TOKENS) as sequence:
        sequence.fill()
        sequence.grow(8)
        sequence.commit()
    assert held(cache, TOKENS) == 8
    settle(cache)


def test_what_rests_in_another_form_is_decoded() -> None:
    manifest = Manifest([Buffer("data", (8,), "float32")], stored_as=Codec("int8", tolerance=0.004))
    cache = cache_of(part("path", Path()), Component("state", manifest, Point()), slots=12, max_running=2)
    values = torch.linspace(-1, 1, 8)
    with cache.open(TOKENS[:8]) as first:
        first.grow(8)
        first.fill()
        content(cache, first)[:] = values
        first.commit()
    with cache.open(TOKENS, leave=1) as second:
        second.fill()
        assert (content(cache, second) - values).abs().max() < 0.01
    settle(cache)


# ---------------------------------------------------------------- streams


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


@FUSED
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


@FUSED
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


@FUSED
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
@FUSED
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


@FUSED
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


@FUSED
def test_between_fill_and_commit_a_state_cannot_be_rewound(debug: bool) -> None:
    cache = cache_of(part("path", Path()), part("state", Point(), max_rewind=3), max_rewind=3, slots=12, debug=debug)
    with cache.open(TOKENS) as sequence:
        sequence.grow(12)
        sequence.rewind(4)  # nobody may have written it yet
        sequence.fill()
        with pytest.raises(ProtocolError, match="layers may have written the state of component 'state'"):
            sequence.rewind(4)
        assert sequence.reserved == 8
        sequence.rewind(0)
        sequence.commit()
        sequence.grow(2)
        sequence.fill()
        sequence.commit()
        sequence.rewind(1)
        assert (sequence.reserved, sequence.committed) == (9, 9)
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


# ---------------------------------------------------------------- refusals and failures


class Adding(Component):
    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> Any:
        return (Op("clear", self.name, dst=(0,)),)


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


@FUSED
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


@FUSED
def test_an_op_that_fails_is_still_due(debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = hybrid(debug=debug)
    cached(cache, TOKENS[:8], 5)
    sequence = cache.open(TOKENS, leave=1)
    lane = cache._lane("state")

    def broken(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(lane), "work", broken)
        with pytest.raises(MemoryError):
            sequence.fill()
    with pytest.raises(ProtocolError, match="ops that have not run"):
        sequence.commit()
    assert cache.evict({"state": 8}) == {"state": 0}, "it is covered until it was copied"
    sequence.fill()
    assert (content(cache, sequence) == 5).all()
    sequence.close()
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
        patch.setattr(type(cache._lane("state")), "work", lambda *_: fail)
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


@FUSED
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


@FUSED
def test_a_refused_fill_does_not_stand_for_the_step_before_it(debug: bool) -> None:
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
            first.fill(sim["b"])
        cache.poll()
        first.close()
        second = cache.open(TOKENS)
        assert second.ready == 12
    enqueue(sim["c"], second)
    assert not sim["c"].ready, "it reads what the first step has yet to write"
    sim.drain()
    second.close()
    settle(cache)
