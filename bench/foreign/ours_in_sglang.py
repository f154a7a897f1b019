"""The adapter of our cache in SGLang: SGLang's requests, batches, pools and scheduler calls, over our books.

Everything is as in ``bench.foreign.sglang``, but for the prefix cache.
"""

from __future__ import annotations

from typing import Any, ClassVar

from bench.foreign.sglang import NAMES, SGLangCache
from prefixloom_sglang.audit import AuditedCache
from prefixloom_sglang.cache import PrefixloomCache
from prefixloom_sglang.composition import FULL, STATE, SWA, books_for, pools_of

COMPONENTS = {"F": FULL, "S": SWA, "M": STATE}
HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 16, "head_dim": 16, "dtype": "float32"}
STATES = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


class OurCacheInSGLang(SGLangCache):
    """prefixloom in SGLang's scheduler."""

    core: ClassVar[str] = "prefixloom"
    cache_class: ClassVar[type[PrefixloomCache]] = AuditedCache
    """With debug mode, or without."""

    def _prefix_cache(self, params: Any) -> PrefixloomCache:
        pools = pools_of(params, "S" in self.letters, "M" in self.letters)
        kinds = {"F": "full_attention", "S": "sliding_attention", "M": "linear_attention"}
        config = {
            "model_type": "qwen3_next",
            "num_hidden_layers": len(self.letters),
            "layer_types": [kinds[each] for each in self.letters],
            "sliding_window": (params.sliding_window_size or 0) + 1,
            **HEADS,
            **STATES,
        }
        books = books_for(config, pools, bigrams=params.is_eagle, policy=params.eviction_policy)
        return self.cache_class(params, books)

    def _cached_units(self) -> dict[str, list[int]]:
        found = {}
        for each in self.letters:
            pool = self.cache.books.pool(COMPONENTS[each])
            found[NAMES[each]] = [page for page in range(pool.capacity) if pool.has(page)]
        return found
