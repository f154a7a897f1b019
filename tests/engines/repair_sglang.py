"""A repair of SGLang 0.5.23 and 0.5.22 on a CPU, for all runs: with its own cache, with ours, and without one.

SGLang's attention backend ``torch_native`` writes windows to their own pool through SGLang's table of pairs, and reads
them back without it. So its answers are wrong as soon as the numbers of a pair differ, whatever the cache is. Here it
reads through the table as well. Nothing else of SGLang is changed: pools, allocators, scheduler and caches are its own.

SGLang's scheduler loads this as one of its plugins, like ``spoil_sglang``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TABLE = 4
"""The place of the table of requests among the arguments."""


def register() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, reading_windows(getattr(TorchNativeAttnBackend, name)))


def reading_windows(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, where a layer of windows finds its slots through SGLang's table of pairs."""

    def repaired(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.use_sliding_window_kv_pool and options.get("sliding_window_size") is not None:
            table = arguments[TABLE]
            windows = self.token_to_kv_pool.translate_loc_from_full_to_swa(table.long())
            arguments = (*arguments[:TABLE], windows, *arguments[TABLE + 1 :])
        return run(self, *arguments, **options)

    return repaired
