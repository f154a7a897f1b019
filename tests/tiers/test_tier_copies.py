"""Copies between tiers: their order, what they bring, what is left of those that fail, and what else a load changes."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

import prefixloom.tiers.restore
from prefixloom import Component, Path, Point, RaceError, Sinks, Transfer, TransferPlan, Window, WorkError
from prefixloom import hookimpl as hook
from prefixloom.cache.cache import Cache
from prefixloom.device.flight import Flight
from prefixloom.testing.inside.backdoor import copies, tier_lanes
from prefixloom.testing.schedules.simulated import SimulatedStream, Simulation
from prefixloom.tiers.host_copies import HostCopies
from tests.support.helpers import part, run, settle
from tests.support.tiers import broken, compute, copies_by, path_of, serve, simulated, tiered, wrong


def later(cache: Cache, simulation: Simulation, tokens: list[int]) -> Any:
    """A sequence whose one step over all of ``tokens`` waits on the stream "forward"."""
    sequence = cache.open(tokens)
    sequence.grow(len(tokens) - sequence.reserved)
    with cache.step([sequence]) as step:
        step.run_ops(simulation["forward"])
        simulation["forward"].run(lambda: None)
    return sequence


def test_a_backup_that_fails_is_counted_and_ends_nobody_who_reads_what_it_copied() -> None:
    cache = tiered(part("path", Path()), part("state", Point()), write="through")
    simulation = simulated(cache)
    with copies_by(broken):
        serve(cache, range(40))
        reader = cache.open(range(41))
        assert reader.ready == 40
        assert reader.running.fence == 0, "nor does it wait for the copy, which only reads as it does"
        simulation.drain()
        cache.poll()
    assert reader.open
    assert cache.stats().tier.failed == 1  # type: ignore[union-attr]
    assert cache.stats().tier.cached == {"path": 0, "state": 0}  # type: ignore[union-attr]
    assert wrong_after_ops(cache, reader, range(41)) == []
    reader.close()
    settle(cache)


def wrong_after_ops(cache: Cache, sequence: Any, tokens: Any) -> list[str]:
    with cache.step([sequence]) as step:
        step.run_ops()
    return wrong(cache, sequence, list(tokens))


def state_below(slots: int = 4) -> Cache:
    """A state at 8 on the device, and one at 16 on the host alone."""
    cache = tiered(part("path", Path()), part("state", Point()), slots=slots)
    serve(cache, range(8))
    serve(cache, range(16))
    node = path_of(cache, range(16))[-1]
    with cache.lease(cache.match(range(8))):
        cache.evict({"state": 1})
    assert node.cells[1] is None
    assert (cache.match(range(17)).ready, cache.match(range(17)).restorable) == (8, 16)
    return cache


def test_a_load_into_a_running_state_comes_after_what_still_writes_that() -> None:
    """A step without tokens fills the state; a restore behind it copies another one into the same slot."""
    cache = state_below()
    simulation = simulated(cache)
    with cache.open(range(17)) as sequence:
        with cache.step([sequence]) as step:
            step.run_ops(simulation["forward"])
        assert sequence.restore().ready == 16
        while simulation["up"].ready:
            simulation["up"].advance()
        with cache.step([sequence]) as step:
            step.run_ops(simulation["forward"])
        simulation.drain()
        assert wrong(cache, sequence, range(17)) == []


def test_a_load_that_fails_leaves_a_running_state_that_was_filled_already() -> None:
    def spoiling(honest: Any, source: Any, src: Any, target: Any, dst: Any) -> None:
        for buffer in target.buffers.values():
            buffer[:, list(dst)] = 5
        raise RuntimeError("half-way")

    cache = state_below()
    with cache.open(range(17)) as sequence:
        assert wrong_after_ops(cache, sequence, range(17)) == []
        with copies_by(spoiling):
            told = sequence.restore()
        assert (told.wanted, told.ready) == (16, 8)
        assert wrong_after_ops(cache, sequence, range(17)) == []
        compute(cache, sequence, list(range(17)), 17)
    settle(cache)


def test_a_running_state_is_filled_after_the_copies_of_a_load_that_failed_half_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy into the running state was enqueued, and the next one of the same load raised."""
    cache = tiered(part("state", Point()), part("path", Path()), slots=4)
    serve(cache, range(8))
    serve(cache, range(16))
    with cache.lease(cache.match(range(8))):
        cache.evict({"state": 1, "path": 8})
    simulation = simulated(cache)
    with cache.open(range(17)) as sequence:
        honest, calls = SimulatedStream.run, iter(range(9))

        def second_raises(stream: SimulatedStream, work: Any) -> None:
            if next(calls):
                raise RuntimeError("half-way")
            honest(stream, work)

        with monkeypatch.context() as patched:
            patched.setattr(SimulatedStream, "run", second_raises)
            told = sequence.restore()
        assert (told.wanted, told.ready) == (16, 8)
        assert simulation["up"].pending
        with cache.step([sequence]) as step:
            step.run_ops(simulation["forward"])
        simulation.drain()  # what stands on "forward" goes first, where it may
        assert wrong(cache, sequence, range(17)) == []
    settle(cache)


