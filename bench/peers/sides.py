"""The sides of the comparison, ours and the peers', by name.

A side is the ``module:Class`` of a driver. Its module is imported only in the process that measures this side, and
raises ``SideUnavailable`` if the peer cannot be imported.
"""

from __future__ import annotations

from importlib import import_module

from bench.drivers.interface import Driver

OURS = {
    "prefixloom": "bench.drivers.drive_prefixloom:Prefixloom",
    "in steps": "bench.drivers.drive_prefixloom:InSteps",
    "tier idle": "bench.drivers.drive_prefixloom:WithIdleTier",
    "stranger's": "bench.drivers.drive_prefixloom:WithForeignComponents",
}
"""Our sides: the installed plugins; each forward pass in a step; with a host tier that copies nothing; with foreign
components in place of the installed ones."""
OURSELVES = next(iter(OURS))
"""The side that is compared with the peers."""

PEERS = {
    "SGLang Rust": "bench.drivers.drive_sglang:SGLangRust",
    "SGLang Python": "bench.drivers.drive_sglang:SGLangPython",
    "vLLM": "bench.drivers.drive_vllm:VLLM",
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
    """The class of a side, by its name or as ``module:Class``."""
    module, _, name = SIDES.get(side, side).partition(":")
    found = getattr(import_module(module), name)
    assert issubclass(found, Driver)
    return found
