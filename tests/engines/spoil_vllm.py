"""The control for vLLM: zeroes what a hit brought, in each worker, so the answers must change.

Without a connector these are the blocks that vLLM's own cache found, and with one those that the connector loaded. vLLM
runs this in its processes, as a plugin; the environment's ``SPOIL`` says which of both.
"""

from __future__ import annotations

import os
from typing import Any


def register() -> None:
    spoil_own() if os.environ["SPOIL"] == "own" else spoil_loads()


def spoil_own() -> None:
    """Zero the blocks that vLLM's own cache found for a request, when its first step begins."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    memory: list[Any] = []
    tokens: list[int] = []  # of a block, by group
    make, run = GPUModelRunner.initialize_kv_cache_tensors, GPUModelRunner.execute_model

    def made(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        caches = make(self, kv_cache_config, *args, **kwargs)
        blocks = kv_cache_config.num_blocks
        memory[:] = [cache.view(blocks, -1, *cache.shape[1:]) for cache in caches.values()]
        tokens[:] = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        return caches

    def begun(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            for size, blocks in zip(tokens, request.block_ids, strict=True):
                for block in {*blocks[: request.num_computed_tokens // size]} - {0}:  # 0 stands for none
                    for cache in memory:
                        cache[block].zero_()
        return run(self, scheduler_output, *args, **kwargs)

    GPUModelRunner.initialize_kv_cache_tensors = made
    GPUModelRunner.execute_model = begun


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
                    layer[:, blocks] = 0
        return answer

    WorkerSide.load = begun  # type: ignore[method-assign]
    WorkerSide.loaded = over  # type: ignore[method-assign]
