"""Memory: which component of a composed cache serves which layer of a model, and where its entries lie.

The manifest of a component names the layers of each buffer, so this module needs to know no component.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from prefixloom import CompositionError

if TYPE_CHECKING:
    from torch import Tensor

    from prefixloom import Cache


@attrs.frozen(eq=False)
class LayerMemory:
    """What one component keeps for one layer.

    ``rows``         by buffer name: a view of the pool, of shape (pages, entries of a page, *shape), for states
                     (slots, *shape)
    ``page_tokens``  how many tokens a page holds; 0 for states
    ``owned``        by buffer name: whether this layer writes the buffer; if not, it reads another layer's entries
    """

    component: str
    page_tokens: int
    rows: Mapping[str, Tensor]
    owned: Mapping[str, bool]


def layer_memories(cache: Cache, layer: int) -> list[LayerMemory]:
    """Return the memory of each component that serves a layer, in the order of the composition."""
    found = []
    for part in cache.composition.parts:
        rows: dict[str, Tensor] = {}
        owned: dict[str, bool] = {}
        for buffer in part.manifest.buffers:
            if layer in buffer.layers or layer in buffer.shared:
                owner = buffer.shared.get(layer, layer)
                rows[buffer.name] = cache.pool(part.name).buffers[buffer.name][buffer.layers.index(owner)]
                owned[buffer.name] = owner == layer
        if rows:
            found.append(LayerMemory(part.name, part.page_tokens, rows, owned))
    return found


def memory_with(cache: Cache, layer: int, *buffers: str) -> LayerMemory:
    """Return the memory of the one component that keeps all of these buffers for a layer."""
    serving = [memory for memory in layer_memories(cache, layer) if set(buffers) <= set(memory.rows)]
    if len(serving) != 1:
        names = ", ".join(memory.component for memory in serving) or "none does"
        raise CompositionError(
            f"layer {layer} keeps {' and '.join(buffers)}, and exactly one component of {cache!r} must keep them for "
            f"it: {names}. Compose the cache from the model's own config"
        )
    return serving[0]
