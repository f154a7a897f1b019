"""Attention sinks and a window for prefixloom: a query sees the first tokens and the last ones, and nothing between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefixloom import Buffer, Component, ComponentType, CompositionError, Manifest, Sinks, Window, hookimpl

prefixloom_api = 1  # the version of the plugin contract that this was built for


class SinkComponent(Component):
    """Keys and values of the first ``sinks`` tokens, and of the last ``window``, the query's own included."""

    def __init__(
        self,
        name: str = "sink",
        *,
        sinks: int = 4,
        window: int = 64,
        layers: int | Sequence[int] = 1,
        kv_heads: int = 1,
        head_dim: int = 16,
        dtype: str = "bfloat16",
    ) -> None:
        if sinks < 1 or window < 1:
            raise CompositionError(f"{name!r}: sinks and window must be at least 1, got {sinks} and {window}")
        numbers = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        buffers = [Buffer(kind, (kv_heads, head_dim), dtype, numbers) for kind in ("k", "v")]
        super().__init__(name, Manifest(buffers), Sinks(sinks) | Window(window))


@hookimpl
def prefixloom_component() -> ComponentType:
    """Offer the component to the registry."""
    return ComponentType("sink", SinkComponent, summary="attention over the first tokens and a window")


@hookimpl
def prefixloom_truth(options: Mapping[str, Any]) -> Any:
    """Say what the layers do: a query reads the first tokens, and those before it in its window."""
    from prefixloom.testing import Truth

    sinks, window, layers = options["sinks"], options["window"], options["layers"]
    numbers = range(layers) if isinstance(layers, int) else layers
    return Truth(
        reads=lambda q: {*range(min(q, sinks)), *range(max(0, q + 1 - window), q)},
        ahead=0,
        grid=1,
        buffers=[Buffer(kind, (options["kv_heads"], options["head_dim"]), options["dtype"], numbers) for kind in "kv"],
        tokens_per_entry=1,
    )