def test_what_a_load_needs_counts_as_used_though_its_copy_failed() -> None:
    cache = tiered(part("path", Path()), part("near", Window(8)))
    old, young = [1] * 16, [2] * 16
    for tokens in (old, young):
        serve(cache, tokens)
    cache.evict({"path": 100})
    with copies_by(broken), cache.open([*old, 3]) as sequence:
        assert sequence.restore().ready == 0
    cache.evict({"near": 6})  # four that nobody needs, and two more
    assert [path_of(cache, tokens)[-1].cells[1] is None for tokens in (old, young)] == [False, True]
    settle(cache)


def test_a_lock_hook_that_raises_after_the_copies_leaves_a_state_that_can_be_filled() -> None:
    """The load has the running state's slot as a second target: its fill comes after that, whatever happened since."""

    class Moody(Component):
        moody = False

        @hook
        def acquire_component_lock(self, anchor: Any, tier: str) -> Any:
            if self.moody and anchor.boundary == 16:
                raise RuntimeError("not now")

    path = part("path", Path(), Moody)
    cache = tiered(path, part("state", Point()), write="through")
    serve(cache, range(8))
    serve(cache, range(16))
    cache.evict({"state": 9})
    serve(cache, range(8), restore=False)
    simulation = simulated(cache)
    with cache.open(range(17)) as sequence:
        assert sequence.ready == 8
        path.moody = True  # type: ignore[attr-defined]
        with pytest.raises(Exception, match="not now"):
            sequence.restore()
        path.moody = False  # type: ignore[attr-defined]
        with cache.step([sequence]) as step:
            step.run_ops(simulation["forward"])
        while simulation["forward"].ready:
            simulation["forward"].advance()
        simulation.drain()
        assert wrong(cache, sequence, range(17)) == []
    settle(cache)


class Greedy(Component):
    """Wants all above copied as well."""

    @hook
    def build_hicache_transfers(self, plan: TransferPlan, phase: str) -> Any:
        return (Transfer(self.name, 0, plan.boundary, "device", "host"),) if phase == "backup" else None


def test_what_a_plugin_wants_copied_too_is_copied_after_it_was_written() -> None:
    cache = tiered(part("near", Window(8), Greedy), write="selective", hits=99)
    serve(cache, range(32), restore=False, chunk=16)
    upper, lower = path_of(cache, range(32))
    cache.evict({"near": 6})
    assert upper.cells[0] is None and lower.cells[0] is not None
    simulation = simulated(cache)
    healing = later(cache, simulation, list(range(16)))
    healing.publish()
    assert upper.cells[0] is not None
    copies(cache).backup([lower])
    while simulation["down"].ready:
        simulation["down"].advance()
    assert simulation["forward"].pending, "the copy did not wait"
    assert simulation["down"].pending
    simulation.drain()
    cache.poll()
    healing.close()
    settle(cache)


