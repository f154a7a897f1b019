"""Streams: order within one, events between them, what failed, and the vector clocks that go along."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch

from prefixloom import InputError, InvariantError
from prefixloom.device.streams import KEPT_FAILURES, Event, InlineStream, Stream, ThreadStream, stream_for
from prefixloom.testing.schedules.simulated import SimulatedStream, Simulation
from tests.support.interrupting import Interrupt
from tests.support.processes import python
from tests.support.stream_helpers import SOON, Gate, LateStream


def fails(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


# ---------------------------------------------------------------- inline


def test_an_inline_stream_runs_at_once_and_raises_to_the_caller() -> None:
    stream, seen = InlineStream("inline"), list[int]()
    stream.run(lambda: seen.append(1))
    assert seen == [1] and stream.inline and stream.record().done
    with pytest.raises(ZeroDivisionError):
        stream.run(lambda: 1 // 0)
    assert stream.failure(0, 9) is None


def test_an_inline_stream_that_waits_blocks_the_caller(threads: Callable[..., ThreadStream]) -> None:
    worker = threads()
    gate = Gate(worker)
    event = worker.record()
    threading.Timer(0.05, gate.free.set).start()
    InlineStream("inline").wait(event)
    assert event.done


# ---------------------------------------------------------------- threads


def test_waiting_for_an_event_ends_when_the_time_is_up(threads: Callable[..., ThreadStream]) -> None:
    worker = threads()
    gate = Gate(worker)
    start = time.monotonic()
    assert worker.record().synchronize(0.02) is False
    assert time.monotonic() - start >= 0.02
    gate.free.set()
    assert worker.record().synchronize(SOON) is True


def test_a_worker_that_waits_goes_on_after_the_other_one_and_the_caller_does_not_wait(
    threads: Callable[..., ThreadStream],
) -> None:
    first, second, seen = threads("first"), threads("second"), list[str]()
    gate = Gate(first)
    first.run(lambda: seen.append("first"))
    event = first.record()
    second.run(lambda: seen.append("before"))
    ahead = second.record()
    second.wait(event)
    second.run(lambda: seen.append("second"))
    assert ahead.synchronize(SOON)
    assert seen == ["before"] and not second.record().done
    gate.free.set()
    assert second.record().synchronize(SOON)
    assert seen == ["before", "first", "second"]


def test_a_worker_that_waits_for_itself_does_not_hang(threads: Callable[..., ThreadStream]) -> None:
    worker = threads()
    worker.run(lambda: None)
    worker.wait(worker.record())
    assert worker.record().synchronize(SOON) and worker.tick == 1


def test_what_work_raises_is_told_by_its_tick_and_the_worker_goes_on(threads: Callable[..., ThreadStream]) -> None:
    worker, seen, errors = threads(), list[int](), [ValueError("one"), KeyboardInterrupt("two")]
    worker.run(lambda: None)
    for error in errors:
        worker.run(fails(error))
    worker.run(lambda: seen.append(1))
    assert worker.record().synchronize(SOON) and seen == [1]
    assert [worker.failure(n, n + 1) for n in range(4)] == [None, *errors, None]
    assert worker.failure(0, 4) is errors[0] and worker.failure(2, 4) is errors[1] and worker.failure(3, 9) is None


def test_a_failure_keeps_nothing_that_its_work_had_at_hand(threads: Callable[..., ThreadStream]) -> None:
    stream, kept = threads("a"), []

    def work() -> None:
        logits = {1, 2}
        kept.append(weakref.ref(logits))
        raise ValueError("no")

    stream.run(work)
    stream.record().synchronize()
    assert str(stream.failure(0, stream.tick)) == "no"
    gc.collect()
    assert kept[0]() is None


def test_a_worker_without_work_keeps_nothing_of_the_last(threads: Callable[..., ThreadStream]) -> None:
    stream, logits = threads("a"), {1, 2}
    kept = weakref.ref(logits)
    stream.run(partial(len, logits))
    del logits
    stream.record().synchronize()
    assert kept() is None


def test_a_failure_is_not_told_before_it_happened(threads: Callable[..., ThreadStream]) -> None:
    worker, error = threads(), ValueError("late")
    gate = Gate(worker)
    worker.run(fails(error))
    assert worker.failure(0, worker.tick) is None
    gate.free.set()
    assert worker.record().synchronize(SOON)
    assert worker.failure(0, worker.tick) is error


def test_closing_a_worker_finishes_its_work_and_then_takes_none(threads: Callable[..., ThreadStream]) -> None:
    worker, seen = threads(), list[int]()
    for number in range(50):
        worker.run(partial(seen.append, number))
    event = worker.record()
    worker.close()
    assert seen == list(range(50)) and event.done
    worker.close()
    with pytest.raises(InputError, match="<ThreadStream 'worker'> is closed"):
        worker.run(lambda: None)
    with pytest.raises(InputError, match="is closed"):
        worker.wait(threads("other").record())
    assert worker.tick == 50 and len(seen) == 50


def test_many_workers_that_wait_for_each_other_keep_every_order(threads: Callable[..., ThreadStream]) -> None:
    """Chains over four workers with random delays: each link runs after the one before it."""
    choice, delays = random.Random(1), random.Random(2)
    workers = [threads(str(n), lambda name: LateStream(name, lambda: 0.0003 * delays.random())) for n in range(4)]
    chains: list[list[int]] = [[] for _ in range(8)]
    last: list[Event | None] = [None] * 8
    for link in range(20):
        for number, chain in enumerate(chains):
            worker = choice.choice(workers)
            event = last[number]
            if event is not None:
                worker.wait(event)
            worker.run(partial(chain.append, link))
            last[number] = worker.record()
    for worker in workers:
        assert worker.record().synchronize(SOON)
    assert chains == [list(range(20))] * 8


# ---------------------------------------------------------------- simulated


def test_a_simulated_stream_runs_when_it_is_told_one_piece_at_a_time() -> None:
    (stream,), seen = Simulation("a").streams, list[int]()
    for number in range(3):
        stream.run(partial(seen.append, number))
    event = stream.record()
    assert not seen and stream.ready and not event.done
    stream.advance()
    assert seen == [0] and not event.done
    stream.advance()
    stream.advance()
    assert seen == [0, 1, 2] and event.done and not stream.ready


def test_a_simulated_stream_that_waits_is_ready_once_the_event_is_over() -> None:
    sim = Simulation("a", "b")
    a, b = sim.streams
    assert sim["b"] is b
    with pytest.raises(KeyError):
        sim["c"]
    a.run(lambda: None)
    b.wait(a.record())
    a.run(lambda: None)
    assert sim.ready == [a] and not b.ready
    with pytest.raises(InvariantError, match=r"<Event 1 of <SimulatedStream 'b'>> is waited for, .* cannot go on"):
        b.record().synchronize()
    a.advance()
    assert sim.ready == [a, b]
    assert b.record().synchronize()
    assert sim.ready == [a] and a.record().synchronize()


def test_draining_runs_all_and_tells_of_what_waits_for_ever() -> None:
    sim, seen = Simulation("a", "b"), list[str]()
    a, b = sim.streams
    b.run(lambda: seen.append("b"))
    a.wait(b.record())
    a.run(lambda: seen.append("a"))
    sim.drain()
    assert seen == ["b", "a"] and a.over == a.tick == 2
    outside = SimulatedStream("c")
    outside.run(lambda: None)
    a.wait(outside.record())
    with pytest.raises(InvariantError, match="<SimulatedStream 'a'> waits for what never comes"):
        sim.drain()


# ---------------------------------------------------------------- which stream is meant


def test_on_a_cpu_no_stream_is_the_caller_and_always_the_same_one() -> None:
    known: dict[object, Stream] = {}
    stream = stream_for(None, "cpu", known)
    assert stream.inline and stream_for(None, "cpu", known) is stream_for(None, "meta", known) is stream
    assert stream_for(None, "cpu", {}) is not stream


def test_a_stream_of_ours_is_itself_and_anything_else_is_refused() -> None:
    stream = SimulatedStream("a")
    assert stream_for(stream, "cpu", {}) is stream
    with pytest.raises(InputError, match=r"a stream is a prefixloom Stream, .* or None, got 'cuda'"):
        stream_for("cuda", "cpu", {})


def test_a_process_that_ends_while_a_stream_is_in_torch_is_not_aborted() -> None:
    told = python(
        "import threading, torch\n"
        "from prefixloom import ThreadStream\n"
        "torch.set_num_threads(1)\n"
        "begun, matrix = threading.Event(), torch.ones(300, 300)\n"
        "def work():\n"
        "    begun.set()\n"
        "    for _ in range(500): matrix @ matrix\n"
        "stream = ThreadStream('x')\n"
        "for each in (work, work, lambda: print('over', flush=True)): stream.run(each)\n"
        "assert begun.wait(30)\n"
    )
    assert told == "over\n"


def test_streams_and_events_say_who_they_are() -> None:
    stream = SimulatedStream("a")
    stream.run(lambda: None)
    assert repr(stream) == "<SimulatedStream 'a'>" and repr(stream.record()) == "<Event 1 of <SimulatedStream 'a'>>"
    assert SimulatedStream("a").number != stream.number


class FakeCuda:
    """As much of a torch.cuda.Stream as tells where it is."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.cuda_stream = 7


