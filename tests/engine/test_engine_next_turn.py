"""Two processes, and the next turn of a conversation: it hits in the decode process as it would in one process.

A prompt is handed over with what its last boundary needs, too, and published there. Where the decode process has no
room for that, it goes on without.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from prefixloom import Buffer, Cache, Component, Identity, Manifest, Path, Point, Reach, Window, compose
from prefixloom_engine import Batch, Engine, Request, ThreeWay, by_count, memory_with
from prefixloom_engine.forward.handover import plan_handover
from tests.support.engines import CAPACITY, cache_for, model, nothing_left, plain, prompt
from tests.support.transports import Two, two

pytestmark = pytest.mark.usefixtures("installed", "one_thread")


class Remembering:
    """What comes next follows from all tokens, from the last few, and from two recurrences: each must be right."""

    vocabulary, stops, config = 97, frozenset[int](), None
    identity = Identity(model="Remembering", weights="none")

    def changed(self) -> bool:
        return False

    def bind(self, cache: Cache) -> BoundRemembering:
        return BoundRemembering(cache)


class BoundRemembering:
    groups = staticmethod(by_count)

    def __init__(self, cache: Cache) -> None:
        self.memories = {name: memory_with(cache, 0, name) for name in ("all", "near", "sum", "mixed")}

    def forward(self, batch: Batch) -> Tensor:
        out = torch.zeros(len(batch.spans), batch.wanted, Remembering.vocabulary)
        for r, span in enumerate(batch.spans):
            for i, token in enumerate(batch.tokens[r].tolist()):
                told = self.one(batch, r, span.start + i, i, token)
                if i >= batch.count - batch.wanted:
                    out[r, i - batch.count, told % Remembering.vocabulary] = 1
        return out

    def one(self, batch: Batch, r: int, at: int, i: int, token: int) -> int:
        told = 0
        for name, back in (("all", at), ("near", 4)):
            memory = self.memories[name]
            size, table = memory.page_tokens, batch.tables[memory.component][r].tolist()
            rows = memory.rows[name]
            rows[table[at // size], at % size] = token
            told += sum(int(rows[table[p // size], p % size]) * (p + 1) for p in range(max(0, at - back), at + 1))
        for name, factor in (("sum", 3), ("mixed", 5)):
            memory = self.memories[name]
            slot = batch.tables[memory.component][r, 0]
            state = (int(memory.rows[name][slot]) * factor + token) % 1009
            singles = batch.singles.get(memory.component)
            for each in [slot, *([singles[r, i]] if singles is not None and batch.count <= singles.shape[1] else [])]:
                memory.rows[name][each] = state
            told += state
        return told


def remembered(**options: Any) -> Cache:
    """Two kinds of recurrence, of which ``every`` may keep checkpoints by itself, and a window smaller than a page."""
    every = options.pop("every", 0)
    parts = [
        Component("all", Manifest([Buffer("all", (), "int64")]), Path()),
        Component("near", Manifest([Buffer("near", (), "int64")]), Window(5)),
        Component("sum", Manifest([Buffer("sum", (), "int64")], max_rewind=8, checkpoint_every=every), Point()),
        Component("mixed", Manifest([Buffer("mixed", (), "int64")], max_rewind=8), Point()),
    ]
    capacity = options.pop("capacity", {"all": 4096, "near": 1024, "sum": 48, "mixed": 48})
    return compose(None, plugins=parts, page_size=16, capacity=capacity, **{"max_rewind": 4, "debug": True, **options})


def said(seed: int, length: int) -> list[int]:
    return [token % Remembering.vocabulary for token in prompt(seed, length)]


def turns(engine: Any, first: list[int], answer: int = 2) -> tuple[list[Any], list[int]]:
    """Two turns of a conversation, and the second one's prompt. ``engine``: one, or two of which one prefills."""
    answered = engine.answer if isinstance(engine, Two) else lambda request: engine.generate([request])
    (one,) = answered(Request(first, answer))
    history = [*first, *one.tokens, *said(99, 30)]
    (two,) = answered(Request(history, 6))
    return [one, two], history


def alone(*requests: Request) -> list[list[int]]:
    """The answers of one engine with much room."""
    with Engine(Remembering(), remembered()) as engine:
        return [answer.tokens for answer in engine.generate(requests)]


@pytest.mark.parametrize(
    ("length", "speculate", "overlap"), [(150, 0, True), (192, 3, True), (129, 3, False), (40, 0, False)]
)
def test_next_turn_hits_at_the_prompts_last_boundary(length: int, speculate: int, overlap: bool) -> None:
    with two(engine={"overlap": overlap, "speculate": speculate}) as both:
        (one, again), history = turns(both, prompt(1, length))
        assert both.decode.handed_over == (length >= 64) + (len(history) - again.hit >= 64)
    assert again.hit == length // 64 * 64
    assert [one.tokens, again.tokens] == plain(model(), [Request(prompt(1, length), 2), Request(history, 6)])


@pytest.mark.parametrize(("length", "hit"), [(150, 128), (192, 192)])
def test_next_turn_hits_with_a_draft(length: int, hit: int) -> None:
    it = ThreeWay("tiny", dtype="float64", draft=True)
    with two(it=it, make=lambda it: cache_for(it, {**CAPACITY, "draft": 1200}), engine={"speculate": 3}) as both:
        (_, again), _ = turns(both, prompt(1, length))
        assert both.decode.handed_over >= 1
    assert again.hit == hit


