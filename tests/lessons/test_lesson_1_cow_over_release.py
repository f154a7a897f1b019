"""Lesson 1, cow_over_release: a temporary pin released other requests' locks.

While a match looked for a free state slot, the recurrent component pinned the node and released the pin without the
window's boundary: the window locks of others went down, to the root. The invariant: a release undoes exactly its own
acquire, on the same nodes, and running out of slots is a value.
"""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import CapacityError, Path, Point, Window
from prefixloom.cache.cache import Cache
from tests.support.helpers import cache_of, held, locks, nodes, part, run, serve, settle, unprotected

LONG = list(range(64))
"""The long path that A holds, of many nodes."""


def full_window_state(slots: int, *, debug: bool = True, tokens: int = 256) -> Cache:
    """All three kinds. Without debug where the test itself must see what is wrong."""
    parts = (part("full", Path()), part("window", Window(10)), part("state", Point()))
    return cache_of(*parts, slots=slots, tokens=tokens, debug=debug)


def long_path(cache: Cache) -> None:
    """LONG in the tree, as one node for every 8 tokens, and a branch that makes a fork of one."""
    for end in range(8, 72, 8):
        serve(cache, LONG[:end])
    serve(cache, [*LONG[:24], *[900] * 8])


def holder(cache: Cache, tokens: list[int]) -> Any:
    """A sequence that covers full + window + state: opened, and its state not copied yet."""
    sequence = cache.open([*tokens, 901])
    assert sequence.ready == len(tokens)
    return sequence


def holders(cache: Cache) -> list[Any]:
    """A, three times: at the path's end, and above it, where a release that walks to the root comes by."""
    return [holder(cache, LONG[:at]) for at in (24, 40, 64)]


def states_left(cache: Cache) -> int:
    figures = cache.stats().components["state"]
    return figures.free + figures.cached - figures.leased


# ---------------------------------------------------------------- the bug itself


@pytest.mark.parametrize("debug", [True, False])
def test_a_match_that_must_evict_for_its_state_leaves_everybody_elses_locks_alone(debug: bool) -> None:
    """B matches with the state pool full, so that a state must go; A's counts are the same on every node."""
    cache = full_window_state(slots=12, debug=debug)
    long_path(cache)
    a = holders(cache)
    fillers = []
    while cache.stats().components["state"].free:
        fillers.append(cache.open([77 + len(fillers)] * 4))
    cached = cache.stats().components["state"].cached
    assert cached > 1, "there are states that B can evict"
    before = locks(cache)
    b = cache.open([*LONG[:24], *[900] * 8, 902])
    assert cache.stats().components["state"].cached == cached - 1, "B's match forced an eviction"
    assert b.ready == 32
    b.abort()
    after = locks(cache)
    gone = {what for what in before if what not in after}
    assert {name for name, *_ in gone} == {"state"}
    assert len(gone) == 1
    assert after == {what: count for what, count in before.items() if what not in gone}
    assert unprotected(cache) == []
    for sequence in (*a, *fillers):
        sequence.abort()
    assert_zero(cache)


@pytest.mark.parametrize("debug", [True, False])
@pytest.mark.parametrize("where", [64, 40, 32])
def test_a_match_that_finds_no_state_slot_leaves_every_count_as_it_was(where: int, debug: bool) -> None:
    """Every slot runs or is pinned: B's match is refused, and its temporary pin undoes exactly itself."""
    cache = full_window_state(slots=12, debug=debug)
    long_path(cache)
    a = holders(cache)
    fillers = fill_states(cache)
    before, plan = locks(cache), cache.match(LONG[:where])
    for attempt in range(3):
        with pytest.raises(CapacityError, match="state"):
            cache.open(plan if attempt % 2 else [*LONG[:where], 902])
        assert locks(cache) == before
    window = {what: count for what, count in before.items() if what[0] == "window" and count}
    assert window, "A's window is covered"
    assert cache.evict({"window": 64})["window"] >= 0  # raises nothing: no assertion, no lost lock
    assert {what: count for what, count in locks(cache).items() if what[0] == "window" and count} == window
    assert unprotected(cache) == []
    for sequence in a:
        run(sequence, 1)  # and goes on from what it holds
        sequence.close()
    for filler in fillers:
        filler.abort()
    assert_zero(cache)
    settle(cache)


def fill_states(cache: Cache) -> list[Any]:
    """Sequences until no state slot can be had."""
    fillers = []
    while states_left(cache):
        fillers.append(cache.open([1000 + len(fillers)] * 4))
    return fillers


def test_a_window_is_let_go_once_however_the_sequence_goes_on() -> None:
    """A releases its window part early, and its end does not release it again: B's stays covered."""
    for end in ("close", "abort"):
        cache = full_window_state(slots=24, debug=False)
        long_path(cache)
        a, b = (cache.open([*LONG, *range(200, 240)]) for _ in range(2))
        run(a, 40)
        cache.reclaim()
        covered = [count for (name, _, end_), count in locks(cache).items() if name == "window" and end_ > 54]
        assert covered
        assert set(covered) == {1}, "B's alone"
        getattr(a, end)()
        assert unprotected(cache) == []
        b.abort()
        assert_zero(cache)


def test_a_lease_of_a_plan_and_a_refused_match_of_it_do_not_meet() -> None:
    """A bare lease and a refused open cover the same nodes: the open gives back one count, the lease keeps its own."""
    cache = full_window_state(slots=12, debug=False)
    long_path(cache)
    lease, above = cache.lease(cache.match(LONG)), cache.lease(cache.match(LONG[:32]))
    fillers = fill_states(cache)
    before = locks(cache)
    with pytest.raises(CapacityError):
        cache.open(cache.match(LONG))
    assert locks(cache) == before
    cache.evict({"window": 64})
    assert (held(cache, LONG), held(cache, LONG[:32])) == (64, 32), "what the leases cover is all there"
    lease.release()
    assert held(cache, LONG[:32]) == 32
    above.release()
    for filler in fillers:
        filler.abort()
    assert_zero(cache)


def assert_zero(cache: Cache) -> None:
    """No lock, no lease and no running slot anywhere, and everything that is cached may go."""
    cache.poll()
    for lane in cache.core.shape.lanes:
        for node in nodes(cache):
            cell = node.cells[lane.index]
            if cell is not None:
                assert cell.locks == (node.parent is None), (lane.name, node, cell.locks)  # a root counts itself
        assert (lane.leased, lane.running) == (0, 0)
    figures = cache.stats().components
    cached = {name: told.cached for name, told in figures.items() if told.cached}
    cache.evict(cached)
    assert not any(told.cached for told in cache.stats().components.values())
    assert cache.stats().nodes == 0
