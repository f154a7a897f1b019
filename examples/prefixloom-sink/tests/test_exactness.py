"""Numerical truth: a small model whose layers see the sinks and the window, with the cache and without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from prefixloom import compose
from prefixloom.testing.toy import ToyModel, toy_config
from prefixloom.testing.toy.layers import LAYERS, LayerStore, PathAttention, rotary
from prefixloom_sink import SinkComponent

SINKS, WINDOW = 3, 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class SinkAttention(PathAttention):
    """A query sees the first ``SINKS`` positions and the last ``WINDOW``, its own included."""

    def forward(self, x: Tensor, start: int, store: LayerStore) -> Tensor:
        q = rotary((x @ self.to_q).view(len(x), self.kv_heads, -1, self.k_dim).flatten(1, 2), start)
        store.write("k", start, rotary((x @ self.to_k).view(len(x), self.kv_heads, self.k_dim), start))
        store.write("v", start, (x @ self.to_v).view(len(x), self.kv_heads, self.v_dim))
        return torch.stack([self.one(q[i], start + i, store) for i in range(len(x))]) @ self.to_x

    def one(self, q: Tensor, position: int, store: LayerStore) -> Tensor:
        low = max(0, position - WINDOW + 1)
        spans = [(0, min(SINKS, low)), (low, position + 1)]
        k, v = (torch.cat([store.read(name, lo, hi) for lo, hi in spans if lo < hi]) for name in ("k", "v"))
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        weights = torch.softmax(torch.einsum("hd,khd->hk", q, k) / self.k_dim**0.5, dim=-1)
        return torch.einsum("hk,khd->hd", weights, v).flatten()


def model_and_cache(page: int, sinks: int = SINKS, window: int = WINDOW) -> tuple[ToyModel, Any]:
    kinds = ["sink_attention", "sink_attention"]
    model = ToyModel(toy_config(kinds), layers={**LAYERS, "sink_attention": SinkAttention})
    sink = SinkComponent(sinks=sinks, window=window, layers=2, kv_heads=2, head_dim=8, dtype="float64")
    return model, compose(None, plugins=[sink], page_size=page, capacity=96, debug=True)


@pytest.mark.parametrize("page", [1, 4])
def test_with_the_cache_equals_without_bit_by_bit(page: int) -> None:
    model, cache = model_and_cache(page)
    rng, hits = random.Random(page), 0
    known = [[rng.randrange(97) for _ in range(40)]]
    for _ in range(6):
        base = rng.choice(known)
        tokens = base[: rng.randrange(8, len(base))] + [rng.randrange(97) for _ in range(rng.randrange(1, 12))]
        known.append(tokens)
        run = model.run(cache, tokens, chunk=page)
        hits += run.ready > 0
        assert torch.equal(run.logits, model.reference(tokens, chunk=page)[run.ready :])
        cache.evict(rng.randrange(12))
    assert hits > 1


def test_every_position_that_is_cached_counts() -> None:
    """What the reach names is read: a wrong entry moves the logits, one outside of the reach does not."""
    tokens = list(range(40))
    for at, counts in ((0, True), (SINKS - 1, True), (SINKS, False), (39 - WINDOW, False), (40 - WINDOW, True)):
        model, cache = model_and_cache(page=1)
        expected = model.reference(tokens)[-1]
        with cache.open(tokens) as sequence:
            model.compute(cache, sequence, upto=39)
            page = sequence.pages("sink")[at]
            for buffer in cache.pool("sink").buffers.values():
                buffer[:, page] = 0.5
            moved = float((model.compute(cache, sequence)[-1] - expected).abs().max())
            assert moved > 1e-4 if counts else moved < 1e-9
            sequence.abort()
