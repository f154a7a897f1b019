"""The race detector: every kind of edge keeps it silent, and each that is missing is told, with both ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixloom import RaceError
from prefixloom.device.streams import InlineStream, host_clock
from tests.support.racing import World


@pytest.fixture
def world() -> World:
    return World()


KINDS = [(first, second) for first in ("writes", "reads") for second in ("writes", "reads")]
CONFLICTS = [kinds for kinds in KINDS if "writes" in kinds]


def wait(world: World) -> None:
    world.b.wait(world.a.record())


def through_a_third_stream(world: World) -> None:
    world.c.wait(world.a.record())
    world.c.run(lambda: None)
    world.b.wait(world.c.record())


def through_a_third_stream_that_was_given_no_work(world: World) -> None:
    world.c.wait(world.a.record())
    world.b.wait(world.c.record())


def seen_by_the_scheduling_thread(world: World) -> None:
    event = world.a.record()
    world.sim.drain()
    assert event.done


def waited_for_by_the_scheduling_thread(world: World) -> None:
    assert world.a.record().synchronize()


def seen_through_another_stream(world: World) -> None:
    world.c.wait(world.a.record())
    event = world.c.record()
    world.sim.drain()
    assert event.done


def seen_then_passed_on(world: World) -> None:
    """Stream c is ordered after a only because its work was enqueued when a's was seen to be over."""
    seen_by_the_scheduling_thread(world)
    world.b.wait(world.c.record())


def through_an_inline_stream(world: World) -> None:
    inline = InlineStream("inline")
    inline.wait(world.a.record())
    world.b.wait(inline.record())


def a_later_event(world: World) -> None:
    world.a.run(lambda: None)
    world.b.wait(world.a.record())


def two_waits(world: World) -> None:
    first, second = world.a.record(), world.c.record()
    world.b.wait(first)
    world.b.wait(second)


EDGES: list[Callable[[World], None]] = [
    wait,
    through_a_third_stream,
    through_a_third_stream_that_was_given_no_work,
    seen_by_the_scheduling_thread,
    waited_for_by_the_scheduling_thread,
    seen_through_another_stream,
    seen_then_passed_on,
    through_an_inline_stream,
    a_later_event,
    two_waits,
]


@pytest.mark.parametrize(("first", "second"), KINDS)
@pytest.mark.parametrize("edge", EDGES)
def test_an_access_that_an_edge_orders_is_none_of_its_business(
    world: World, edge: Callable[[World], None], first: str, second: str
) -> None:
    getattr(world, first)(world.a, "first")
    edge(world)
    getattr(world, second)(world.b, "second")


# ---------------------------------------------------------------- edges that are missing


def nothing(world: World) -> None:
    pass


def an_event_that_nobody_waits_for(world: World) -> None:
    world.a.record()


def an_event_that_is_not_yet_done(world: World) -> None:
    assert not world.a.record().done


def work_that_is_over_but_was_not_seen(world: World) -> None:
    world.a.record()
    world.sim.drain()


def a_wait_on_the_wrong_stream(world: World) -> None:
    world.c.wait(world.a.record())


def a_wait_the_wrong_way_round(world: World) -> None:
    world.a.wait(world.b.record())


def a_chain_that_ends_too_early(world: World) -> None:
    early = world.c.record()
    world.c.wait(world.a.record())
    world.b.wait(early)


def an_inline_stream_that_did_not_wait(world: World) -> None:
    world.b.wait(InlineStream("inline").record())


GAPS: list[Callable[[World], None]] = [
    nothing,
    an_event_that_nobody_waits_for,
    an_event_that_is_not_yet_done,
    work_that_is_over_but_was_not_seen,
    a_wait_on_the_wrong_stream,
    a_wait_the_wrong_way_round,
    a_chain_that_ends_too_early,
    an_inline_stream_that_did_not_wait,
]
EDGE = "missing edge: stream 'b' must wait for an event recorded on stream 'a' after 'first'"


