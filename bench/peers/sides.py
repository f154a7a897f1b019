"""The sides of the comparison, ours and the peers', by name.

A side is the ``module:Class`` of a driver. Its module is imported only in the process that measures this side, and
raises ``EngineUnavailable`` if the peer cannot be imported.
"""

from __future__ import annotations

from importlib import import_module

from bench.engines.driver import Driver

OURS = {
    "prefixloom": "bench.engines.ours:Prefixloom",
    "in steps": "bench.engines.ours:InSteps",
    "tier idle": "bench.engines.ours:WithIdleTier",
    "stranger's": "bench.engines.ours:WithForeignComponents",
}
"""Our sides: the installed plugins; each forward pass in a step; with a host tier that copies nothing; with foreign
components in place of the installed ones."""
OURSELVES = next(iter(OURS))
"""The side that is compared with the peers."""

PEERS = {
    "SGLang Rust": "bench.engines.sglang_rows:SGLangRust",
    "SGLang Python": "bench.engines.sglang_rows:SGLangPython",
    "vLLM": "bench.engines.vllm:VLLM",
}
SIDES = OURS | PEERS

NOT_THE_SAME = {
    "vLLM": {
        "lock and unlock": "vLLM has no locks: a request counts references to its blocks when it takes slots",
        "evict": "vLLM frees nothing: it takes unused blocks and forgets their hashes",
        "bytes per leaf": "vLLM keeps hashes and no tokens, and its blocks exist from the beginning",
    }
}
"""By side, and by the beginning of the row's name: why this side does less work there. It is not compared there."""


def load(side: str) -> type[Driver]:
    """Return the class of a side, by its name or as ``module:Class``."""
    module, _, name = SIDES.get(side, side).partition(":")
    found = getattr(import_module(module), name)
    assert issubclass(found, Driver)
    return found
