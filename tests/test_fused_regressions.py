"""What went wrong when the hot path was rearranged. Every one of these failed once, fused or as written."""

from __future__ import annotations

from typing import Any

import pytest

from helpers import cache_of, part, run, serve, settle
from prefixloom import Component, Path, Point, Reach, TierManifest, Window, hookimpl
from prefixloom_hicache import HostTier

BOTH = pytest.mark.parametrize("fuse", [False, True])


class Told(Reach):
    """A window that raises when it is told to."""

    raising = False

    def needs(self, n: int) -> tuple[tuple[int, int], ...]:
        return ((max(0, n - 6), n),) if n else ()

    def until(self, p: int) -> float:
        if self.raising:
            self.raising = False
            raise ZeroDivisionError
        return p + 6


class Interrupted(Component):
    now = False

    @hookimpl
    def evict_component(self, node: Any, tier: Any) -> None:
        if self.now:
            raise KeyboardInterrupt


@BOTH
@pytest.mark.parametrize("facts", [{}, {"checkpoint_every": 4}])
def test_a_sequence_may_be_closed_in_the_block_of_a_step_that_fails(fuse: bool, facts: dict[str, int]) -> None:
    cache = cache_of(part("path", Path()), part("state", Point(), **facts), debug=False, fuse=fuse)
    sequence = cache.open(range(16))
    run(sequence, 8)
    sequence.grow(4)
    with pytest.raises(ZeroDivisionError), cache.step([sequence]) as step:
        step.run_ops()
        sequence.close()
        raise ZeroDivisionError
    assert cache.peek(range(16)) == 8 * bool(facts)
    settle(cache)


@BOTH
def test_a_sequence_may_be_closed_before_its_step_begins(fuse: bool) -> None:
    cache = cache_of(part("path", Path()), part("state", Point(), checkpoint_every=4), debug=False, fuse=fuse)
    sequence = cache.open(range(16))
    run(sequence, 8)
    step = cache.step([sequence])
    sequence.close()
    with step:
        step.run_ops()
    settle(cache)


@BOTH
def test_a_commit_that_fails_is_not_done_again(fuse: bool) -> None:
    """Neither for the sequence whose reach raised nor for those before it: the states of single tokens stay known."""
    reach = Told()
    states = part("state", Point(), max_rewind=3)
    cache = cache_of(
        part("path", Path()), part("near", reach), states, page=1, capacity={"near": 28}, slots=30, max_rewind=3,
        debug=False, fuse=fuse,
    )  # fmt: skip
    sequences = [cache.open([number] * 30) for number in (1, 2)]
    for count in (10, 3):
        for sequence in sequences:
            sequence.grow(count)
        step = cache.step(sequences).__enter__()
        step.run_ops()
        object.__setattr__(reach, "raising", count == 3)
        if count == 3:
            with pytest.raises(ZeroDivisionError):
                step.__exit__(None, None, None)
        else:
            step.__exit__(None, None, None)
    for sequence in sequences:
        assert sequence.committed == 13
        sequence.rewind(1)
        assert sequence.committed == 12
        sequence.abort()
    settle(cache)


@BOTH
def test_what_one_component_has_got_is_given_back_if_another_is_interrupted(fuse: bool) -> None:
    whole = part("whole", Path(), Interrupted)
    cache = cache_of(part("near", Window(6)), whole, capacity={"whole": 40, "near": 80}, debug=False, fuse=fuse)
    serve(cache, range(32))
    sequence = cache.open(range(100, 136))
    free = cache.stats().components["near"].free
    whole.now = True  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        sequence.grow(32)
    whole.now = False  # type: ignore[attr-defined]
    assert [len(sequence.pages(name)) for name in ("near", "whole")] == [0, 0]
    assert cache.stats().components["near"].free == free
    sequence.abort()
    settle(cache)


@BOTH
def test_once_a_tier_has_copied_the_pools_keep_their_order(fuse: bool) -> None:
    """Which is told to them by the first copy, when functions are made already."""
    tier = HostTier(TierManifest(capacity={"path": 640}, write="through", overlap=False))
    cache = cache_of(part("path", Path()), tier, tokens=64, debug=False, fuse=fuse)
    serve(cache, range(8))
    cache.poll()
    pool = cache._lanes[0].pool
    assert pool.orderly
    pool.give(pool.take(9)[::-1].tobytes())
    with cache.open(range(100, 120)) as sequence:
        sequence.grow(20)
        pages = sequence.pages("path")
        assert pages == sorted(pages)
        sequence.abort()


@BOTH
def test_what_a_failed_publication_left_in_the_tree_may_be_evicted(fuse: bool) -> None:
    """Of a path, too, that handed over before another failed."""
    reach = Told()
    cache = cache_of(part("path", Path()), part("near", reach), debug=False, fuse=fuse)
    sequence = cache.open(range(16))
    run(sequence, 16)
    object.__setattr__(reach, "raising", True)
    with pytest.raises(ZeroDivisionError):
        sequence.publish()
    assert not sequence.open
    figures = cache.stats().components["path"]
    assert (figures.cached, figures.leased) == (4, 0)
    assert cache.evict({"path": 4}) == {"path": 4}
    settle(cache)
