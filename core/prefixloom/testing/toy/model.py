"""A toy model: a tiny deterministic transformer that runs through a cache as an engine would.

The model is made from a model config, as the cache is, and has one layer for each that the config lists. It remembers
nothing outside the slots of the composed cache, which it finds through the page tables of ``cache.step``.
``reference`` computes the same without a cache. The model computes in float64 with large weights, so that a wrong
entry moves the logits clearly and rounding does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from ...compose.model_config import CHUNKED, CONVOLUTION, GLOBAL, HYBRID, INDEXED, LINEAR, SLIDING, read_facts
from ...errors import CompositionError
from ...keys.tokens import encode
from .arithmetic import normed, weights
from .layers import LAYERS, Layer, LayerMaker, LayerStore, PageStore, PlainStore, StateStore

if TYPE_CHECKING:
    from ...cache.cache import Cache
    from ...cache.sequence import Sequence as CachedSequence
    from ...contract.composition import Part


NUMBERS: dict[str, dict[str, Any]] = {
    SLIDING: {"sliding_window": 9},
    CHUNKED: {"attention_chunk_size": 20},
    LINEAR: {"mamba_expand": 1, "mamba_d_state": 4, "mamba_d_conv": 4, "mamba_dt_rank": 32},
    CONVOLUTION: {"conv_L_cache": 3},
    INDEXED: {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "index_topk": 8, "index_head_dim": 6},
}
"""The config entries that each kind of layer needs, with default values."""
DELTA_RULE: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
"""The config entries of a gated delta rule: its states are in float32, and exact at multiples of 64 tokens."""
COMPOSITIONS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "F": ([GLOBAL, GLOBAL], {}),
    "S": ([SLIDING, SLIDING], {}),
    "M": ([LINEAR, LINEAR], {}),
    "FS": ([SLIDING, GLOBAL], {}),
    "FM": ([LINEAR, GLOBAL], {}),
    "SM": ([LINEAR, SLIDING], {}),
    "FSM": ([LINEAR, SLIDING, GLOBAL], {}),
    "two windows": ([SLIDING, SLIDING, GLOBAL], {"per_layer_config": {1: {"sliding_window": 22}}}),
    "two kinds of state": ([LINEAR, CONVOLUTION, GLOBAL], {}),
    "chunks and states": ([CHUNKED, CONVOLUTION], {}),
    "latents and an indexer": ([INDEXED, INDEXED], {}),
    "attention beside a state": ([HYBRID, SLIDING], NUMBERS[LINEAR]),
}
"""Layer kinds and further config entries for ``toy_config``: the combinations of kinds of memory that tests use."""


def toy_config(layer_types: Iterable[str] = (GLOBAL, GLOBAL), **changes: Any) -> dict[str, Any]:
    """Return the config of a small model with these layers. ``changes`` add entries or replace them."""
    kinds = list(layer_types)
    config = {
        "model_type": "toy",
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "dtype": "float64",
    }
    for kind in kinds:
        if kind != LINEAR or "linear_num_key_heads" not in changes:
            config |= NUMBERS.get(kind, {})
    return config | changes


def composition(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config of one of ``COMPOSITIONS``."""
    kinds, numbers = COMPOSITIONS[name]
    return toy_config(kinds, **{**numbers, **changes})


@attrs.frozen
class ToyRun:
    """The result of one request: how many tokens hit, all tokens, and the logits of the tokens that were computed."""

    ready: int
    tokens: tuple[int, ...]
    logits: Tensor = attrs.field(eq=False)


