"""Slots of tokens: page numbers in the books, and token slots in SGLang's allocators.

SGLang numbers slots by token. A page of the books is ``page_size`` slots that follow each other, and its number is that
of SGLang's page: the slot divided by the page size. Slot 0, and with it page 0, is SGLang's place for padding, so 0
stands for "none" in SGLang's tables.

Where a model has windows, a request's row has slots of full attention only. SGLang's kernels find the slot in the
window's pool through a table, ``full_to_swa_index_mapping``. So two pages that the tree holds at one position, one of
each kind, must be a pair in that table, and a page whose partner is gone must have none. ``PairedSlots`` keeps this
true, since the books evict windows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .composition import FULL, SWA

Pages = npt.NDArray[np.int32]
"""Page numbers, in the host's memory."""
Handed = dict[str, Pages]
"""What is handed in, by component."""
Back = Mapping[str, Sequence[int]]
"""What came back from the books, by component."""


def pages_of(numbers: Sequence[int] | Pages) -> Pages:
    """Return page numbers as an array, without copying the numbers of the books."""
    return np.asarray(numbers, np.int32)


class TokenSlots:
    """The slots of full attention, and SGLang's allocator of them."""

    def __init__(self, allocator: Any, page_size: int, to_device: Callable[..., torch.Tensor]) -> None:
        """``to_device`` moves a tensor of the host to a device, without waiting where that is possible."""
        self.page_size = page_size
        self.device = allocator.device
        self._full = allocator
        self._to_device = to_device
        self._offsets = torch.arange(page_size, dtype=torch.int64, device=self.device)
        self.nothing = torch.empty(0, dtype=torch.int64, device=self.device)

    def locations(self, pages: Sequence[int] | Pages) -> torch.Tensor:
        """Return the token slots of pages, on the device."""
        if not len(pages):
            return self.nothing
        numbers = self._numbers(pages)
        if self.page_size == 1:
            return numbers
        return (numbers[:, None] * self.page_size + self._offsets).reshape(-1)

    def hand_in(self, row: torch.Tensor, finished: bool) -> Handed | None:
        """Return the pages of a part of a request's row, for the books to take. It begins and ends at page ends.

        None: the request still runs, and has given back so much that nobody could resume where this part ends.
        """
        return {FULL: self._pages(row).to("cpu", torch.int32).numpy()}

    def give_back(self, back: Back) -> None:
        """Free pages that nobody uses any more in SGLang's pools."""
        if len(back.get(FULL, ())):
            self._full.free_page_ids(self._numbers(back[FULL]))

    def rejoin(self, handed: Handed, back: Back, tree: Callable[[], Sequence[int]]) -> None:
        """Join after an insert what the books took to what they had. There is nothing to join here."""

    def _pages(self, row: torch.Tensor) -> torch.Tensor:
        return self._divided(row[:: self.page_size])

    def _divided(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self.page_size == 1 else slots // self.page_size

    def _numbers(self, pages: Sequence[int] | Pages) -> torch.Tensor:
        return self._to_device(torch.from_numpy(pages_of(pages).astype(np.int64)), self.device)


class PairedSlots(TokenSlots):
    """The slots of full attention and of windows, where SGLang's allocator hands out a pair for each token.

    ``_window_of`` and ``_full_of`` are SGLang's table and its inverse, by page, for pages that are in the books. They
    lie on the host, so that nothing has to wait for the device.
    """

    def __init__(self, allocator: Any, page_size: int, to_device: Callable[..., torch.Tensor], window: int) -> None:
        super().__init__(allocator, page_size, to_device)
        self._allocator = allocator
        self._full = allocator.full_attn_allocator
        self._windows = allocator.swa_attn_allocator
        self._reads_back = window
        self._window_of = np.zeros(allocator.size_full // page_size + 1, dtype=np.int32)
        self._full_of = np.zeros(allocator.size_swa // page_size + 1, dtype=np.int32)

    def hand_in(self, row: torch.Tensor, finished: bool) -> Handed | None:
        first = row[:: self.page_size].to(torch.int64)
        pairs = torch.stack((first, self._allocator.full_to_swa_index_mapping[first]))
        full, windows = self._divided(pairs).to("cpu", torch.int32).numpy()
        if self._is_useless(windows):
            if not finished:
                return None
            self._allocator.free_swa(self.locations(full[windows > 0]))  # SGLang would free slot 0 where there is none
            windows = np.zeros_like(windows)
        self._window_of[full] = windows
        self._full_of[windows] = full
        return {FULL: full, SWA: np.where(windows > 0, windows, -1).astype(np.int32)}

    def _is_useless(self, windows: Pages) -> bool:
        """Return whether the request has freed so much of its window that nobody could resume where this part ends."""
        (gone,) = np.nonzero(windows == 0)
        return bool(len(gone)) and (len(windows) - 1 - int(gone[-1])) * self.page_size < self._reads_back

    def give_back(self, back: Back) -> None:
        full, windows = pages_of(back.get(FULL, ())), pages_of(back.get(SWA, ()))
        widowed = self._full_of[windows]
        widowed = widowed[self._window_of[widowed] == windows]
        self._full_of[windows] = 0
        self._window_of[widowed] = 0
        parted = np.concatenate((widowed, full[self._window_of[full] > 0]))
        if len(parted):
            self._window_of[parted] = 0
            self._allocator.clear_full_to_swa_mapping(self.locations(parted))
        if len(windows):
            self._windows.free_page_ids(self._numbers(windows))
        if len(full):
            self._full.free_page_ids(self._numbers(full))

    def rejoin(self, handed: Handed, back: Back, tree: Callable[[], Sequence[int]]) -> None:
        """Pair each window page that the books took with the page of full attention that they had already.

        ``tree`` says which pages of full attention the books have where ``handed`` was.
        """
        returned = pages_of(back.get(FULL, ()))
        if not len(returned):
            return
        full, windows = handed[FULL], handed[SWA]
        taken = np.isin(full, returned) & (windows > 0) & ~np.isin(windows, pages_of(back.get(SWA, ())))
        if not taken.any():
            return
        full, windows = pages_of(tree())[taken], windows[taken]
        self._window_of[full] = windows
        self._full_of[windows] = full
        self._allocator.set_full_to_swa_mapping(self.locations(full), self.locations(windows))
