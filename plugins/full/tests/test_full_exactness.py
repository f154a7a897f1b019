"""The Full component is exact: what is restored equals what was live, and the cache changes no logit.

A toy model in float64 runs through the cache as an engine would. Restored against live is compared bitwise; cached
against uncached bitwise where the same rows go through the same kernels, and within 1e-10 otherwise. Negative controls
show that a single wrong page moves the logits by far more.
"""

from __future__ import annotations

import functools
import random
from importlib.metadata import EntryPoint

import pytest
import torch
from torch import Tensor

import prefixloom
from prefixloom import ComponentSpec, Profile
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from prefixloom.compose.registry import Registry
from prefixloom.testing.inside.witness import Witness
from prefixloom.testing.toy import ToyModel, toy_config
from tests.support.sampling import slow

TOLERANCE = 1e-10
MOVED = 1e-3
"""What one wrong page moves at least; measured: 0.036 and more."""
PAGES = pytest.mark.parametrize("page", [slow(1), 4, slow(16)])


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def model() -> ToyModel:
    return ToyModel(toy_config(v_head_dim=4))


def composed(page: int, capacity: int = 512) -> Cache:
    options = {"layers": 2, "kv_heads": 2, "k_dim": 8, "v_dim": 4, "dtype": "float64"}
    registry = Registry([EntryPoint("full", "prefixloom_full.plugin", "prefixloom")])
    profile = Profile([ComponentSpec("full", options=options)])
    return prefixloom.compose(profile, page_size=page, capacity=capacity, debug=True, registry=registry)


def prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(model().vocabulary) for _ in range(count)]


def content(cache: Cache, sequence: Sequence, upto: int) -> dict[str, Tensor]:
    """K and V of the positions before ``upto``, fetched one by one through the sequence's page table."""
    table = sequence.pages("full")
    page = cache.stats().components["full"].page_tokens
    return {
        name: torch.stack([buffer[:, table[p // page], p % page] for p in range(upto)], dim=1)
        for name, buffer in cache.pool("full").buffers.items()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() == {"k", "v"} and all(torch.equal(a[name], b[name]) for name in a)


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


# ---------------------------------------------------------------- restored equals live


@PAGES
def test_restored_content_equals_live_bitwise(page: int) -> None:
    cache, tokens = composed(page), prompt(random.Random(page), 77)
    with cache.open(tokens) as live:
        model().compute(cache, live, chunk=24)
        kept = content(cache, live, 77)
    with cache.open(tokens) as restored:
        assert restored.ready == 77 // page * page
        assert same(content(cache, restored, restored.ready), {k: v[:, : restored.ready] for k, v in kept.items()})


@PAGES
def test_continuing_from_the_cache_equals_the_live_continuation_bitwise(page: int) -> None:
    rng = random.Random(page)
    cache, tokens, more = composed(page), prompt(rng, 64), prompt(rng, 21)
    with cache.open(tokens) as live:
        model().compute(cache, live, chunk=20)
        live.publish()
        live.append(more)
        with cache.open(tokens + more) as restored:
            assert (restored.ready, live.committed) == (64, 64)
            of_live = model().compute(cache, live, chunk=8)
            of_restored = model().compute(cache, restored, chunk=8)
            assert set(live.pages("full")[64 // page :]).isdisjoint(restored.pages("full")[64 // page :])
            assert torch.equal(of_restored, of_live)
            assert same(content(cache, restored, 85), content(cache, live, 85))


@PAGES
def test_two_branches_of_a_split_node_each_continue_as_if_alone(page: int) -> None:
    rng = random.Random(page)
    cache, trunk = composed(page), prompt(rng, 48)
    branches = [trunk[:32] + prompt(rng, 30) for _ in range(2)]
    model().run(cache, trunk, chunk=page)
    for tokens in branches * 2:
        run = model().run(cache, tokens, chunk=page)
        assert run.ready >= 32
        assert torch.equal(run.logits, model().reference(tokens, chunk=page)[run.ready :])
    assert run.ready == 61 // page * page, "the second time, a branch hits as far as it was published"


# ---------------------------------------------------------------- with the cache equals without


@PAGES
def test_with_the_same_row_partition_the_cache_changes_no_bit(page: int) -> None:
    rng = random.Random(page)
    cache = composed(page, capacity=160)
    known: list[list[int]] = [prompt(rng, 40)]
    hits = 0
    for _ in range(40):
        base = rng.choice(known[-5:])
        tokens = (base[: rng.randrange(len(base) + 1)] + prompt(rng, rng.randrange(1, 30)))[:120]
        known.append(tokens)
        run = model().run(cache, tokens, namespace=rng.choice("ab"), chunk=page)
        hits += run.ready > 0
        assert torch.equal(run.logits, model().reference(tokens, chunk=page)[run.ready :])
    assert hits > 5
    assert cache.stats().components["full"].evicted > 0


# ---------------------------------------------------------------- negative controls


@PAGES
@pytest.mark.parametrize("buffer", ["k", "v"])
@pytest.mark.parametrize("layer", [0, 1])
def test_one_zeroed_page_of_one_layer_moves_the_logits(page: int, buffer: str, layer: int) -> None:
    cache, tokens = composed(page), prompt(random.Random(page), 50)
    expected = model().run(cache, tokens).logits[-1]
    witness = Witness(cache)
    with cache.open(tokens, leave=1) as sequence:
        witness.live(sequence)
        assert distance(model().compute(cache, sequence)[-1], expected) < TOLERANCE
    with cache.open(tokens, leave=1) as sequence:
        pool = cache.pool("full").buffers[buffer]
        pool[layer, sequence.pages("full")[20 // page]] = 0
        assert distance(model().compute(cache, sequence)[-1], expected) > MOVED
        assert witness.restored(sequence) == 1


@PAGES
def test_one_page_of_another_prompt_moves_the_logits(page: int) -> None:
    """Two whole pages in the wrong order would not: attention does not see the order of what it reads."""
    cache, tokens = composed(page), prompt(random.Random(page), 50)
    expected = model().run(cache, tokens).logits[-1]
    model().run(cache, tokens[::-1])
    with cache.open(tokens, leave=1) as sequence, cache.open(tokens[::-1], leave=1) as other:
        ours, theirs = sequence.pages("full")[12 // page], other.pages("full")[12 // page]
        for buffer in cache.pool("full").buffers.values():
            buffer[:, ours] = buffer[:, theirs]
        assert distance(model().compute(cache, sequence)[-1], expected) > MOVED


def test_another_namespace_hits_nothing_of_the_same_tokens() -> None:
    cache, tokens = composed(4), prompt(random.Random(0), 50)
    assert [model().run(cache, tokens, namespace=name).ready for name in ("a", "b", "a")] == [0, 0, 48]
