"""What is made for compositions: shared by caches of one shape, and never something else than what was composed."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import pytest

from helpers import cache_of, part, run
from prefixloom import EvictionPolicy, Path, Point, Window
from prefixloom import fused as of_compositions
from prefixloom.cache import Cache
from prefixloom.fusing import Fuser
from prefixloom.lane import Lane
from prefixloom.queues import ListQueue
from setups import setups


def small(**options: Any) -> Cache:
    parts = part("whole", Path()), part("near", Window(9)), part("state", Point())
    return cache_of(*parts, debug=False, **options)


def filled(cache: Cache, *, first: int = 0) -> None:
    with cache.open(range(first, first + 24)) as sequence:
        run(sequence, 16)
        sequence.publish()
        run(sequence, 8)


def test_caches_of_one_shape_share_what_is_made() -> None:
    one, two = small(), small()
    assert type(one) is type(two) and type(one) is not Cache and isinstance(one, Cache)
    assert type(small(fuse=False)) is Cache


@pytest.mark.parametrize("name", setups())
def test_all_operations_of_a_composition_are_made(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("setups.DEBUG", False)
    cache = setups()[name].compose()
    (made,) = [each for each in of_compositions.made.values() if type(cache) in each.classes.values()]
    assert made.plain == []


def test_a_method_put_on_a_lane_that_had_it_from_above_is_the_one_that_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled(small())
    called = []

    def leave(self: Any, cell: Any) -> None:
        called.append(cell)
        Lane.leave(self, cell)

    kind = next(type(lane) for lane in small()._lanes if "leave" not in vars(type(lane)))
    monkeypatch.setattr(kind, "leave", leave, raising=False)
    cache = small()
    filled(cache)
    cache.evict(1000)
    assert called


def evicted_first(policy: EvictionPolicy, fuse: bool, flush: bool) -> list[int]:
    """What is still found of two prompts, after one has been evicted."""
    cache = cache_of(part("whole", Path()), debug=False, policy=policy, fuse=fuse)
    if flush:
        filled(cache)
        cache.flush()
    filled(cache)
    filled(cache, first=100)
    cache.evict({"whole": 6})
    return [cache.peek(range(first, first + 24)) for first in (0, 100)]


class Backwards(ListQueue):
    """The most recently used first, by methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.add = self.add_first  # type: ignore[method-assign]


@pytest.mark.parametrize("fuse", [True, False])
def test_a_queue_has_the_methods_that_it_was_given(fuse: bool) -> None:
    assert evicted_first(EvictionPolicy("backwards", make=Backwards), fuse, False) == [24, 0]


@pytest.mark.parametrize("fuse", [True, False])
def test_a_policy_may_make_another_kind_of_queue_at_a_flush(fuse: bool) -> None:
    def other() -> Any:
        return (ListQueue, ListQueue, Newest)[next(count)]()

    class Newest(ListQueue):
        __slots__ = ()

        def add(self, cell: Any) -> None:
            self.add_first(cell)

    count = itertools.count()
    assert evicted_first(EvictionPolicy("other", make=other), fuse, True) == [24, 0]


def test_what_is_made_keeps_no_cache_that_is_dropped() -> None:
    cache = small()
    filled(cache)
    pools = [weakref.ref(lane.pool.buffers["data"]) for lane in cache._lanes]
    del cache
    gc.collect()
    assert [pool() is None for pool in pools] == [True] * 3


def test_several_threads_may_compose_at_once() -> None:
    of_compositions.made.clear()
    failed = []

    def make() -> None:
        try:
            filled(small())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed


def test_what_goes_wrong_while_functions_are_made_keeps_no_cache_from_being_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of_compositions.made.clear()
    monkeypatch.setattr(Fuser, "entry", lambda *_: 1 / 0)
    filled(small())
    assert "Cache.open of custom runs as it is written" in caplog.text
    of_compositions.made.clear()
