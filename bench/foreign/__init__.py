"""Adapters of cache managers for the kit's tests of foreign caches: our own, SGLang's and vLLM's.

They keep the contract of ``prefixloom.testing.foreign`` and are found by its entry points. Unlike the drivers of the
benchmarks they use the engines' own pools and allocators, small ones, on a CPU. ``docs/peers.md`` has what was found.
``beside_sglang`` runs traces through SGLang's scheduler calls with its own cache and with ours. Read ``ours`` first.
"""
