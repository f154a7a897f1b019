"""Steps: ops run once and in order, drafts run none, a step is used once, a failed step commits nothing."""

from __future__ import annotations

from typing import Any

import attrs
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
from prefixloom.device.streams import InlineStream, ThreadStream
from prefixloom.testing.schedules.simulated import Simulation
from tests.support.helpers import cache_of, enqueue, held, part, path_cache, run, serve, settle

TOKENS = list(range(40))


class Broken(Exception):
    pass


def cached(cache: Any) -> dict[str, int]:
    return {name: figures.cached for name, figures in cache.stats().components.items()}


class Flushing(Component):
    """Adds an op of its own to every step, and remembers what ran."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ran: list[tuple[Op, Any]] = []
        self.batches: list[Any] = []
        self.answer: Any = (Op("flush", "mine", dst=(0,), data=1, sequence=0),)
        self.fails = False

    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> Any:
        self.batches.append(batch)
        return self.answer

    @hookimpl
    def run_forward_op(self, op: Op, stream: Any) -> None:
        self.ran.append((op, stream))
        if self.fails:
            raise LookupError("no stream")


class Claiming(Flushing):
    """Claims an op before the layers and one after them for every sequence."""

    @hookimpl
    def finalize_match_result(self, walk: Any) -> Claim:
        return Claim(ops=(Op("flush", "mine", data=2), Op("flush", "mine", data=3, after=True)))


def flushing() -> tuple[Any, Flushing]:
    mine = part("mine", Point(), kind=Flushing)
    assert isinstance(mine, Flushing)
    return cache_of(part("path", Path()), mine, part("state", Point())), mine


def test_the_derived_ops_come_first_and_then_the_plugins_own() -> None:
    cache, mine = flushing()
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        with cache.step([sequence]) as step:
            assert [(op.kind, op.component) for op in step.ops] == [
                ("clear", "mine"), ("clear", "state"), ("flush", "mine")
            ]  # fmt: skip
            assert mine.ran == []
            stream = InlineStream("a stream")
            step.run_ops(stream)
        named = attrs.evolve(mine.answer[0], dst=tuple(sequence.pages("mine")))
        assert mine.ran == [(named, stream)], "places are slots when an op runs"
        (batch,) = mine.batches
        assert [(view.boundary, view.key_tokens) for view in batch] == [(0, 40)]
    settle(cache)


def test_ops_run_once_however_a_forward_is_split() -> None:
    cache, mine = flushing()
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        with cache.step([sequence]) as step:
            step.run_ops()
            with pytest.raises(ProtocolError, match="have run already"):
                step.run_ops()
        assert len(mine.ran) == 1
    settle(cache)


def test_a_draft_step_has_no_ops_and_commits_nothing() -> None:
    cache, mine = flushing()
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        with cache.step([sequence], role="draft") as step:
            assert step.ops == ()
            step.run_ops()
        assert (mine.ran, mine.batches, sequence.committed) == ([], [], 0)
        run(sequence, 0)
        assert sequence.committed == 8
    settle(cache)


def test_ops_that_were_not_run_are_an_error_and_nothing_is_committed() -> None:
    cache, _ = flushing()
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        with pytest.raises(ProtocolError, match="ops that were not run"), cache.step([sequence]):
            pass
        assert sequence.committed == 0
    settle(cache)


def test_a_step_is_used_once_and_its_ops_inside_of_it() -> None:
    cache = path_cache()
    with cache.open(TOKENS) as sequence:
        step = cache.step([sequence])
        with pytest.raises(ProtocolError, match="inside of the step's with block"):
            step.run_ops()
        with step:
            step.run_ops()
        with pytest.raises(ProtocolError, match="used once"), step:
            pass
        with pytest.raises(ProtocolError, match="inside of the step's with block"):
            step.run_ops()


def test_a_step_skips_sequences_that_ended_while_it_ran() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()))
    bystander = cache.open([4] * 8)
    run(bystander, 8)
    stays, leaves = cache.open(TOKENS), cache.open([5] * 8)
    for sequence in (stays, leaves):
        sequence.grow(8)
    step = cache.step([stays, leaves])
    leaves.abort()
    other = cache.open([6] * 8)  # may get the slot that the aborted one had
    content = cache.pool("state").buffers["data"]
    content.fill_(77)
    with step:
        step.run_ops()
    (cleared,) = stays.pages("state")
    written = [slot for slot in range(content.shape[1]) if not (content[:, slot] == 77).all()]
    assert written == [cleared], "a late op must not hit a slot that is somebody else's by now"
    assert (stays.committed, leaves.open) == (8, False)
    for sequence in (stays, other, bystander):
        sequence.close()
    settle(cache)


def test_an_op_that_fails_fails_the_step_and_the_derived_ones_are_not_run_again() -> None:
    cache, mine = flushing()
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        mine.fails = True
        with pytest.raises(PluginError, match="'mine': run_forward_op raised"), cache.step([sequence]) as step:
            step.run_ops()
        assert sequence.committed == 0
        mine.fails = False
        with cache.step([sequence]) as step:
            assert [op.kind for op in step.ops] == ["flush"]
            step.run_ops()
        assert sequence.committed == 8
    settle(cache)


def test_a_claimed_op_is_due_in_the_first_step_that_runs_it_and_in_no_other() -> None:
    mine: Any = part("mine", Point(), kind=Claiming)
    cache = cache_of(part("path", Path()), mine)
    with cache.open(TOKENS) as sequence, cache.open([9] * 8) as other:
        sequence.grow(8)
        first, second = cache.step([sequence]), cache.step([sequence, other])
        with first:
            assert [(op.kind, op.data) for op in first.ops][1:] == [("flush", 2), ("flush", 1), ("flush", 3)]
            first.run_ops()
            assert [op.data for op in first.ops] == [1, 3], "what the step itself asked for belongs to it alone"
        assert [op.data for op, _ in mine.ran] == [2, 1, 3]
        assert [op.data for op in second.ops if op.kind == "flush"] == [2, 1, 3], "those of the other"
        other.abort()
        assert [op.data for op in second.ops] == [1]
        with second:
            second.run_ops()
        assert [op.data for op, _ in mine.ran][3:] == [1]
    settle(cache)


@pytest.mark.parametrize(
    "answer",
    [
        5, [Op("flush", "mine")], (5,), (Op("flush", "nobody"),), (Op("flush", "state"),),
        (Op("clear", "mine", dst=(99,)),), (Op("copy", "mine", dst=(0,), sequence=0),), (None,),
        (Op("copy", "mine", dst=("a",), src=("b",)),), (Op("clear", "mine", dst=5.5),),  # type: ignore[arg-type]
        (Op("track", "mine", dst=(0,), sequence=0),),
        (Op("copy", "mine", dst=(1, 2), src=((1, 2), (1,)), selector=torch.tensor([0, 0]), sequence=0),),
        (Op("copy", "mine", dst=(1,), src=((1, 2),), selector=torch.tensor([0, 0]), sequence=0),),
        (Op("copy", "mine", dst=(1,), src=((1, 2), (1, 2)), selector=torch.tensor([0]), sequence=0),),
    ],
    ids=repr,
)  # fmt: skip
def test_ops_that_cannot_be_run_are_refused_before_anything_runs(answer: Any) -> None:
    cache, mine = flushing()
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        mine.answer = answer
        with pytest.raises(PluginError, match="'mine': deferred_forward_ops must answer"):
            cache.step([sequence])
        mine.answer = None
        with cache.step([sequence]) as step:
            assert [op.kind for op in step.ops] == ["clear", "clear"]
            step.run_ops()
    settle(cache)


def test_the_role_and_the_sequences_of_a_step_are_checked() -> None:
    cache, other = path_cache(), path_cache()
    with cache.open(TOKENS) as mine, other.open(TOKENS) as foreign:
        with pytest.raises(InputError, match="'target' or 'draft', got 'both'"):
            cache.step([mine], role="both")  # type: ignore[arg-type]
        with pytest.raises(ProtocolError, match="belongs to another cache"):
            cache.step([mine, foreign])
        with pytest.raises(InputError, match="no component 'ghost' here; there are path"):
            cache.step([mine]).table("ghost")
        for wrong in (mine, [5], None):
            with pytest.raises((InputError, ProtocolError)):
                cache.step(wrong)  # type: ignore[arg-type]
    serve(cache, TOKENS)
    settle(cache)


@pytest.mark.parametrize("threaded", [False, True])
def test_plugins_ops_run_before_and_behind_the_layers_on_the_stream(threaded: bool) -> None:
    mine = part("mine", Path(), kind=Flushing)
    assert isinstance(mine, Flushing)
    cache = cache_of(mine)
    data = cache.pool("mine").buffers["data"]
    stream = ThreadStream("forward") if threaded else InlineStream("forward")
    order: list[str] = []
    mine.ran = Order(order)  # type: ignore[assignment]
    chosen = torch.tensor([1, 0])
    mine.answer = (
        Op("late", "mine", after=True), Op("track", "mine", dst=(9,), src=(4,), sequence=0),
        Op("early", "mine", selector=chosen),
        Op("copy", "mine", dst=(13, 16), src=((1, 4), (4, 1)), selector=chosen, after=True, sequence=0),
    )  # fmt: skip
    with cache.open(TOKENS) as sequence:
        sequence.grow(20)
        pages = sequence.pages("mine")
        with cache.step([sequence]) as step:
            assert [op.kind for op in step.ops] == ["early", "late", "track", "copy"]
            step.run_ops(stream)
            stream.run(lambda: order.append("layers"))
            stream.run(lambda: data[:, pages[1]].fill_(4))
            assert threaded or order == ["early", "layers"]
        stream.record().synchronize()
        assert order == ["early", "layers", "late"]
        assert [int(data[0, slot].max()) for slot in pages] == [0, 4, 4, 4, 4]
        sequence.abort()
    cache.poll()
    stream.close()
    settle(cache)


def test_copies_that_a_plugin_asks_for_may_share_what_they_read() -> None:
    mine = part("mine", Path(), kind=Flushing)
    assert isinstance(mine, Flushing)
    cache, streams = cache_of(mine), Simulation("one", "two")
    mine.answer = ()
    serve(cache, TOKENS[:8])
    mine.answer = (Op("copy", "mine", dst=(8,), src=(0,), sequence=0),)
    for number, name in enumerate(("one", "two")):
        sequence = cache.open([*TOKENS[:8], number, number])
        sequence.grow(2)
        enqueue(streams[name], sequence)
        sequence.abort()
    streams.drain()
    settle(cache)


class Order(list[Any]):
    """Takes what a plugin's op tells, and keeps its kind."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.order = order

    def append(self, told: Any) -> None:
        self.order.append(told[0].kind)


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_token_that_is_named_after_the_step_completes_nothing(lookahead: int) -> None:
    cache = cache_of(part("path", Path()), part("draft", Path(), lookahead=lookahead))
    with cache.open(TOKENS[:8]) as sequence:
        run(sequence, 8)
        assert sequence.publishable == 4
        sequence.append(TOKENS[8 : 8 + lookahead])
        assert sequence.publishable == 4
        with pytest.raises(ProtocolError, match=f"committed 8, of which {8 - lookahead} complete, lookahead"):
            sequence.publish(8)
    assert cache.peek(TOKENS) == 4
    settle(cache)


@pytest.mark.parametrize(("role", "ahead"), [("target", -1), ("target", 1.0), ("target", True), ("draft", 1)])
def test_another_number_of_chosen_tokens_is_refused(role: str, ahead: object) -> None:
    cache = path_cache()
    with cache.open(TOKENS[:8]) as sequence, pytest.raises(InputError, match="ahead takes a number of tokens"):
        cache.step([sequence], role, ahead=ahead)  # type: ignore[arg-type]


# ---------------------------------------------------------------- steps used badly: who is harmed


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
