"""Repairs of SGLang 0.5.23 and 0.5.22 on a CPU, for all runs: with its own cache, with ours, and without one.

SGLang's attention backend ``torch_native`` writes windows to their own pool through SGLang's table of pairs, and reads
them back without it. So its answers are wrong as soon as the numbers of a pair differ, whatever the cache is. Here it
reads through the table as well.

Its LoRA adapters pin the host's memory, for copies to a GPU, which torch refuses where there is none. Here nothing is
pinned. Speculation and states need kernels that its library for CPUs has, and ``kernels_sglang`` has them in torch:
SGLang's attention backend for CPUs, ``intel_amx``, then runs without that library. They give states after each chunk,
too, so SGLang may be asked for its extra buffer of states, which it has on GPUs alone.

Nothing else of SGLang is changed: pools, allocators, scheduler and caches are its own.

SGLang's scheduler loads this as one of its plugins, like ``spoil_sglang``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.engines import kernels_sglang

TABLE = 4
"""The place of the table of requests among the arguments."""


def register() -> None:
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.runtime_context import override_platform

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, reading_windows(getattr(TorchNativeAttnBackend, name)))
    torch.tensor, torch.zeros = unpinned(torch.tensor), unpinned(torch.zeros)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    kernels_sglang.place()
    override_platform(has_amx=True).install()  # whoever asks for ``intel_amx`` gets it
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True


def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make`` for memory that is not pinned."""

    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*arguments, **options)

    return made


def reading_windows(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, where a layer of windows finds its slots through SGLang's table of pairs."""

    def repaired(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.use_sliding_window_kv_pool and options.get("sliding_window_size") is not None:
            table = arguments[TABLE]
            windows = self.token_to_kv_pool.translate_loc_from_full_to_swa(table.long())
            arguments = (*arguments[:TABLE], windows, *arguments[TABLE + 1 :])
        return run(self, *arguments, **options)

    return repaired
