"""Filling running states outside of steps: content, what may go afterwards, refusals, failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixloom import Buffer, Claim, Codec, Component, Manifest, Op, Path, Point, ProtocolError, WorkError, hookimpl
from tests.support.filling import DEBUG_OR_NOT, TOKENS, cached, content, hybrid
from tests.support.helpers import cache_of, held, part, run, settle


@DEBUG_OR_NOT
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


@DEBUG_OR_NOT
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


@DEBUG_OR_NOT
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


@DEBUG_OR_NOT
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
