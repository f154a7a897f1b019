"""The control for SGLang: zeroes what a request's hit holds, so the answers must change.

Of models with windows these are the windows alone, and of models with states the states alone.

SGLang's scheduler is a process of its own, and loads this as one of its plugins: ``run`` puts an entry point of the
group ``sglang.srt.plugins`` on its path, in a folder that no other run sees.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    indices_of = allocation._prefix_kv_indices

    copy = HybridReqToTokenPool.copy_mamba_state

    def copied(self: Any, source: Any, target: Any) -> None:
        copy(self, source, target)
        state = self.mamba_pool.mamba_cache
        for tensor in (*state.conv, state.temporal):
            tensor[:, target] = 0

    HybridReqToTokenPool.copy_mamba_state = copied

    def spoiled(batch: Any, req: Any) -> Any:
        indices = indices_of(batch, req)
        if not req.kv.holds_kv and len(indices):
            pool = batch.tree_cache.token_to_kv_pool_allocator.get_kvcache()
            slots = indices
            if hasattr(pool, "mamba_pool"):
                return indices
            if hasattr(pool, "swa_kv_pool"):  # windows alone
                slots = pool.translate_loc_from_full_to_swa(indices)
                pool, slots = pool.swa_kv_pool, slots[slots > 0]
            for layer in range(pool.layer_num):
                pool.get_value_buffer(pool.start_layer + layer)[slots] = 0
        return indices

    allocation._prefix_kv_indices = spoiled