def lose_one(cache: Cache) -> None:
    freed: list[Any] = []
    tier_lanes(cache)[0].evict(1, freed)
    cache.core.index.tree.prune_all(freed)


def test_a_host_slot_that_cannot_be_had_yet_takes_no_fence_from_another() -> None:
    """Two slots are wanted: one was read by a load that runs, the other waits for a step whose block is open."""
    cache = tiered(part("path", Path()), page=4, tokens=64, host={"path": 16}, write="back")
    serve(cache, [1] * 4)
    serve(cache, [2] * 4)
    cache.evict({"path": 2})
    serve(cache, [3] * 4)
    serve(cache, [4] * 4)
    host = tier_lanes(cache)[0]
    assert (host.pool.free, host.in_tree) == (2, 2)
    kept = host.pool.mint(2)
    simulation = simulated(cache)
    loading = cache.open([1] * 5)
    assert loading.restore().ready == 4
    lose_one(cache)  # what is being read: [1] * 4
    other = cache.open([9] * 4)
    other.grow(4)
    with cache.step([other]) as step:
        step.run_ops(simulation["forward"])
        lose_one(cache)
        copies(cache).backup([path_of(cache, [3] * 4)[0], path_of(cache, [4] * 4)[0]])
    assert host.in_tree == 1
    while simulation["down"].ready:
        simulation["down"].advance()
    assert simulation["down"].pending, "it writes what a load still reads"
    simulation.drain()
    cache.poll()
    kept.free()
    loading.close()
    other.abort()
    settle(cache)


def test_the_upper_half_of_a_split_is_copied_as_well_when_its_copy_had_to_wait() -> None:
    cache = tiered(part("path", Path()), write="through")
    simulation = simulated(cache)
    other = cache.open([9] * 4)
    other.grow(4)
    mine = later(cache, simulation, list(range(32)))
    with cache.step([other]) as step:
        step.run_ops(simulation["forward"])
        late = later(cache, simulation, list(range(100, 132)))
        late.publish()  # after a step that is open: the copy has to wait
        assert cache.stats().tier.cached == {"path": 0}  # type: ignore[union-attr]
    for at in (8, 16):
        cache.open([*range(100, 100 + at), 1]).close()  # splits
    cache.poll()
    simulation.drain()
    assert cache.stats().tier.cached == {"path": 8}  # type: ignore[union-attr]
    for sequence in (other, mine, late):
        sequence.abort()
    cache.evict(1000)
    assert cache.match(range(100, 133)).restorable == 32
    settle(cache)


def test_what_goes_before_it_can_be_copied_is_counted_as_dropped() -> None:
    """Its copy would come after a step that is open, and by the end of that step it has gone."""
    cache = tiered(part("path", Path()), write="back")
    simulation = simulated(cache)
    other = cache.open([9] * 4)
    other.grow(4)
    with cache.step([other]) as step:
        step.run_ops(simulation["forward"])
        later(cache, simulation, list(range(32))).close()
        assert cache.evict({"path": 8}) == {"path": 8}
        told = cache.stats().tier
        assert told is not None and (told.backed_up, told.dropped) == (0, 1)
    simulation.drain()
    cache.poll()
    assert cache.match(range(33)).restorable == 0
    other.abort()
    settle(cache)


