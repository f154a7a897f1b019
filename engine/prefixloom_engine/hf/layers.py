"""Layers: transformers' cache layers, with their memory in the pools of a composed cache.

Each class that transformers has for a kind of layer has a subclass here; it must be a subclass because masks and models
test for the class. No class here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from prefixloom import Cache, Chunk, CompositionError, Reach, Window

from ..contract.memory import LayerMemory, layer_memories
from .pages import Pages
from .refusals import RECOMPOSE
from .states import CONV, RECURRENT, States

ATTENTION = (("k", "v"), ("latent", "rope"))
"""The names of the buffers that attention may have: keys and values, or those of multi-head latent attention, which
transformers passes in their place."""
INDEX = ("index",)
"""The name of the buffer with the keys of an indexer."""


class PagedMixin:
    """A layer with keys and values in pages."""

    pages: Pages
    is_initialized = True

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        keys, values = self.pages.extend(keys, values)
        return keys, values

    def get_seq_length(self) -> int:
        return self.pages.seen


class StateMixin:
    """A layer with states. transformers' own methods work on the states that ``States`` has put into the layer. A new
    recurrent state is not copied into the old one, as transformers does it, but takes its place."""

    states: States

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        self.states.check(CONV, conv_states)
        out: Tensor = super().update_conv_state(conv_states, state_idx, **kwargs)  # type: ignore[misc]
        return out

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        self.states.check(RECURRENT, recurrent_states)
        return self.states.replace(RECURRENT, recurrent_states)


class PagedLayer(PagedMixin, DynamicLayer):
    """Full attention, with keys and values or with multi-head latents."""

    def __init__(self, pages: Pages) -> None:
        super().__init__()
        self.pages = pages
        self.is_initialized = True


class WindowLayer(PagedMixin, DynamicSlidingWindowLayer):
    """Sliding-window and chunked attention: attention gets the last window, which includes the query."""

    def __init__(self, pages: Pages, window: int) -> None:
        super().__init__(sliding_window=window)
        self.pages = pages
        self.is_initialized = True

    @property
    def cumulative_length(self) -> int:
        return self.pages.seen

    @cumulative_length.setter
    def cumulative_length(self, value: int) -> None:
        """Ignore the count that transformers' constructor sets: ``pages`` keeps it."""


class IndexedLayer(PagedLayer, DynamicIndexedLayer):
    """Attention over the tokens that an indexer selects; the indexer has keys of its own."""

    def __init__(self, pages: Pages, keys: Pages | None) -> None:
        super().__init__(pages)
        self.index = keys

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """The positions of the past, by which Qwen4's indexer rotates its keys; without images all three are equal."""
        past = self.pages.past_positions()
        return None if past is None else past.expand(3, *past.shape)

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: Tensor | None) -> None:
        """Ignore positions of the past: they follow from its length."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        if self.index is None:
            raise CompositionError(
                f"layer {self.pages.layer} has an indexer, and no component keeps its keys. {RECOMPOSE}"
            )
        return self.index.extend(indexer_key_states[:, None])[0][:, 0]


class StateLayer(StateMixin, LinearAttentionLayer):
    """Linear attention, state spaces, short convolutions."""

    def __init__(self, layer: int, memory: LayerMemory) -> None:
        super().__init__()
        self.states = States(layer, memory, self)


class StatePagedLayer(StateMixin, PagedMixin, LinearAttentionAndFullAttentionLayer):
    """A state and full attention in one layer."""

    def __init__(self, layer: int, memory: LayerMemory, pages: Pages) -> None:
        super().__init__()
        self.pages = pages
        self.states = States(layer, memory, self)
        self.is_initialized = True


class StateWindowLayer(StateMixin, PagedMixin, LinearAttentionAndSlidingWindowAttentionLayer):
    """A state and attention with a window in one layer."""

    cumulative_length = WindowLayer.cumulative_length

    def __init__(self, layer: int, memory: LayerMemory, pages: Pages, window: int) -> None:
        super().__init__(sliding_window=window)
        self.pages = pages
        self.states = States(layer, memory, self)
        self.is_initialized = True


# ---------------------------------------------------------------- making them from transformers' layers


def pooled_layer(template: Any, cache: Cache, layer: int) -> Any:
    """Make the layer that does what ``template``, transformers' own cache layer, does, with its memory in pools."""
    make = MAKERS.get(type(template))
    if make is None:
        raise CompositionError(
            f"layer {layer} remembers in transformers' {type(template).__name__}, which is not known here. Known: "
            f"{', '.join(kind.__name__ for kind in MAKERS)}"
        )
    return make(template, cache, layer)


