"""The layers of ``ThreeWay``: attention over everything or over a window, and a gated delta rule.

A layer has weights alone. What it remembers it reads and writes through a ``Place``: the memory of one layer in the
pools, and where in it the rows of a batch have theirs.
"""

from __future__ import annotations

import itertools

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from .binding import LayerMemory
from .delta import CHUNK, by_chunks, by_tokens
from .model import Batch


@attrs.frozen
class Sizes:
    """The widths of a ``ThreeWay``; ``layers`` are kinds in the words of model configs."""

    layers: tuple[str, ...]
    hidden: int
    heads: int
    kv_heads: int
    width: int
    """Of a head of attention."""
    inner: int
    """Of the gated linear unit behind each layer."""
    vocabulary: int
    window: int
    delta_heads: int
    delta_width: int
    """Of keys and values of the delta rule, both."""
    kernel: int = 4
    """Tokens that the short convolution sees, its own included."""
    mixing: float = 1.0
    """How much a layer adds to what came before. Little of it, and an answer soon repeats itself."""

    @property
    def channels(self) -> int:
        """Of the short convolution: queries, keys and values."""
        return 3 * self.delta_heads * self.delta_width


class Weights:
    """Seeded random matrices that keep the size of what goes through them."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype, self._device = dtype, device
        self.count = 0

    def __call__(self, *shape: int, gain: float = 1.0) -> Tensor:
        made = torch.randn(shape, generator=self._generator, dtype=torch.float32)
        self.count += made.numel()
        return made.mul(float(gain / shape[0] ** 0.5)).to(self._dtype).to(self._device)


def normed(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def rotary(x: Tensor, positions: Tensor) -> Tensor:
    """Turn each pair of (rows, tokens, heads, width) by its position's angles."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = (positions[..., None].to(torch.float64) * rates)[:, :, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention:
    """Causal attention with grouped heads and rotary positions; ``window`` counts the query itself, 0: everything."""

    buffers = ("k", "v")

    def __init__(self, sizes: Sizes, window: int, weights: Weights) -> None:
        self.sizes, self.window = sizes, window
        self.to_qkv = weights(sizes.hidden, (sizes.heads + 2 * sizes.kv_heads) * sizes.width, gain=1.5)
        self.to_x = weights(sizes.heads * sizes.width, sizes.hidden, gain=sizes.mixing)

    def forward(self, x: Tensor, batch: Batch, memory: LayerMemory) -> Tensor:
        sizes, (rows, count, _) = self.sizes, x.shape
        starts = torch.tensor([span.start for span in batch.spans], device=x.device)
        positions = starts[:, None] + torch.arange(count, device=x.device)
        mixed = (x @ self.to_qkv).view(rows, count, -1, sizes.width)
        q, k, v = torch.split(mixed, [sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=2)
        q, k = rotary(q, positions), rotary(k, positions)
        table = batch.tables[memory.component]
        pages = table.gather(1, positions // memory.page_tokens).long()
        for name, entries in (("k", k), ("v", v)):
            memory.rows[name][pages, positions % memory.page_tokens] = entries
        out = torch.empty_like(q)
        for first, last in _tiles(batch):
            out[:, first:last] = self._attend(q[:, first:last], positions[:, first:last], batch, last, memory)
        return out.flatten(2) @ self.to_x

    def _attend(self, q: Tensor, positions: Tensor, batch: Batch, last: int, memory: LayerMemory) -> Tensor:
        """Of queries up to the ``last`` of the batch's, over the entries that the pages hold."""
        size, count = memory.page_tokens, q.shape[1]
        ends = [span.start + last for span in batch.spans]
        lows = [max(0, end - count - self.window + 1) // size if self.window else 0 for end in ends]
        width = max(-(-end // size) - low for end, low in zip(ends, lows, strict=True))
        table = batch.tables[memory.component]
        at = torch.tensor(lows, device=q.device)[:, None] + torch.arange(width, device=q.device)
        pages = table.gather(1, at.clamp(max=table.shape[1] - 1)).long().clamp(min=0)
        seen = (at[:, :, None] * size + torch.arange(size, device=q.device)).flatten(1)[:, None]
        hidden = seen > positions[:, :, None]
        if self.window:
            hidden |= seen <= positions[:, :, None] - self.window
        k, v = (memory.rows[name][pages].flatten(1, 2).permute(0, 2, 1, 3) for name in ("k", "v"))
        if len(ends) == 1:  # behind a row's end lies anything, and 0 times that need not be 0
            written = ends[0] - lows[0] * size
            k, v, hidden = k[:, :, :written], v[:, :, :written], hidden[:, :, :written]
        else:
            v = v.masked_fill(hidden.all(1)[:, None, :, None], 0)
        kv_heads, width, rows = self.sizes.kv_heads, self.sizes.width, len(q)
        grouped = q.reshape(rows, count, kv_heads, -1, width).permute(0, 2, 3, 1, 4)
        scores = (grouped.flatten(2, 3) @ k.transpose(-1, -2)).view(rows, kv_heads, -1, count, k.shape[2])
        weights = (scores * float(width**-0.5)).masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
        mixed = (weights.flatten(2, 3) @ v).view(rows, kv_heads, -1, count, width)
        return mixed.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _tiles(batch: Batch) -> list[tuple[int, int]]:
    """A prompt's queries in tiles that end on multiples of ``CHUNK``, so that a cut there changes no sum."""
    start, count = batch.spans[0].start, batch.count
    if count <= CHUNK and start % CHUNK + count <= CHUNK:
        return [(0, count)]
    if any((span.start - start) % CHUNK for span in batch.spans):
        return [(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]
    return list(itertools.pairwise((0, *range(CHUNK - start % CHUNK, count, CHUNK), count)))


class Delta:
    """A gated delta rule behind a short convolution, as in Qwen3-Next; states in the dtype of the model."""

    buffers = ("conv", "recurrent")

    def __init__(self, sizes: Sizes, weights: Weights) -> None:
        self.sizes = sizes
        self.to_channels = weights(sizes.hidden, sizes.channels)
        self.to_gates = weights(sizes.hidden, 2 * sizes.delta_heads)
        self.kernel = weights(sizes.kernel, sizes.channels)
        self.to_x = weights(sizes.delta_heads * sizes.delta_width, sizes.hidden, gain=sizes.mixing)

    def forward(self, x: Tensor, batch: Batch, memory: LayerMemory) -> Tensor:
        slots = batch.tables[memory.component][:, 0].long()
        singles = batch.singles.get(memory.component)
        if singles is not None and not batch.count <= singles.shape[1]:
            singles = None
        mixed = functional.silu(self._convolve(x @ self.to_channels, slots, singles, memory.rows["conv"]))
        shape = (len(x), batch.count, 3, self.sizes.delta_heads, self.sizes.delta_width)
        heads = mixed.reshape(shape).permute(2, 0, 3, 1, 4)
        q, k = (functional.normalize(part, dim=-1) for part in (heads[0], heads[1]))
        rate, slow = (x @ self.to_gates).transpose(1, 2).chunk(2, dim=1)
        decay = functional.logsigmoid(slow) * 0.2  # so slow that a state tells of its whole prefix
        rows = memory.rows["recurrent"]
        state = rows[slots]
        if singles is None and batch.count > 1:
            read, state = by_chunks(q, k, heads[2], decay, rate.sigmoid(), state)
        else:
            read, states = by_tokens(q, k, heads[2], decay, rate.sigmoid(), state)
            state = states[-1]
            if singles is not None:
                for token, after in enumerate(states):
                    rows[singles[:, token].long()] = after
        rows[slots] = state
        return read.transpose(1, 2).flatten(2) @ self.to_x

    def _convolve(self, x: Tensor, slots: Tensor, singles: Tensor | None, rows: Tensor) -> Tensor:
        """Each channel with its own last inputs; the state is these, the newest included."""
        width, count = self.sizes.kernel, x.shape[1]
        inputs = torch.cat((rows[slots][:, :, 1:], x.transpose(1, 2)), dim=-1)
        out = inputs[:, :, :count] * self.kernel[0][:, None]
        for tap in range(1, width):
            out = out + inputs[:, :, tap : tap + count] * self.kernel[tap][:, None]
        if singles is not None:
            for token in range(count):
                rows[singles[:, token].long()] = inputs[:, :, token : token + width]
        rows[slots] = inputs[:, :, count - 1 :]
        return out.transpose(1, 2)
