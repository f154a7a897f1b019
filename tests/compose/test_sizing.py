"""Sizes: how many pages and state slots follow from tokens or from a memory budget."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import Buffer, Component, CompositionError, Manifest, Path, compose, parse_memory
from tests.support.composing import composed, paths, refused, state, windowed


def test_a_capacity_in_tokens_is_the_same_for_all_and_rounded_up_to_pages() -> None:
    composition = composed(paths(), windowed(page_size=8), state(), capacity=40_001)
    assert [part.capacity for part in composition.parts] == [2501, 5001, 19]


def test_states_are_at_least_sixteen_where_nothing_else_is_said() -> None:
    assert composed(paths(), state(), capacity=64).parts[1].capacity == 16


def test_a_capacity_by_name_is_tokens_for_pages_and_slots_for_states() -> None:
    composition = composed(paths(), windowed(), state(), capacity={"whole": 160, "near": 33, "state": 3})
    assert [part.capacity for part in composition.parts] == [10, 3, 3]


def test_a_capacity_below_one_page_of_the_tree_is_refused_with_the_number_needed() -> None:
    refused("capacity=47 tokens is less than one page of the tree, 48 tokens", paths(), state(grid=48), capacity=47)
    refused(r"capacity\['whole'\]=8 tokens is less.*give at least 16", paths(), capacity={"whole": 8})
    refused(
        r"capacity\['state'\] must be a whole number of at least 1 state slots, got 0", state(), capacity={"state": 0}
    )
    assert composed(paths(), state(grid=48), capacity=48).parts[0].capacity == 3


def test_memory_is_spent_on_as_many_tokens_as_fit() -> None:
    wide = Component("wide", Manifest((Buffer("k", (4,), "uint8", (0, 1)),)), Path())
    (part,) = composed(wide, memory=1024).parts
    assert part.capacity == 1024 // (16 * 8)
    assert composed(wide, memory=1023).parts[0].capacity == 7
    grouped = Component("grouped", Manifest((Buffer("k", (8,), "uint8"),), tokens_per_slot=4), Path())
    assert composed(grouped, memory=1024).parts[0].capacity == 1024 // (4 * 8), "one slot stands for four tokens"


def test_memory_for_states_alone_is_spent_on_states() -> None:
    assert composed(state(), memory=100).parts[0].capacity == 100


def test_too_little_memory_is_refused_with_the_bytes_needed() -> None:
    told = refused("memory of 31 bytes is too little", paths(), state(), memory=31)  # even without any traffic in mind
    assert told.endswith("one page of 16 tokens and state: 16 state slots takes 32 bytes")
    assert [part.capacity for part in composed(paths(), state(), memory=32).parts] == [1, 16]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (512, 512), ("512", 512), ("512B", 512), ("1KiB", 1024), ("20GiB", 20 << 30), ("1.5 TiB", 3 << 39),
        ("20GB", 20 * 10**9), ("20g", 20 * 10**9), (" 2mib ", 2 << 20),
    ],
)  # fmt: skip
def test_memory_is_read_in_the_usual_spellings(text: Any, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lots", "is no size"), ("20 G i B", "is no size"), ("iB", "is no size"), ("5iB", "is no size"),
        ("-1GiB", "is no size"), (0, "must be positive"), ("0GiB", "must be positive"),
        (-1, "must be positive, got -1"), (1.5, "must be bytes or a text"), (True, "must be bytes or a text"),
    ],
)  # fmt: skip
def test_memory_that_is_no_size_is_refused(text: Any, told: str) -> None:
    with pytest.raises(CompositionError, match=told):
        parse_memory(text)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_the_memory_of_a_pool_is_what_was_counted_for_it(layout: Any) -> None:
    """A page-first slot is padded: one of 5 bytes takes 8."""
    odd = Component("odd", Manifest((Buffer("k", (5,), "uint8"),)), Path())
    cache = compose(None, plugins=[odd], page_size=1, memory=800, layout=layout)
    pool = cache.pool("odd")
    taken = sum(block.numel() * block.element_size() for block in pool.blocks)
    assert 800 - taken < taken // pool.capacity and taken <= 800
