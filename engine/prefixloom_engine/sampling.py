"""Sampling: the next token of each row, on the device, with nothing read back.

What is drawn depends on a request's seed and the position alone, so that it is the same in any batch, ahead or not,
with a cache or without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def choose(logits: Tensor, temperatures: Sequence[float], seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """One token for each row and each asked position: logits (rows, wanted, vocabulary) -> (rows, wanted), int64.

    ``positions``: of each row the position of the first token that is chosen.
    """
    chosen = logits.argmax(-1)
    for row, temperature in enumerate(temperatures):
        if temperature:
            for i in range(logits.shape[1]):
                noise = _noise(seeds[row], positions[row] + i, logits.shape[-1]).to(logits.device)
                chosen[row, i] = (logits[row, i].to(torch.float64) / temperature + noise).argmax()
    return chosen


def _noise(seed: int, position: int, count: int) -> Tensor:
    """Gumbel noise: the largest of logits / temperature + noise is a draw from their softmax."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + position) & 0x7FFFFFFFFFFFFFFF)
    uniform = torch.rand(count, generator=generator, dtype=torch.float64).clamp(min=1e-300)
    return -(-uniform.log()).log()
