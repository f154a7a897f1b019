"""Weights of the toy model: random, the same for the same generator, and strong.

A wrong entry moves the logits; rounding does not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weights(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    """A matrix of float64, about normal(0, 0.2) at a width of 32."""
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).mul(1.2 / rows**0.5)
