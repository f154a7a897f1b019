"""What the engine needs of a model.

A ``Model`` has weights and a config and knows no cache. Bound to a composed cache it is a ``Runner``: layers that read
and write the pools of this cache, and remember nothing anywhere else. The engine plans in one thread and never looks at
a tensor; ``Runner.forward`` runs on the forward stream (a worker thread on a CPU, a CUDA stream elsewhere), after the
step's ops and after the forward of the step before. So everything in a ``Batch`` that a plan knows is a plain number,
and everything that only the device knows (which token was sampled) is a tensor.

How a runner finds memory, for a row r of a batch and a position p:

- a page component (``binding.layer_memories`` says which one serves a layer): ``tables[name][r, p // page_tokens]`` is
  the page, ``memory.rows[page, p % page_tokens]`` the entry. Entries from ``spans[r].start`` on are the runner's to
  write, those before it to read. -1 is an absent page: a window that has moved on. It is never read: a layer reads
  what its reach says, no more.
- a state component: ``tables[name][r, 0]`` is the slot of the running state, read at the begin and written in place at
  the end of the forward. Before position 0 it holds zeros. Where ``singles[name]`` has at least as many columns as the
  span has tokens, ``singles[name][r, i]`` is the slot for the state after token i of the span as well: speculation
  takes the sequence back to one of them. A kernel that cannot stop in between runs such spans one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    from torch import Tensor

    from prefixloom import Cache


@attrs.frozen
class Span:
    """The positions [start, end) that one forward pass computes of one sequence; at least one."""

    start: int
    end: int

    @property
    def count(self) -> int:
        return self.end - self.start


def no_gate(layer: int) -> None:
    """Nothing is on its way."""


@attrs.frozen(eq=False)
class Batch:
    """One forward pass over rows of equal ``count``; how they are grouped is the runner's own ``groups``.

    ``tokens``  (rows, count), int64: the ids of the tokens that are computed
    ``spans``   their positions, row by row, known without asking the device
    ``tables``  by component, int32, to be read only: page numbers (rows, longest) by ``position // page_tokens``, -1
                where absent; of a state component the slot of the running state (rows, 1)
    ``singles`` of state components of a composition with a rewind depth k: slots (rows, k + 1) for the state after
                each token, to be written where ``count <= k + 1``. Empty without such a depth
    ``wanted``  logits are asked for of the last so many tokens of each row; 0: of none
    ``gate``    to be called with a layer's number before this layer first touches its memory. It waits, on the forward
                stream, for what a lower tier still loads into it
    """

    tokens: Tensor
    spans: Sequence[Span]
    tables: Mapping[str, Tensor]
    singles: Mapping[str, Tensor] = attrs.field(factory=dict)
    wanted: int = 1
    gate: Callable[[int], None] = no_gate

    @property
    def count(self) -> int:
        """Tokens of each row."""
        return self.spans[0].count

    @property
    def longest(self) -> int:
        """Where the longest row ends: how far a table is read."""
        return max(span.end for span in self.spans)


@runtime_checkable
class Runner(Protocol):
    """A model whose layers are bound to the buffers of one cache. It has no state of its own between two batches.

    A runner with an attribute ``drafter`` that is not None has a draft beside it (``drafting.Drafter``).
    """

    def groups(self, spans: Sequence[Span]) -> list[list[int]]:
        """The rows (their indices into ``spans``) that may go through one forward pass together, pass by pass.

        Each group becomes a ``Batch``: its spans are of equal count. A runner that batches less than ``by_count``
        does (one request at a time where it has more than one token, say) returns smaller groups; a span that it cannot
        compute at all it refuses with an ``InputError`` that says why.
        """

    def forward(self, batch: Batch) -> Tensor:
        """Compute the batch, layer by layer, and leave what the layers remember in the pools.

        Returns logits, (rows, ``batch.wanted``, vocabulary). Called on the forward stream, one batch at a time and in
        the order of the plan. It allocates its own working memory, waits for nothing but the ``gate``, reads nothing
        back to the host on CUDA, and keeps no reference to the batch's tensors.
        """


@runtime_checkable
class Model(Protocol):
    """Weights and a config."""

    @property
    def config(self) -> object:
        """What ``prefixloom.compose`` takes: a config dict or object, the path of one, or a ``Profile``.

        From it come the components, so it must list every layer that remembers something.
        """

    @property
    def vocabulary(self) -> int:
        """Token ids are from 0 up to it."""

    @property
    def stops(self) -> frozenset[int]:
        """Token ids that end an answer unless a request says otherwise; may be empty."""

    def bind(self, cache: Cache) -> Runner:
        """The model over the memory of ``cache``, which was composed from ``config``.

        Everything that cannot work is refused here, before a request comes, by a ``CompositionError`` that names the
        layer and the reason: a layer that no component serves, buffers of another shape or dtype than the layer writes,
        an architecture that is known to be wrong when it goes on from a restored state. Binding allocates nothing that
        has to be given back, and a model may be bound to several caches.
        """


def by_count(spans: Sequence[Span]) -> list[list[int]]:
    """The usual groups: all rows of the same number of tokens together, in the order in which they come.

    A batch of rows of different counts would need padding, which windows and recurrences read as tokens.
    """
    found: dict[int, list[int]] = {}
    for row, span in enumerate(spans):
        found.setdefault(span.count, []).append(row)
    return list(found.values())
