"""What the engine needs from a model.

A ``Model`` has weights and a config, and knows no cache. ``Model.bind(cache)`` returns a ``Runner``: the model's
layers, which read and write the pools of this cache and keep nothing anywhere else.

The engine plans in one thread and never reads a tensor. ``Runner.forward`` runs on the forward stream (a worker thread
on a CPU, a CUDA stream elsewhere), after the ops of the step and after the forward pass of the step before. So
everything in a ``Batch`` that the planning thread knows is a plain number, and everything that only the device knows
(such as a sampled token) is a tensor.

How a runner finds the memory of row r of a batch at position p:

- Of a component with pages (``memory.layer_memories`` says which one serves a layer), ``tables[name][r, p //
  page_tokens]`` is the page and ``memory.rows[page, p % page_tokens]`` the entry. The runner writes the entries from
  ``spans[r].start`` on and reads those before. -1 is an absent page, one that a window has left behind. No layer reads
  it, since a layer reads only what the component's reach covers.
- Of a component with states, ``tables[name][r, 0]`` is the slot of the running state. The runner reads it at the
  beginning of the forward pass and writes it in place at the end. At position 0 the slot holds zeros. Where
  ``singles[name]`` has at least as many columns as the span has tokens, the runner also writes the state after token i
  of the span into slot ``singles[name][r, i]``: speculation rewinds the sequence to one of them. A kernel that cannot
  stop within a span computes such a span one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from torch import Tensor

    from prefixloom import Cache, Identity


@attrs.define(eq=False)
class Media:
    """What a prompt carries beside its tokens, such as images. A model makes it, and its runner reads it.

    ``extra``  spans (start, end, key): what is remembered of these positions depends on this key as well. They are in
               the key under which the cache keeps the sequence
    ``whole``  spans (start, end) whose tokens see each other, the later ones too: a pass that begins such a span must
               not end inside it
    """

    extra: Sequence[tuple[int, int, str]]
    whole: Sequence[tuple[int, int]] = ()

    def pass_end(self, start: int, end: int) -> int:
        """Return where a pass from ``start`` may end: at ``end``, or before or behind the span that it would cut."""
        for first, last in self.whole:
            if first < end < last:
                return first if first > start else last
        return end


@attrs.frozen
class Span:
    """The positions [start, end) of one sequence that one forward pass computes; at least one position.

    ``media``: what the sequence's prompt carries beside its tokens; None: nothing.
    """

    start: int
    end: int
    media: Media | None = None

    @property
    def count(self) -> int:
        return self.end - self.start


def no_gate(layer: int) -> None:
    """Wait for nothing, as the ``Batch.gate`` of a batch without gates."""


@attrs.frozen(eq=False)
class Batch:
    """One forward pass over rows. ``Runner.groups`` decides which rows go together.

    ``tokens``  (rows, count), int64: the ids of the tokens that are computed. If the runner has put rows with
                different numbers of tokens together, rows are aligned at their ends, with zeros before shorter ones
    ``spans``   the positions of these tokens, row by row; known without asking the device
    ``tables``  by component, int32, read only. Of a component with pages: page numbers (rows, longest), indexed by
                ``position // page_tokens``, -1 where absent. Of a component with states: the slot of the running state
                (rows, 1)
    ``singles`` by component with states, in a composition with ``max_rewind`` k: slots (rows, k + 1) for the state
                after each token, to be written where ``count <= k + 1``. Empty without ``max_rewind``
    ``wanted``  the runner returns logits of this many tokens at the end of each row; 0: of none
    ``gate``    a runner calls it with a layer's number before this layer first touches its memory. It waits, on the
                forward stream, for what a lower tier still loads into that memory
    """

    tokens: Tensor
    spans: Sequence[Span]
    tables: Mapping[str, Tensor]
    singles: Mapping[str, Tensor] = attrs.field(factory=dict)
    wanted: int = 1
    gate: Callable[[int], None] = no_gate

    @property
    def count(self) -> int:
        """How many tokens the row with the most has."""
        return self.tokens.shape[1]

    @property
    def longest(self) -> int:
        """The position at which the longest row ends, and so how far a table is read."""
        return max(span.end for span in self.spans)


@runtime_checkable
class Runner(Protocol):
    """A model whose layers are bound to the buffers of one cache. It keeps no state of its own between two batches.

    A runner may have an attribute ``drafter``: a ``Drafter``, or None.
    """

    def groups(self, spans: Sequence[Span]) -> list[list[int]]:
        """Group rows that may go through one forward pass together; rows are given as indices into ``spans``.

        Each group becomes one ``Batch``. Spans of different counts may go together only if the runner can compute the
        shorter ones behind padding. A runner that batches less than ``by_count`` does (for example one request at a
        time where a span has more than one token) returns smaller groups. A runner refuses a span that it cannot
        compute with an ``InputError`` that gives the reason.
        """

    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch layer by layer, and write into the pools what the layers have to remember.

        Returns logits of shape (rows, ``batch.wanted``, vocabulary). The engine calls it on the forward stream, one
        batch at a time, in the order of the plan. The runner allocates its own working memory, waits for nothing but
        ``batch.gate``, copies nothing from CUDA to the host, and keeps no reference to the batch's tensors.
        """


