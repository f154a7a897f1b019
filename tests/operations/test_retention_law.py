"""Laws of retention: what a running sequence keeps is enough for every boundary that it may still publish."""

from __future__ import annotations

import random

import pytest

from prefixloom import Chunk, Path, Point, Reach, Sinks, Tail, Window
from prefixloom.cache.cache import Cache
from tests.support.helpers import cache_of, held, part, run, serve, settle
from tests.support.setups import BarePath, Landmarks, NeverNeeded, Strided


def fsm(window: int, every: int, *, max_rewind: int = 0) -> Cache:
    state = part("state", Point(), checkpoint_every=every, max_rewind=max_rewind)
    return cache_of(part("full", Path()), part("window", Window(window)), state, slots=16, max_rewind=max_rewind)


@pytest.mark.parametrize("every", [4, 8, 16])
@pytest.mark.parametrize("window", [1, 3, 6, 10, 40])
def test_law_a_checkpoint_keeps_the_window_that_it_is_resumed_with(window: int, every: int) -> None:
    """In FSM, a state that is kept deeper than the window reaches is of no use without the window at its boundary."""
    tokens = list(range(62))
    for length in range(1, 63):
        cache = fsm(window, every)
        with cache.open(tokens[:length]) as sequence:
            for at in range(0, length, 4):
                run(sequence, min(4, length - at))
                cache.reclaim()  # gives back all that it need not keep
        assert held(cache, tokens[:length]) == (length if length % 4 == 0 else length // every * every)
        settle(cache)


def test_law_a_checkpoint_keeps_its_window_where_tokens_are_named_late_and_taken_back() -> None:
    """With overlap: what is computed runs ahead of what is named, so that an earlier checkpoint is published."""
    for seed in range(30):
        draw = random.Random(seed)
        cache = fsm(6, 8, max_rewind=3)
        tokens = [seed * 100 + i for i in range(60)]
        named = draw.randrange(20, 60)
        sequence = cache.open(tokens[:named])
        while sequence.reserved < 60:
            run(sequence, min(draw.randrange(1, 9), 60 - sequence.reserved))
            cache.reclaim()
        tracks = {at for at in range(0, named + 1, 8) if at in boundaries(sequence)}
        sequence.close()
        assert held(cache, tokens[:named]) == max(tracks, default=0)
        settle(cache)


def boundaries(sequence: object) -> list[int]:
    """Where the sequence has kept states."""
    (_, holding), *_ = sequence.running.states  # type: ignore[attr-defined]
    return [track.as_of for track in holding.tracks]


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
