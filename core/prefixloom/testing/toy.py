"""A toy model: a tiny deterministic transformer that runs through a cache as an engine would.

It is made from a model config, as the cache is, with one layer for each that the config lists. What it remembers lies
in the slots of the composed cache alone, found through the page tables of ``cache.step``; ``reference`` computes the
same plainly, with no cache. Float64 and strong weights: a wrong entry moves the logits, rounding does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from ..errors import CompositionError
from ..facts import GLOBAL, read_facts
from ..keys import encode
from .layers import LAYERS, Layer, LayerMaker, PageStore, PlainStore, Store, weights

if TYPE_CHECKING:
    from ..cache import Cache
    from ..compose import Part
    from ..sequence import Sequence as CachedSequence


def toy_config(layer_types: Iterable[str] = (GLOBAL, GLOBAL), **changes: Any) -> dict[str, Any]:
    """The config of a small model with these layers; ``changes`` are further entries, or others in their place."""
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
    return config | changes


@attrs.frozen
class Run:
    """A prompt that went through a cache: how much of it hit, and the logits of the tokens that were computed."""

    ready: int
    tokens: tuple[int, ...]
    logits: Tensor = attrs.field(eq=False)


class ToyModel:
    """``config`` is a model config; ``layers`` says what computes each layer kind, a plugin's own included."""

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
            _Block(facts.index, layers[facts.kind](self.facts, facts, generator), generator, width)
            for facts in self.facts.layers
        ]
        self.to_logits = weights(generator, width, self.vocabulary)

    # ------------------------------------------------------------ computing
    def forward(self, tokens: Sequence[int], start: int, stores: Mapping[int, Store]) -> Tensor:
        """The logits after each of ``tokens``, which stand at the positions from ``start`` on."""
        x = self.embedding[torch.tensor(tokens)]
        for block in self.blocks:
            x = block.forward(x, start, stores[block.index])
        return _normed(x) @ self.to_logits

    def plain(self) -> dict[int, PlainStore]:
        """Empty stores of a forward without a cache."""
        return {block.index: PlainStore() for block in self.blocks}

    def reference(self, tokens: Any, *, chunk: int | None = None) -> Tensor:
        """The logits after each token, computed with no cache, ``chunk`` rows at a time (default: all at once)."""
        named, stores = encode(tokens).tolist(), self.plain()
        spans = _spans(0, len(named), chunk)
        return torch.cat([self.forward(named[start:end], start, stores) for start, end in spans])

    def compute(
        self, cache: Cache, sequence: CachedSequence, *, chunk: int | None = None, upto: int | None = None
    ) -> Tensor:
        """Compute what of ``sequence`` is named, up to ``upto``, and not committed; the logits after each of those."""
        tokens = sequence.tokens.tolist()
        logits = [torch.empty(0, self.vocabulary, dtype=torch.float64)]
        for start, end in _spans(sequence.committed, sequence.named if upto is None else upto, chunk):
            sequence.grow(end - sequence.reserved)
            with cache.step([sequence]) as step:
                step.run_ops()
                stores = self._stores(cache, {part.name: step.table(part.name)[0] for part in cache.composition.parts})
                logits.append(self.forward(tokens[start:end], start, stores))
        return torch.cat(logits)

    def decode(self, cache: Cache, sequence: CachedSequence, logits: Tensor, count: int) -> tuple[list[int], Tensor]:
        """``count`` tokens, each the likeliest, from the last row of ``logits`` on; what was computed for them.

        The last one is only named, as in an engine: the next turn computes it.
        """
        chosen: list[int] = []
        rows = [logits]
        for _ in range(count):
            if chosen:
                rows.append(self.compute(cache, sequence))
            chosen.append(int(rows[-1][-1].argmax()))
            sequence.append(chosen[-1:])
        return chosen, torch.cat(rows)

    def run(self, cache: Cache, tokens: Any, *, namespace: str = "", chunk: int | None = None, decode: int = 0) -> Run:
        """One request through the cache: open, compute what did not hit, decode, close."""
        with cache.open(tokens, namespace=namespace, leave=1) as sequence:
            logits = self.compute(cache, sequence, chunk=chunk)
            _, logits = self.decode(cache, sequence, logits, decode)
            return Run(sequence.ready, tuple(sequence.tokens.tolist()), logits)

    # ------------------------------------------------------------ binding
    def _stores(self, cache: Cache, tables: Mapping[str, Tensor]) -> dict[int, PageStore]:
        stores = {}
        for block in self.blocks:
            part = self._serving(cache, block)
            pool = cache.pool(part.name)
            stores[block.index] = PageStore(pool, part.page_tokens, tables[part.name].long(), block.index)
        return stores

    def _serving(self, cache: Cache, block: _Block) -> Part:
        """The one component of the cache that has this layer's buffers."""
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


class _Block:
    """A layer that remembers, and what follows it: each added to what came before."""

    def __init__(self, index: int, layer: Layer, generator: torch.Generator, width: int) -> None:
        self.index = index
        self.layer = layer
        self.up = weights(generator, width, 4 * width)
        self.down = weights(generator, 4 * width, width)

    def forward(self, x: Tensor, start: int, store: Store) -> Tensor:
        x = x + self.layer.forward(_normed(x), start, store)
        return x + functional.silu(_normed(x) @ self.up) @ self.down


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def _spans(start: int, end: int, chunk: int | None) -> list[tuple[int, int]]:
    """[start, end) in runs of ``chunk`` that end on its multiples, so that which rows go together depends on no hit."""
    cuts = [start, *range(start // chunk * chunk + chunk, end, chunk), end] if chunk else [start, end]
    return list(itertools.pairwise(cuts)) if start < end else []
