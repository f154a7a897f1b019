"""What the race detector keeps: readers and writers, slots and pools, and what it may forget."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from time import perf_counter

import pytest

from prefixloom import InvariantError, RaceError
from prefixloom.device.race import Race
from prefixloom.device.streams import InlineStream, host_clock
from prefixloom.testing.schedules.simulated import SimulatedStream, Simulation
from tests.support.racing import POOL, World

HOST = InlineStream("the scheduling thread")


@pytest.fixture
def world() -> World:
    return World()


def test_every_reader_since_the_write_must_come_before_the_next_write(world: World) -> None:
    world.reads(world.a, "reader a")
    world.reads(world.b, "reader b")
    world.c.wait(world.a.record())
    with pytest.raises(RaceError, match="'reader b', which read it"):
        world.writes(world.c, "writer")
    world.c.wait(world.b.record())
    world.writes(world.c, "writer")


def test_only_the_newest_read_of_a_stream_counts(world: World) -> None:
    world.reads(world.a, "old")
    early = world.a.record()
    world.reads(world.a, "new")
    world.b.wait(early)
    with pytest.raises(RaceError, match="'new', which read it"):
        world.writes(world.b, "writer")


def test_a_read_that_a_later_one_is_ordered_after_is_covered_by_it(world: World) -> None:
    world.reads(world.a, "old")
    world.b.wait(world.a.record())
    world.reads(world.b, "new")
    with pytest.raises(RaceError, match="'new', which read it"):
        world.writes(world.c, "writer")
    world.c.wait(world.b.record())
    world.writes(world.c, "writer")


def test_a_reader_keeps_the_writer_known(world: World) -> None:
    world.writes(world.a)
    world.b.wait(world.a.record())
    world.reads(world.b, "reader")
    with pytest.raises(RaceError, match="'first', which wrote it"):
        world.reads(world.c, "second")


def test_a_write_supersedes_all_before_it(world: World) -> None:
    world.reads(world.a)
    world.b.wait(world.a.record())
    world.writes(world.b, "second")
    world.c.wait(world.b.record())
    world.writes(world.c, "third")
    with pytest.raises(RaceError, match="'third', which wrote it"):
        world.reads(world.b, "fourth")


def test_a_late_write_into_a_recycled_slot_is_found(world: World) -> None:
    """The step of an aborted sequence still runs when its slot is cleared for another one."""
    world.touch(world.a, "forward of step 3", reads=[7], writes=[7])
    with pytest.raises(RaceError, match=r"'clear of step 4' writes slot 7.* after 'forward of step 3', which wrote it"):
        world.touch(world.b, "clear of step 4", writes=[7])


# ---------------------------------------------------------------- slots and pools


def test_other_slots_and_pools_are_apart(world: World) -> None:
    world.touch(world.a, "first", writes=[1, 2], reads=[3])
    world.touch(world.b, "second", writes=[4], reads=[3])
    world.touch(world.b, "second", writes=[1, 2, 3], pool="state on the host")
    with pytest.raises(RaceError, match="slot 1 of pool 'state on the host'"):
        world.touch(world.c, "third", reads=[1], pool="state on the host")


def test_the_message_tells_how_many_slots_there_are_more(world: World) -> None:
    world.touch(world.a, "first", writes=[5, 6, 9])
    with pytest.raises(RaceError, match=r"reads slot 9 \(and of 2 more\) of pool"):
        world.touch(world.b, "second", reads=[1, 9, 6, 6, 5])


def test_absent_pages_are_passed_over(world: World) -> None:
    world.touch(world.a, "first", reads=[-1, 2], writes=[-1])
    world.touch(world.b, "second", reads=[-1, 2], writes=[-1, 3])


@pytest.mark.parametrize("slots", [range(3), (n for n in range(3)), dict.fromkeys(range(3))])
def test_slots_come_in_any_iterable(world: World, slots: Iterable[int]) -> None:
    world.touch(world.a, "first", writes=slots)
    with pytest.raises(RaceError, match=r"slot 2 of"):
        world.touch(world.b, "second", reads=iter([2]))


# ---------------------------------------------------------------- the books


def test_an_access_that_is_refused_is_not_recorded(world: World) -> None:
    world.touch(world.a, "first", writes=[7])
    with pytest.raises(RaceError):
        world.touch(world.b, "second", reads=[5], writes=[6, 7])
    world.touch(world.c, "third", writes=[5, 6])


def test_work_that_the_stream_was_never_given_is_refused(world: World) -> None:
    with pytest.raises(
        InvariantError, match="'copy' is recorded as work of <SimulatedStream 'a'>, on which nothing was"
    ):
        world.race.access(world.a, "copy", POOL, writes=[1])


def test_where_it_was_recorded_is_the_callers_line(world: World) -> None:
    for stream in (world.a, world.b):
        stream.run(lambda: None)
    world.race.access(world.a, "first", POOL, writes=[1])
    with pytest.raises(
        RaceError, match=r"'first' wrote on stream 'a', recorded at .*test_race_books.py:\d+ in test_where_it"
    ):
        world.race.access(world.b, "second", POOL, writes=[1])


def test_an_event_recorded_before_its_stream_was_followed_is_no_edge_for_what_came_later() -> None:
    sim, race = Simulation("a", "b"), Race()
    a, b = sim.streams
    a.run(lambda: None)
    event = a.record()
    a.run(lambda: None)
    race.access(a, "first", POOL, writes=[1])
    b.wait(event)
    b.run(lambda: None)
    with pytest.raises(RaceError, match="nothing so far orders stream 'b'"):
        race.access(b, "second", POOL, writes=[1])
    b.wait(a.record())
    b.run(lambda: None)
    race.access(b, "second", POOL, writes=[1])


def test_what_was_seen_before_a_stream_was_followed_orders_its_work() -> None:
    sim, race = Simulation("a", "b"), Race()
    a, b = sim.streams
    a.run(lambda: None)
    race.access(a, "first", POOL, writes=[1])
    assert a.record().synchronize()
    b.run(lambda: None)
    race.access(b, "second", POOL, writes=[1])


def test_streams_that_are_no_more_leave_the_clock_of_the_scheduling_thread() -> None:
    race = Race()
    race.access(HOST, "nothing", POOL)
    gc.collect()
    race.access(HOST, "nothing", POOL)
    before = len(host_clock)
    for _ in range(50):
        stream = SimulatedStream("short")
        stream.run(lambda: None)
        race.access(stream, "work", POOL, reads=[1], writes=[2])
        assert stream.record().synchronize()
        race.access(HOST, "next", POOL, writes=[1])
        race.access(HOST, "next", POOL, writes=[2])
    del stream
    gc.collect()
    race.access(HOST, "nothing", POOL)
    assert len(host_clock) == before


def test_a_stream_of_which_an_access_is_kept_stays_known() -> None:
    race = Race()
    gone = SimulatedStream("gone")
    gone.run(lambda: None)
    race.access(gone, "first", POOL, writes=[1])
    assert gone.record().synchronize()
    del gone
    gc.collect()
    stream = SimulatedStream("next")
    stream.run(lambda: None)
    race.access(stream, "second", POOL, reads=[1])


def test_a_list_of_very_many_pages_is_cheap() -> None:
    """A decode step that reads a million pages: well below a second here, and 0.1 us a page on an idle machine."""
    race, stream = Race(), SimulatedStream("a")
    pages = list(range(1 << 20))
    stream.run(lambda: None)
    race.access(stream, "prefill", POOL, writes=pages)
    start = perf_counter()
    stream.run(lambda: None)
    race.access(stream, "decode", POOL, reads=pages)
    assert perf_counter() - start < 3
