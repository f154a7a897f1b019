"""SGLang's adapter with another prefix cache: ours in its place, or SGLang's own with a mistake put back.

The mistakes are those that SGLang's makers have repaired. The kit must find them in the cache's own code. Each class
patches one method of one cache. The patch is ours and does what the thread describes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from bench.engines.sglang import NAMES, TYPES, SGLangCache
from prefixloom_sglang.audit import AuditedCache
from prefixloom_sglang.cache import PrefixloomCache
from prefixloom_sglang.composition import FULL, STATE, SWA, books_for, pools_of

COMPONENTS = {"F": FULL, "S": SWA, "M": STATE}
KINDS = {"F": "full_attention", "S": "sliding_attention", "M": "linear_attention"}
SIZES = {
    "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 16, "head_dim": 16, "dtype": "float32",
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


class OurCacheInSGLang(SGLangCache):
    """prefixloom in SGLang's scheduler: SGLang's requests, batches, pools and calls, over our books."""

    core: ClassVar[str] = "prefixloom"
    cache_class: ClassVar[type[PrefixloomCache]] = AuditedCache
    """With debug mode, or without."""

    def _prefix_cache(self, params: Any) -> PrefixloomCache:
        pools = pools_of(params, "S" in self.letters, "M" in self.letters)
        config = {
            "model_type": "qwen3_next", "num_hidden_layers": len(self.letters),
            "layer_types": [KINDS[each] for each in self.letters],
            "sliding_window": (params.sliding_window_size or 0) + 1, **SIZES,
        }  # fmt: skip
        books = books_for(config, pools, bigrams=params.is_eagle, policy=params.eviction_policy)
        return self.cache_class(params, books)

    def _cached_units(self) -> dict[str, list[int]]:
        found = {}
        for each in self.letters:
            pool = self.cache.books.pool(COMPONENTS[each])
            found[NAMES[each]] = [page for page in range(pool.capacity) if pool.has(page)]
        return found


def component_of(cache: Any, letter: str) -> Any:
    return next(each for each in cache._components_tuple if each.component_type == TYPES[letter])


class SnapshotTakenEarly(SGLangCache):
    """github.com/sgl-project/sglang/issues/24221: a chunk's state is copied before its forward pass has ended."""

    sets = ("FM", "FSM")
    page_sizes = (4,)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        component = component_of(self.cache, "M")
        honest, rows = component.prepare_for_caching_req, self.rows

        def copying(req: Any, insert_params: Any, token_ids_len: int, is_finished: bool) -> Any:
            length = req.kv.mamba_last_track_seqlen
            if is_finished or length is None:
                return honest(
                    req=req, insert_params=insert_params, token_ids_len=token_ids_len, is_finished=is_finished
                )
            slot = component._alloc_mamba_slot(req)
            written = req.kv.mamba_ping_pong_track_buffer[rows.get_mamba_ping_pong_keep_idx(req)]
            rows.mamba_pool.copy_from(written.unsqueeze(0), slot)
            insert_params.mamba_value = slot
            return length

        component.prepare_for_caching_req = copying


class LockReleasedTooFar(SGLangCache):
    """github.com/sgl-project/sglang/pull/27038: a short lock is released down to the root, and not to its boundary."""

    sets = ("FSM",)
    page_sizes = (1, 4)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        component = component_of(self.cache, "M")
        honest_match, honest_release = component.finalize_match_result_in_cache, self.cache.dec_lock_ref
        matching: list[bool] = []

        def match(*args: Any, **kwargs: Any) -> Any:
            matching.append(True)
            try:
                return honest_match(*args, **kwargs)
            finally:
                matching.pop()

        def release(node: Any, params: Any = None, **kwargs: Any) -> Any:
            if matching:
                params = dataclasses.replace(params, component_lock_uuids=dict.fromkeys(params.component_lock_uuids))
            return honest_release(node, params, **kwargs)

        component.finalize_match_result_in_cache, self.cache.dec_lock_ref = match, release
