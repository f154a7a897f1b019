"""Faults of a host tier: a sample of the matrix of ``tier_faults``, completions that never come.

All of the matrix: ``python -m tests.random.tier_faults``.
"""

from __future__ import annotations

import logging

import pytest

from prefixloom import Path, Point, Window
from prefixloom.testing.inside.backdoor import transfer_streams
from tests.random.tier_faults import LAYOUTS, MATRIX, SETS, WRITES, Case, Drive, Faults, faults_of
from tests.support.helpers import part, settle
from tests.support.sampling import only, sampled_rows
from tests.support.tiers import restorable, serve, simulated, tiered, wrong

SOME = 4
"""Faults of each case."""
CASES = tuple((WRITES[k % 3], comps, (4, 1)[k % 2], LAYOUTS[k // 2 % 2]) for k, comps in enumerate(SETS))

LAGGING = [(case, lag) for k, case in enumerate(CASES) for lag in (0, (1, 3)[k % 2])]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("case", "lag"),
    sampled_rows(LAGGING, 3),
    ids=lambda given: "-".join(map(str, given)) if isinstance(given, tuple) else f"lag {given}",
)
def test_after_any_fault_the_books_are_right_and_the_oracles_length_is_told(
    case: Case, lag: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    counts = faults_of(case, lag, some=SOME)
    assert sum(counts.values()) >= SOME - 2, counts


@pytest.mark.parametrize("comps", only(SETS, "S", "FM", "FSM", "FU", "FH", "FO", "two"))
def test_without_a_fault_what_comes_and_goes_adds_up(comps: str) -> None:
    brought = 0
    for case in MATRIX:
        if case[1] == comps:
            drive = Drive(case, Faults(), lag=len(case[0]) % 2)
            drive.run()
            brought += drive.brought
    assert brought or "optional" not in SETS[comps]


@pytest.mark.parametrize("write", WRITES)
def test_copies_that_never_end_stop_nobody(write: str) -> None:
    """The streams of the tier stand still: what is on the device is served, what is not is computed or given up."""
    cache = tiered(
        part("path", Path()), part("near", Window(10)), part("state", Point(), checkpoint_every=8),
        tokens=96, slots=8, host={"path": 96, "near": 96, "state": 8}, write=write, hits=1,
    )  # fmt: skip
    serve(cache, range(40), chunk=8)
    cache.evict({"path": 100, "near": 100, "state": 8})
    simulation = simulated(cache)
    for turn in range(12):
        tokens = [turn % 5, *range(30 + turn)]
        with cache.open(tokens, leave=1) as sequence:  # nothing is restored: all is done in the calling thread
            if cache.core.flight.unfinished(sequence.running.fence):
                sequence.abort()  # its slots wait for a copy: another time
                continue
            with cache.step([sequence]) as step:
                step.run_ops()
            assert wrong(cache, sequence, tokens) == []
        with cache.open([*range(40), turn], leave=1) as sequence:
            if restorable(cache, range(40)) != {0}:
                assert sequence.restore().ready == sequence.ready
            sequence.abort()
        cache.evict(8)
        cache.poll()
    simulation.drain()
    cache.poll()
    settle(cache)
    for turn in range(12):
        serve(cache, [turn % 5, *range(30 + turn)], chunk=8)
        simulation.drain()
        cache.poll()
    settle(cache)


def test_a_flush_while_copies_run_both_ways() -> None:
    cache = tiered(part("path", Path()), part("state", Point()), write="through", tokens=64, slots=4)
    serve(cache, range(24))
    cache.evict({"path": 100, "state": 9})
    simulation = simulated(cache)
    loading = cache.open(range(25))
    assert loading.restore().ready == 24
    serve(cache, [7] * 20, restore=False)
    assert cache.core.flight.works
    cache.flush()
    assert not loading.open
    later = cache.open([9] * 40)  # takes slots that the copies still write
    later.grow(40)
    assert cache.core.flight.unfinished(later.running.fence)
    with cache.step([later]) as step:
        step.run_ops(simulation["forward"])
        simulation["forward"].run(lambda: None)
    later.close()
    simulation.drain()
    cache.poll()
    simulation.drain()
    cache.poll()
    assert max(restorable(cache, range(24))) == 0
    settle(cache)
    cache.flush()
    for lane in cache.core.shape.all_lanes:
        assert (lane.pool.free, lane.pool.retiring) == (lane.pool.capacity, 0)


def test_a_namespace_that_is_dropped_while_its_data_is_loaded_and_copied_down() -> None:
    cache = tiered(part("path", Path()), part("state", Point()), write="through")
    serve(cache, range(24), namespace="a")
    cache.evict({"path": 100, "state": 9})
    simulation = simulated(cache)
    loading = cache.open(range(25), namespace="a")
    assert loading.restore().ready == 24
    serve(cache, [7] * 20, namespace="a", restore=False)
    cache.drop_namespace("a")
    serve(cache, range(24), namespace="a", restore=False)
    simulation.drain()
    cache.poll()
    with cache.step([loading]) as step:
        step.run_ops()
    assert wrong(cache, loading, list(range(25))) == []
    loading.close()
    simulation.drain()
    cache.poll()
    settle(cache)
    assert cache.match(range(25), namespace="a").ready == 24
    cache.drop_namespace("a")
    assert cache.stats().tier.cached == {"path": 0, "state": 0}  # type: ignore[union-attr]


def test_two_caches_in_one_process_know_nothing_of_each_other() -> None:
    caches = [tiered(part("path", Path()), part("state", Point()), write="through", overlap=True) for _ in range(2)]
    for turn in range(6):
        for number, cache in enumerate(caches):
            serve(cache, [number, *range(20 + turn)])
            cache.evict({"path": 20, "state": 2})
            cache.poll()
            for stream in transfer_streams(cache).values():
                stream.record().synchronize()
    for number, cache in enumerate(caches):
        cache.poll()
        assert max(restorable(cache, [number, *range(25)])) > 0
        assert max(restorable(cache, [1 - number, *range(25)])) == 0
        for stream in transfer_streams(cache).values():
            stream.record().synchronize()
        settle(cache)
