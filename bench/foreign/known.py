"""SGLang's cache with mistakes put back that its makers have repaired: the kit must find them in the cache's own code.

Each class patches one method of one cache. The patch is ours and does what the thread describes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from bench.foreign.sglang import TYPES, SGLangCache


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