@pytest.mark.parametrize(
    ("length", "every", "speculate", "overlap"),
    [(150, 0, 0, True), (144, 16, 3, True), (145, 16, 0, False), (65, 0, 3, False), (150, 16, 3, True)],
)
def test_next_turn_hits_with_two_recurrences_and_a_window_smaller_than_a_page(
    length: int, every: int, speculate: int, overlap: bool
) -> None:
    """``every``: of one recurrence the cache keeps checkpoints of a decode by itself."""
    options = {"overlap": overlap, "speculate": speculate}
    with two(it=Remembering(), make=lambda _: remembered(every=every), engine=options) as both:
        told, history = turns(both, said(1, length))
        assert both.decode.handed_over >= 1
        assert both.decode.engine.counts.prefilled < 64
    assert [answer.tokens for answer in told] == alone(*(answer.request for answer in told))
    assert told[1].hit == length // 16 * 16
    assert len(history) - told[1].hit < 64, "the rest was computed here"


def test_window_of_the_last_boundary_is_handed_over() -> None:
    """Without a recurrence the window of the boundary begins before that of the end, and nothing else is lacking."""
    parts = [
        Component("all", Manifest([Buffer("all", (), "int64")]), Path()),
        Component("near", Manifest([Buffer("near", (), "int64")]), Window(5)),
    ]
    cache = compose(None, plugins=parts, page_size=16, capacity=1024)
    assert plan_handover(cache, 0, 0, 150) == (144, {"all": list(range(10)), "near": [8, 9]})
    assert plan_handover(cache, 144, 144, 150) == (0, {"all": [9], "near": [9]})
    assert plan_handover(cache, 0, 0, 16) == (0, {"all": [0], "near": [0]}), "there is no boundary before its end but 0"
    paths = compose(None, plugins=parts[:1], page_size=16, capacity=1024)
    assert plan_handover(paths, 0, 0, 150) == (0, {"all": list(range(10))}), "of a path the end's is all"


class Odd(Reach):
    """Inside of a page the first one is needed, and at its end it is not."""

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((0, min(n, 16)),) if n % 16 else ()


def test_pages_that_the_end_needs_and_the_boundary_does_not_are_handed_over_at_once() -> None:
    """There would be no slots for it in the second of two steps."""
    odd = Component("odd", Manifest([Buffer("odd", (), "int64")]), Odd())
    state = Component("sum", Manifest([Buffer("sum", (), "int64")]), Point())
    cache = compose(None, plugins=[odd, state], page_size=16, capacity=1024)
    assert plan_handover(cache, 0, 144, 150) == (0, {"odd": [0]})
    assert plan_handover(cache, 16, 144, 150) == (144, {"odd": []}), "the receiver has it"


def test_decode_process_without_room_for_a_checkpoint_goes_on_without() -> None:
    """Of states it has what runs and one to copy into; so nothing is kept, and nothing fails."""
    many = [Request(said(n, 150), 40) for n in range(5, 11)]
    cache = remembered(capacity={"all": 512, "near": 384, "sum": 2, "mixed": 2}, max_rewind=0)
    with two(it=Remembering(), make=lambda _: remembered(), cache=cache, engine={"max_running": 2}) as both:
        told, _ = turns(both, said(1, 150))
        told += both.answer(*many)
        assert both.decode.engine.counts.arrived >= 300
        assert cache.stats().skipped_checkpoints > 0
    assert [answer.tokens for answer in told] == alone(*(answer.request for answer in told))


@pytest.mark.parametrize("how", ["a pass failed in between", "it has no states"])
def test_content_that_arrives_in_part_or_does_not_fit_is_computed_here(how: str) -> None:
    """Between the two copies: the request starts over from what was published, or from nothing."""
    it, asked, cache = Remembering(), Request(said(1, 150), 6), remembered()
    with Engine(it, remembered()) as engine:
        (computed,) = engine.generate([Request(asked.tokens, 1, hand_over=0)])
    assert computed.handed is not None
    if how == "it has no states":
        computed.handed.states.clear()  # type: ignore[attr-defined]
    with Engine(it, cache, overlap=False) as engine:
        answer = engine.add(asked, computed.handed)
        if how == "a pass failed in between":
            engine.step()
            engine._scheduler.restart(next(iter(engine._scheduler.jobs.values())))
        while engine.step():
            pass
        if how == "a pass failed in between":
            assert (engine.counts.arrived, engine.counts.prefilled) == (144, 6)
        else:
            assert engine.counts.failed == 1
    assert (answer.tokens, answer.reason) == (alone(asked)[0], "length")
    nothing_left(cache)


def test_conversation_hits_turn_by_turn() -> None:
    """Each turn asks the prefill process for no more than what the decode process lacks."""
    with two(it=Remembering(), make=lambda _: remembered(), least=16) as both:
        history, before = said(1, 100), 0
        for n in range(4):
            (answer,) = both.answer(Request(history, 20))
            assert answer.hit >= before
            before = (len(history) + 19) // 16 * 16
            history = [*history, *answer.tokens, *said(n, 40)]
            assert both.decode.cache.peek(history, leave=1) == before
        assert both.decode.handed_over == 4
