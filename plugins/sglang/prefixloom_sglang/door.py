"""The door: what SGLang calls when it starts.

SGLang loads all entry points of the group ``sglang.srt.plugins`` in each of its processes. Ours registers a factory
under the name that ``--radix-cache-backend`` takes. The factory looks at the model, the flags and the pools. It makes
a cache, or refuses with one sentence that names what is in the way and what to do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from prefixloom import CompositionError

NAME = "prefixloom"
UNKNOWN = "PREFIXLOOM_SGLANG_UNKNOWN_MODEL"
"""What to do with a model that no profile knows: "own" (SGLang's own cache, and a line in the log) or "refuse"."""

FLAGS: Mapping[str, Mapping[str, str]] = {
    "memory": {
        "enable_hierarchical_cache": "--enable-hierarchical-cache",
        "enable_session_radix_cache": "--enable-session-radix-cache",
        "enable_lmcache": "--enable-lmcache",
        "enable_flexkv": "--enable-flexkv",
        "enable_unified_cache_external_linker": "--enable-unified-cache-external-linker",
        "enable_unified_memory": "--enable-unified-memory",
        "enable_hisparse": "--enable-hisparse",
    },
    "serving": {"enable_streaming_session": "--enable-streaming-session"},
    "mamba": {
        "enable_linear_replayssm": "--enable-linear-replayssm",
        "enable_linear_replayssm_spec": "--enable-linear-replayssm-spec",
    },
    "disagg": {"disaggregation_decode_enable_offload_kvcache": "--disaggregation-decode-enable-offload-kvcache"},
    "parallel": {"dcp_enabled": "--dcp-size"},
}
"""Flags of which SGLang's own cache class is a part, by the place in SGLang's configuration where they stand."""

POLICIES = ("lru", "lfu", "slru", "priority")
"""What ``--radix-eviction-policy`` may say."""

log = logging.getLogger("sglang.prefixloom")


def register() -> None:
    """Register the cache: the entry point. SGLang only logs errors raised here, so ``make`` refuses instead."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_radix_cache_backend(NAME, make)


def make(context: Any) -> Any:
    """Make the cache, as SGLang's factory. ``context`` is its ``TreeCacheBuildContext``."""
    from . import interface

    interface.check()
    from sglang.srt.mem_cache.registry import default_radix_cache_factory

    if context.disable_radix_cache:
        log.warning("prefixloom: the prefix cache is switched off, so SGLang's own class keeps the tables of requests")
        return default_radix_cache_factory(context)
    flags = _flags()
    refuse_flags(flags, context.params)
    refuse_allocator(context.params.token_to_kv_pool_allocator)
    from .audit import AuditedCache
    from .cache import PrefixloomCache
    from .composition import SizeError, books_for, pools_of

    params = context.params
    try:
        books = books_for(
            context.model_config.hf_config,
            pools_of(params, context.is_hybrid_swa, context.is_hybrid_ssm),
            bigrams=params.is_eagle,
            policy=params.eviction_policy.lower(),
        )
    except SizeError:
        raise  # SGLang's own cache could not work either
    except CompositionError as error:
        return _unknown_model(context, error)
    log.info("prefixloom: %s", books)
    return (AuditedCache if books.composition.debug else PrefixloomCache)(params, books)


def _unknown_model(context: Any, error: CompositionError) -> Any:
    from sglang.srt.mem_cache.registry import default_radix_cache_factory

    choice = os.environ.get(UNKNOWN, "own")
    if choice not in ("own", "refuse"):
        raise CompositionError(f"{UNKNOWN} is 'own' or 'refuse', got {choice!r}")
    if choice == "refuse":
        raise CompositionError(
            f"prefixloom cannot cache this model: {error}. Leave out --radix-cache-backend"
        ) from error
    log.warning("prefixloom cannot cache this model, so SGLang's own cache does: %s", error)
    return default_radix_cache_factory(context)


def _flags() -> Mapping[str, Any]:
    """Return the parts of SGLang's configuration that have the flags which are checked."""
    from sglang.srt import runtime_context as context

    execution = context.get_exec()
    return {
        "memory": context.get_memory(),
        "serving": context.get_serving(),
        "mamba": execution.mamba,
        "disagg": context.get_disagg(),
        "parallel": context.get_parallel(),
    }


def refuse_flags(flags: Mapping[str, Any], params: Any) -> None:
    """Raise CompositionError if a flag belongs to SGLang's own cache class."""
    for place, names in FLAGS.items():
        for name, flag in names.items():
            if getattr(flags[place], name, False):
                raise CompositionError(
                    f"{flag} works only with SGLang's own cache class: leave out that flag, or --radix-cache-backend "
                    f"{NAME}"
                )
    if flags["disagg"].disaggregation_mode == "decode":
        raise CompositionError(
            f"--disaggregation-mode decode with a prefix cache works only with SGLang's own cache class: leave out "
            f"--disaggregation-decode-enable-radix-cache, or --radix-cache-backend {NAME}"
        )
    if flags["disagg"].disaggregation_decode_retraction_backup == "host_pool":
        raise CompositionError(
            f"--disaggregation-decode-retraction-backup host_pool works only with SGLang's own cache class: say "
            f"cpu_tensor, or leave out --radix-cache-backend {NAME}"
        )
    policy = params.eviction_policy.lower()
    if policy not in POLICIES:
        raise CompositionError(
            f"--radix-eviction-policy {policy} works only with SGLang's own cache class: prefixloom has "
            f"{', '.join(POLICIES)}"
        )
    if params.eviction_policy_config:
        raise CompositionError(
            "--radix-eviction-policy-config is for the policies of SGLang's own cache class: leave it out. Policies of "
            "prefixloom have no parameters here"
        )
    if getattr(params, "decoder_swa_bounded_replay", False):  # SGLang 0.5.22 has no such flag
        raise CompositionError(
            f"--enable-decoder-swa-bounded-replay works only with SGLang's own cache class: leave out that flag, or "
            f"--radix-cache-backend {NAME}"
        )


def refuse_allocator(allocator: Any) -> None:
    """Raise CompositionError if SGLang hands out slots in a way that the adapter does not know."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    known = (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator)
    if type(allocator) not in known or getattr(allocator, "swa_req_ring", False):
        ring = " with a ring for each request" if getattr(allocator, "swa_req_ring", False) else ""
        raise CompositionError(
            f"prefixloom does not know SGLang's allocator {type(allocator).__name__}{ring}, which this model or these "
            f"flags ask for; it knows {', '.join(each.__name__ for each in known)}. Leave out --radix-cache-backend"
        )