def test_a_stream_of_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", FakeCuda)
    known: dict[object, Stream] = {}
    assert stream_for(FakeCuda(1), "cuda:1", known) is stream_for(FakeCuda(1), "cuda", known)
    for device in ("cpu", "meta", "cuda:0"):
        with pytest.raises(InputError, match=f"the cache lies on '{device}', and .* is a stream of cuda:1"):
            stream_for(FakeCuda(1), device, {})
    with pytest.raises(InputError, match="cannot tell when work on 'cuda:0' is over"):
        stream_for(SimulatedStream("a"), "cuda:0", {})


@pytest.mark.parametrize("busy", [False, True])
def test_whatever_an_interrupt_kept_from_a_worker_nobody_waits_for_ever(busy: bool) -> None:
    """At every line: what was enqueued is over in time, and what is enqueued later is not taken for done too early."""

    def interrupted(line: int) -> bool:
        stream = ThreadStream("interrupted")
        gate, ran = threading.Event(), threading.Event()
        stream.run(gate.wait if busy else int)
        assert busy or stream.record().synchronize(5)
        interrupt = Interrupt(line)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            stream.run(ran.set)
        event = stream.record()
        assert not (busy and event.done)
        gate.set()
        assert event.synchronize(5), f"line {line}"
        gate.clear()
        stream.run(gate.wait)
        later = stream.record()
        assert not later.synchronize(0.01), f"line {line}"
        gate.set()
        assert later.synchronize(5), f"line {line}"
        stream.close()
        assert ran.is_set() or interrupt.left == 0
        closed = ThreadStream("closed at once")
        with contextlib.suppress(KeyboardInterrupt), Interrupt(line):
            closed.run(int)
        closed.close()
        assert closed.record().done, f"line {line}"
        return interrupt.left <= 0

    line = 1
    while interrupted(line):
        line += 1
    assert line > 4


def test_a_failure_that_was_forgotten_counts_for_work_that_began_before_it_alone() -> None:
    stream = SimulatedStream("a")
    for _ in range(KEPT_FAILURES + 1):
        stream.run(lambda: 1 // 0)
        stream.advance()
    assert isinstance(stream.failure(0, 1), ZeroDivisionError), "it was the first of them"
    assert stream.failure(1, 1) is None, "the work began when that was over"


def test_a_stream_that_keeps_failing_does_not_keep_every_failure() -> None:
    (stream,) = Simulation("a").streams
    for _ in range(200):
        stream.run(lambda: 1 // 0)
    while stream.ready:
        stream.advance()
    assert len(stream.failures) < 100
    assert isinstance(stream.failure(0, 200), ZeroDivisionError)