def test_what_a_sequence_held_before_a_load_is_not_what_it_holds() -> None:
    """What it kept to spare is forgotten with the holdings that a load replaces."""
    cache = tiered(part("path", Path()), part("near", Sinks(4) | Window(8)), write="back", max_rewind=4)
    tokens = list(range(40))
    serve(cache, [*tokens, 99])
    cache.evict(256)
    sequence = cache.open([*tokens, 5], leave=1)
    sequence.grow(1)
    with cache.step([sequence]) as step:
        step.run_ops()
    sequence.rewind(1)
    assert sequence.restore().ready == 40
    leased = cache.stats().components["near"].leased
    cache.reclaim()
    assert cache.stats().components["near"].leased == leased > 0
    cache.evict({"near": 64})
    other = list(range(500, 700))
    compute(cache, cache.open(other), other, 200)
    assert wrong(cache, sequence, tokens) == []


def test_a_state_that_a_loaded_one_has_passed_is_evicted_before_an_older_one() -> None:
    cache = tiered(part("path", Path()), part("state", Point()), write="through")
    long, other = list(range(24)), list(range(100, 116))
    serve(cache, long, chunk=8)
    cache.evict({"state": 3})
    serve(cache, other, chunk=16)  # a state at 16, the oldest from now on
    for end in (8, 16):
        sequence = cache.open(long[: end + 1])
        assert sequence.restore().ready == end
        sequence.close()
    assert cache.evict({"state": 1}) == {"state": 1}
    assert (cache.peek([*other, 1]), cache.peek([*long[:8], 1])) == (16, 0)


def test_a_tiers_threads_end_with_its_cache() -> None:
    before = set(threading.enumerate())
    cache = tiered(part("path", Path()), write="through", overlap=True)
    serve(cache, range(40))
    assert set(threading.enumerate()) - before
    del cache
    until = time.monotonic() + 5
    while set(threading.enumerate()) - before and time.monotonic() < until:
        gc.collect()  # not at once: the copies that were enqueued hold their pools
        time.sleep(0.01)
    assert not set(threading.enumerate()) - before


def test_pools_see_to_the_order_of_their_pages_once_they_are_copied() -> None:
    """Until then it would cost, and be of no use."""
    cache = tiered(part("path", Path()), write="back")
    pools = [lane.pool for lane in cache.core.shape.all_lanes]
    serve(cache, range(40))
    assert [pool.orderly for pool in pools] == [False, False]
    cache.evict(40)
    assert [pool.orderly for pool in pools] == [True, True]
    settle(cache)


def test_a_restore_that_cannot_fit_does_not_try_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tiered(part("path", Path()), tokens=1024, host={"path": 1200})
    serve(cache, range(1000))
    cache.evict(1024)
    asked = []
    honest = prefixloom.tiers.restore._load
    monkeypatch.setattr(prefixloom.tiers.restore, "_load", lambda *args: asked.append(1) or honest(*args))
    with cache.open([7] * 900) as other:
        other.grow(900)
        with cache.open(range(1001)) as sequence:
            assert sequence.restore().ready == 124  # what is left of 1,024
    assert len(asked) <= 3
    settle(cache)


def test_a_load_that_fails_after_its_sources_went_takes_nothing_else() -> None:
    cache = tiered(part("path", Path()), part("state", Point()))
    serve(cache, range(40), namespace="a")
    cache.evict({"path": 1000, "state": 8})
    simulation = simulated(cache)
    with copies_by(broken):
        sequence = cache.open(range(44), namespace="a")
        assert sequence.restore().ready == 40
        cache.drop_namespace("a")
        simulation.drain()
        cache.poll()
    assert sequence.failed is not None and cache.stats().tier.failed == 1  # type: ignore[union-attr]
    serve(cache, range(40), namespace="a")
    settle(cache)


