"""Each engine's cache manager, driven as the engine's scheduler drives it: ours, SGLang's and vLLM's.

An engine has one adapter (``sglang``, ``vllm``), and its users get a face each: the rows beside the peers (``Driver``),
the kit's tests of other caches (``ForeignCache``) and the lab's replays (``PeerCache``). Nothing is measured here. Read
``driver`` and ``stand_ins`` first. ``docs/peers.md`` says how the engines are installed without a GPU.

- ``ours``, ``ours_kit``: our own cache, as a driver and for the kit
- ``vllm``, ``vllm_lab``, ``vllm_sizes``: vLLM's manager; how vLLM divides bytes
- ``sglang``, ``sglang_rows``, ``sglang_lab``, ``sglang_sizes``: SGLang's cache; the same with counters in place of
  pools; how SGLang divides bytes
- ``sglang_loop``: SGLang's scheduling loop around it. ``sglang_variants``: with our cache, or with a mistake put back
"""
