"""Versions: whether vLLM's interface is the one that this connector was written for. Checked first of all."""

from __future__ import annotations

import importlib
import inspect

from prefixloom import CompositionError

WRITTEN_FOR = ("0.32.0", "0.33.0")

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
INTERFACE: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    (BASE, "KVConnectorBase_V1"): {
        "__init__": ("vllm_config", "role", "kv_cache_config"),
        "register_kv_caches": ("kv_caches",),
        "handle_preemptions": ("kv_connector_metadata",),
        "bind_connector_metadata": ("connector_metadata",),
        "start_load_kv": ("forward_context",),
        "wait_for_layer_load": ("layer_name",),
        "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata"),
        "wait_for_save": (),
        "get_finished": ("finished_req_ids",),
        "get_transfer_results": ("finished_req_ids",),
        "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
        "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
        "build_connector_meta": ("scheduler_output",),
        "update_connector_output": ("connector_output",),
        "request_finished": ("request", "block_ids"),
        "has_pending_push_work": (),
        "get_kv_connector_stats": (),
        "build_kv_connector_stats": ("data",),
        "build_prom_metrics": ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
        "reset_cache": (),
        "take_events": (),
        "shutdown": (),
    },
    (BASE, "SupportsHMA"): {"request_finished_all_groups": ("request", "block_ids")},
    (BASE, "KVConnectorTransferResults"): {"__init__": ("finished_sending", "finished_recving", "failed_recving")},
    ("vllm.v1.core.sched.output", "SchedulerOutput"): {
        "__init__": (
            "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens",
            "kv_cache_block_copies", "kv_connector_block_state",
        ),
    },
    ("vllm.v1.core.sched.output", "KVConnectorBlockState"): {
        "__init__": ("resolve_block_ids", "boundary_state_offloads"),
    },
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): {
        "__init__": ("num_blocks", "kv_cache_groups", "kv_cache_layout"), "needs_kv_cache_zeroing": (),
    },
    ("vllm.config", "VllmConfig"): {"use_v2_model_runner": ()},
    ("vllm.v1.metrics.cache_hit_source", "CacheHitSource"): {"HOST": ()},
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): {
        "__init__": ("layer_names", "kv_cache_spec", "is_eagle_group", "host_resident", "enable_kv_transfer"),
    },
    ("vllm.v1.kv_cache_interface", "MambaSpec"): {"__init__": ("block_size", "mamba_cache_mode")},
    ("vllm.v1.kv_cache_interface", "SlidingWindowSpec"): {
        "__init__": ("block_size", "sliding_window", "extra_retained_tokens"),
    },
}  # fmt: skip
"""By module and class: the methods that are used, with the arguments that they must have."""


def check_interface(version: str) -> None:
    """Refuse a vLLM whose interface is another one, and name what changed."""
    if changes := list(changed()):
        raise CompositionError(
            f"this connector was written for vLLM {' and '.join(WRITTEN_FOR)}, and vLLM {version} is another: "
            f"{'; '.join(changes)}. Install vllm=={WRITTEN_FOR[-1]}, or a prefixloom that knows vLLM {version}"
        )


def changed() -> list[str]:
    """List in words the classes, methods and parameters that this vLLM lacks of the interface."""
    found = []
    for (module, name), methods in INTERFACE.items():
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            found.append(f"{module} has no {name}")
            continue
        for method, wanted in methods.items():
            there = getattr(kind, method, None)
            if there is None:
                found.append(f"{name} has no {method}")
            elif wanted and (lacking := [each for each in wanted if each not in inspect.signature(there).parameters]):
                found.append(f"{name}.{method} takes no {', '.join(lacking)}")
    return found
