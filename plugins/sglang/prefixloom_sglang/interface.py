"""What the adapter uses of SGLang, checked when SGLang starts.

SGLang changes its cache interface with every release. A change shows here, in one sentence with the version and the
name, and not as a wrong answer later. The first thing to do for a newer release is to read its changes of these names.
"""

from __future__ import annotations

import dataclasses
import dis
import importlib
import inspect
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prefixloom import CompositionError

VERSIONS = ("0.5.22", "0.5.23")
"""The releases with which the adapter is tested."""

CACHE = "sglang.srt.mem_cache"
ABSTRACT = frozenset({"reset", "match_prefix", "checkpoint", "evict", "inc_lock_ref", "dec_lock_ref"})
"""The methods that ``BasePrefixCache`` leaves to us. A further one would be a duty that we do not know."""

FUNCTIONS: dict[str, tuple[str, ...]] = {
    f"{CACHE}.registry:register_radix_cache_backend": ("name", "factory"),
    f"{CACHE}.registry:default_radix_cache_factory": ("ctx",),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.checkpoint": ("self", "req", "up_to"),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.match_prefix": ("self", "params"),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.evict": ("self", "params"),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.evict_for_alloc": ("self", "params"),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.inc_lock_ref": ("self", "node"),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.dec_lock_ref": ("self", "node", "params"),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.lock": ("self", "node"),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.unlock": ("self", "lock"),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.path_device_indices": ("self", "node"),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.on_release": ("self", "req", "checkpointed"),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.touch_prefix": ("self", "key"),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.dfs_weight_order": ("self", "node_handles"),
    f"{CACHE}.base_prefix_cache:BasePrefixCache.update_eviction_metrics": ("self", "num_evicted", "start_time"),
    f"{CACHE}.common:release_kv_cache": ("req", "tree_cache", "checkpoint"),
    f"{CACHE}.common:checkpoint_kv_cache": ("req", "tree_cache"),
    f"{CACHE}.radix_cache:RadixKey.raw_token_ids": ("self",),
    f"{CACHE}.allocator.token:TokenToKVPoolAllocator.free_page_ids": ("self", "page_ids"),
    f"{CACHE}.allocator.paged:PagedTokenToKVPoolAllocator.free_page_ids": ("self", "page_ids"),
    f"{CACHE}.allocator.swa:SWATokenToKVPoolAllocator.free_swa": ("self", "free_index"),
    f"{CACHE}.allocator.swa:SWATokenToKVPoolAllocator.clear_full_to_swa_mapping": ("self", "full_indices"),
    f"{CACHE}.allocator.swa:SWATokenToKVPoolAllocator.set_full_to_swa_mapping": (
        "self", "full_indices", "swa_indices",
    ),
    f"{CACHE}.allocator.mamba:MambaSlotAllocator.alloc": ("self", "need_size"),
    f"{CACHE}.allocator.mamba:MambaSlotAllocator.free": ("self", "free_index"),
    f"{CACHE}.memory_pool:HybridReqToTokenPool.donate_mamba_ping_pong_slot": ("self", "req", "new_slot"),
    f"{CACHE}.memory_pool:HybridReqToTokenPool.free_mamba_cache": (
        "self", "req", "mamba_ping_pong_track_buffer_to_keep",
    ),
    f"{CACHE}.memory_pool:HybridReqToTokenPool.get_mamba_ping_pong_keep_idx": ("self", "req"),
    f"{CACHE}.memory_pool:HybridReqToTokenPool.get_mamba_ping_pong_other_idx": ("self", "mamba_next_track_idx"),
    f"{CACHE}.events:KVCacheEventRecorder.record_store": ("self", "node"),
    f"{CACHE}.events:KVCacheEventRecorder.record_remove": ("self", "node"),
    f"{CACHE}.events:KVCacheEventRecorder.record_all_cleared": ("self",),
    f"{CACHE}.events:KVCacheEventRecorder.enqueue": ("self", "event"),
    f"{CACHE}.events:KVCacheEventRecorder.take": ("self",),
    f"{CACHE}.utils:compute_node_event_hash_values": ("node", "page_size"),
    "sglang.srt.runtime_context:mamba_checkpoint_grid": ("tree_page",),
    "sglang.srt.runtime_context:mamba_track_grid": ("tree_page",),
    "sglang.srt.utils.common:is_pin_memory_available": ("device",),
}  # fmt: skip
"""The functions that we call or override, with the parameters that we rely on, in this order. More may follow them."""

