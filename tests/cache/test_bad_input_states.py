"""Bad input around windows and states: a clear result, nothing lost, and nobody else's locks are touched."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import CapacityError, Path, Point, Window
from prefixloom.cache.cache import Cache
from tests.support import helpers
from tests.support.helpers import cache_of, held, part, run, serve, settle

TOKENS = list(range(40))


def locks(cache: Cache) -> dict[tuple[str, int, int], int]:
    """Lock counts; without those of roots, which count their children."""
    return {what: count for what, count in helpers.locks(cache).items() if what[2]}


def fsm(slots: int = 8, *, debug: bool = True, **state: Any) -> Cache:
    parts = (part("full", Path()), part("window", Window(10)), part("state", Point(), **state))
    return cache_of(*parts, slots=slots, debug=debug, max_rewind=state.get("max_rewind", 0))


# ---------------------------------------------------------------- refused when it is composed


# ---------------------------------------------------------------- refused while it runs


# ---------------------------------------------------------------- a pool that runs dry


def fill_states(cache: Cache) -> list[Any]:
    """Sequences until no state slot can be had."""
    fillers = []
    while True:
        try:
            fillers.append(cache.open([1000 + len(fillers)] * 4))
        except CapacityError:
            return fillers


@pytest.mark.parametrize("pool", ["full", "window", "state"])
def test_dry_while_matching_a_request_is_refused_and_nothing_was_taken(pool: str) -> None:
    cache = fsm()
    serve(cache, TOKENS)
    holder = cache.open([*TOKENS, 1])
    spans = [cache.pool(pool).mint(cache.pool(pool).free)]  # somebody outside holds all that is left
    before, counts = cache.stats().components, locks(cache)
    if pool == "state":
        with pytest.raises(CapacityError, match="state: needs 1"):
            cache.open([*TOKENS, 2])
    else:
        with cache.open([*TOKENS, *range(30)]) as sequence:  # a match needs no page
            assert sequence.ready == 40
            with pytest.raises(CapacityError, match=pool):
                sequence.grow(30)
            assert sequence.reserved == 40
            sequence.abort()
    assert locks(cache) == counts
    assert cache.stats().components == before
    run_ops(cache, holder)
    spans.pop().free()
    holder.close()
    assert held(cache, TOKENS) == 40
    settle(cache)


def run_ops(cache: Cache, sequence: Any) -> None:
    with cache.step([sequence]) as step:
        step.run_ops()


def check_dry_before_the_copy(debug: bool) -> None:
    """Between a match and its copy the pool runs dry, and all that may go is evicted: the source stays."""
    cache = fsm(4, debug=debug)
    content = cache.pool("state").buffers["data"]
    with cache.open(TOKENS) as first:
        run(first, 40)
        content[:, first.pages("state")[0]] = 41
    sequence = cache.open([*TOKENS, 1])
    assert sequence.ready == 40
    counts = locks(cache)
    assert cache.evict({"state": 4}) == {"state": 0}
    fillers = fill_states(cache)
    for filler in fillers:
        run_ops(cache, filler)
        content[:, filler.pages("state")[0]] = 7
    assert locks(cache) == counts
    run_ops(cache, sequence)
    assert (content[:, sequence.pages("state")[0]] == 41).all(), "copied, and from the state that was matched"
    assert len(fillers) == 2
    late = cache.open([9] * 4)  # the source is covered until it was copied, and no longer
    assert cache.stats().components["state"].cached == 0
    for one in (late, sequence, *fillers):
        one.abort()
    settle(cache)


def test_dry_before_the_copy_the_source_stays_until_it_was_copied() -> None:
    for debug in (True, False):
        check_dry_before_the_copy(debug)


def test_dry_while_donating_a_checkpoint_is_left_out_and_counted() -> None:
    """No slot to go on with: the sequence keeps its state, its pages are published, and it runs on."""
    cache = fsm(5)
    serve(cache, [500 + i for i in range(24)])
    other = cache.open([*[500 + i for i in range(24)], 1])  # pins a state that is not copied yet
    sequence = cache.open(TOKENS)
    run(sequence, 20)
    slot = sequence.pages("state")
    fillers = fill_states(cache)
    before = locks(cache)
    assert sequence.publish() == 20
    assert sequence.pages("state") == slot
    assert cache.stats().skipped_checkpoints == 1
    assert {what: locks(cache)[what] for what in before} == before
    plan = cache.match(TOKENS)
    assert (plan.ready, plan.walked, plan.branch) == (0, 20, 20)
    run(sequence, 4)
    fillers.pop().abort()
    assert sequence.publish() == 24, "and now there is a slot"
    assert cache.peek(TOKENS) == 24
    for one in (sequence, other, *fillers):
        one.close()
    settle(cache)
