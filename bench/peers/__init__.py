"""The sides of the comparison, ours and the peers', behind the one interface of ``driver``.

A side is ``module:Class`` of a ``driver.Driver``; its module is imported only where that side is measured, and raises
``Missing`` where what it drives cannot be imported.
"""

from __future__ import annotations

from importlib import import_module

from peers.driver import Driver, Missing

__all__ = ["NOT_THE_SAME", "OURS", "OURSELVES", "PEERS", "SIDES", "Driver", "Missing", "load"]

OURS = {
    "prefixloom": "peers.drive_prefixloom:Prefixloom",
    "in steps": "peers.drive_prefixloom:InSteps",
    "tier idle": "peers.drive_prefixloom:WithIdleTier",
    "stranger's": "peers.drive_prefixloom:Strangers",
}
"""The installed plugins; each forward pass in a step; with a host tier that is composed and never used; a stranger's
components in their place."""
OURSELVES = next(iter(OURS))

PEERS = {
    "SGLang Rust": "peers.drive_sglang:RustCore",
    "SGLang Python": "peers.drive_sglang:PythonCore",
    "vLLM": "peers.drive_vllm:Blocks",
}
SIDES = OURS | PEERS

NOT_THE_SAME = {
    "vLLM": {
        "lock and unlock": "it has no locks: a request counts references to its blocks when it takes slots",
        "evict": "it frees nothing: it takes blocks that nobody uses and forgets their hashes",
        "bytes per leaf": "it keeps hashes and no tokens, and its blocks are there from the beginning",
    }
}
"""By side, and by how rows begin: why it does less there than the others, who are not compared with it."""


def load(side: str) -> type[Driver]:
    """The class of a side, by its name or as ``module:Class``."""
    module, _, name = SIDES.get(side, side).partition(":")
    found = getattr(import_module(module), name)
    assert issubclass(found, Driver)
    return found
