"""The layers of ``ThreeWay``: attention over everything or over a window, and a gated delta rule.

A layer object holds only weights. What the layer remembers lies in the pools: ``LayerMemory`` gives the rows of the
layer there, and the tables of the ``Batch`` say which rows belong to which sequence.
"""

from __future__ import annotations

import itertools

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from ..contract.memory import LayerMemory
from ..contract.model import Batch
from .delta_rule import CHUNK, by_chunks, by_tokens


@attrs.frozen
class Sizes:
    """The sizes of a ``ThreeWay``. ``layers`` names the kind of each layer as model configs do."""

    layers: tuple[str, ...]
    hidden: int
    heads: int
    kv_heads: int
    width: int
    """The width of one attention head."""
    inner: int
    """The inner width of the gated linear unit after each layer."""
    vocabulary: int
    window: int
    delta_heads: int
    delta_width: int
    """The width of the keys of the delta rule, and of its values."""
    kernel: int = 4
    """How many tokens the short convolution sees, the newest included."""
    mixing: float = 1.0
    """The gain with which a layer adds to the residual stream. With a small one, answers soon repeat themselves."""

    @property
    def channels(self) -> int:
        """How many channels the short convolution has: those of queries, keys and values."""
        return 3 * self.delta_heads * self.delta_width


class Weights:
    """Makes random matrices from a seed, scaled so that a product with one keeps the magnitude of its input."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype, self._device = dtype, device
        self.made: list[Tensor] = []

    @property
    def count(self) -> int:
        """How many numbers they are."""
        return sum(each.numel() for each in self.made)

    def __call__(self, *shape: int, gain: float = 1.0) -> Tensor:
        made = torch.randn(shape, generator=self._generator, dtype=torch.float32)
        matrix = made.mul(float(gain / shape[0] ** 0.5)).to(self._dtype).to(self._device)
        self.made.append(matrix)
        return matrix


def normed(x: Tensor) -> Tensor:
    """Normalize by the root mean square, without weights."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def rotary(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate (rows, tokens, heads, width) by these positions: rotary embedding."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = (positions[..., None].to(torch.float64) * rates)[:, :, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention:
    """Causal attention with grouped heads and rotary positions.

    ``window``: how many tokens a query sees, itself included; 0: all.
    """

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
        """Attend from queries that end at index ``last`` of their spans to the entries in the pages."""
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
        if len(ends) == 1:  # what lies after the row's end is arbitrary, and 0 times NaN is not 0
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
    """Cut a prompt's queries into tiles that end on multiples of ``CHUNK``.

    So a prompt that is computed in two passes, the first up to such a multiple, has the same tiles and the same sums.
    """
    start, count = batch.spans[0].start, batch.count
    if count <= CHUNK and start % CHUNK + count <= CHUNK:
        return [(0, count)]
    if any((span.start - start) % CHUNK for span in batch.spans):
        return [(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]
    return list(itertools.pairwise((0, *range(CHUNK - start % CHUNK, count, CHUNK), count)))


class DeltaRule:
    """A gated delta rule after a short convolution, as in Qwen3-Next. Its states have the dtype of the model."""

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
        decay = functional.logsigmoid(slow) * 0.2  # so slow that a state depends on its whole prefix
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
        """Convolve each channel with its last inputs. The state is these inputs, the newest included."""
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
