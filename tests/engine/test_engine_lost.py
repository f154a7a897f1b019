"""What was computed from a copy that failed is not taken, whatever became of its reader; and a flush costs a recompute.

Copies that fail leave rubbish where they were to write: what was there before is right by chance, now and then.
"""

from __future__ import annotations

import threading
from typing import Any

import attrs
import pytest

import prefixloom.tiers.host_copies
from prefixloom import Cache
from prefixloom.testing.inside.backdoor import transfer_streams
from prefixloom_engine import Answer, Engine, Request
from prefixloom_engine.forward.jobs import Job
from prefixloom_hicache import MemoryBackend
from tests.engine.test_engine_tier import AHEAD, process, tiered
from tests.support.engines import model, nothing_left, plain, prompt
from tests.support.stores import write_out

pytestmark = pytest.mark.usefixtures("installed", "one_thread")
ROOM = {"full": 48_000, "swa": 48_000, "mamba": 400}


@attrs.define
class Copies:
    """Copies one way, that fail while ``failing``; each waits until it is ``known`` that it does."""

    way: str
    failing: bool = False
    begun: threading.Event = attrs.field(factory=threading.Event)
    known: threading.Event = attrs.field(factory=threading.Event)
    honest: Any = prefixloom.tiers.host_copies.copy_between

    def __call__(self, source: Any, src: Any, target: Any, dst: Any, *more: Any) -> None:
        if self.failing and target.name.startswith("host") == (self.way == "down"):
            self.begun.set()
            assert self.known.wait(20)
            for buffer in target.buffers.values():
                buffer[:, list(dst)] = 7
            raise OSError("a copy failed")
        self.honest(source, src, target, dst, *more)


@pytest.fixture
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Copies:
    made = Copies(getattr(request, "param", "up"))
    monkeypatch.setattr(prefixloom.tiers.host_copies, "copy_between", made)
    return made


def lose(cache: Cache) -> None:
    """All goes down to the host."""
    cache.evict({part.name: part.capacity for part in cache.composition.parts})
    settle(cache)


def settle(cache: Cache) -> None:
    settle_copies_only(cache)
    cache.poll()


def run(engine: Engine, *answers: Answer) -> list[list[int]]:
    while not all(answer.done for answer in answers):
        engine.step()
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return [answer.tokens for answer in answers]


def loading(engine: Engine, request: Request, copies: Copies) -> tuple[Answer, Job]:
    """It was answered before, lies on the host, and comes back in a copy that is to fail; its pass is in flight."""
    engine.generate([request])
    lose(engine.cache)
    copies.failing = True
    answer = engine.add(request)
    engine.step()
    (job,) = engine._scheduler.running
    assert job.unread_passes
    assert copies.begun.wait(20)
    return answer, job


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("retracted", [False, True])
def test_what_was_read_from_a_copy_that_fails_counts_for_nothing_whatever_became_of_its_reader(
    retracted: bool, flushed: bool, copies: Copies
) -> None:
    """Its pass is in flight when it has to leave, or loses all that it holds, before the copy is known to fail."""
    cache, request = tiered(overlap=True), Request(prompt(1, 330), 4)
    with Engine(model(), cache, chunk=256) as engine:
        answer, job = loading(engine, request, copies)
        if retracted:
            engine._scheduler.retract(job)
        if flushed:
            cache.flush()
        copies.known.set()
        assert run(engine, answer) == plain(model(), [request])
        assert engine.counts.failed > 0 or (flushed and not retracted)
    nothing_left(cache)


@AHEAD
def test_others_may_poll_or_flush_between_two_steps(overlap: bool, copies: Copies) -> None:
    cache, request = tiered(overlap=True), Request(prompt(1, 330), 4)
    with Engine(model(), cache, chunk=256, overlap=overlap) as engine:
        if overlap:
            answer, _ = loading(engine, request, copies)
            copies.known.set()
            settle(cache)
            copies.failing = False
            assert run(engine, answer) == plain(model(), [request])
            assert engine.counts.failed == 1
        request, flushes = attrs.evolve(request, max_tokens=30), 0
        answer = engine.add(request)
        while not answer.done:
            for _ in range(6):  # after fewer it would not get anywhere
                engine.step()
            cache.flush()
            flushes += 1
        assert flushes > 3, "more often than a request is tried again: a flush is no failure of its own"
        assert answer.error is None
        assert [answer.tokens] == plain(model(), [request])
    nothing_left(cache)


@pytest.mark.parametrize("copies", ["up", "down"], indirect=True)
def test_more_copies_fail_between_two_polls_than_a_stream_remembers(copies: Copies) -> None:
    """Three components of thirty requests each, all at once."""
    requests = [Request(prompt(seed, 70), 3) for seed in range(30)]
    cache = tiered("through", overlap=True, capacity=ROOM)
    with Engine(model(), cache, chunk=4096, max_running=40) as engine:
        if copies.way == "up":
            engine.generate(requests)
            lose(cache)
        copies.failing = True
        answers = [engine.add(request) for request in requests]
        engine.step()
        assert copies.begun.wait(20)
        copies.known.set()
        settle_copies_only(cache)
        copies.failing = copies.way == "down"
        assert run(engine, *answers) == plain(model(), requests)
        engine.drain()
        lose(cache)
        copies.failing = False
        assert [answer.tokens for answer in engine.generate(requests)] == plain(model(), requests)
    nothing_left(cache)


def settle_copies_only(cache: Cache) -> None:
    """All have failed, and nobody has asked."""
    for stream in transfer_streams(cache).values():
        assert stream.record().synchronize(20)


def test_a_load_that_always_fails_is_computed_in_the_end_whatever_a_store_brings(copies: Copies) -> None:
    """The host forgets what could not be copied, and the store brings it again."""
    request, store = Request(prompt(1, 330), 6), MemoryBackend(capacity=1 << 26)
    cache, _ = process(store)
    with Engine(model(), cache) as engine:
        engine.generate([request])
        write_out(cache)
    cache, host = process(store, overlap=True)
    copies.failing = True
    copies.known.set()
    with Engine(model(), cache) as engine:
        assert [answer.tokens for answer in engine.generate([request])] == plain(model(), [request])
        assert engine.counts.failed == 2
    host.detach()
    nothing_left(cache)