def test_of_a_load_that_fails_without_a_copy_no_other_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has all of it since another sequence computed it, and there is no lower boundary to resume at."""
    cache = tiered(part("path", Path()), write="through")
    calls = iter(range(2))

    def fail(*_: Any) -> Any:
        next(calls)
        raise WorkError("no stream")

    with cache.open(range(41)) as sequence:
        serve(cache, range(40))
        with monkeypatch.context() as patched:
            patched.setattr(HostCopies, "stream", fail)
            told = sequence.restore()
        assert (told.ready, next(calls)) == (0, 1) and "no stream" in told.why
        assert sequence.restore().ready == 40
    settle(cache)


def test_a_load_that_is_over_is_not_remembered_until_the_next_poll() -> None:
    cache = tiered(part("path", Path()))
    for _ in range(3):
        serve(cache, range(40))
        cache.evict(1000)
    assert copies(cache).flying == []
    run_one = cache.open(range(44))
    run(run_one, 1)
    run_one.close()


@pytest.mark.parametrize("way", ["down", "up"])
def test_wrong_books_are_no_copy_that_failed(way: str) -> None:
    """What the second set of books finds in a copy is told, not taken for bad luck."""
    cache = tiered(part("path", Path()))
    serve(cache, range(40))
    if way == "up":
        cache.evict(1000)

    def wrong_books(*_: Any) -> None:
        raise RaceError("seen")

    with copies_by(wrong_books), pytest.raises(RaceError):
        if way == "down":
            cache.evict(1000)
        with cache.open(range(44)) as sequence:
            sequence.restore()


def test_only_what_the_device_lacks_is_copied_up() -> None:
    """Of a window's three pages two are there."""
    cache = tiered(part("near", Window(10)))
    for end in (8, 16, 24):
        serve(cache, range(end))
    cache.evict({"near": 1000})
    serve(cache, range(25))
    lane = cache.core.shape.lanes[0]
    (cell,) = [node.cells[0] for node in path_of(cache, range(24)) if node.end == 16]
    lane.drop_cell(cell)
    copied: list[int] = []

    def counted(honest: Any, source: Any, src: Any, target: Any, dst: Any) -> None:
        if target is lane.pool:
            copied.append(len(src))
        honest(source, src, target, dst)

    with copies_by(counted), cache.open(range(25)) as sequence:
        assert sequence.restore().ready == 24
    assert copied == [1]
    settle(cache)


def test_a_hit_counts_for_all_that_lies_above_it() -> None:
    cache = tiered(part("path", Path()), write="selective", hits=2)
    for end in (8, 16):
        serve(cache, range(end), restore=False)
    before = [node.hits for node in path_of(cache, range(16))]  # type: ignore[attr-defined]
    cache.open(range(17)).close()
    assert [node.hits for node in path_of(cache, range(16))] == [count + 1 for count in before]  # type: ignore[attr-defined]


def test_a_state_that_a_load_brought_is_covered_no_longer() -> None:
    cache = state_below()
    with cache.open(range(17)) as sequence:
        assert sequence.restore().ready == 16
        assert cache.stats().components["state"].leased == 0
    settle(cache)


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_copy_that_comes_after_nothing_races_with_the_layers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a copy reads in one pool and what it writes in the other are both known to the second set of books."""
    cache = tiered(part("path", Path()), write="through" if way == "down" else "back")
    if way == "up":
        serve(cache, range(40))
        cache.evict(1000)
    simulation = simulated(cache)
    monkeypatch.setattr(Flight, "order", lambda *_: None)
    with cache.open(range(44)) as sequence:
        if way == "up":
            assert sequence.restore().ready == 40
        sequence.grow(4)
        said = (
            "copy down of path' reads" if way == "down" else "layers of .* reads slot .*'copy up of path', which wrote"
        )
        with pytest.raises(RaceError, match=said):
            with cache.step([sequence]) as step:
                step.run_ops(simulation["forward"])
            sequence.publish()
        simulation.drain()


def test_only_what_goes_is_copied_before_it_goes() -> None:
    """Of two prompts whose first pages are slack, one is cut."""
    cache = tiered(part("near", Window(8)))
    for first in (1, 2):
        serve(cache, [first] * 40)
    assert cache.evict({"near": 1})["near"] == 8
    assert cache.stats().tier.backed_up == 10  # type: ignore[union-attr]
    settle(cache)
