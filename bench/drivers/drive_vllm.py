"""The driver of vLLM's KV cache manager.

It follows vLLM's scheduler. A request hashes its blocks when it is made, asks for computed blocks, takes slots for its
prompt, appends its answer, takes slots for the answer, and is freed. With states, slots are taken in two steps: the
first one ends at a whole block, where a state is kept.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from bench.drivers.interface import Driver, SideUnavailable
from bench.drivers.stand_ins import sealed, stand_in

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
stand_in("triton", "vllm._C", "vllm._moe_C", "flashinfer", "cpuinfo", "xgrammar")
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.request import Request
except ImportError as error:
    raise SideUnavailable(
        f"{error}. Install vLLM without what needs a GPU: pip install --no-deps vllm==0.33.0, and what its cache "
        "manager imports (see docs/performance.md)"
    ) from error
sealed(True)
init_none_hash(sha256)


class VLLMRequest:
    __slots__ = ("blocks", "hit", "request")


class VLLM(Driver):
    """vLLM's cache manager."""

    def __init__(self, comps: str, page: int, tokens: int, states: int, window: int) -> None:
        if page == 1:
            raise SideUnavailable("vLLM hashes whole blocks, and is not made for blocks of one token")
        super().__init__(comps, page, tokens, states, window)
        kv = {"block_size": page, "num_kv_heads": 1, "head_size": 1, "dtype": torch.bfloat16}
        specs = {
            "F": lambda: FullAttentionSpec(**kv),
            "S": lambda: SlidingWindowSpec(**kv, sliding_window=window),
            "M": lambda: MambaSpec(
                block_size=page, shapes=((1,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align"
            ),
        }  # fmt: skip
        blocks = sum(states if letter == "M" else tokens // page for letter in comps)
        config = KVCacheConfig(
            num_blocks=blocks + 1,  # vLLM keeps one block that stands for none
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([letter], specs[letter]()) for letter in comps],
            hash_block_size=page,
        )
        self.manager = KVCacheManager(
            config, max_model_len=1 << 20, scheduler_block_size=page, hash_block_size=page, enable_caching=True
        )
        self.states = "M" in comps
        self.hasher = get_request_block_hasher(page, sha256)
        self.sampling = SamplingParams(max_tokens=16)
        self.requests = 0

    def key(self, tokens: list[int]) -> list[int]:
        return tokens

    def joined(self, key: list[int], tail: list[int]) -> None:
        return None  # a request extends its own key

    def open(self, key: list[int]) -> VLLMRequest:
        found = self.match(key)
        self.pages(found)
        return found

    def hit(self, request: VLLMRequest) -> int:
        return request.hit

    def grow(self, request: VLLMRequest, tokens: int) -> None:
        """Take slots for the prompt. vLLM cannot take slots for tokens that are not known yet."""
        self._compute(request.request, request.hit, request.blocks)

    def _compute(self, request: Any, hit: int = 0, blocks: Any = None) -> None:
        """Take slots for all known tokens as one step does, or two with states: the first ends at a whole block."""
        begin, end = max(hit, request.num_computed_tokens), request.num_tokens
        whole = end // self.page * self.page
        for upto in (whole, end) if self.states and begin < whole < end else (end,):
            self._take(request, upto - begin, hit, blocks)
            begin = request.num_computed_tokens = upto
            hit, blocks = 0, None

    def _take(self, request: Any, count: int, hit: int = 0, blocks: Any = None) -> None:
        self.manager.new_step_starts()
        if self.manager.allocate_slots(request, count, hit, blocks) is None:
            raise MemoryError("no blocks are left")

    def finish(self, request: VLLMRequest, tail: list[int] | None, whole: Any) -> None:
        if tail is not None:
            request.request.append_output_token_ids(tail)
            self._compute(request.request)

    def close(self, request: VLLMRequest) -> None:
        self.manager.free(request.request)

    def chunk(self, request: VLLMRequest, tokens: int, key: Any) -> None:
        theirs = request.request
        self._take(theirs, tokens - theirs.num_computed_tokens)
        theirs.num_computed_tokens = tokens

    def match(self, key: list[int]) -> VLLMRequest:
        self.requests += 1
        found = VLLMRequest()
        found.request = Request(
            request_id=str(self.requests),
            prompt_token_ids=key,
            sampling_params=self.sampling,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        found.blocks, found.hit, _ = self.manager.get_computed_blocks(found.request)
        return found

    def matched(self, found: VLLMRequest) -> int:
        return found.hit

    def pages(self, found: VLLMRequest) -> Any:
        return found.blocks.get_block_ids()

    def lock(self, found: VLLMRequest) -> Any:
        return found

    def unlock(self, lock: Any) -> None:
        pass

    def evict(self, tokens: int) -> int:
        pool = self.manager.block_pool
        count = tokens // self.page
        pool.free_blocks(pool.get_new_blocks(count))
        return count * self.page

    def filled(self) -> None:
        """vLLM takes never used blocks first. Use them up, so that every further block has hashes to forget."""
        pool = self.manager.block_pool
        head = pool.free_block_queue.fake_free_list_head
        while head.next_free_block.block_hash is None:
            pool.get_new_blocks(1)