@pytest.mark.parametrize(("first", "second"), CONFLICTS)
@pytest.mark.parametrize("gap", GAPS)
def test_an_access_that_no_edge_orders_names_both_ops_and_the_edge(
    world: World, gap: Callable[[World], None], first: str, second: str
) -> None:
    getattr(world, first)(world.a, "first")
    gap(world)
    did = {"writes": "wrote", "reads": "read"}
    with pytest.raises(RaceError) as caught:
        getattr(world, second)(world.b, "second")
    text = str(caught.value)
    assert text.startswith(f"'second' {second} slot 7 of pool 'state' without being ordered after 'first'")
    assert f"before: 'first' {did[first]} on stream 'a', recorded at " in text
    assert f"now:    'second' {second} on stream 'b', recorded at " in text
    assert EDGE in text


@pytest.mark.parametrize("gap", GAPS)
def test_reads_of_two_streams_need_no_order(world: World, gap: Callable[[World], None]) -> None:
    world.reads(world.a)
    gap(world)
    world.reads(world.b)


def test_an_event_recorded_before_the_work_does_not_order_it_and_the_message_tells_how_far_it_reaches(
    world: World,
) -> None:
    world.a.run(lambda: None)
    early = world.a.record()
    world.writes(world.a)
    world.b.wait(early)
    with pytest.raises(RaceError, match=r"stream 'b' is ordered after that stream's work 1; 'first' is its work 2\)"):
        world.writes(world.b, "second")


def test_without_any_order_between_the_streams_the_message_says_so(world: World) -> None:
    world.writes(world.a)
    with pytest.raises(RaceError, match=r"\(nothing so far orders stream 'b' after stream 'a'\)"):
        world.reads(world.b, "second")


def test_a_wait_orders_only_what_is_enqueued_after_it(world: World) -> None:
    world.writes(world.a)
    event = world.a.record()
    with pytest.raises(RaceError):
        world.reads(world.b, "second")
    world.b.wait(event)
    world.reads(world.b, "second")


def test_work_of_one_stream_is_in_order(world: World) -> None:
    for _ in range(2):
        world.writes(world.a)
        world.reads(world.a)


def test_one_access_may_read_and_write_the_same_slot(world: World) -> None:
    world.touch(world.a, "update", reads=[7, 7], writes=[7, 7])
    with pytest.raises(RaceError, match=r"without being ordered after 'update', which wrote it\n"):
        world.reads(world.b, "second")


# ---------------------------------------------------------------- the scheduling thread, and inline streams


def test_what_the_scheduling_thread_does_is_over_for_all_that_comes_later(world: World) -> None:
    inline = world.host
    world.writes(inline)
    world.reads(world.a)
    world.reads(inline)
    world.writes(world.a, slot=8)


@pytest.mark.parametrize(("first", "second"), CONFLICTS)
def test_the_scheduling_thread_must_have_seen_the_work_done(world: World, first: str, second: str) -> None:
    inline = world.host
    getattr(world, first)(world.a, "first")
    event = world.a.record()
    edge = "the scheduling thread must see an event recorded on stream 'a' after 'first' done before it goes on"
    with pytest.raises(
        RaceError, match=f"now:    'second' {second} on the scheduling thread.*\n.*missing edge: {edge}"
    ):
        getattr(world, second)(inline, "second")
    world.sim.drain()
    assert event.done
    getattr(world, second)(inline, "second")


def test_an_inline_stream_that_waited_has_seen_it(world: World) -> None:
    inline = InlineStream("inline")
    world.writes(world.a)
    inline.wait(world.a.record())
    world.writes(inline, "second")
    world.reads(world.host, "third")
    world.reads(world.b, "fourth")


def test_a_read_of_the_scheduling_thread_leaves_the_readers_of_streams_to_be_ordered(world: World) -> None:
    world.reads(world.a)
    world.reads(world.host, "host")
    with pytest.raises(RaceError, match="without being ordered after 'first', which read it"):
        world.writes(world.b, "second")


def test_inline_streams_take_no_place_in_the_clock(world: World) -> None:
    inline = InlineStream("inline")
    world.writes(inline)
    assert inline.record().done
    assert inline.clock is None and inline.number not in host_clock
