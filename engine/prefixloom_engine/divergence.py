"""Divergence: how far what a model says next is from what it says without a cache, token by token."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

LIMIT = 1e-8
"""Of the divergence at any token in float32, in nats; measured over 200 requests: 1.5e-10 at most."""
CONTROL = 100
"""So many times what was measured, at least, is what one lost piece of memory does."""


def divergence(found: Tensor, expected: Tensor) -> Tensor:
    """KL(expected, found) of every row, in float64, so that only what was computed is rounded."""
    ours, right = (logits.double().log_softmax(-1) for logits in (found, expected))
    return (right.exp() * (right - ours)).sum(-1).clamp(min=0)


@attrs.define
class Compared:
    """``most`` and ``mean`` of the divergence; ``agreed``: tokens at which both would say the same next.

    ``control``: the divergence of a hit of which a piece of memory was zeroed.
    """

    requests: int = 0
    tokens: int = 0
    agreed: int = 0
    most: float = 0.0
    total: float = 0.0
    hit: int = 0
    evicted: int = 0
    control: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1)

    def sound(self) -> bool:
        return self.most < LIMIT and self.control > CONTROL * self.most

    def compare(self, found: Tensor, expected: Tensor) -> None:
        apart = divergence(found, expected)
        self.most = max(self.most, float(apart.max()))
        self.total += float(apart.sum())
        self.tokens += len(apart)
        self.agreed += int(torch.eq(found.argmax(-1), expected.argmax(-1)).sum())
