"""The gated delta rule: chunk by chunk for many tokens, token by token for few. Both give the same result.

The state of a head is a matrix S from keys to values. A token with key k, value v, decay a and rate b updates it with
``S = a * S`` and then ``S = S + k (b * (v - k S))``, and outputs ``q S``. Over a chunk of C tokens these updates form a
triangular system of C unknowns, which ``by_chunks`` solves (Yang et al., Gated Delta Networks).
Shapes: q, k (rows, heads, tokens, key width), v (rows, heads, tokens, value width), decay and rate (rows, heads,
tokens). ``decay`` is the logarithm of the decay.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64
"""How many tokens a chunk has. A prompt that is cut at multiples of it has the same chunks as an uncut one."""


def by_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of all tokens, and the state after the last."""
    tokens = q.shape[2]
    out = torch.empty_like(v)
    whole = tokens // CHUNK * CHUNK
    for first, last, size in ((0, whole, CHUNK), (whole, tokens, tokens - whole)):
        if last > first:
            cut = [each[:, :, first:last].unfold(2, size, size) for each in (decay, rate)]
            wide = [each[:, :, first:last].unfold(2, size, size).transpose(-1, -2) for each in (q, k, v, out)]
            state = _chunks(wide[0], wide[1], wide[2], cut[0], cut[1], state, wide[3])
    return out, state


def _chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor, out: Tensor) -> Tensor:
    """Compute chunks of equal size, (rows, heads, chunks, size, width), into ``out``; return the last state."""
    size = q.shape[3]
    total = decay.cumsum(-1)  # the decay from the beginning of the chunk to after each token
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    weighted = k * rate[..., None]
    system = (weighted @ k.transpose(-1, -2) * between).tril(-1)
    known = torch.cat((v * rate[..., None], weighted * total.exp()[..., None]), dim=-1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    seen = q @ k.transpose(-1, -2) * between
    read, left = q * total.exp()[..., None], k * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()
    for chunk in range(q.shape[2]):
        fresh = values[:, :, chunk] - keys[:, :, chunk] @ state
        out[:, :, chunk] = read[:, :, chunk] @ state + seen[:, :, chunk] @ fresh
        state = state * kept[:, :, chunk, None, None] + left[:, :, chunk].transpose(-1, -2) @ fresh
    return state


def by_tokens(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of all tokens, and the state after each."""
    kept = decay.exp()
    out, states = torch.empty_like(v), []
    for token in range(q.shape[2]):
        state = state * kept[:, :, token, None, None]
        key = k[:, :, token, None, :]
        fresh = rate[:, :, token, None, None] * (v[:, :, token, None, :] - key @ state)
        state = state + key.transpose(-1, -2) * fresh
        out[:, :, token] = (q[:, :, token, None, :] @ state)[:, :, 0]
        states.append(state)
    return out, states
