"""The race detector against a graph of all that happened before, the words of what it finds, and what it forgets."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable

import pytest

from prefixloom import InvariantError, RaceError, ThreadStream
from prefixloom.device.race import Race
from prefixloom.device.streams import Event, InlineStream, Stream, host_clock
from prefixloom.testing.schedules.simulated import SimulatedStream, Simulation
from tests.support.sampling import slow
from tests.support.stream_helpers import SOON, Gate

POOL = "state"


class Oracle:
    """Happens-before as a graph of single actions; what is ordered is its transitive closure, by brute force."""

    def __init__(self) -> None:
        self.before: list[int] = []  # of each action, the set of those before it, as bits
        self.last: dict[str, int] = {}
        self.touched: list[tuple[int, str, set[int], set[int]]] = []

    def act(self, actor: str, *after: int) -> int:
        """A new action, after the actor's last one and these. Streams go on from where the host has come to."""
        number = len(self.before)
        bits = 0
        for other in (*after, *(self.last[a] for a in {actor, "host"} if a in self.last)):
            bits |= self.before[other] | 1 << other
        self.before.append(bits)
        self.last[actor] = number
        return number

    def races(self, number: int, reads: set[int], writes: set[int]) -> set[str]:
        """The accesses so far that conflict with this one and are not before it."""
        return {
            what
            for other, what, r, w in self.touched
            if not self.before[number] >> other & 1 and (writes & (r | w) or reads & w)
        }


