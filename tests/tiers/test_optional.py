"""Memory that no boundary needs, in a cache with a host tier: it comes back where it can, and never costs a hit."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import Optional, Path
from prefixloom.cache.cache import Cache
from prefixloom.device.pool import Pool
from tests.support.helpers import part
from tests.support.tiers import compute, copies_by, serve, tiered, wrong

LENGTH = 24
PAGES = 6
NAMES = ("path", "far")


def evicted(*names: str) -> Cache:
    """A cache that served a prompt, and has lost these components on the device and not on the host."""
    cache = tiered(part("path", Path()), part("far", Optional()), tokens=64, capacity={"far": 32}, write="through")
    serve(cache, range(LENGTH))
    cache.evict(dict.fromkeys(names, PAGES))
    return cache


def failing(honest: Any, source: Pool, src: list[int], target: Pool, *rest: Any) -> None:
    """Make a copy, unless it goes to the device of what is not needed."""
    if target.name == "far":
        raise RuntimeError("the bus is broken")
    honest(source, src, target, *rest)


@pytest.mark.parametrize("lost", [("far",), ("path",), NAMES], ids="+".join)
def test_what_is_not_needed_comes_back_whether_or_not_the_boundary_does(lost: tuple[str, ...]) -> None:
    cache = evicted(*lost)
    with cache.open(range(LENGTH)) as sequence:
        told = sequence.restore()
        assert (told.ready, told.why) == (LENGTH, "")
        assert [sequence.pages(name).count(-1) for name in NAMES] == [0, 0]
        assert wrong(cache, sequence, range(LENGTH)) == []


@pytest.mark.parametrize("lost", [("far",), NAMES], ids="+".join)
def test_without_room_for_what_is_not_needed_the_hit_is_as_deep(lost: tuple[str, ...]) -> None:
    cache = evicted(*lost)
    with cache.open(range(100, 124)) as other:
        compute(cache, other, range(100, 124), LENGTH)  # of the eight pages that are not needed, two are left
        with cache.open(range(LENGTH)) as sequence:
            told = sequence.restore()
            assert told.ready == LENGTH
            assert "did not fit" in told.why
            assert [sequence.pages(name).count(-1) for name in NAMES] == [0, PAGES]
            assert wrong(cache, sequence, range(LENGTH)) == []


@pytest.mark.parametrize("lost", [("far",), NAMES], ids="+".join)
def test_a_copy_of_what_is_not_needed_that_fails_costs_no_hit(lost: tuple[str, ...]) -> None:
    cache = evicted(*lost)
    with copies_by(failing), cache.open(range(LENGTH)) as sequence:
        told = sequence.restore()
        assert told.ready == LENGTH
        assert "failed" in told.why
        assert [sequence.pages(name).count(-1) for name in NAMES] == [0, PAGES]
        assert wrong(cache, sequence, range(LENGTH)) == []
    with cache.open(range(LENGTH)) as sequence:  # what failed is not tried again
        assert sequence.restore().why == ""
