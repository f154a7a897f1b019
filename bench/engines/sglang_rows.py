"""The drivers of SGLang's unified radix cache, with its tree core in Rust or in Python.

They follow SGLang's scheduler. A request matches, locks, and asks for the slot numbers of the path. The allocator's own
rule decides when to evict. The slots of a request are one tensor. A request is inserted once at its end; a chunked
prefill inserts each chunk and then moves the lock there.

Counters replace SGLang's allocators and cost almost nothing. The driver leaves out what the scheduler does beyond the
cache: it copies no matched state, writes no rows of request tables, and makes no second insertion where the prompt
ends.
"""

from __future__ import annotations

from array import array
from typing import Any, ClassVar

from bench.engines.driver import Driver
from bench.engines.sglang import (
    TYPES,
    CacheInitParams,
    EvictParams,
    HybridReqToTokenPool,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    UnifiedRadixCache,
    start,
    torch,
)
from bench.engines.stand_ins import imported, sealed

with imported("sglang", "0.5.23"):
    from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey


class SlotCounter:
    """Gives slot numbers from one long tensor, again and again. A tree keeps slot numbers but never reads them."""

    def __init__(self, size: int) -> None:
        self.size = self.free = size
        self.numbers = torch.arange(2 * size + 4096)
        self.at = 0

    def take(self, count: int) -> Any:
        if count > self.free:
            return None
        if self.at + count > len(self.numbers):
            self.at = 0
        self.at += count
        self.free -= count
        return self.numbers[self.at - count : self.at]

    def give(self, slots: Any, start_pos: int = 0) -> None:
        self.free += slots.numel()


class CountedSlots(TokenToKVPoolAllocator):
    def __init__(self, size: int, page: int) -> None:
        self.size, self.page_size, self.device, self.dtype = size, page, "cpu", torch.int64
        self.counter = SlotCounter(size)
        self.alloc = self.counter.take
        self.free = self.free_full = self.counter.give
        self.free_segment = self.free_full_segment = self.counter.give

    def clear(self) -> None:
        pass

    def available_size(self) -> int:
        return self.counter.free


class CountedWindowSlots(SWATokenToKVPoolAllocator):
    """Slots of full attention and of the window. The two slots of a token have the same number."""

    def __init__(self, size: int, page: int) -> None:
        self._size_full = self._size_swa = size
        self._swa_req_ring = False
        self.page_size, self.device, self.dtype = page, "cpu", torch.int64
        self.full_attn_allocator, self.swa_attn_allocator = CountedSlots(size, page), CountedSlots(size, page)
        self.full, self.window = self.full_attn_allocator.counter, self.swa_attn_allocator.counter
        self.free_full = self.free_full_segment = self.full.give
        self.free_swa = self.free_swa_segment = self.window.give

    def alloc(self, count: int) -> Any:
        if count > self.window.free or (slots := self.full.take(count)) is None:
            return None
        self.window.free -= count
        return slots

    def free(self, slots: Any, start_pos: int = 0) -> None:
        self.full.give(slots)
        self.window.give(slots)

    free_segment = free

    def translate_swa_indices_for_transfer(self, slots: Any) -> Any:
        return slots

    translate_loc_from_full_to_swa = translate_swa_indices_for_transfer

    def set_full_to_swa_mapping(self, full: Any, window: Any) -> None:
        pass

    def clear_full_to_swa_mapping(self, full: Any) -> None:
        pass


class CountedStates(MambaSlotAllocator):
    def __init__(self, size: int) -> None:
        self.counter = SlotCounter(size)
        super().__init__(size, "cpu")
        self._do_alloc = self.counter.take
        self.free = self.counter.give

    def clear(self) -> None:
        pass

    def available_size(self) -> int:
        return self.counter.free


class SGLangRequest:
    __slots__ = ("hit", "lock", "node", "slots")


class SGLang(Driver):
    """SGLang's cache; ``core`` names the implementation of its tree."""

    core: ClassVar[str]

    def __init__(self, comps: str, page: int, tokens: int, states: int, window: int) -> None:
        super().__init__(comps, page, tokens, states, window)
        start(page, max(64, page))
        self.windowed = "S" in comps
        self.allocator = (CountedWindowSlots if self.windowed else CountedSlots)(tokens // page * page, page)
        self.states = CountedStates(states) if "M" in comps else None
        requests = object.__new__(HybridReqToTokenPool)  # the cache asks it for the states only
        requests.mamba_allocator = self.states
        parameters = CacheInitParams(
            disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=self.allocator, page_size=page,
            sliding_window_size=window if self.windowed else None, tree_core_backend=self.core,
            tree_components=tuple(TYPES[letter] for letter in comps),
            enable_mamba_extra_buffer=self.states is not None and page > 1,
        )  # fmt: skip
        sealed(False)  # making the cache imports more modules
        self.cache = UnifiedRadixCache(parameters)
        sealed(True)
        assert ("Rust" in type(self.cache.tree_core).__name__) == (self.core == "rust")

    def key(self, tokens: list[int]) -> array[int]:
        return array("q", tokens)

    def joined(self, key: array[int], tail: array[int]) -> array[int]:
        return key + tail

    def open(self, key: array[int]) -> SGLangRequest:
        found = self.match(key)
        request = SGLangRequest()
        request.hit = found.device_prefix_len
        request.node = found.last_device_node
        request.lock = self.cache.lock(request.node)
        request.slots = self.cache.path_device_indices(request.node)
        return request

    def hit(self, request: SGLangRequest) -> int:
        return request.hit

    def grow(self, request: SGLangRequest, tokens: int) -> None:
        count = tokens - len(request.slots)
        self.allocator.evict_to_free_tokens(self.cache, count)
        if self.states is not None and self.states.counter.free < 1:
            self.cache.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
        if count:
            request.slots = torch.cat((request.slots, self.allocator.alloc(count)))

    def finish(self, request: SGLangRequest, tail: Any, whole: array[int]) -> None:
        self._insert(request, whole)

    def _insert(self, request: SGLangRequest, key: array[int]) -> Any:
        state = None if self.states is None else self.states.alloc(1)
        result = self.cache.insert(
            InsertParams(key=RadixKey(key), value=request.slots, prev_prefix_len=request.hit, mamba_value=state)
        )
        if result.mamba_exist:
            self.states.free(state)
        return result.last_device_node

    def close(self, request: SGLangRequest) -> None:
        self.cache.unlock(request.lock)

    def chunk(self, request: SGLangRequest, tokens: int, key: array[int]) -> None:
        self.grow(request, tokens)
        request.node = self._insert(request, key)
        request.hit = tokens
        request.slots = self.cache.path_device_indices(request.node)
        before = request.lock
        request.lock = self.cache.lock(request.node)
        self.cache.unlock(before)

    def match(self, key: array[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(key)))

    def matched(self, found: Any) -> int:
        return int(found.device_prefix_len)

    def pages(self, found: Any) -> Any:
        return self.cache.path_device_indices(found.last_device_node)

    def lock(self, found: Any) -> Any:
        return self.cache.lock(found.last_device_node)

    def unlock(self, lock: Any) -> None:
        self.cache.unlock(lock)

    def evict(self, tokens: int) -> int:
        return int(self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)


class SGLangPython(SGLang):
    core = "python"


class SGLangRust(SGLang):
    core = "rust"
