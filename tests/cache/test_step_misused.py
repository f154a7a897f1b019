"""Steps used badly: what is refused says so and harms nobody, and a plugin's own ops do what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from prefixloom import (
    BrokenError,
    Buffer,
    Claim,
    Codec,
    Component,
    InputError,
    Manifest,
    Op,
    Path,
    PluginError,
    Point,
    ProtocolError,
    hookimpl,
)
from prefixloom.testing.schedules.simulated import Simulation
from tests.device.test_flight_hostile import cached
from tests.device.test_flight_regressions import TOKENS, Broken, enqueue
from tests.support.helpers import cache_of, held, part, run, settle


def test_a_flush_inside_of_a_step_that_fails_gives_nothing_back_twice() -> None:
    cache = cache_of(part("state", Point(), checkpoint_every=4))
    sequence = cache.open(TOKENS)
    sequence.grow(8)
    with pytest.raises(Broken), cache.step([sequence]) as step:
        step.run_ops()
        cache.flush()
        raise Broken
    assert sorted(cache.core.shape.lane("state").pool.free_ids()) == list(range(8))


def test_a_step_that_is_refused_at_its_end_has_written_its_states_all_the_same() -> None:
    """The others of a refused batch published what its layers had written as the state of where they were before."""
    cache = cache_of(part("path", Path()), part("state", Point()))
    one, other = cache.open(TOKENS), cache.open([5] * 40)
    run(one, 4)
    run(other, 4)
    one.grow(4)
    with cache.step([one]) as outer:
        outer.run_ops()
        one.grow(4)
        other.grow(4)
        with pytest.raises(ProtocolError, match="has not ended"), cache.step([one, other]) as step:
            step.run_ops()
        one.abort()
    other.close()
    assert cached(cache) == {"path": 1, "state": 0}
    settle(cache)


def test_tokens_that_are_taken_back_inside_of_a_step_are_not_committed_by_it_under_other_names() -> None:
    cache = cache_of(part("path", Path()))
    with cache.open(TOKENS[:8]) as sequence:
        sequence.grow(8)
        with cache.step([sequence]) as step:
            step.run_ops()
            sequence.rewind(3)
            sequence.append([7, 7, 7])
            sequence.grow(3)
        assert sequence.committed == 5
    assert held(cache, [*TOKENS[:5], 7, 7, 7]) == 4
    settle(cache)


def test_tokens_that_are_taken_back_inside_of_a_step_are_not_committed_by_it_when_another_step_computes_them() -> None:
    """The end of the first step committed what the second was about to compute, and that was published unwritten."""
    cache = cache_of(part("path", Path()))
    sequence = cache.open(TOKENS[:8])
    sequence.grow(8)
    first = cache.step([sequence])
    with first:
        first.run_ops()
        sequence.rewind(4)
        sequence.append([7, 7, 7, 7])
        sequence.grow(4)
        second = cache.step([sequence]).__enter__()
        second.run_ops()
    assert (sequence.committed, sequence.publish()) == (4, 4)
    second.__exit__(None, None, None)
    assert (sequence.committed, sequence.publish()) == (8, 8)
    sequence.close()
    settle(cache)


@pytest.mark.parametrize("late", [False, True])
def test_a_step_whose_op_failed_commits_nothing_when_the_caller_goes_on(late: bool) -> None:
    """The error of ``run_ops`` was caught, and the end of the block committed what had been computed without the op."""
    mine = part("state", Point(), kind=Adds)
    assert isinstance(mine, Adds)
    cache = cache_of(part("path", Path()), mine)
    sequence = cache.open(TOKENS)
    if late:
        run(sequence, 4)
    sequence.grow(4)
    committed = sequence.committed
    mine.answer = (Op("fails", "state", dst=(0,), sequence=0),)
    refused = pytest.raises(ProtocolError, match="ops that were not run")
    with refused, cache.step([sequence]) as step, pytest.raises(PluginError, match="run_forward_op raised"):
        step.run_ops()
    assert (sequence.committed, sequence.publish()) == (committed, committed)
    mine.answer = ()
    with pytest.raises(ProtocolError, match="may have written half a state"):
        run(sequence, 0)
    sequence.close()
    settle(cache)


def test_a_step_that_left_out_the_op_of_a_plugin_has_written_its_states_all_the_same() -> None:
    mine = part("state", Point(), kind=Adds)
    assert isinstance(mine, Adds)
    cache = cache_of(part("path", Path()), mine)
    sequence = cache.open(TOKENS)
    run(sequence, 4)
    sequence.grow(4)
    mine.answer = (Op("clear", "state", dst=(0,), sequence=0),)
    with pytest.raises(ProtocolError, match="ops that were not run"), cache.step([sequence]):
        pass
    mine.answer = ()
    with pytest.raises(ProtocolError, match="may have written half a state"):
        run(sequence, 0)
    sequence.close()
    assert cached(cache) == {"path": 1, "state": 0}
    settle(cache)


def test_a_state_is_not_taken_back_while_an_open_step_brings_it_further() -> None:
    """The step's end took it for the state of where the sequence was rewound to."""
    cache = cache_of(part("state", Point(), max_rewind=4), max_rewind=4)
    sequence = cache.open(TOKENS[:8])
    run(sequence, 4)
    sequence.grow(4)
    with cache.step([sequence]) as step:
        step.run_ops()
        with pytest.raises(ProtocolError, match="End the step first"):
            sequence.rewind(2)
    sequence.rewind(2)
    assert (sequence.committed, [kind for _, _, kind, _ in sequence.running.fills]) == (6, ["copy"])
    sequence.abort()


