"""The control for vLLM: zeroes what a hit brought, so the answers must change. Needs the engine in one process.

Without a connector these are the blocks that vLLM's own cache found. With one, those that the connector loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Spoiler:
    """Knows the engine's memory, and zeroes blocks of it."""

    def __init__(self) -> None:
        self.memory: list[Any] = []
        self.blocks = 0

    def __call__(self, blocks: Iterable[int]) -> None:
        for cache in self.memory:
            by_block = cache.view(self.blocks, -1, *cache.shape[1:])
            for block in blocks:
                by_block[block].zero_()


def spoil_hits(mode: str) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    spoil = Spoiler()
    make = GPUModelRunner.initialize_kv_cache_tensors

    def made(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        caches = make(self, kv_cache_config, *args, **kwargs)
        spoil.memory = list(caches.values())
        spoil.blocks = kv_cache_config.num_blocks
        return caches

    GPUModelRunner.initialize_kv_cache_tensors = made
    if mode == "own":
        find = KVCacheManager.get_computed_blocks

        def found(self: Any, request: Any) -> Any:
            answer = find(self, request)
            spoil(block.block_id for group in answer[0].blocks for block in group if not block.is_null)
            return answer

        KVCacheManager.get_computed_blocks = found
        return
    from prefixloom_vllm.connector import PrefixloomConnector

    loading: dict[str, list[int]] = {}
    allocated = PrefixloomConnector.update_state_after_alloc
    over = PrefixloomConnector.get_transfer_results

    def update(self: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            mine = [block.block_id for group in blocks.blocks for block in group if not block.is_null]
            loading[request.request_id] = mine
        allocated(self, request, blocks, num_external_tokens)

    def results(self: Any, finished_req_ids: set[str]) -> Any:
        answer = over(self, finished_req_ids)
        for name in answer.finished_recving:
            spoil(loading.pop(name, ()))
        return answer

    PrefixloomConnector.update_state_after_alloc = update
    PrefixloomConnector.get_transfer_results = results
