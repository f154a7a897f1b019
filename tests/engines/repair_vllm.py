"""A repair of vLLM 0.32.0 on a CPU, for all runs: with its own cache, with ours, and without one.

vLLM's Mamba 2 layers promise to write the state at a block's boundary in the midst of a pass. Its kernels for a CPU
give back the state at the end of the pass alone, so with prefix caching a pass ends with an IndexError, whatever the
cache. Here the layers promise nothing, and vLLM's scheduler ends a pass at the boundary, as it does for other states.

vLLM runs this in each of its processes, as a plugin, like ``hold_vllm``.
"""

from __future__ import annotations


def register() -> None:
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