def test_a_state_that_an_open_step_kept_from_the_tree_is_published_once_that_failed_without_writing_it() -> None:
    cache = cache_of(part("state", Point()))
    sequence = cache.open(TOKENS[:8])
    run(sequence, 8)
    with pytest.raises(KeyError), cache.step([sequence]) as step:
        step.run_ops()
        assert sequence.publish(4) == 4
        raise KeyError
    assert (held(cache, TOKENS[:8]), sequence.publish(), held(cache, TOKENS[:8])) == (0, 8, 8)
    sequence.close()
    settle(cache)


def test_accept_says_what_is_wrong_and_takes_one_tensor() -> None:
    cache = cache_of(part("state", Point(), max_rewind=2), max_rewind=2)
    sequence = cache.open(TOKENS[:8])
    run(sequence, 5)
    sequence.grow(3)
    bad: list[Any] = [3, [1], torch.tensor([1, 1]), torch.tensor([1.0]), torch.tensor([True]), None]
    with cache.step([sequence]) as step:
        step.run_ops()
        for kept in bad:
            with pytest.raises(InputError, match="an int tensor"):
                step.accept(kept)
        step.accept(torch.tensor([1]))
        with pytest.raises(ProtocolError, match="called already"):
            step.accept(torch.tensor([1]))
    with pytest.raises(ProtocolError, match="into a target step's with block"):
        step.accept(torch.tensor([1]))
    sequence.rewind(2)
    sequence.grow(1)
    with cache.step([sequence], role="draft") as draft:
        draft.run_ops()
        with pytest.raises(ProtocolError, match="into a target step's with block"):
            draft.accept(torch.tensor([1]))
    sequence.abort()


class Adds(Component):
    """Adds ops of its own to every step; an interrupt hits it when it is asked what may go."""

    answer: tuple[Op, ...] = ()
    interrupted = False

    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> Any:
        return self.answer

    @hookimpl
    def run_forward_op(self, op: Op, stream: Any) -> None:
        raise LookupError

    @hookimpl
    def evict_component(self, node: Any) -> Claim | None:
        if self.interrupted:
            raise KeyboardInterrupt
        return None


def test_after_an_interrupt_while_a_step_ends_a_flush_leaves_no_step_in_flight() -> None:
    mine = part("state", Point(), kind=Adds, checkpoint_every=4)
    assert isinstance(mine, Adds)
    cache = cache_of(mine, slots=4)
    for n in range(3):
        with cache.open([n] * 5) as other:
            run(other, 4)
    sequence = cache.open(TOKENS)
    sequence.grow(4)
    with pytest.raises(KeyboardInterrupt), cache.step([sequence]) as step:
        step.run_ops()
        mine.interrupted = True
    mine.interrupted = False
    with pytest.raises(BrokenError, match=r"KeyboardInterrupt in (Step\.)?__exit__"):
        run(sequence, 0)
    cache.flush()
    assert (cache.core.flight.works, cache.core.flight.stamp) == ([], 0)
    settle(cache)


# ---------------------------------------------------------------- plugins' own ops


class Unreadable(torch.Tensor):
    """What only the device may look at."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        raise AssertionError("read by the scheduling thread")


@pytest.mark.parametrize("kind", ["copy", "track"])
def test_an_op_of_a_plugin_may_have_a_selector_and_nobody_reads_it(kind: str) -> None:
    mine = part("mine", Point(), kind=Adds, max_rewind=2)
    assert isinstance(mine, Adds)
    cache = cache_of(mine, slots=8, max_rewind=2)
    sequence = cache.open(TOKENS)
    sequence.grow(4)
    selector = torch.tensor([1]).as_subclass(Unreadable)
    mine.answer = (Op(kind, "mine", dst=(0,), src=((1, 2),), selector=selector, sequence=0),)
    data = cache.pool("mine").buffers["data"]
    data[0, sequence.rewind_slots("mine")[1]] = 33
    sim = Simulation("a")
    enqueue(sim["a"], sequence)
    sim.drain()
    assert data[0, sequence.pages("mine")[0]].tolist() == [33, 33]
    for wrong in ((2,), ((),), ((1, 2), (1,)), ()):
        mine.answer = (Op(kind, "mine", dst=(0,), src=wrong, selector=torch.tensor([1]), sequence=0),)
        with pytest.raises(PluginError, match="must answer"):
            cache.step([sequence])
    cache.poll()


def test_an_op_of_a_plugin_names_slots_of_running_states_also_where_they_rest_in_another_form() -> None:
    codec = Codec("int8", tolerance=0.004)
    mine = Adds("state", Manifest([Buffer("data", (2,), "float32")], stored_as=codec), Point())
    cache = cache_of(mine, max_running=4)
    sequence = cache.open(TOKENS)
    run(sequence, 4)
    data = cache.pool("state").buffers["data"]
    data.fill_(7)
    mine.answer = (Op("clear", "state", dst=(0,), sequence=0),)
    run(sequence, 4)
    assert data[0, sequence.pages("state")[0]].tolist() == [0, 0]
