"""Memory between a store and the host's slots is used again, and never by two at once."""

from __future__ import annotations

from typing import Any

import pytest

import prefixloom.tiers.pieces
from prefixloom import Path
from prefixloom.storage import Record
from prefixloom.tiers.pieces import Spare, Spares
from prefixloom_hicache import MemoryBackend
from tests.support.helpers import part
from tests.support.stores import TOKENS, behind, composed, idle, read_back, stocked
from tests.support.tiers import serve


def test_what_was_given_back_is_had_again_by_size() -> None:
    spares = Spares()
    small, large = spares.take(8), spares.take(64)
    for each in (small, large):
        spares.give(memoryview(each)[2:4].toreadonly())
    assert spares.kept == 72
    assert spares.take(64) is large and spares.take(8) is small
    assert spares.take(8) is not small and spares.kept == 0


def test_no_more_is_kept_than_may_be() -> None:
    spares = Spares(most=100)
    for each in [spares.take(40) for _ in range(3)]:
        spares.give(each)
    assert spares.kept == 80


def test_what_is_somebody_elses_is_left_to_them() -> None:
    spares = Spares()
    for theirs in (bytearray(8), b"8 bytes.", memoryview(bytearray(8)).toreadonly()):
        spares.give(theirs)
    assert spares.kept == 0


def test_storing_and_fetching_take_no_new_memory_once_they_have_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of five tokens have 80 bytes: a thread that another test has left behind takes memory of other sizes."""
    made: list[int] = []

    class Counted(Spare):
        def __init__(self, size: int) -> None:
            made.append(size)
            super().__init__(size)

    monkeypatch.setattr("prefixloom.tiers.pieces.Spare", Counted)
    store = MemoryBackend(capacity=1 << 24)
    cache, tier = composed(part("path", Path()), store=store, page=5)
    tier.fetch_at_least = 1000  # or a late look finds what was stored meanwhile, and reads it for nobody
    for first in (0, 1000, 2000):
        serve(cache, [first + k for k in range(40)])
        idle(cache)
    assert made.count(80) == 8, "eight pages at a time"
    cache, _ = composed(part("path", Path()), store=store, page=5)
    made.clear()
    for first in (0, 1000, 2000):
        assert read_back(cache, [*(first + k for k in range(40)), 1]) == 40
    assert made.count(80) == 8


class Crossed(MemoryBackend):
    """Tells the truth, in the memory that it was given for something else."""

    def get(self, keys: Any, into: Any = None) -> Any:
        found = super().get(keys, into)
        if len(keys) < 2 or into is None or not all(isinstance(each, Record) for each in found):
            return found
        first, second, *rest = found
        content = bytes(first.payload)
        into[1][:] = content
        told = (first.component, first.start, first.end, first.layout, memoryview(into[1]))
        return (Record(first.key, *told), second, *rest)


def test_an_answer_in_the_memory_of_another_piece_is_none() -> None:
    store = stocked(part("path", Path()), kind=Crossed)
    cache, _ = composed(part("path", Path()), store=store)
    with cache.open([*TOKENS, 1]) as sequence:
        told = sequence.restore()
        while not told.over:
            cache.poll()
        assert (told.ready, "another piece's memory" in told.why) == (0, True)
    held = [each for kept in behind(cache).store.spares._by_size.values() for each in kept]
    assert len(held) == len({id(each) for each in held})
    assert prefixloom.tiers.pieces.READ > 1
