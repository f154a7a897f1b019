"""Peers of the lab: the cache managers of vLLM and SGLang at the bytes that their own rules make of a budget.

``python -m prefixloom replay TRACE ... --beside vllm --beside sglang`` finds them by entry points of the group
``prefixloom.beside`` (in a checkout only). docs/peers.md says how the engines are installed without a GPU.

Read ``vllm_sizes`` first, and ``sglang_sizes``: they are the engines' rules of sizes, and import no engine. ``vllm``
and ``sglang`` drive the managers.
"""
