"""What a sequence fills at a boundary that it only passed goes before what others ended at."""

from __future__ import annotations

from prefixloom import Cache, Path, Reach, Sinks, Window
from tests.support.helpers import cache_of, part, serve

LONG = list(range(100, 124))
OTHER = [7] * 8


def passed_again(reach: Reach, *, forks: bool = False) -> Cache:
    """LONG has ends at 8 and 24. Its windows were evicted, OTHER came, and LONG was computed again in one pass.

    Then room was made until one of the older ends was gone.
    """
    cache = cache_of(part("path", Path()), part("near", reach))
    serve(cache, LONG[:8])
    serve(cache, LONG)
    if forks:
        serve(cache, [*LONG[:8], 50, 51, 52, 53])
    cache.evict({"near": cache.stats().components["near"].cached})
    serve(cache, OTHER)
    assert serve(cache, LONG) == 0
    while cache.peek(LONG[:8]) and cache.peek(OTHER):
        cache.evict({"near": 1})
    return cache


def test_a_boundary_that_was_only_passed_goes_before_an_older_end() -> None:
    cache = passed_again(Window(4))
    assert (cache.peek(LONG[:8]), cache.peek(OTHER), cache.peek(LONG)) == (0, 8, 24)


def test_where_prompts_part_a_passed_boundary_counts_as_used() -> None:
    cache = passed_again(Window(4), forks=True)
    assert (cache.peek(LONG[:8]), cache.peek(OTHER), cache.peek(LONG)) == (8, 0, 24)


def test_what_the_end_of_the_path_needs_is_not_passed() -> None:
    cache = passed_again(Sinks(4) | Window(4))
    assert (cache.peek(LONG[:8]), cache.peek(OTHER), cache.peek(LONG)) == (8, 0, 24)
