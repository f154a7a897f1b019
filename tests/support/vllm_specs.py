"""Stand-ins for what vLLM says of a model's memory: the specs of layers, and its configuration of groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def spec(kind: str, **fields: Any) -> Any:
    """A spec of the class ``kind``: blocks of four tokens, two bytes of each in a layer, unless told otherwise."""
    fields = {"block_size": 4, "unpadded_page_size_bytes": 8, "prefix_cacheable": True, **fields}
    return type(kind, (), fields)()


FULL = spec("FullAttentionSpec")
WINDOW = spec("SlidingWindowSpec", sliding_window=6, extra_retained_tokens=0)
STATE = spec("MambaSpec", mamba_cache_mode="align", unpadded_page_size_bytes=16)


def config(*specs: Any, **fields: Any) -> Any:
    """A group of two layers for each spec."""
    plain = {"is_eagle_group": False, "host_resident": False, "enable_kv_transfer": True, **fields}
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(layer_names=[f"{i}.0", f"{i}.1"], kv_cache_spec=each, **plain)
            for i, each in enumerate(specs)
        ]
    )
