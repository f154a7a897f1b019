"""Page tables while steps run: who writes which row when, and what the layers read of it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import prefixloom.device.tables
from prefixloom import InputError, Path, Point, ProtocolError, RaceError, WorkError
from prefixloom.device.streams import InlineStream
from prefixloom.testing.inside.backdoor import page_table_tensors, watch_accesses
from prefixloom.testing.schedules.simulated import Simulation
from tests.support.helpers import cache_of, enqueue, part, settle

TOKENS = list(range(40))


def test_a_table_that_is_made_on_one_stream_is_not_cleared_under_another() -> None:
    """Stream a is late: what made the table, and then grew it, must not undo what b wrote since."""
    cache = cache_of(part("path", Path()))
    sim = Simulation("a", "b")
    one, two = cache.open(TOKENS), cache.open([5] * 40)
    for length in (8, 40):
        seen = []
        for sequence, stream in ((one, sim["a"]), (two, sim["b"])):
            sequence.grow(length - sequence.reserved)
            with cache.step([sequence]) as step:
                step.run_ops(stream)
                seen.append((sequence, step.table("path")))
        while ready := sim.ready:
            ready[-1].advance()
        for sequence, table in seen:
            assert table.tolist() == [sequence.pages("path")]
        cache.poll()


@pytest.mark.parametrize("turned", [False, True], ids=["rows side by side", "rows apart"])
def test_a_table_that_could_not_be_written_is_written_whole_at_the_next_call(turned: bool) -> None:
    class Flaw(InlineStream):
        broken = False

        def run(self, work: Any) -> None:
            if self.broken:
                raise RuntimeError("no memory")
            super().run(work)

    cache, stream = cache_of(part("path", Path())), Flaw("flaw")
    with cache.open(TOKENS) as sequence, cache.open([5] * 40) as other:
        for each in (sequence, other):
            each.grow(24)
        with cache.step([sequence, other]) as step:
            step.run_ops(stream)
            step.table("path")
        sequence.grow(8)
        with cache.step([other, sequence] if turned else [sequence, other]) as step:
            step.run_ops(stream)
            stream.broken = True
            with pytest.raises(WorkError, match="no memory"):
                step.table("path")
            stream.broken = False
            rows = [sequence.pages("path"), [*other.pages("path"), -1, -1]]
            assert step.table("path").tolist() == (rows[::-1] if turned else rows)
    settle(cache)


def test_a_step_writes_only_those_entries_of_a_table_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    honest = prefixloom.device.tables.put

    def put(table: Any, places: Any, entries: Any) -> None:
        written.append(len(entries))
        honest(table, places, entries)

    monkeypatch.setattr(prefixloom.device.tables, "put", put)
    cache = cache_of(part("path", Path()))
    with cache.open(TOKENS) as sequence:
        for count in (24, 4, 4):
            sequence.grow(count)
            with cache.step([sequence]) as step:
                step.run_ops()
                step.table("path")
    assert written == [6, 1, 1]
    settle(cache)


def test_a_table_has_room_for_eight_pages_at_first_and_then_for_twice_as_many_each_time() -> None:
    """So what grows page by page seldom needs another one, which is written whole."""
    cache = cache_of(part("path", Path()), tokens=256)
    widths = []
    with cache.open(range(256)) as sequence:
        for _ in range(64):
            sequence.grow(4)
            with cache.step([sequence]) as step:
                step.run_ops()
                step.table("path")
            widths.append(page_table_tensors(cache)["path"][0].shape[1])
        sequence.abort()
    assert [widths.count(width) for width in (8, 16, 32, 64)] == [8, 8, 16, 32]
    settle(cache)


def test_a_table_that_was_outgrown_is_kept_while_a_step_may_read_it() -> None:
    cache = cache_of(part("path", Path()))
    sim = Simulation("a")
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        with cache.step([sequence]) as step:
            step.run_ops(sim["a"])
            step.table("path")
            sim["a"].run(lambda: None)
        while len(sim["a"].pending) > 1:
            sim["a"].advance()
        (first,) = page_table_tensors(cache)["path"]
        known = weakref.ref(first)
        del first, step
        sequence.append(range(100))
        for last in (False, True):
            sequence.grow(60 if last else 32)
            with cache.step([sequence]) as step:
                step.run_ops(sim["a"])
                step.table("path")
            del step
            gc.collect()
            assert (known() is None) == last
            sim.drain()
            cache.poll()
    settle(cache)


def test_what_grows_while_a_step_is_open_is_not_touched_by_its_layers() -> None:
    cache = cache_of(part("path", Path()))
    told: list[Any] = []
    watch_accesses(cache, lambda *given: told.append(given))
    with cache.open(TOKENS) as sequence:
        sequence.grow(6)
        with cache.step([sequence]) as step:
            step.run_ops()
            sequence.grow(16)
            step.table("path")
        (touched,) = [given for given in told if "layers" in given[1]]
        assert touched[3:5] == ([], sequence.pages("path")[:2])
    settle(cache)


def test_the_table_of_a_step_whose_sequences_all_ended_is_absent_throughout() -> None:
    cache = cache_of(part("path", Path()), part("state", Point()))
    sim = Simulation("a")
    for stream in (None, sim["a"]):
        sequences = cache.open(TOKENS), cache.open(TOKENS)
        step = cache.step(sequences)
        for sequence in sequences:
            sequence.abort()
        with step:
            step.run_ops(stream)
            table, slots = step.table("path"), step.table("state")
            with pytest.raises(InputError, match="'path' has pages, no states after single tokens"):
                step.rewind_table("path")
        sim.drain()
        cache.poll()
        assert tuple(table.shape) == (2, 0)
        assert slots.tolist() == [[-1], [-1]]
        assert sim["a"].failure(0, 99) is None


def test_what_is_read_in_the_tree_after_the_ops_ran_is_waited_for_before_the_layers() -> None:
    """A publication inside of the block swaps duplicates for pages of the tree that a step on another stream writes."""
    cache = cache_of(part("path", Path()))
    sim = Simulation("a", "b")
    one, two = cache.open(TOKENS), cache.open(TOKENS)
    for sequence, stream in ((two, sim["b"]), (one, sim["a"])):
        sequence.grow(8)
        enqueue(stream, sequence)
    one.publish()
    two.grow(4)
    with cache.step([two]) as step:
        step.run_ops(sim["b"])
        two.publish()
        assert two.pages("path")[:2] == one.pages("path"), "it reads the tree's from now on"
        step.table("path")
        sim["b"].run(lambda: None)
    while sim["b"].ready:
        sim["b"].advance()
    assert sim["b"].pending, "it waits for what stream a writes"
    sim.drain()


def test_what_the_layers_read_is_told_as_the_table_has_it() -> None:
    """The same without the table's wait: the race detector sees the pages that the table named, not older ones."""
    cache = cache_of(part("path", Path()))
    sim = Simulation("a", "b")
    one, two = cache.open(TOKENS), cache.open(TOKENS)
    for sequence, stream in ((two, sim["b"]), (one, sim["a"])):
        sequence.grow(8)
        enqueue(stream, sequence)
    one.publish()
    two.grow(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefixloom.device.flight.Flight.order", lambda *args: None)
        with pytest.raises(RaceError, match=r"reads slot .* of pool 'path'"), cache.step([two]) as step:
            step.run_ops(sim["b"])
            two.publish()
            step.table("path")


def test_a_table_is_asked_for_after_run_ops_where_steps_are_in_flight() -> None:
    """Before that nobody knows on which stream it would be written: here it would be at once, under running steps."""
    cache = cache_of(part("path", Path()))
    sim = Simulation("a")
    with cache.open(TOKENS) as sequence:
        sequence.grow(8)
        with cache.step([sequence]) as step:
            assert step.table("path").tolist() == [sequence.pages("path")]  # nothing is in flight
            step.run_ops(sim["a"])
        sequence.grow(8)
        with cache.step([sequence]) as step:
            with pytest.raises(ProtocolError, match=r"call run_ops first: it says on which stream"):
                step.table("path")
            step.run_ops(sim["a"])
            step.table("path")
    sim.drain()


def test_a_flush_keeps_the_tables_that_a_running_step_reads() -> None:
    cache, simulation = cache_of(part("path", Path())), Simulation("a")
    first = cache.open(list(range(16)))
    first.grow(8)
    with cache.step([first]) as step:
        step.run_ops(simulation["a"])
        step.table("path")
    old = weakref.ref(cache.core.tables)
    cache.flush()
    with cache.open([9] * 16) as second:
        second.grow(4)
        for expected in (True, False):
            with cache.step([second]) as step:
                step.run_ops(simulation["a"])
                step.table("path")
            gc.collect()
            assert (old() is not None) == expected
            simulation.drain()
            cache.poll()
    cache.poll()
    simulation.drain()
    settle(cache)