@runtime_checkable
class Drafter(Protocol):
    """A runner with a draft model beside it; both are bound to one cache. It is the ``drafter`` of a ``Runner``."""

    @property
    def width(self) -> int:
        """The width of the hidden vector that the model leaves at each position."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute as ``Runner.forward`` does; also return the hidden vectors of all tokens, (rows, count, width)."""

    def draft(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Write the draft's entries of the batch's positions, and guess what follows.

        The entry of position p is made of ``hidden`` at p and of the token at p + 1. ``batch.tokens`` holds the tokens
        at p + 1. Returns the logits of the tokens at p + 2, (rows, wanted, vocabulary), and the vectors that stand in
        for ``hidden`` at p + 1, (rows, count, width).
        """


@runtime_checkable
class Identified(Protocol):
    """A model that says what its content depends on beside the tokens.

    What is computed under one identity is never found under another. Of a model that is not ``Identified``, an engine
    assumes that it never changes and that no other one uses the cache, and hands nothing over to another process.
    """

    @property
    def identity(self) -> Identity:
        """The identity of the model as it is. The engine asks for it at every request."""

    def changed(self) -> bool:
        """Return whether the identity may have changed since it was last read.

        The engine asks before every step, so this must be cheap.
        """


@runtime_checkable
class Multimodal(Protocol):
    """A model whose prompts may carry more than tokens, such as images."""

    def media(self, tokens: Sequence[int], inputs: Mapping[str, object]) -> Media:
        """Return what ``inputs``, made by the model's own processor, add to a prompt.

        Inputs that do not fit the tokens, or that the model does not take, are refused with an ``InputError``. This
        runs in the planning thread, so it encodes nothing: a runner does so in the first pass that needs it.
        """


@runtime_checkable
class Trained(Protocol):
    """A model that says for how long a sequence it was made."""

    @property
    def context(self) -> int | None:
        """How many tokens a prompt and its answer may have together; None: the model does not say."""


@runtime_checkable
class Model(Protocol):
    """Weights and a config. A model may be ``Identified``, and should; it may be ``Multimodal`` or ``Trained``."""

    @property
    def config(self) -> object:
        """What ``prefixloom.compose`` takes: a config dict or object, the path of a config, or a ``Profile``.

        The components are derived from it, so it must list every layer that remembers something.
        """

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary; token ids are from 0 up to it."""

    @property
    def stops(self) -> frozenset[int]:
        """The token ids that end an answer unless the request names others; may be empty."""

    def bind(self, cache: Cache) -> Runner:
        """Bind the model's layers to the memory of ``cache``, which was composed from ``config``.

        A model refuses here, before any request comes, everything that cannot work: a layer that no component serves,
        buffers of another shape or dtype than the layer writes, an architecture that is known to compute wrong results
        from a restored state. It raises a ``CompositionError`` that names the layer and the reason. Binding allocates
        nothing that has to be freed, and a model may be bound to several caches.
        """


def by_count(spans: Sequence[Span]) -> list[list[int]]:
    """Group all rows with the same number of tokens, in the order of arrival: the usual ``Runner.groups``.

    A batch of rows with different counts would need padding, which windows and recurrences would read as tokens.
    """
    found: dict[int, list[int]] = {}
    for row, span in enumerate(spans):
        found.setdefault(span.count, []).append(row)
    return list(found.values())