class ToyModel:
    """A model made from a config. ``layers`` maps each layer kind to what computes it; a plugin adds its own kind."""

    def __init__(self, config: Mapping[str, Any], *, seed: int = 0, layers: Mapping[str, LayerMaker] = LAYERS) -> None:
        self.config = dict(config)
        self.facts = read_facts(config)
        self.vocabulary = int(config["vocab_size"])
        unknown = sorted({layer.kind for layer in self.facts.layers} - set(layers))
        if unknown:
            raise CompositionError(
                f"the toy model cannot compute layers of kind {', '.join(unknown)}: pass layers= with a maker of each"
            )
        width = self.facts.hidden_size
        generator = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(self.vocabulary, width, generator=generator, dtype=torch.float64)
        self.blocks = [
            TransformerBlock(number, facts.index, layers[facts.kind](self.facts, facts, generator), generator, width)
            for number, facts in enumerate(self.facts.layers)
        ]
        self.to_logits = weights(generator, width, self.vocabulary)

    # ------------------------------------------------------------ computing
    def forward(self, tokens: Sequence[int], start: int, stores: Mapping[int, LayerStore]) -> Tensor:
        """Return the logits after each of ``tokens``, whose positions begin at ``start``."""
        return self.logits(self.hidden(tokens, start, stores))

    def hidden(self, tokens: Sequence[int], start: int, stores: Mapping[int, LayerStore]) -> Tensor:
        """Return the last layer's output for each of ``tokens``."""
        x = self.embedding[torch.tensor(tokens)]
        for block in self.blocks:
            x = block.forward(x, start, stores[block.number])
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return normed(hidden) @ self.to_logits

    def plain(self) -> dict[int, PlainStore]:
        """Return empty stores for computing without a cache."""
        return {block.number: PlainStore() for block in self.blocks}

    def reference(self, tokens: Any, *, chunk: int | None = None) -> Tensor:
        """Return the logits after each token, computed without a cache, ``chunk`` rows at a time (default: all)."""
        named, stores = encode(tokens).tolist(), self.plain()
        spans = spans_of(0, len(named), chunk)
        return torch.cat([self.forward(named[start:end], start, stores) for start, end in spans])

    def compute(
        self, cache: Cache, sequence: CachedSequence, *, chunk: int | None = None, upto: int | None = None
    ) -> Tensor:
        """Compute the tokens of ``sequence`` that are named but not committed, up to ``upto``. Return their logits."""
        tokens = sequence.tokens.tolist()
        logits = [torch.empty(0, self.vocabulary, dtype=torch.float64)]
        for start, end in spans_of(sequence.committed, sequence.named if upto is None else upto, chunk):
            sequence.grow(end - sequence.reserved)
            with cache.step([sequence]) as step:
                step.run_ops()
                tables = {part.name: step.table(part.name)[0] for part in cache.composition.parts}
                logits.append(self._pass(cache, sequence, tables, tokens, start, end))
        return torch.cat(logits)

    def append(self, cache: Cache, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Add the tokens that follow, as an engine does after it samples them or is given them."""
        sequence.append(tokens)

    def _pass(
        self,
        cache: Cache,
        sequence: CachedSequence,
        tables: Mapping[str, Tensor],
        tokens: Sequence[int],
        start: int,
        end: int,
    ) -> Tensor:
        """Run the layers of one step over the positions [start, end). Return the logits."""
        stores = {block.number: self._store(cache, sequence, tables, block) for block in self.blocks}
        hidden = self.hidden(tokens[start:end], start, stores)
        self._passed(cache, sequence, tables, tokens, hidden)
        return self.logits(hidden)

    def _passed(
        self,
        cache: Cache,
        sequence: CachedSequence,
        tables: Mapping[str, Tensor],
        tokens: Sequence[int],
        hidden: Tensor,
    ) -> None:
        """Compute, from the output of the layers of a step, what a subclass has in addition."""

    def decode(self, cache: Cache, sequence: CachedSequence, logits: Tensor, count: int) -> tuple[list[int], Tensor]:
        """Decode ``count`` tokens greedily from the last row of ``logits``. Return the tokens and all logits.

        The last token is added but not computed, as in an engine: the next turn computes it.
        """
        chosen: list[int] = []
        rows = [logits]
        for _ in range(count):
            if chosen:
                rows.append(self.compute(cache, sequence))
            chosen.append(int(rows[-1][-1].argmax()))
            self.append(cache, sequence, chosen[-1:])
        return chosen, torch.cat(rows)

    def run(
        self, cache: Cache, tokens: Any, *, namespace: str = "", chunk: int | None = None, decode: int = 0
    ) -> ToyRun:
        """Run one request through the cache: open, compute what did not hit, decode, close."""
        with cache.open(tokens, namespace=namespace, leave=1) as sequence:
            logits = self.compute(cache, sequence, chunk=chunk)
            _, logits = self.decode(cache, sequence, logits, decode)
            return ToyRun(sequence.ready, tuple(sequence.tokens.tolist()), logits)

    # ------------------------------------------------------------ binding
    def _store(
        self, cache: Cache, sequence: CachedSequence, tables: Mapping[str, Tensor], block: TransformerBlock
    ) -> PageStore | StateStore:
        part = self._serving(cache, block)
        pool, table = cache.pool(part.name), tables[part.name].long()
        if part.page_tokens:
            return PageStore(pool, part.page_tokens, table, block.index)
        return StateStore(pool, int(table[0]), sequence.rewind_slots(part.name), block.index)

    def _serving(self, cache: Cache, block: TransformerBlock) -> Part:
        """Return the one component of the cache that has this layer's buffers."""
        serving = [
            part
            for part in cache.composition.parts
            if {b.name for b in part.manifest.buffers if block.index in (*b.layers, *b.shared)}.issuperset(
                block.layer.buffers
            )
        ]
        if len(serving) != 1:
            names = ", ".join(part.name for part in serving) or "none"
            raise CompositionError(
                f"layer {block.index} keeps {' and '.join(block.layer.buffers)}, and one component of {cache!r} must "
                f"have them for it; there are: {names}"
            )
        return serving[0]


class TransformerBlock:
    """One block of the transformer: a layer that remembers, then a feed-forward layer, each with a residual connection.

    ``index`` is the number of the layer in the model. A layer that remembers in several ways becomes several blocks,
    which ``number`` tells apart.
    """

    def __init__(self, number: int, index: int, layer: Layer, generator: torch.Generator, width: int) -> None:
        self.number = number
        self.index = index
        self.layer = layer
        self.up = weights(generator, width, 4 * width)
        self.down = weights(generator, 4 * width, width)

    def forward(self, x: Tensor, start: int, store: LayerStore) -> Tensor:
        x = x + self.layer.forward(normed(x), start, store)
        return x + functional.silu(normed(x) @ self.up) @ self.down


def spans_of(start: int, end: int, chunk: int | None) -> list[tuple[int, int]]:
    """Split [start, end) at the multiples of ``chunk``, so that the split does not depend on how many tokens hit."""
    cuts = [start, *range(start // chunk * chunk + chunk, end, chunk), end] if chunk else [start, end]
    return list(itertools.pairwise(cuts)) if start < end else []