class Program:
    """A random program over three simulated streams, and an inline one, which is the scheduling thread."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.oracle = Oracle()
        self.sim = Simulation("a", "b", "c")
        self.race = Race()
        self.inline = InlineStream("inline")
        self.events: list[tuple[Event, int]] = []
        self.found = self.silent = 0
        if self.random.random() < 0.8:
            self.race.follow(*self.sim.streams)
        else:  # the detector gets to know them by their first work
            for stream in self.sim.streams:
                self._told(stream, "start", set(), set())

    def _slots(self) -> set[int]:
        return {self.random.randrange(4) for _ in range(self.random.choice((0, 1, 1, 2)))}

    def run(self, length: int) -> None:
        acts = (self.touch, self.touch, self.touch, self.record, self.wait, self.observe, self.advance)
        for number in range(length):
            act = self.random.choice(acts)
            if act == self.touch:
                self.touch(f"op {number}")
            else:
                act("")

    def touch(self, what: str) -> None:
        stream = self.random.choice((*self.sim.streams, *self.sim.streams, self.inline, self.inline))
        self._told(stream, what, self._slots(), self._slots())

    def _told(self, stream: Stream, what: str, reads: set[int], writes: set[int]) -> None:
        stream.run(lambda: None)
        number = self.oracle.act("host" if stream.inline else stream.name)
        races = self.oracle.races(number, reads, writes)
        try:
            self.race.access(stream, what, POOL, reads=reads, writes=writes)
        except RaceError as error:
            old = str(error).split("ordered after '")[1].split("'")[0]
            assert old in races, (what, old, races)
            self.found += 1
        else:
            assert not races, (what, races)
            self.silent += 1
            self.oracle.touched.append((number, what, reads, writes))

    def record(self, _: str) -> None:
        stream = self.random.choice((*self.sim.streams, self.inline))
        self.events.append((stream.record(), self.oracle.act("host" if stream.inline else stream.name)))

    def wait(self, _: str) -> None:
        if self.events:
            event, number = self.random.choice(self.events)
            stream = self.random.choice((*self.sim.streams, *self.sim.streams, self.inline))
            if stream.inline:
                self.sim.drain()  # a simulated stream that waits for another one does not go on by itself
            stream.wait(event)
            self.oracle.act("host" if stream.inline else stream.name, number)

    def observe(self, _: str) -> None:
        if self.events:
            event, number = self.random.choice(self.events)
            if event.done:
                self.oracle.act("host", number)

    def advance(self, _: str) -> None:
        for _ in range(self.random.randrange(6)):
            if ready := self.sim.ready:
                self.random.choice(ready).advance()


@pytest.mark.parametrize("programs", [800, slow(4000)])
def test_it_agrees_with_a_graph_of_all_that_happened_before(programs: int) -> None:
    found = silent = 0
    for seed in range(programs):
        program = Program(seed)
        program.run(40)
        found += program.found
        silent += program.silent
    assert found > 2 * programs and silent > 2 * programs


# ---------------------------------------------------------------- what is told


class World:
    """Three simulated streams, and a race detector that is told of what they are given."""

    def __init__(self) -> None:
        self.sim = Simulation("a", "b", "c")
        self.a, self.b, self.c = self.sim.streams
        self.race = Race()
        self.race.follow(*self.sim.streams)
        self.host = InlineStream("the scheduling thread")

    def touch(
        self, stream: Stream, what: str, reads: Iterable[int] = (), writes: Iterable[int] = (), pool: str = POOL
    ) -> None:
        stream.run(lambda: None)
        self.race.access(stream, what, pool, reads=reads, writes=writes)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("where", ["b", "host"])
@pytest.mark.parametrize(("first", "second"), [("writes", "writes"), ("writes", "reads"), ("reads", "writes")])
def test_race_names_both_ops_and_the_missing_edge(world: World, where: str, first: str, second: str) -> None:
    stream, name, edge = {
        "b": (world.b, "stream 'b'", "stream 'b' must wait for an event recorded on stream 'a' after 'first'"),
        "host": (
            world.host, "the scheduling thread",
            "the scheduling thread must see an event recorded on stream 'a' after 'first' done before it goes on",
        ),
    }[where]  # fmt: skip
    did = {"writes": "wrote", "reads": "read"}[first]
    world.touch(world.a, "first", **{first: [7]})  # type: ignore[arg-type]
    with pytest.raises(RaceError) as caught:
        world.touch(stream, "second", **{second: [7]})  # type: ignore[arg-type]
    text = str(caught.value)
    assert text.startswith(f"'second' {second} slot 7 of pool 'state' without being ordered after 'first', which {did}")
    assert f"before: 'first' {did} on stream 'a', recorded at " in text
    assert f"now:    'second' {second} on {name}, recorded at " in text
    assert f"missing edge: {edge}" in text


@pytest.mark.parametrize("early", [False, True])
def test_race_tells_how_far_the_order_of_the_streams_reaches(world: World, early: bool) -> None:
    if early:
        world.a.run(lambda: None)
        world.b.wait(world.a.record())
    world.touch(world.a, "first", writes=[7])
    told = (
        r"stream 'b' is ordered after that stream's work 1; 'first' is its work 2\)"
        if early
        else r"\(nothing so far orders stream 'b' after stream 'a'\)"
    )
    with pytest.raises(RaceError, match=told):
        world.touch(world.b, "second", writes=[7])


def test_a_wait_through_a_third_stream_without_work_is_an_order(world: World) -> None:
    world.touch(world.a, "first", writes=[7])
    world.c.wait(world.a.record())
    world.b.wait(world.c.record())
    world.touch(world.b, "second", writes=[7])


def test_accesses_of_other_slots_and_pools_are_apart_and_absent_pages_are_none(world: World) -> None:
    world.touch(world.a, "first", writes=[-1, 1, 2], reads=[-1, 3])
    world.touch(world.b, "second", writes=[-1, 4], reads=[-1, 3])
    world.touch(world.b, "second", writes=[1, 2, 3], pool="state on the host")
    with pytest.raises(RaceError, match="slot 1 of pool 'state on the host'"):
        world.touch(world.c, "third", reads=[1], pool="state on the host")


@pytest.mark.parametrize("slots", [[5, 6, 9], (n for n in (5, 6, 9)), dict.fromkeys((5, 6, 9))])
def test_race_tells_the_number_of_further_slots_whatever_they_come_in(world: World, slots: Iterable[int]) -> None:
    world.touch(world.a, "first", writes=slots)
    with pytest.raises(RaceError, match=r"reads slot 9 \(and of 2 more\) of pool"):
        world.touch(world.b, "second", reads=iter([1, 9, 6, 6, 5]))


def test_one_access_may_read_and_write_a_slot_and_counts_as_its_writer(world: World) -> None:
    world.touch(world.a, "update", reads=[7, 7], writes=[7, 7])
    with pytest.raises(RaceError, match=r"without being ordered after 'update', which wrote it\n"):
        world.touch(world.b, "second", reads=[7])


def test_work_that_the_stream_was_never_given_is_refused(world: World) -> None:
    with pytest.raises(
        InvariantError, match="'copy' is recorded as work of <SimulatedStream 'a'>, on which nothing was"
    ):
        world.race.access(world.a, "copy", POOL, writes=[1])


def test_race_names_the_line_of_the_caller(world: World) -> None:
    for stream in (world.a, world.b):
        stream.run(lambda: None)
    world.race.access(world.a, "first", POOL, writes=[1])
    with pytest.raises(
        RaceError, match=r"'first' wrote on stream 'a', recorded at .*test_race.py:\d+ in test_race_names"
    ):
        world.race.access(world.b, "second", POOL, writes=[1])


# ---------------------------------------------------------------- clocks, and what is forgotten


def test_streams_without_a_detector_have_no_clocks() -> None:
    sim = Simulation("a", "b")
    a, b = sim.streams
    before = dict(host_clock)
    a.run(lambda: None)
    event = a.record()
    b.wait(event)
    sim.drain()
    assert event.done
    assert a.clock is b.clock is event.clock is None and host_clock == before
    assert InlineStream("inline").clock is None


def test_an_event_recorded_before_its_stream_was_followed_is_no_edge_for_later_work() -> None:
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
    b.follow()  # again: it keeps its clock
    b.run(lambda: None)
    race.access(b, "second", POOL, writes=[1])


def test_work_that_was_seen_done_before_a_stream_was_followed_orders_its_work() -> None:
    sim, race = Simulation("a", "b"), Race()
    a, b = sim.streams
    a.run(lambda: None)
    race.access(a, "first", POOL, writes=[1])
    assert a.record().synchronize()
    b.run(lambda: None)
    race.access(b, "second", POOL, writes=[1])


def test_a_thread_knows_of_an_event_what_it_waited_for_and_nothing_if_its_time_was_up(
    threads: Callable[..., ThreadStream],
) -> None:
    worker, inline = threads(), InlineStream("inline")
    worker.follow()
    gate = Gate(worker)
    assert not worker.record().synchronize(0.001)
    assert worker.number not in host_clock
    gate.free.set()
    inline.wait(worker.record())
    assert host_clock[worker.number] == 1
    worker.run(lambda: None)
    assert worker.record().synchronize(SOON) and host_clock[worker.number] == 2


def test_streams_that_are_no_more_leave_the_clock_of_the_scheduling_thread() -> None:
    race, host = Race(), InlineStream("the scheduling thread")
    gc.collect()
    race.access(host, "nothing", POOL)
    before = len(host_clock)
    for _ in range(50):
        stream = SimulatedStream("short")
        stream.run(lambda: None)
        race.access(stream, "work", POOL, reads=[1], writes=[2])
        assert stream.record().synchronize()
        race.access(host, "next", POOL, writes=[1])
        race.access(host, "next", POOL, writes=[2])
    del stream
    gc.collect()
    race.access(host, "nothing", POOL)
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
