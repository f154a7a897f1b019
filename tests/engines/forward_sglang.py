"""Lets SGLang's own tests of August 2026 run on SGLang 0.5.23, whose interface has changed since.

What these tests call is still there, in other places: what a request has of the pools lies in ``req.kv``, a finished
request is a checkpoint and a release, a lock has a receipt, and a match says how long it is in place of its slots.
Here the old names lead to the new ones. A name that has no successor becomes an empty class, so that the file can be
imported; a test that uses it fails, with SGLang's own cache as well, and does not count.

The tests of 0.5.23 itself need none of this, and are not changed by it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import base_prefix_cache, unified_radix_cache
from sglang.srt.mem_cache.unified_cache.components import ComponentType

CACHE = "sglang.srt.mem_cache"
MOVED = {
    f"{CACHE}.unified_cache.components.tree_component": f"{CACHE}.unified_cache.components.base",
    f"{CACHE}.unified_cache.components.full_component": f"{CACHE}.unified_cache.components.full",
    f"{CACHE}.unified_cache.components.swa_component": f"{CACHE}.unified_cache.components.swa",
    f"{CACHE}.unified_cache.components.mamba_component": f"{CACHE}.unified_cache.components.mamba",
}
"""Modules that have another name now."""
ON_THE_RECORD = (
    "req_pool_idx", "mamba_pool_idx", "kv_committed_len", "kv_allocated_len", "cache_protected_len",
    "mamba_last_track_seqlen", "mamba_ping_pong_track_buffer", "mamba_next_track_idx", "mamba_cow_src_index",
    "mamba_needs_clear",
)  # fmt: skip
"""Fields of a request that belong to its record of memory now."""


def modules() -> None:
    """Modules that moved, and the two classes that SGLang's one tree has replaced."""
    for old, new in MOVED.items():
        sys.modules[old] = importlib.import_module(new)
    for old, name, components in (
        ("swa_radix_cache", "SWARadixCache", (ComponentType.FULL, ComponentType.SWA)),
        ("mamba_radix_cache", "MambaRadixCache", (ComponentType.FULL, ComponentType.MAMBA)),
    ):
        module = ModuleType(f"{CACHE}.{old}")
        setattr(module, name, tree_of(components))
        sys.modules[module.__name__] = module


def tree_of(components: tuple[Any, ...]) -> Any:
    def make(params: Any) -> Any:
        params.tree_components = components
        return unified_radix_cache.UnifiedRadixCache(params)

    return make


def names(file: Path) -> None:
    """Make an empty class for each name that ``file`` imports and SGLang does not have any more."""
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("sglang"):
            continue
        try:
            module = importlib.import_module(node.module or "")
        except ImportError:
            module = sys.modules[node.module or ""] = ModuleType(node.module or "")
        for each in node.names:
            try:
                found = hasattr(module, each.name) or importlib.import_module(f"{module.__name__}.{each.name}")
            except ImportError:
                found = False
            if not found:
                setattr(module, each.name, type(each.name, (), {}))


