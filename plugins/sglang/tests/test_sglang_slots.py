"""The pairs of full attention and windows, over an allocator that does what SGLang's does with its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from prefixloom_sglang.composition import FULL, SWA
from prefixloom_sglang.slots import PairedSlots, TokenSlots

WINDOW = 4


def to_device(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return tensor.to(device)


def lists(handed: Any) -> dict[str, list[int]]:
    return {name: pages.tolist() for name, pages in handed.items()}


class FreeList:
    def __init__(self) -> None:
        self.free: list[int] = []

    def free_page_ids(self, pages: torch.Tensor) -> None:
        self.free += pages.tolist()


class Allocator(FreeList):
    """Two free lists and a table from a slot of full attention to its window's; 0: it has none."""

    def __init__(self, tokens: int, page_size: int) -> None:
        super().__init__()
        self.device = "cpu"
        self.page_size = page_size
        self.size_full = self.size_swa = tokens
        self.full_attn_allocator, self.swa_attn_allocator = FreeList(), FreeList()
        self.full_to_swa_index_mapping = torch.zeros(tokens + page_size, dtype=torch.int64)

    def set_full_to_swa_mapping(self, full: torch.Tensor, windows: torch.Tensor) -> None:
        self.full_to_swa_index_mapping[full] = windows

    def clear_full_to_swa_mapping(self, full: torch.Tensor) -> None:
        self.full_to_swa_index_mapping[full] = 0

    def free_swa(self, slots: torch.Tensor) -> None:
        slots = slots.long()
        windows = self.full_to_swa_index_mapping[slots].tolist()
        assert all(windows), "SGLang frees slot 0 where a slot has no window"
        pages = {slot // self.page_size for slot in windows}
        self.swa_attn_allocator.free += sorted(pages)
        self.clear_full_to_swa_mapping(slots)


def make(page_size: int) -> tuple[PairedSlots, Allocator, Any]:
    """Slots, their allocator, and a function that pairs pages as a running request has them, and returns its row."""
    allocator = Allocator(64, page_size)
    slots = PairedSlots(allocator, page_size, to_device, WINDOW)

    def row(full: Sequence[int], windows: Sequence[int]) -> torch.Tensor:
        for page, window in zip(full, windows, strict=True):
            if window:
                allocator.set_full_to_swa_mapping(slots.locations([page]), slots.locations([window]))
        return slots.locations(full).to(torch.int32)

    return slots, allocator, row


def pairs(slots: PairedSlots, allocator: Allocator, pages: Sequence[int]) -> list[int]:
    """The window's page of each page, from the whole of the table."""
    found = []
    for page in pages:
        mapped = allocator.full_to_swa_index_mapping[slots.locations([page])].tolist()
        window = mapped[0] // allocator.page_size
        assert mapped == (slots.locations([window]).tolist() if window else [0] * allocator.page_size)
        found.append(window)
    return found


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_row_is_handed_in_by_pages(page_size: int) -> None:
    slots, _, row = make(page_size)
    assert slots.locations([3]).tolist() == list(range(3 * page_size, 4 * page_size))
    whole = row([5, 2, 7, 8, 9, 10], [0, 0, 4, 1, 2, 3])
    assert lists(slots.hand_in(whole, finished=True)) == {FULL: [5, 2, 7, 8, 9, 10], SWA: [-1, -1, 4, 1, 2, 3]}
    full = TokenSlots(Allocator(64, page_size), page_size, to_device).hand_in(whole, finished=True)
    assert lists(full) == {FULL: [5, 2, 7, 8, 9, 10]}


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_window_that_goes_alone_leaves_its_page_without_a_partner(page_size: int) -> None:
    slots, allocator, row = make(page_size)
    slots.hand_in(row([5, 6], [1, 2]), finished=True)
    slots.give_back({SWA: [1]})
    assert pairs(slots, allocator, [5, 6]) == [0, 2]
    assert (allocator.swa_attn_allocator.free, allocator.full_attn_allocator.free) == ([1], [])
    slots.give_back({FULL: [5, 6], SWA: [2]})
    assert pairs(slots, allocator, [5, 6]) == [0, 0]
    assert (allocator.swa_attn_allocator.free, allocator.full_attn_allocator.free) == ([1, 2], [5, 6])


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_window_that_fills_a_gap_of_the_tree_is_joined_to_the_trees_page(page_size: int) -> None:
    slots, allocator, row = make(page_size)
    slots.hand_in(row([5, 6], [1, 2]), finished=True)
    slots.give_back({SWA: [1]})  # the tree has page 5 without a window
    handed = slots.hand_in(row([7, 8], [3, 4]), finished=True)
    back = {FULL: [7, 8], SWA: [4]}  # the tree had both pages, and took the window that it lacked
    slots.give_back(back)
    slots.rejoin(handed, back, lambda: [5, 6])
    assert pairs(slots, allocator, [5, 6, 7, 8]) == [3, 2, 0, 0]
    slots.give_back({FULL: [5, 6], SWA: [3, 2]})
    assert pairs(slots, allocator, [5, 6]) == [0, 0]


def test_where_all_was_taken_or_all_came_back_nothing_is_joined() -> None:
    slots, allocator, row = make(1)

    def never() -> list[int]:
        raise AssertionError("nobody has to look at the tree")

    handed = slots.hand_in(row([5, 6], [1, 2]), finished=True)
    slots.rejoin(handed, {}, never)
    again = slots.hand_in(row([7, 8], [3, 4]), finished=True)
    back = {FULL: [7, 8], SWA: [3, 4]}
    slots.give_back(back)
    slots.rejoin(again, back, never)
    assert pairs(slots, allocator, [5, 6, 7, 8]) == [1, 2, 0, 0]


def test_windows_too_short_to_resume_at_their_end_are_freed_at_once() -> None:
    slots, allocator, row = make(1)
    handed = slots.hand_in(row([5, 6, 7, 8, 9, 10], [0, 0, 0, 1, 2, 3]), finished=True)  # of a window of four
    assert lists(handed)[SWA] == [-1] * 6
    assert allocator.swa_attn_allocator.free == [1, 2, 3]
    assert pairs(slots, allocator, [8, 9, 10]) == [0, 0, 0]
    short = slots.hand_in(row([11, 12], [4, 5]), finished=True)  # this is all that there is, so nothing lacks
    assert lists(short)[SWA] == [4, 5]
