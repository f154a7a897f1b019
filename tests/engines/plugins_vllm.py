"""What vLLM runs as plugins, in each of its processes: a repair for all runs, controls, and a load that is held.

``running`` puts an entry point for each function here that a run needs into the group ``vllm.general_plugins``.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

ARMED, HELD = "armed", "held"
HOLD = 3.0


def repair() -> None:
    """Repair vLLM 0.32.0 on a CPU, for all runs: with its own cache, with ours, and without one.

    vLLM's Mamba 2 layers promise to write the state at a block's boundary in the midst of a pass. Its kernels for a CPU
    give back the state at the end of the pass alone, so with prefix caching a pass ends with an IndexError, whatever
    the cache. Here the layers promise nothing, and vLLM's scheduler ends a pass at the boundary, as for other states.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def spoil() -> None:
    """Zero what a hit brought, so that the answers must change.

    Without a connector these are the blocks that vLLM's own cache found, and with one those that the connector loaded.
    The environment's ``SPOIL`` says which of both.
    """
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


def blind() -> None:
    """Let our connector not see the salts and adapters that keep requests apart."""
    from prefixloom_vllm import scheduler

    scheduler.namespace_of = lambda request: ""


def hold() -> None:
    """Hold a load of the connector in the midst of its copies, so that its process can be killed there.

    Once the folder that ``HOLD_LOADS`` names has the file ``armed``, the next load stops after its first group of
    blocks, and says so by the file ``held``.
    """
    from prefixloom_vllm import worker

    folder = Path(os.environ["HOLD_LOADS"])
    move_slots = worker.move_slots
    armed = 0  # calls since then: one for each group of a load

    def held(*moved: Any) -> None:
        nonlocal armed
        if threading.current_thread().name == "prefixloom loads" and (folder / ARMED).exists():
            armed += 1
            if armed == 2:
                (folder / ARMED).rename(folder / HELD)
                time.sleep(HOLD)
        move_slots(*moved)

    worker.move_slots = held  # type: ignore[assignment]