# ------------------------------------------------------------ requests
def requests() -> None:
    Req, Info = schedule_batch.Req, schedule_batch.ReqKvInfo
    for name in ON_THE_RECORD:
        if not hasattr(Req, name):
            setattr(Req, name, on_the_record(name))
    Req.kv = property(lambda self: self._record, replace_record)
    Req.prefix_indices = property(
        lambda self: getattr(self, "_hit", torch.empty(0, dtype=torch.int64)),
        lambda self, value: setattr(self, "_hit", value),
    )
    Req.set_extend_range = lambda self, start, end: setattr(self, "extend_end", end)
    Req.extend_range = property(lambda self: slice_of(self))
    Req.effective_kv_committed_len = Req.owned_kv_len
    Req.swa_uuid_for_lock = property(lambda self: None, lambda self, value: None)
    Req.swa_prefix_lock_released = property(
        lambda self: self.lock is not None and self.lock.swa_released, lambda self, value: None
    )
    Info.swa_evicted_seqlen = property(
        lambda self: self.get_evicted_seqlen(ComponentType.SWA),
        lambda self, value: self.set_evicted_seqlen(ComponentType.SWA, value),
    )
    make = Info.__init__

    def made(self: Any, *args: Any, swa_evicted_seqlen: int | None = None, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if swa_evicted_seqlen is not None:
            self.swa_evicted_seqlen = swa_evicted_seqlen

    Info.__init__ = made


def on_the_record(name: str) -> property:
    return property(lambda self: getattr(self.kv, name), lambda self, value: setattr(self.kv, name, value))


def replace_record(self: Any, value: Any) -> None:
    """Keep what a record of August did not have: it had two fields alone."""
    before = self.__dict__.get("_record")
    if before is not None and not value.holds_kv:
        for field in dataclasses.fields(value):
            if field.name not in ("kv_allocated_len", "component_evicted_seqlens"):
                setattr(value, field.name, getattr(before, field.name))
    self.__dict__["_record"] = value


class slice_of:
    """``req.extend_range`` of August."""

    def __init__(self, req: Any) -> None:
        self.start, self.end = 0, req.extend_end


# ------------------------------------------------------------ caches
def parameters() -> None:
    """Parameters and results that have another form now."""
    base = base_prefix_cache

    class InsertParams(base.InsertParams):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, swa_evicted_seqlen: int | None = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if swa_evicted_seqlen is not None:
                self.set_evicted_seqlen(ComponentType.SWA, swa_evicted_seqlen)

    class DecLockRefParams(base.DecLockRefParams):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, swa_uuid_for_lock: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    base.InsertParams, base.DecLockRefParams = InsertParams, DecLockRefParams
    base.IncLockRefResult.swa_uuid_for_lock = property(lambda self: self.component_lock_uuids.get(ComponentType.SWA))


class Matched(base_prefix_cache.MatchResult):  # type: ignore[misc]
    """A match that has the slots of its prefix, as in August."""

    cache: Any

    @property
    def device_indices(self) -> torch.Tensor:
        indices: torch.Tensor = self.cache.path_device_indices(self.last_device_node)
        return indices

    def _replace(self, **fields: Any) -> Any:
        other = super()._replace(**fields)
        other.cache = self.cache
        return other


def tree(cls: Any) -> None:
    """Give one class of caches the verbs of August, over those of 0.5.23."""
    match = cls.match_prefix

    def match_prefix(self: Any, params: Any) -> Any:
        result = Matched(*match(self, params))
        result.cache = self
        return result

    cls.match_prefix = match_prefix
    cls.cache_unfinished_req = cache_unfinished_req
    cls.cache_finished_req = cache_finished_req


def cache_unfinished_req(self: Any, req: Any, **kwargs: Any) -> None:
    self.checkpoint(req, up_to=len(req.get_fill_ids()))
    req.prefix_indices = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.kv.cache_protected_len]


def cache_finished_req(
    self: Any, req: Any, *, is_insert: bool = True, kv_len_to_handle: int | None = None, owned_kv_len: int | None = None
) -> None:
    """As ``release_kv_cache``, which keeps the row here: the test frees it."""
    end = next(each for each in (kv_len_to_handle, owned_kv_len, req.owned_kv_len()) if each is not None)
    if req.finished_reason is None:
        req.finished_reason = schedule_batch.FINISH_LENGTH(length=0)
    if is_insert:
        self.checkpoint(req, up_to=end)
    self.free_kv_row(req.kv, [(req.kv.cache_protected_len, end)])
    self.unlock(req.lock)
    req.lock = None
    self.on_release(req, checkpointed=is_insert)


def receipts(cls: Any) -> None:
    """Let a release without a receipt, as in August, take that of the last lock on the node."""
    lock, unlock = cls.inc_lock_ref, cls.dec_lock_ref
    taken: dict[tuple[int, Any], list[Any]] = defaultdict(list)

    def inc_lock_ref(self: Any, node: Any, *args: Any) -> Any:
        result = lock(self, node, *args)
        taken[id(self), node].append(result.to_dec_params())
        return result

    def dec_lock_ref(self: Any, node: Any, params: Any = None, **kwargs: Any) -> Any:
        receipt = taken[id(self), node].pop()
        return unlock(self, node, receipt if params is None or params.node_id is None else params, **kwargs)

    def dec_swa_lock_only(self: Any, node: Any, uuid: Any = None) -> None:
        self._apply_eviction_result(self.tree_core.dec_swa_lock_only(node, taken[id(self), node][-1]))

    cls.inc_lock_ref, cls.dec_lock_ref, cls.dec_swa_lock_only = inc_lock_ref, dec_lock_ref, dec_swa_lock_only


def forward() -> None:
    """Do all of this. A file's own imports follow when it is collected (``names``)."""
    modules()
    requests()
    parameters()
    unified = unified_radix_cache.UnifiedRadixCache
    tree(unified)
    receipts(unified)
    from sglang.srt.mem_cache.radix_cache import RadixCache

    tree(RadixCache)
