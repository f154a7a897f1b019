"""An instance that may remember something of a cache serves one cache at a time."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from prefixloom import Component, CompositionError, Path, TierManifest, Window, compose, hookimpl
from prefixloom.cache.cache import Cache
from prefixloom_hicache import HostTier
from tests.support.helpers import part, serve


class WithPool(Component):
    pool: Any = None


class Rejecting(Component):
    """Has no pool, and remembers what it saw."""

    seen = 0

    @hookimpl
    def create_match_validator(self) -> Any:
        def validator(walk: Any) -> int:
            self.seen = max(self.seen, walk.key_tokens)
            return 0 if walk.boundary < self.seen // 2 else int(walk.boundary)

        return validator


MAKERS = {
    "pool": lambda: part("mine", Window(8), WithPool),
    "hook": lambda: part("mine", Window(8), Rejecting),
    "tier": lambda: HostTier(TierManifest(capacity=256), name="mine"),
}


def composed_with(*mine: Any) -> Cache:
    return compose(None, plugins=[part("path", Path()), *mine], capacity=256, page_size=4)


@pytest.mark.parametrize("kind", MAKERS)
def test_instance_is_refused_while_another_cache_that_it_serves_is_in_use(kind: str) -> None:
    mine = MAKERS[kind]()
    first = composed_with(mine)
    pool = getattr(mine, "pool", None)
    with pytest.raises(
        CompositionError, match=r"'mine' .* serves another cache that is still in use\. Make an instance"
    ):
        composed_with(mine)
    assert getattr(mine, "pool", None) is pool
    sequence = first.open(range(8))
    del first
    with pytest.raises(CompositionError, match="serves another cache"):
        composed_with(mine)  # a sequence that is open holds its cache
    sequence.abort()
    del sequence
    assert serve(composed_with(mine), range(8)) == 0


@pytest.mark.parametrize("kind", MAKERS)
def test_instance_is_refused_twice_in_one_cache_and_in_two_that_are_made_at_once(kind: str) -> None:
    mine, made, refused = MAKERS[kind](), [], []
    with pytest.raises(CompositionError, match="two "):
        composed_with(mine, mine)

    def make() -> None:
        try:
            made.append(composed_with(mine))
        except CompositionError as error:
            refused.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), len(refused)) == (1, 3)


def test_component_without_hooks_and_pool_may_serve_several_caches() -> None:
    plain = part("plain", Window(8))
    for cache in [composed_with(plain) for _ in range(2)]:
        serve(cache, range(8))
        assert cache.peek(range(8)) == 8