def list_layers(config: Any) -> None:
    """Write the kinds of its layers into a config that does not list them, as transformers' own cache takes them."""
    if getattr(config, "layer_types", None) is None and getattr(config, "layers_block_type", None) is None:
        config.layer_types = get_layer_types_and_kwargs(config)[0]


def _attention(template: Any, cache: Cache, layer: int) -> Pages:
    window = int(template.sliding_window) if isinstance(template, DynamicSlidingWindowLayer) else 0
    memory, names = _serving(cache, layer, ATTENTION)
    reach = {part.name: part.reach for part in cache.composition.parts}[memory.component]
    if not _fits(reach, window):
        raise CompositionError(
            f"layer {layer} attends to {f'the last {window} tokens' if window else 'every token'}, and component "
            f"{memory.component!r} keeps {reach}. {RECOMPOSE}"
        )
    return Pages(layer, memory, names, window - 1 if window else 0)


def _fits(reach: Reach, window: int) -> bool:
    """Return whether a component with this reach keeps everything that attention reads."""
    return reach.closed_upward or (window > 0 and reach in (Window(window), Chunk(window)))


def _index(cache: Cache, layer: int) -> Pages | None:
    """Return the keys of a layer's indexer; None if it uses what the indexer of an earlier layer has selected."""
    if not any(set(INDEX) <= set(memory.rows) for memory in layer_memories(cache, layer)):
        return None
    memory, names = _serving(cache, layer, (INDEX,))
    return Pages(layer, memory, names, 0)


def _states(template: Any, cache: Cache, layer: int) -> LayerMemory:
    if template.number_of_states != 1:
        raise CompositionError(
            f"layer {layer} has {template.number_of_states} conv states, and there is a place for one"
        )
    return _serving(cache, layer, ((CONV, RECURRENT), (CONV,), (RECURRENT,)))[0]


def _serving(cache: Cache, layer: int, wanted: tuple[tuple[str, ...], ...]) -> tuple[LayerMemory, tuple[str, ...]]:
    """Find the one component that keeps all buffers of one of these sets for a layer; also return the set."""
    memories = layer_memories(cache, layer)
    for names in wanted:
        serving = [memory for memory in memories if set(names) <= set(memory.rows)]
        if len(serving) == 1:
            return serving[0], names
        if serving:
            raise CompositionError(
                f"layer {layer} has its {' and '.join(names)} in several components: "
                f"{', '.join(memory.component for memory in serving)}"
            )
    sets = "; or ".join(" and ".join(names) for names in wanted)
    raise CompositionError(
        f"layer {layer} needs a component with the buffers {sets}, and {cache!r} has none for it. {RECOMPOSE}"
    )


MAKERS: dict[type, Callable[[Any, Cache, int], Any]] = {
    DynamicLayer: lambda template, cache, layer: PagedLayer(_attention(template, cache, layer)),
    DynamicSlidingWindowLayer: lambda template, cache, layer: WindowLayer(
        _attention(template, cache, layer), template.sliding_window
    ),
    DynamicIndexedLayer: lambda template, cache, layer: IndexedLayer(
        _attention(template, cache, layer), _index(cache, layer)
    ),
    LinearAttentionLayer: lambda template, cache, layer: StateLayer(layer, _states(template, cache, layer)),
    LinearAttentionAndFullAttentionLayer: lambda template, cache, layer: StatePagedLayer(
        layer, _states(template, cache, layer), _attention(template, cache, layer)
    ),
    LinearAttentionAndSlidingWindowAttentionLayer: lambda template, cache, layer: StateWindowLayer(
        layer, _states(template, cache, layer), _attention(template, cache, layer), template.sliding_window
    ),
    DummyLayer: lambda template, cache, layer: DummyLayer(),
}
"""For each of transformers' layer classes, what makes the layer that does the same over pools."""