FIELDS: dict[str, tuple[str, ...]] = {
    f"{CACHE}.base_prefix_cache:MatchPrefixParams": ("key", "cow_mamba", "req"),
    f"{CACHE}.base_prefix_cache:EvictParams": ("num_tokens", "swa_num_tokens", "mamba_num"),
    f"{CACHE}.base_prefix_cache:EvictResult": ("num_tokens_evicted", "swa_num_tokens_evicted", "mamba_num_evicted"),
    f"{CACHE}.base_prefix_cache:MatchResult": (
        "device_prefix_len", "last_device_node", "last_host_node", "best_match_node", "mamba_branching_seqlen",
        "full_kv_hit_length",
    ),
    f"{CACHE}.cache_init_params:CacheInitParams": (
        "disable", "req_to_token_pool", "token_to_kv_pool_allocator", "page_size", "is_eagle", "eviction_policy",
        "eviction_policy_config", "enable_metrics", "enable_kv_cache_events", "enable_mamba_extra_buffer",
        "enable_mamba_extra_buffer_lazy",
        "sliding_window_size",
    ),
    f"{CACHE}.registry:TreeCacheBuildContext": (
        "params", "is_hybrid_swa", "is_hybrid_ssm", "enable_hierarchical_cache", "disable_radix_cache", "model_config",
    ),
    f"{CACHE}.base_prefix_cache:TreeLock": ("node",),
    "sglang.srt.managers.schedule_batch:Req": (
        "rid", "kv", "lock", "last_node", "extra_key", "cache_salt", "priority", "origin_input_ids", "output_ids",
        "full_untruncated_fill_ids", "refresh_fill_ids", "finished", "skip_radix_cache_insert", "decode_batch_idx",
    ),
    "sglang.srt.managers.schedule_batch:ReqKvInfo": (
        "req_pool_idx", "cache_protected_len", "cache_inserted_len", "kv_allocated_len", "mamba_pool_idx",
        "mamba_ping_pong_track_buffer", "mamba_next_track_idx", "kv_committed_len",
        "mamba_last_track_seqlen", "mamba_prev_track_seqlen", "mamba_cow_src_index",
        "mamba_needs_clear",
    ),
}  # fmt: skip
"""The fields that we read or write, and of plain classes the methods that we call without parameters."""


def installed() -> str:
    """Return the version of SGLang that runs."""
    try:
        return version("sglang")
    except PackageNotFoundError:  # unpacked, and not installed
        return str(getattr(sys.modules.get("sglang"), "__version__", "of unknown version"))


def check() -> None:
    """Raise CompositionError if SGLang's interface is not the one for which the adapter was written."""
    for what in _changes():
        raise CompositionError(
            f"prefixloom knows SGLang {' and '.join(VERSIONS)}. This is SGLang {installed()}, and there {what}. "
            f"Install sglang=={VERSIONS[-1]}, or a newer prefixloom, or leave out --radix-cache-backend"
        )


def _changes() -> Iterator[str]:
    for name, parameters in FUNCTIONS.items():
        found = _find(name)
        if found is None:
            yield f"{_short(name)} is missing"
        elif (has := tuple(inspect.signature(found).parameters))[: len(parameters)] != parameters:
            yield f"{_short(name)} takes {', '.join(has)} in place of {', '.join(parameters)}"
    for name, fields in FIELDS.items():
        found = _find(name)
        lacking = [field for field in fields if field not in _fields_of(found)]
        if lacking:
            yield f"{_short(name)} has no {', '.join(lacking)}"
    base = _find(f"{CACHE}.base_prefix_cache:BasePrefixCache")
    further = sorted(getattr(base, "__abstractmethods__", frozenset()) - ABSTRACT)
    if further:
        yield f"BasePrefixCache.{further[0]} is a method that every cache must have, and ours has not"


def _find(name: str) -> Any:
    module, path = name.split(":")
    try:
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _fields_of(found: Any) -> tuple[str, ...]:
    if found is None:
        return ()
    if dataclasses.is_dataclass(found):
        return tuple(field.name for field in dataclasses.fields(found))
    if hasattr(found, "_fields"):
        return tuple(found._fields)
    made = [step.argval for step in dis.get_instructions(found.__init__) if step.opname == "STORE_ATTR"]
    return (*dir(found), *made)


def _short(name: str) -> str:
    return name.split(":")[1]
