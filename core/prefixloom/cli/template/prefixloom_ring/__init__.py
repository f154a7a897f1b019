"""ring: a component of prefixloom, for layers that read the first tokens and a window of the last ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixloom import Buffer, Component, ComponentType, Manifest, Sinks, Window, hookimpl

prefixloom_api = 1  # the version of the plugin contract that this was built for


class RingComponent(Component):
    """What a token keeps in a layer (the manifest), and what must be present to resume (the reach)."""

    def __init__(self, name: str = "ring", *, sinks: int = 4, window: int = 64, layers: int = 1) -> None:
        buffers = [Buffer(kind, (2, 8), "bfloat16", range(layers)) for kind in ("k", "v")]
        super().__init__(name, Manifest(buffers), Sinks(sinks) | Window(window))


@hookimpl
def prefixloom_component() -> ComponentType:
    """Offer the component to the registry."""
    return ComponentType("ring", RingComponent, summary="attention over the first tokens and a window")


@hookimpl
def prefixloom_truth(options: Mapping[str, Any]) -> Any:
    """Say what the layers do, and not what the reach says: the conformance kit compares the two."""
    from prefixloom.testing import Truth

    sinks, window = options["sinks"], options["window"]
    return Truth(
        reads=lambda q: {*range(min(sinks, q)), *range(max(0, q + 1 - window), q)},
        ahead=0,
        grid=1,
        buffers=[Buffer(kind, (2, 8), "bfloat16", range(options["layers"])) for kind in ("k", "v")],
        tokens_per_entry=1,
    )
