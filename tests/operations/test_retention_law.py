"""Laws of retention: what a running sequence keeps is enough for every boundary that it may still publish."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import CapacityError, Chunk, Path, Point, Reach, Sinks, Tail, Window
from prefixloom.cache.cache import Cache
from tests.support.helpers import cache_of, locks, part, run, serve, settle
from tests.support.setups import BarePath, Landmarks, NeverNeeded, Strided


def test_a_shortage_takes_from_no_more_sequences_than_it_needs() -> None:
    cache = cache_of(part("full", Path()), part("window", Window(4)), tokens=400, capacity={"full": 2000})
    running = [cache.open([at * 50 + i for i in range(40)]) for at in range(3)]
    for sequence in running:
        run(sequence, 40)
    lane = cache.core.shape.lane("window")
    assert [sequence.owned("window") for sequence in running] == [10, 10, 10], "there is room"
    short = cache.open(range(1000, 1300))
    short.grow((lane.pool.free + 3) * 4)
    assert sorted(sequence.owned("window") for sequence in running) == [1, 10, 10]
    for sequence in [*running, short]:
        sequence.abort()
    settle(cache)


def test_every_component_gives_back_what_a_computed_prompt_needs_no_more() -> None:
    cache = cache_of(part("full", Path()), part("near", Window(4)), part("far", Window(8)))
    with cache.open(range(40)) as sequence:
        run(sequence, 40)
        cache.reclaim()
        assert [sequence.owned(name) for name in ("full", "near", "far")] == [10, 1, 2]
    settle(cache)


REACHES = {
    "window": Window(9), "chunk": Chunk(12), "tail": Tail(12, 5), "sinks": Sinks(5) | Window(9), "strided": Strided(),
    "landmarks": Landmarks(), "bare path": BarePath(), "never needed": NeverNeeded(),
}  # fmt: skip


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
def test_law_after_a_reclaim_a_running_sequence_has_what_its_reach_may_still_need_and_no_more(
    reach: Reach, page: int
) -> None:
    """Also where that lies apart, however often some of it was given back before. The step's table says the same."""
    cache = cache_of(part("full", Path()), part("mine", reach), page=page)
    with cache.open(range(61)) as sequence:
        for count in (4, 1, 9, 2, 16, 7, 4, 17):
            run(sequence, count)
            with cache.step([sequence]) as step:
                step.table("mine")  # from now on only what changes is written
            cache.reclaim()
            floor = sequence.committed // page * page
            needed = {at // page for at in range(sequence.committed) if at >= floor or reach.until(at) >= floor}
            pages = sequence.pages("mine")
            assert {at for at, slot in enumerate(pages) if slot >= 0} == needed
            with cache.step([sequence]) as step:
                assert step.table("mine").tolist() == [pages]
        sequence.abort()
    settle(cache)


@pytest.mark.parametrize("how", ["close", "abort", "flush"])
def test_who_has_ended_is_asked_for_nothing(how: str) -> None:
    cache = cache_of(part("full", Path()), part("window", Window(4)))
    sequence = cache.open(range(40))
    run(sequence, 40)
    assert len(cache.core.shape.lane("window").surplus) == 1
    if how == "flush":
        cache.flush()
    else:
        getattr(sequence, how)()
    assert not cache.core.shape.lane("window").surplus


@pytest.mark.parametrize("scarce", [False, True])
def test_a_publication_gives_back_what_is_not_needed_once_room_has_become_scarce(scarce: bool) -> None:
    """Also of what it does not publish: the sequence may have been computed while there was room."""
    cache = cache_of(part("full", Path()), part("window", Window(4)), tokens=200, capacity={"full": 1000})
    sequence = cache.open(range(40))
    run(sequence, 40)
    before = cache.stats().components["window"]
    assert before.running == 10, "there is room, so all of it is kept"
    if scarce:
        other = cache.open(range(1000, 1160))
        other.grow(160)
    assert sequence.publish(8) == 8
    own = sequence.owned("window")
    assert own == (1 if scarce else 8), "of the pages after 8 the last one has all that 40 needs"
    settle(cache) if not scarce else other.abort()


def test_what_a_lease_covers_and_nobody_reads_any_more_is_uncovered_by_a_publication() -> None:
    """What a boundary far behind needs is somebody else's, and far behind what the sequence goes on with."""
    cache = cache_of(part("full", Path()), part("window", Window(4)), tokens=128)
    sequence = cache.open(range(40))
    run(sequence, 40)
    cache.reclaim()
    serve(cache, range(8))
    assert sequence.publish(8) == 8
    assert (cache.stats().components["full"].leased, cache.stats().components["window"].leased) == (2, 0)
    sequence.close()
    settle(cache)


@pytest.mark.parametrize(("lookahead", "back", "window"), [(8, 16, 5), (8, 32, 5), (16, 16, 5), (5, 16, 5)])
@pytest.mark.parametrize("first", [True, False])
def test_after_a_rewind_nothing_goes_that_a_lower_boundary_needs_before_it_publishes(
    lookahead: int, back: int, window: int, first: bool
) -> None:
    cache = cache_of(
        part("full", Path(), lookahead=lookahead), part("window", Window(window)),
        capacity={"full": 1600, "window": 160}, max_rewind=back,
    )  # fmt: skip
    sequence = cache.open(range(64 + lookahead))
    run(sequence, 64)
    sequence.rewind(back)
    if first:
        sequence.publish()
    cache.reclaim()
    sequence.append(range(500, 504))
    cache.reclaim()
    with cache.step([sequence], role="draft") as step:  # which writes again what waited for these
        step.run_ops()
    cache.reclaim()
    published = sequence.publish()
    assert published == (64 - back + 4 - lookahead) // 4 * 4
    assert cache.match([*range(64 - back), *range(500, 504)]).ready == published
    sequence.abort()
    settle(cache)


# ---------------------------------------------------------------- a pool of states that runs dry


def fill_states(cache: Cache) -> list[Any]:
    """Sequences until no state slot can be had."""
    fillers = []
    while True:
        try:
            fillers.append(cache.open([1000 + len(fillers)] * 4))
        except CapacityError:
            return fillers


def test_dry_while_donating_a_checkpoint_is_left_out_and_counted() -> None:
    """No slot to go on with: the sequence keeps its state, its pages are published, and it runs on."""
    parts = (part("full", Path()), part("window", Window(10)), part("state", Point()))
    cache = cache_of(*parts, slots=5)
    serve(cache, [500 + i for i in range(24)])
    other = cache.open([*[500 + i for i in range(24)], 1])  # pins a state that is not copied yet
    sequence = cache.open(range(40))
    run(sequence, 20)
    slot = sequence.pages("state")
    fillers = fill_states(cache)
    before = {what: count for what, count in locks(cache).items() if what[2]}  # roots count their children
    assert sequence.publish() == 20
    assert sequence.pages("state") == slot
    assert cache.stats().skipped_checkpoints == 1
    assert {what: locks(cache)[what] for what in before} == before
    plan = cache.match(range(40))
    assert (plan.ready, plan.walked, plan.branch) == (0, 20, 20)
    run(sequence, 4)
    fillers.pop().abort()
    assert sequence.publish() == 24, "and now there is a slot"
    assert cache.peek(range(40)) == 24
    for one in (sequence, other, *fillers):
        one.close()
    settle(cache)
