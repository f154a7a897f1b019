"""``HFRunner``: a transformers model over the pools of one cache, as a ``Runner`` of the engine."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from prefixloom import Cache, InputError

from ..contract.model import Batch, Span
from .cache import cache_over
from .images import images_in, positions_of
from .refusals import UNPADDED, cache_parameter
from .rope import length_dependent
from .rows import Rows

POSITION_TABLES = ("wpe", "embed_positions", "position_embedding", "position_embeddings")
"""The names that models of transformers give to a table of learned positions. Some have rows before position 0, and
their number as ``offset``."""


PASS_TOKENS = 24
"""About how many tokens are computed in the time that a pass takes beside its tokens."""
TOKEN_PAIRS = 4096
"""For about how many pairs of a query and a column attention is computed in the time of a token."""


class HFRunner:
    """Calls transformers' code, unchanged, with positions, a mask and a ``PooledCache``."""

    def __init__(self, model: Any, cache: Cache) -> None:
        self._model = model
        self._cache = cache
        self.pooled = cache_over(cache, model.config.get_text_config(decoder=True))
        takes = inspect.signature(model.forward).parameters
        self.cache_name = cache_parameter(model)
        self.input_names = list(takes)
        self.rope = length_dependent(model.config.get_text_config(decoder=True))
        self.scans_from_zero = scans_from_zero(model)
        self.places_images = hasattr(model.base_model, "get_rope_index")
        """Whether rotary embeddings use positions that the model makes of images."""
        self._unpadded = model.config.model_type in UNPADDED
        self._takes_positions = "position_ids" in takes
        self._takes_wanted = "logits_to_keep" in takes
        self._positions = learned_positions(model)

    def groups(self, spans: Sequence[Span]) -> list[list[int]]:
        """Group rows that go through one pass.

        Of a model with states these are rows of equal count. Rows that start at position 0 are separate, since they
        have no state yet. So the tokens that are computed never need padding; only their past does. Other models
        compute padding without reading it, so rows of other counts join where that costs less than another pass.

        A span beyond the learned positions is refused: on CUDA, the lookup would end the whole process.
        """
        if self.rope is not None:
            for span in spans:  # a batch has one set of frequencies, so the engine serves the first regime alone
                self.rope.check("", span.end)
        longest = max((span.end for span in spans), default=0)
        if self._positions is not None and longest > self._positions:
            raise InputError(f"{type(self._model).__name__} has learned {self._positions} positions, not {longest}")
        found: dict[tuple[int, int], list[int]] = {}
        alone: list[list[int]] = []  # the model is given the images of one prompt in a pass
        for row, span in enumerate(spans):
            if images_in(span):
                alone.append([row])
            else:
                past = span.start if self._unpadded else int(span.start > 0)
                found.setdefault((span.count, past), []).append(row)
        alike = list(found.values())
        return [*(alike if self.pooled.has_states or self._unpadded else joined(alike, spans)), *alone]

    def forward(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            stepwise = [name for name, slots in batch.singles.items() if batch.count <= slots.shape[1]]
            continues = batch.count > 1 and batch.spans[0].start > 0
            if stepwise or (continues and self.scans_from_zero):
                return self._token_by_token(batch, stepwise)
            return self._run(batch)

    def _run(self, batch: Batch) -> Tensor:
        rows = self.pooled.begin(batch)
        try:
            logits = self.call(
                batch.tokens,
                positions_of(rows),
                self._mask(rows),
                max(batch.wanted, 1),
                **self.media_inputs(batch.spans),
            )
            self.pooled.check(rows)
        finally:
            self.pooled.end()
        return logits[:, logits.shape[1] - batch.wanted :]

    def _mask(self, rows: Rows) -> Tensor | None:
        """Return the mask of the columns; None for a model without attention.

        Mamba's first generation takes a mask for one of the new tokens.
        """
        return rows.mask() if self.pooled.has_pages else None

    def media_inputs(self, spans: Sequence[Span]) -> dict[str, Any]:
        """Return what the model is given of images in a pass over ``spans``."""
        found = [images for images in map(images_in, spans) if images is not None]
        return found[0].inputs(self._model, spans[0].start, spans[0].end) if found else {}

    def call(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, wanted: int, **more: Any) -> Tensor:
        """Call the model over ``pooled``; return the logits of the last ``wanted`` tokens, or of all of them."""
        inputs = {"input_ids": tokens, "use_cache": True, self.cache_name: self.pooled, **more}
        if self._takes_positions:
            inputs["position_ids"] = positions
        if mask is not None:
            inputs["attention_mask"] = mask
        if self._takes_wanted:
            inputs["logits_to_keep"] = wanted
        logits: Tensor = self._model(**inputs).logits
        return logits

    def _token_by_token(self, batch: Batch, components: Sequence[str]) -> Tensor:
        """Compute one token at a time, and keep the state after each in the ``singles`` of these components.

        transformers' kernels return the last state only, and some of them cannot start from one with several tokens.
        """
        wanted = []
        for at in range(batch.count):
            spans = [attrs.evolve(span, start=span.start + at, end=span.start + at + 1) for span in batch.spans]
            keep = int(at >= batch.count - batch.wanted)
            one = attrs.evolve(batch, tokens=batch.tokens[:, at : at + 1], spans=spans, singles={}, wanted=keep)
            wanted.append(self._run(one))
            for name in components:
                source, target = batch.tables[name][:, 0].long(), batch.singles[name][:, at].long()
                for content in self._cache.pool(name).buffers.values():
                    content.index_copy_(1, target, content.index_select(1, source))
        return torch.cat(wanted, dim=1)


def joined(alike: Iterable[list[int]], spans: Sequence[Span]) -> list[list[int]]:
    """Join groups of rows of equal count, those with the most tokens first, where padding costs less than a pass."""
    out: list[list[int]] = []
    for rows in sorted(alike, key=lambda rows: -spans[rows[0]].count):
        together = [*out[-1], *rows] if out else rows
        if out and padding(together, spans) - padding(out[-1], spans) - padding(rows, spans) <= PASS_TOKENS:
            out[-1] = together
        else:
            out.append(rows)
    return out


def padding(rows: Sequence[int], spans: Sequence[Span]) -> float:
    """Return how many tokens could be computed in the time that padding takes in a pass over these rows."""
    count = max(spans[row].count for row in rows)
    longest = max(spans[row].end for row in rows)
    return sum(count - spans[row].count + count * (longest - spans[row].end) / TOKEN_PAIRS for row in rows)


def learned_positions(model: Any) -> int | None:
    """Return for how many positions a text model has a table of embeddings; None if it has no such table."""
    tables = [
        module.num_embeddings - int(getattr(module, "offset", 0))
        for name, module in model.get_decoder().named_modules()
        if isinstance(module, torch.nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES
    ]
    return min(tables, default=None)


def scans_from_zero(model: Any) -> bool:
    """Return whether transformers starts a scan of this model from zero if several tokens continue from a state.

    That is so in its code of selective scans (Mamba's first generation), whose decay is a matrix of channels and
    states; it is right from zero on, and for single tokens. Every later recurrence has one decay for each head.
    """
    decays = (getattr(module, "A_log", None) for module in model.modules())
    return any(decay is not None and sum(size > 1 for size in decay.shape) > 1 for decay in decays)
