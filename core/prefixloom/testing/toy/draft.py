"""A toy model with a draft layer, whose entries depend on the token after their own, as in EAGLE and MTP.

The draft is one more layer of attention, numbered after the model's layers. Its entry at position p is computed from
the model's output at p and the token at p + 1; a component with a lookahead of 1 serves it. The token after the last
named one is not known yet, so that entry is written in a draft step as soon as ``append`` adds the token. After a
rewind, ``append`` rewrites the entries that were computed from rewound tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...compose.model_config import GLOBAL
from ...contract.values import LayerFacts
from ...keys.tokens import encode
from .arithmetic import normed, weights
from .layers import LAYERS, LayerMaker, LayerStore, PathAttention, PlainStore
from .model import ToyModel, TransformerBlock, spans_of

if TYPE_CHECKING:
    from ...cache.cache import Cache
    from ...cache.sequence import Sequence as CachedSequence


class _Drafted:
    """What the draft computed for one sequence. The first row belongs to the position at which it was opened."""

    def __init__(self, first: int, width: int, vocabulary: int) -> None:
        self.first = first
        self.hidden = torch.empty(0, width, dtype=torch.float64)
        self.followed: list[int] = []
        self.guesses = torch.empty(0, vocabulary, dtype=torch.float64)

    def keep(self, tokens: Sequence[int], committed: int) -> None:
        """Forget what was computed from tokens that were rewound."""
        self.hidden = self.hidden[: max(0, committed - self.first)]
        right = 0
        for made_of, token in zip(self.followed[: len(self.hidden)], tokens[self.first + 1 :], strict=False):
            if made_of != token:
                break
            right += 1
        del self.followed[right:]
        self.guesses = self.guesses[:right]


class DraftedModel(ToyModel):
    """A toy model with a draft layer, number ``draft_layer``, that a component with a lookahead of 1 must serve."""

    def __init__(self, config: Mapping[str, Any], *, seed: int = 0, layers: Mapping[str, LayerMaker] = LAYERS) -> None:
        super().__init__(config, seed=seed, layers=layers)
        generator = torch.Generator().manual_seed(~seed & 0xFFFF)
        width = self.facts.hidden_size
        self.draft_layer = 1 + max(block.index for block in self.blocks)
        attention = PathAttention(self.facts, LayerFacts(self.draft_layer, GLOBAL), generator)
        self.draft = TransformerBlock(len(self.blocks), self.draft_layer, attention, generator, width)
        self.to_draft = weights(generator, 2 * width, width)
        self._made: WeakKeyDictionary[CachedSequence, _Drafted] = WeakKeyDictionary()

    # ------------------------------------------------------------ computing
    def guess(self, hidden: Tensor, following: Sequence[int], start: int, store: LayerStore) -> Tensor:
        """Return, for each position from ``start`` on, the logits of the token two positions later."""
        x = torch.cat((normed(hidden), self.embedding[torch.tensor(following)]), dim=-1) @ self.to_draft
        return self.logits(self.draft.forward(x, start, store))

    def reference_guesses(self, tokens: Any, *, chunk: int | None = None) -> Tensor:
        """Return what ``guess`` gives for all positions but the last, without a cache, ``chunk`` rows at a time."""
        named, stores, store = encode(tokens).tolist(), self.plain(), PlainStore()
        rows = [torch.empty(0, self.vocabulary, dtype=torch.float64)]
        for start, end in spans_of(0, len(named), chunk):
            hidden = self.hidden(named[start:end], start, stores)
            following = named[start + 1 : end + 1]
            if following:
                rows.append(self.guess(hidden[: len(following)], following, start, store))
        return torch.cat(rows)

    def guesses(self, sequence: CachedSequence) -> Tensor:
        """Return the draft's logits for a sequence, from ``sequence.ready`` up to the last known token."""
        return self._drafted(sequence).guesses

    # ------------------------------------------------------------ through a cache
    def append(self, cache: Cache, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Add tokens, and write the entries that waited for the first of them before anything can be published."""
        sequence.append(tokens)
        self._catch_up(cache, sequence)

    def compute(
        self, cache: Cache, sequence: CachedSequence, *, chunk: int | None = None, upto: int | None = None
    ) -> Tensor:
        self._catch_up(cache, sequence)
        return super().compute(cache, sequence, chunk=chunk, upto=upto)

    def _passed(
        self,
        cache: Cache,
        sequence: CachedSequence,
        tables: Mapping[str, Tensor],
        tokens: Sequence[int],
        hidden: Tensor,
    ) -> None:
        made = self._drafted(sequence)
        made.hidden = torch.cat((made.hidden, hidden))
        self._draft(cache, sequence, tables, tokens)

    def _catch_up(self, cache: Cache, sequence: CachedSequence) -> None:
        tokens = sequence.tokens.tolist()
        made = self._drafted(sequence)
        made.keep(tokens, sequence.committed)
        at = made.first + len(made.followed)
        if at < min(made.first + len(made.hidden), len(tokens) - 1):
            with cache.step([sequence], role="draft") as step:
                tables = {part.name: step.table(part.name)[0] for part in cache.composition.parts}
                self._draft(cache, sequence, tables, tokens)

    def _draft(
        self, cache: Cache, sequence: CachedSequence, tables: Mapping[str, Tensor], tokens: Sequence[int]
    ) -> None:
        """Write the entries of the computed positions whose next token is known."""
        made = self._drafted(sequence)
        done = len(made.followed)
        following = list(tokens[made.first + done + 1 : made.first + len(made.hidden) + 1])
        if following:
            store = self._store(cache, sequence, tables, self.draft)
            rows = made.hidden[done : done + len(following)]
            made.guesses = torch.cat((made.guesses, self.guess(rows, following, made.first + done, store)))
            made.followed += following

    def _drafted(self, sequence: CachedSequence) -> _Drafted:
        made = self._made.get(sequence)
        if made is None:
            made = self._made[sequence] = _Drafted(sequence.ready, self.facts.hidden_size, self.vocabulary)
        return made
