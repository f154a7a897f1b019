"""The control for vLLM: zeroes what a hit brought, so the answers must change.

Without a connector these are the blocks that vLLM's own cache found: that needs the engine in one process. With one,
they are the blocks that the connector loaded, in each worker. vLLM runs this in its processes, as a plugin; the
environment's ``SPOIL`` says which of both.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    spoil_own() if os.environ["SPOIL"] == "own" else spoil_loads()


def spoil_own() -> None:
    """Zero the blocks that vLLM's own cache finds."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    memory: list[Any] = []
    make = GPUModelRunner.initialize_kv_cache_tensors
    find = KVCacheManager.get_computed_blocks

    def made(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        caches = make(self, kv_cache_config, *args, **kwargs)
        blocks = kv_cache_config.num_blocks
        memory[:] = [cache.view(blocks, -1, *cache.shape[1:]) for cache in caches.values()]
        return caches

    def found(self: Any, request: Any) -> Any:
        answer = find(self, request)
        for block in {block.block_id for group in answer[0].blocks for block in group if not block.is_null}:
            for cache in memory:
                cache[block].zero_()
        return answer

    GPUModelRunner.initialize_kv_cache_tensors = made
    KVCacheManager.get_computed_blocks = found


def spoil_loads() -> None:
    """Zero the blocks that the connector has loaded, as soon as a load is over."""
    from prefixloom_vllm.worker import WorkerSide

    loading: dict[str, Any] = {}
    load, loaded = WorkerSide.load, WorkerSide.loaded

    def begun(self: WorkerSide, plan: Any) -> None:
        loading.update({copy.request: copy for copy in plan.loads})
        load(self, plan)

    def over(self: WorkerSide) -> tuple[set[str], set[str]]:
        answer = loaded(self)
        for request in answer[0]:
            for index, (blocks, _) in loading.pop(request).pairs.items():
                for layer in self.device[index]:
                    layer[blocks] = 0
        return answer

    WorkerSide.load = begun  # type: ignore[method-assign]
    WorkerSide.loaded = over  # type: ignore[method-assign]
