"""The arithmetic that the toy model's layers share: weights, norms, rotary positions and attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def weights(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    """Return a random float64 matrix, about normal(0, 0.2) at a width of 32; the same for the same generator.

    The weights are large on purpose: a wrong cache entry moves the logits clearly, and rounding does not.
    """
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).mul(1.2 / rows**0.5)


def normed(x: Tensor) -> Tensor:
    """Return the rows of ``x``, each scaled to a mean square of 1."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def rotary(x: Tensor, start: int) -> Tensor:
    """Apply rotary positions, beginning at ``start``, to ``x`` (rows, heads, width)."""
    half = x.shape[-1] // 2
    frequencies = 100.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(start, start + len(x), dtype=x.dtype, device=x.device)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, start: int, first: int, lows: list[int] | None = None) -> Tensor:
    """Return causal attention. The queries begin at position ``start``, and the keys and values at position ``first``.

    ``lows``: the first position that each query sees; by default every query sees all.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    rows = torch.arange(start, start + len(q), device=q.device)[:, None]
    columns = torch.arange(first, first + len(k), device=q.device)
    hidden = columns > rows
    if lows is not None:
        hidden = hidden | (columns < torch.tensor(lows, device=q.device)[:, None])
    return torch.einsum("hqk,khd->qhd", functional.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1), v)
