"""Lesson 3, stale_map: a window slot was freed twice through a stale full-to-window table.

A sequence that arrives from another machine gets window slots for its tail only. Where a side table said which window
slot goes with a full slot, recycled full slots still had entries of an earlier request, and freeing them freed somebody
else's window. The invariant: every slot has exactly one owner; a grant says, per position, a slot or *absent*.
"""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import pytest

from prefixloom import InvariantError, Path, Window
from prefixloom.cache.cache import Cache
from tests.support.helpers import cache_of, owners, part, settle

W = 10


def full_and_window(page: int, tokens: int = 256, *, debug: bool = True) -> Cache:
    return cache_of(part("full", Path()), part("window", Window(W)), page=page, tokens=tokens, debug=debug)


def arriving(cache: Cache, tokens: list[int], tail: int) -> Any:
    """A sequence whose last ``tail`` window positions are computed here; all before came from elsewhere.

    Its full pages are granted for the whole extent, its window pages for what resuming at the border needs, and then
    for the tail.
    """
    sequence = cache.open(tokens)
    border = len(tokens) - tail
    sequence.grow(border - sequence.reserved, arriving=True)
    sequence.grow(tail)
    return sequence


def present(sequence: Any, name: str) -> list[bool]:
    return [slot >= 0 for slot in sequence.pages(name)]


# ---------------------------------------------------------------- the grants


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("tail", [0, 1, W, 48])
def test_a_tail_grant_says_slot_or_absent_of_every_position(tail: int, page: int) -> None:
    cache = full_and_window(page)
    sequence = arriving(cache, list(range(48)), tail)
    border = 48 - tail
    needed = range(max(0, border - W + 1), 48)
    wanted = [any(p // page == index for p in needed) for index in range(48 // page)]
    if border % page:
        wanted[border // page] = True  # a page that is begun is written on
    assert present(sequence, "window") == wanted
    assert all(present(sequence, "full"))
    assert sequence.owned("window") == sum(wanted)
    sequence.abort()
    settle(cache)


# ---------------------------------------------------------------- the bug itself


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("tails", [(0, 1, W), (48, 0, 1), (W, 48, 0), (1, 1, 48), (0, 0, 0)])
def test_tails_of_any_length_are_freed_in_any_order(tails: tuple[int, ...], order: tuple[int, ...], page: int) -> None:
    """Allocated 1:1 and freed; then tails on the recycled slots, with a third request that holds some of them."""
    cache = full_and_window(page, debug=False)
    first = cache.open(range(96))
    first.grow(96)  # 1:1, so that a table would have an entry for every full slot
    first.abort()
    others = []
    for number, tail in enumerate(tails):
        tokens = [(number + 1) * 100 + i for i in range(48)]
        others.append(arriving(cache, tokens, tail))
        owners(cache, others)
    third = cache.open([7] * 32)
    third.grow(32)  # holds recycled slots all the while
    held_by_third = third.pages("window"), third.pages("full")
    live = [*others, third]
    for number in order:
        others[number].abort()
        live.remove(others[number])
        owners(cache, live)
        assert (third.pages("window"), third.pages("full")) == held_by_third
    for name in ("window", "full"):
        assert not set(third.pages(name)) & set(cache.pool(name).free_ids())
    third.abort()
    owners(cache, [])
    settle(cache)


def test_a_full_slot_that_is_free_leads_to_nothing() -> None:
    """No side table: that a full page was recycled tells a window nothing."""
    cache = full_and_window(4)
    first = cache.open(range(96))
    first.grow(96)
    windows, full = set(first.pages("window")), set(first.pages("full"))
    first.abort()
    tail = arriving(cache, list(range(200, 248)), 0)
    assert set(tail.pages("full")) & full, "full slots are recycled"
    assert {slot for slot in tail.pages("window") if slot >= 0} <= windows
    other = cache.open([5] * 48)
    other.grow(48)
    mine = set(other.pages("window"))
    tail.abort()
    assert not mine & set(cache.pool("window").free_ids()), "freeing the tail freed nobody else's window"
    other.abort()
    settle(cache)


def test_a_slot_that_is_given_back_twice_is_seen_at_once() -> None:
    """The sanitizer: in debug mode the pool itself refuses it."""
    cache = full_and_window(4)
    sequence = cache.open(range(48))
    sequence.grow(48)
    page = array("i", sequence.pages("window")[:1]).tobytes()
    sequence.abort()
    with pytest.raises(InvariantError, match="given back twice, or never handed out"):
        cache.pool("window").give(page)
