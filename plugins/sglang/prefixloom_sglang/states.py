"""Slots of states: Mamba and linear attention in SGLang's hybrid request pool, and what of them the books get.

A running request has a slot in which its state runs. With SGLang's extra buffer it also has one or two slots into which
the kernels write the state at a boundary while the request runs on. The cache is given such a slot and the request a
fresh one in its place, so nothing is copied. Without the buffer, only the state at the end of a request can be given
away, and a running one has to be copied. A request that hits copies the cached state into its running slot: SGLang does
this on the forward stream, right before the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .composition import STATE
from .prefix import Prefix
from .slots import Back, Handed, pages_of


class StateSlots:
    """SGLang's pool of states. ``make_room`` asks the cache to evict so many."""

    def __init__(
        self, pool: Any, to_device: Callable[..., torch.Tensor], make_room: Callable[[int], None], buffered: bool,
        lazy: bool, grid: int,
    ) -> None:  # fmt: skip
        """``buffered``: SGLang has its extra buffer, so it knows the states of running requests at boundaries, which
        are multiples of ``grid``. ``lazy``: it has the second place of that buffer only while it needs it.
        """
        self._pool = pool
        self._allocator = pool.mamba_allocator
        self._to_device = to_device
        self._make_room = make_room
        self._buffered = buffered
        self._grid = grid
        self._one_ahead = buffered and not lazy and pool.mamba_ping_pong_track_buffer_size == 2
        """Whether a decode pass may write into the buffer while its request is found to have ended."""

    # ------------------------------------------------------------ a request begins
    def begin(self, req: Any, prefix: Prefix) -> bool:
        """Begin the request's running state as a copy of the one at the end of ``prefix``.

        False: it has no slot, and none can be had.
        """
        (slot,) = prefix.pages(STATE)
        if not req.kv.holds_mamba:
            prefix.lock()  # making room must not evict what is about to be copied
            fresh = self._take()
            prefix.unlock()
            if fresh is None:
                return False
            req.kv.mamba_pool_idx = fresh[0]
        req.kv.mamba_cow_src_index = self._numbers([slot])
        req.kv.mamba_needs_clear = False
        return True

    # ------------------------------------------------------------ a request hands over
    def length(self, req: Any, up_to: int, finished: bool) -> int:
        """Return for how many tokens there is a state that can be handed over; 0: there is none."""
        return self._newest(req, up_to, finished)[0]

    def hand_in(self, req: Any, up_to: int, finished: bool) -> Handed | None:
        """Return the slot of the newest state, for the books. None: the request would have no slot to continue with."""
        if finished:
            return self._hand_in_last(req, up_to)
        fresh = self._take()
        if fresh is None:
            return None
        if self._buffered:
            fresh = self._pool.donate_mamba_ping_pong_slot(req, fresh)
        else:
            translate = self._pool.translate_mamba_indices
            self._pool.mamba_pool.copy_from(translate(req.kv.mamba_pool_idx.unsqueeze(0)), translate(fresh))
        self.forget(req)
        return {STATE: pages_of(fresh.tolist())}

    def _hand_in_last(self, req: Any, up_to: int) -> Handed:
        """Return the slot of a finished request's newest state, and free its other slots."""
        _, index = self._newest(req, up_to, True)
        if self._buffered:
            slot = req.kv.mamba_ping_pong_track_buffer[index].item()
            self._pool.free_mamba_cache(req, mamba_ping_pong_track_buffer_to_keep=index)
        else:
            slot = req.kv.mamba_pool_idx.item()
            req.kv.mamba_pool_idx = None
        return {STATE: pages_of([slot])}

    def _newest(self, req: Any, up_to: int, finished: bool) -> tuple[int, int]:
        """Return the length and the place in the buffer of the newest state that covers at most ``up_to`` tokens.

        A state covers more if a draft model ran past the end of the answer. Then the state before lies in the other
        place: with a draft model, SGLang turns to the other place at each state. Without one SGLang may turn wrongly
        (``_place_written_now``), but no state covers more tokens than are kept. The kept tokens may also end at the
        prompt (``--strip-thinking-cache``). Then no state of the answer fits, and those of the prompt were handed over.
        """
        if not self._buffered:
            return up_to, -1
        length = req.kv.mamba_last_track_seqlen or 0
        if not finished:  # SGLang has no older one while a request runs: it is donated from this place
            return length if length <= up_to else 0, -1
        place = self._pool.get_mamba_ping_pong_keep_idx(req)
        written = self._place_written_now(req, length)
        if length <= up_to and place != written:
            return length, place
        older, other = req.kv.mamba_prev_track_seqlen, self._pool.get_mamba_ping_pong_other_idx(place)
        if length <= up_to or older is None or older > up_to or other in (place, written):
            return 0, -1
        return older, other  # the kernels ran past the tokens that are kept

    def _place_written_now(self, req: Any, length: int) -> int | None:
        """Return the place of the buffer to which a pass that still runs writes the state at the next boundary.

        With overlap, one decode pass may run when a request is found to have ended. Where that pass ends at a boundary,
        it writes to the place that was SGLang's next one when the pass began. SGLang turns to the other place when it
        processes the result of the decode pass before. The first pass after a prompt has none before it, so nothing
        has turned yet.

        It ought to be the place that does not hold the newest state. But SGLang turns not at all where that first pass
        reaches a boundary, or where another request's prefill comes just before such a pass, and it turns twice where a
        prefill comes just after. Then the newest state lies in its next place, and the pass at the boundary after that
        overwrites it.
        """
        end = req.kv.kv_committed_len
        if not self._one_ahead or end <= length or end % self._grid:
            return None
        place: int = req.kv.mamba_next_track_idx
        if req.decode_batch_idx > 1:
            place = self._pool.get_mamba_ping_pong_other_idx(place)
        return place

    @staticmethod
    def forget(req: Any) -> None:
        """Forget the states in the request's buffer: they were handed over, or belong to no boundary."""
        req.kv.mamba_last_track_seqlen = None
        req.kv.mamba_prev_track_seqlen = None

    def release(self, req: Any) -> None:
        """Free all slots of a request that is over."""
        if req.kv.holds_mamba:
            self._pool.free_mamba_cache(req)

    # ------------------------------------------------------------ free lists
    def give_back(self, back: Back) -> None:
        if len(back.get(STATE, ())):
            self._allocator.free(self._numbers(back[STATE]))

    def _take(self) -> torch.Tensor | None:
        """Take one slot, on the device."""
        slot: torch.Tensor | None = self._allocator.alloc(1)
        if slot is None:
            self._make_room(1)
            slot = self._allocator.alloc(1)
        return slot

    def _numbers(self, slots: Sequence[int]) -> torch.Tensor:
        return self._to_device(torch.tensor(slots, dtype=torch.int64), self._pool.device)
