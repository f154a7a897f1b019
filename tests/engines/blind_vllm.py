"""A control for vLLM: our connector does not see the salts and adapters that keep requests apart.

vLLM runs this in each of its processes, as a plugin, like ``spoil_vllm``.
"""

from __future__ import annotations


def register() -> None:
    from prefixloom_vllm import scheduler

    scheduler.namespace_of = lambda request: ""
