"""``ThreeWay``: the built-in model, with layers of full attention, of a sliding window and of a gated delta rule.

Its weights are random numbers from a seed, so nothing has to be downloaded. Its answers mean nothing, but each token
depends on every token before. Everything that its layers remember lies in the pools of the cache that it is bound to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from prefixloom import Cache, ComponentSpec, CompositionError, Identity, InputError, Profile

from ..contract.memory import LayerMemory, memory_with
from ..contract.model import Batch, Span, by_count
from ..contract.weights import WatchedWeights, combined
from .delta_rule import CHUNK
from .layers import Attention, DeltaRule, Sizes, Weights, normed

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
PATTERN = (LINEAR, SLIDING, LINEAR, FULL)
SIZES: Mapping[str, Sizes] = {
    "tiny": Sizes((LINEAR, SLIDING, FULL), 64, 4, 2, 16, 160, 512, 40, 4, 16),
    "small": Sizes(PATTERN, 192, 6, 2, 32, 512, 2048, 96, 6, 32),
    "medium": Sizes(PATTERN * 2, 384, 6, 2, 64, 1024, 4096, 256, 6, 64),
    "large": Sizes(PATTERN * 3, 768, 12, 4, 64, 1792, 4096, 256, 12, 64),
}
"""The named sizes: about 0.2, 2.5, 17 and 80 million parameters."""


class DecoderLayer:
    """A mixing layer (attention or delta rule) and a gated linear unit after it, each on a residual connection."""

    def __init__(self, kind: str, sizes: Sizes, weights: Weights) -> None:
        self.mixer: Attention | DeltaRule
        if kind == LINEAR:
            self.mixer = DeltaRule(sizes, weights)
        elif kind in (FULL, SLIDING):
            self.mixer = Attention(sizes, sizes.window if kind == SLIDING else 0, weights)
        else:
            raise CompositionError(f"ThreeWay has layers of {FULL}, {SLIDING} and {LINEAR}, not {kind!r}")
        self.up = weights(sizes.hidden, 2 * sizes.inner)
        self.down = weights(sizes.inner, sizes.hidden, gain=sizes.mixing)

    def forward(self, x: Tensor, batch: Batch, memory: LayerMemory) -> Tensor:
        x = x + self.mixer.forward(normed(x), batch, memory)
        gate, up = (normed(x) @ self.up).chunk(2, dim=-1)
        return x + functional.silu(gate) * up @ self.down


class Draft:
    """The draft model: one decoder layer that guesses from the model's hidden vector at a position and the next token.

    Where ``Sizes.mixing`` is small, the token itself dominates both the model's output and the draft's. So the less
    mixing there is, the better the guesses.
    """

    def __init__(self, sizes: Sizes, weights: Weights) -> None:
        self.block = DecoderLayer(FULL, sizes, weights)
        self.to_x = weights(sizes.hidden, sizes.hidden, gain=sizes.mixing)


class ThreeWay:
    """The built-in ``Model`` of the engine.

    ``size``   a name in ``SIZES``, or a ``Sizes`` of the caller's
    ``draft``  whether a draft model (``Drafter``) guesses tokens; it has a component of its own
    """

    def __init__(
        self,
        size: str | Sizes = "small",
        *,
        dtype: str = "float32",
        seed: int = 0,
        device: str = "cpu",
        draft: bool = False,
    ) -> None:
        if dtype not in ("float32", "float64"):
            raise InputError(f"ThreeWay computes in float32 or float64, got {dtype!r}")
        if not isinstance(size, Sizes) and size not in SIZES:
            raise InputError(f"a size of ThreeWay is one of {', '.join(SIZES)}, or Sizes(...); got {size!r}")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            told = str(error).partition("\n")[0]
            raise InputError(f"ThreeWay cannot be put on device {device!r}: {told}") from error
        self.sizes = SIZES[size] if isinstance(size, str) else size
        self.dtype, self.device = dtype, device
        weights = Weights(seed, getattr(torch, dtype), device)
        self.embedding = weights(self.sizes.vocabulary, self.sizes.hidden, gain=self.sizes.vocabulary**0.5)
        self.blocks = [DecoderLayer(kind, self.sizes, weights) for kind in self.sizes.layers]
        self.to_logits = weights(self.sizes.hidden, self.sizes.vocabulary, gain=2.0)
        self.draft = Draft(self.sizes, weights) if draft else None
        self.parameters = weights.count
        self._weights = WatchedWeights(partial(_numbered, weights.made))  # a copy of the model watches its own
        self._identity: Identity | None = None

    @property
    def identity(self) -> Identity:
        if self._identity is None or not self._weights.same():
            weights = combined(self._weights.digests().items())
            self._identity = Identity(model=f"ThreeWay {self.sizes}", weights=weights, precision=self.dtype)
        return self._identity

    def changed(self) -> bool:
        return not self._weights.seem_same()

    @property
    def vocabulary(self) -> int:
        return self.sizes.vocabulary

    @property
    def stops(self) -> frozenset[int]:
        return frozenset()

    @property
    def config(self) -> Profile:
        """One component for each kind of layer, and one for the draft model.

        While decoding, a state is kept at every multiple of ``CHUNK``. So the next turn of a conversation hits its
        whole history, rounded down to a multiple of ``CHUNK``.
        """
        sizes = self.sizes
        numbers = {
            kind: [at for at, each in enumerate(sizes.layers) if each == kind] for kind in dict.fromkeys(PATTERN)
        }
        heads = {"kv_heads": sizes.kv_heads, "k_dim": sizes.width, "dtype": self.dtype}
        recurrent = (sizes.delta_heads, sizes.delta_width, sizes.delta_width)
        state = {"conv": (sizes.channels, sizes.kernel), "recurrent": recurrent, "state_dtype": self.dtype}
        options = {
            FULL: ("full", heads),
            SLIDING: ("swa", {**heads, "window": sizes.window}),
            LINEAR: ("mamba", {**state, "dtype": self.dtype, "grid": CHUNK, "checkpoint_every": CHUNK}),
        }
        specs = [
            ComponentSpec(kind, options={"layers": numbers[layer], **more})
            for layer, (kind, more) in options.items()
            if numbers[layer]
        ]
        if self.draft is not None:
            number = len(sizes.layers)
            specs.append(ComponentSpec("full", "draft", {"layers": [number], "lookahead": 1, **heads}))
        return Profile(specs, page_size=16, name="ThreeWay")

    def bind(self, cache: Cache) -> BoundThreeWay:
        blocks = [*self.blocks, self.draft.block] if self.draft is not None else self.blocks
        return BoundThreeWay(self, [self._memory(cache, number, block) for number, block in enumerate(blocks)])

    def _memory(self, cache: Cache, number: int, block: DecoderLayer) -> LayerMemory:
        memory = memory_with(cache, number, *block.mixer.buffers)
        for name, rows in memory.rows.items():
            if rows.dtype != self.embedding.dtype or rows.device != self.embedding.device:
                raise CompositionError(
                    f"layer {number} writes {name!r} in {self.dtype} on {self.device}, and component "
                    f"{memory.component!r} keeps it in {rows.dtype} on {rows.device}"
                )
        return memory


def _numbered(tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    return [(str(at), each) for at, each in enumerate(tensors)]


@attrs.frozen(eq=False)
class BoundThreeWay:
    """``ThreeWay`` over the pools of one cache."""

    model: ThreeWay
    memories: Sequence[LayerMemory]

    def groups(self, spans: Sequence[Span]) -> list[list[int]]:
        return by_count(spans)

    def forward(self, batch: Batch) -> Tensor:
        return self.logits(self.hidden(batch), batch)

    def hidden(self, batch: Batch) -> Tensor:
        """Return the hidden vectors after the last layer, of all tokens."""
        x = self.model.embedding[batch.tokens]
        for number, (block, memory) in enumerate(zip(self.model.blocks, self.memories, strict=False)):
            batch.gate(number)
            x = block.forward(x, batch, memory)
        return x

    def logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        return normed(hidden[:, batch.count - batch.wanted :]) @ self.model.to_logits

    @property
    def drafter(self) -> BoundDraft | None:
        return None if self.model.draft is None else BoundDraft(self, self.model.draft)


@attrs.frozen(eq=False)
class BoundDraft:
    """The draft model of a bound ``ThreeWay``: its ``Drafter``."""

    bound: BoundThreeWay
    draft_model: Draft

    @property
    def width(self) -> int:
        return self.bound.model.sizes.hidden

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = self.bound.hidden(batch)
        return self.bound.logits(hidden, batch), hidden

    def draft(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        batch.gate(len(self.bound.model.blocks))
        x = self.bound.model.embedding[batch.tokens] + normed(hidden) @ self.draft_model.to_x
        out = self.draft_model.block.forward(x, batch, self.bound.memories[-1])
        return self.bound.logits(out, batch), out
