"""What SGLang's scheduler runs as its plugins: repairs for all runs, controls, and an ear for drafts.

``running`` puts an entry point for each function here that a run needs into the group ``sglang.srt.plugins``, in a
folder that no other run sees. The scheduler is a process of its own, and calls them when it starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.engines import kernels_sglang

TABLE = 4
"""The place of the table of requests among the arguments."""


def repair() -> None:
    """Repair SGLang 0.5.23 and 0.5.22 on a CPU, for all runs: with its own cache, with ours, and without one.

    Its attention backend ``torch_native`` writes windows to their own pool through SGLang's table of pairs, and reads
    them back without it. So its answers are wrong as soon as the numbers of a pair differ, whatever the cache is. Here
    it reads through the table as well.

    Its LoRA adapters pin the host's memory, for copies to a GPU, which torch refuses where there is none. Here nothing
    is pinned. Speculation and states need kernels that its library for CPUs has, and ``kernels_sglang`` has them in
    torch: SGLang's attention backend for CPUs, ``intel_amx``, then runs without that library. They give states after
    each chunk, too, so SGLang may be asked for its extra buffer of states, which it has on GPUs alone.

    Nothing else of SGLang is changed: pools, allocators, scheduler and caches are its own.
    """
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


def spoil() -> None:
    """Zero what a request's hit holds, so that the answers must change.

    Of models with windows these are the windows alone, and of models with states the states alone.
    """
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


def blind() -> None:
    """Let our cache not see what keeps requests apart, nor what a draft model adds to keys.

    So requests of other tenants and adapters share memory, and a draft model gets entries of another token.
    """
    from prefixloom_sglang import cache, composition

    make = composition.books_for

    def made(*arguments: Any, **options: Any) -> Any:
        return make(*arguments, **{**options, "bigrams": False})

    composition.books_for = made
    cache.namespace_of = lambda extra_key, cache_salt: ""


def drafts() -> None:
    """Write down what a draft model proposes: for each request, by the number of tokens before, the tokens.

    The model's answers do not depend on its drafts, so only here it shows that the draft model's memory is right. The
    environment's ``DRAFTS`` names the file.
    """
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    propose = EagleDraftWorker.draft
    path = Path(os.environ["DRAFTS"])

    def proposed(self: Any, batch: Any, **options: Any) -> Any:
        lengths = batch.seq_lens.tolist()
        answer = propose(self, batch, **options)
        drafts = answer.draft_token.view(len(lengths), -1).tolist()
        with path.open("a") as file:
            for request, length, tokens in zip(batch.reqs, lengths, drafts, strict=True):
                file.write(json.dumps([request.rid, length, tokens]) + "\n")
        return answer

    EagleDraftWorker.draft = proposed


def drafts_in(path: Path) -> dict[str, dict[str, list[int]]]:
    """Return by request and by the number of tokens before, what was proposed last."""
    found: dict[str, dict[str, list[int]]] = {}
    for line in path.read_text().splitlines():
        request, length, tokens = json.loads(line)
        found.setdefault(request, {})[str(length)] = tokens
    return found
