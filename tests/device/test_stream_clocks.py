"""The vector clocks of streams, which the race detector reads."""

from __future__ import annotations

from collections.abc import Callable

from prefixloom.device.streams import InlineStream, ThreadStream, host_clock, join
from prefixloom.testing.schedules.simulated import SimulatedStream, Simulation
from tests.support.stream_helpers import SOON, Gate


def followed() -> tuple[Simulation, SimulatedStream, SimulatedStream, SimulatedStream]:
    sim = Simulation("a", "b", "c")
    for stream in sim.streams:
        stream.follow()
    return (sim, *sim.streams)  # type: ignore[return-value]


def test_without_a_detector_there_are_no_clocks() -> None:
    sim = Simulation("a", "b")
    a, b = sim.streams
    before = dict(host_clock)
    a.run(lambda: None)
    event = a.record()
    b.wait(event)
    sim.drain()
    assert event.done
    assert a.clock is b.clock is event.clock is None and host_clock == before


def test_work_knows_its_own_tick_and_what_the_stream_waited_for() -> None:
    _, a, b, c = followed()
    a.run(lambda: None)
    a.run(lambda: None)
    event = a.record()
    a.run(lambda: None)
    b.wait(event)
    assert a.number not in c.entering()
    assert b.entering()[a.number] == 2 and b.entering()[b.number] == b.tick == 1
    c.wait(b.record())
    assert c.entering()[a.number] == 2 and c.entering()[b.number] == 1
    assert b.number not in a.entering()


def test_an_event_knows_only_what_came_before_it() -> None:
    _, a, b, c = followed()
    a.run(lambda: None)
    early = b.record()
    b.wait(a.record())
    assert early.clock is not None and a.number not in early.clock
    c.wait(early)
    assert a.number not in c.entering()


def test_what_is_seen_done_is_known_to_all_that_is_enqueued_later() -> None:
    sim, a, b, c = followed()
    a.run(lambda: None)
    b.wait(a.record())
    b.run(lambda: None)
    event = b.record()
    assert not event.done and a.number not in host_clock and a.number not in c.entering()
    sim.drain()
    assert a.number not in host_clock, "nobody looked"
    assert event.done
    assert host_clock[a.number] == 1 and host_clock[b.number] == 2
    assert c.entering()[a.number] == 1
    late = SimulatedStream("late")
    late.follow()
    assert late.entering()[b.number] == 2


def test_following_again_keeps_the_clock_and_an_earlier_event_has_none() -> None:
    sim = Simulation("a", "b")
    a, b = sim.streams
    a.run(lambda: None)
    early = a.record()
    a.follow()
    b.follow()
    b.wait(early)
    assert a.number not in b.entering()
    b.wait(a.record())
    b.follow()
    assert b.entering()[a.number] == 1


def test_a_clock_never_goes_back() -> None:
    clock = {1: 5, 2: 1}
    join(clock, {1: 3, 2: 4, 7: 2})
    assert clock == {1: 5, 2: 4, 7: 2}


def test_the_thread_that_waits_for_an_event_knows_what_it_knew(threads: Callable[..., ThreadStream]) -> None:
    worker, other, inline = threads(), threads("other"), InlineStream("inline")
    for stream in (worker, other):
        stream.follow()
    worker.run(lambda: None)
    inline.wait(worker.record())
    assert host_clock[worker.number] == 1 and other.entering()[worker.number] == 1
    other.run(lambda: None)
    assert other.record().synchronize(SOON) and host_clock[other.number] == 1


def test_an_event_that_was_not_over_in_time_tells_nothing(threads: Callable[..., ThreadStream]) -> None:
    worker = threads()
    worker.follow()
    gate = Gate(worker)
    assert not worker.record().synchronize(0.001)
    assert worker.number not in host_clock
    gate.free.set()
    assert worker.record().synchronize(SOON) and host_clock[worker.number] == 1
