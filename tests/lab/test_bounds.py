"""The optimum and the upper bound, held to exhaustive search and to the reference values of real traces."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest

from prefixloom import (
    Buffer,
    Cache,
    Component,
    InputError,
    Manifest,
    Path,
    Point,
    Sinks,
    TierManifest,
    Window,
    compose,
)
from prefixloom.lab import BlockPrompt, LabRequest, Replay, Service, read_trace
from prefixloom.lab.bounds import Pools, chained, optimum, upper_bound
from prefixloom.lab.trace_bounds import TraceBounds, pools_of
from prefixloom_hicache import HostTier

Kept = tuple[frozenset[int], ...]


def subsets(items: frozenset[int], most: float) -> Iterator[frozenset[int]]:
    for count in range(min(int(most), len(items)) + 1):
        yield from map(frozenset, itertools.combinations(sorted(items), count))


def best_of_all(paths: list[list[int]], pools: Pools) -> int:
    """The most blocks that any sequence of decisions hits: every resume and every choice of what stays is tried."""
    limits = [10**6 if each is None else each for each in (pools.whole, pools.window, pools.states)]
    unlimited = [each is None for each in (pools.whole, pools.window, pools.states)]
    plans: dict[Kept, int] = {(frozenset(), frozenset(), frozenset()): 0}
    for path in paths:
        after: dict[Kept, int] = {}
        for kept, hits in plans.items():
            full, window, states = kept
            for n in range(len(path) + 1):
                needed = set(path[:n]), set(path[max(0, n - pools.reach) : n]), set(path[n - 1 : n])
                if not (needed[0] <= full and needed[1] <= window and needed[2] <= states):
                    continue
                choices = [
                    [held | frozenset(path[n:])] if free else list(subsets(held | frozenset(path[n:]), limit))
                    for held, limit, free in zip(kept, limits, unlimited, strict=True)
                ]
                for chosen in itertools.product(*choices):
                    after[chosen] = max(after.get(chosen, 0), hits + n)
        plans = after
    return max(plans.values())


def short_trace(seed: int, requests: int) -> list[list[int]]:
    chance = random.Random(seed)
    return chained([[chance.randrange(2) for _ in range(chance.randrange(1, 4))] for _ in range(requests)])


def test_the_optimum_is_what_exhaustive_search_finds() -> None:
    for seed in range(20):
        paths = short_trace(seed, 4)
        for capacity in (0, 1, 2, 3):
            assert sum(optimum(paths, capacity)) == best_of_all(paths, Pools(whole=capacity)), (seed, capacity)


def test_the_optimum_of_a_loop_keeps_what_fits() -> None:
    loop = chained([[each] for each in range(4)] * 10)
    assert sum(optimum(loop, 2)) == 18  # of four, two stay for ever
    assert sum(optimum(loop, 4)) == 36
    assert sum(optimum(loop, 0)) == 0


def test_the_bound_holds_against_exhaustive_search_and_is_near_it() -> None:
    ratios = []
    for seed in range(16):
        chance = random.Random(seed)
        pools = Pools(
            whole=chance.choice((None, 1, 2, 3)),
            window=chance.choice((None, 1, 2)),
            reach=chance.choice((1, 2)),
            states=chance.choice((None, 1, 2)),
        )
        paths = short_trace(seed, 4)
        best, bound = best_of_all(paths, pools), upper_bound(paths, pools, rounds=200)
        assert bound >= best - 1e-6, (seed, pools, paths)
        if best:
            ratios.append(bound / best)
    assert sum(ratios) / len(ratios) < 1.1, ratios
    assert max(ratios) < 2.01, ratios


def test_prices_find_the_optimum_of_one_pool_of_states() -> None:
    """With paths of one block, states are blocks, and their bound is MIN."""
    chance = random.Random(7)
    paths = chained([[chance.randrange(12)] for _ in range(200)])
    for capacity in (1, 3, 6):
        best = sum(optimum(paths, capacity))
        assert best <= upper_bound(paths, Pools(states=capacity), rounds=400) + 1e-6 < best * 1.05 + 1


def test_more_pools_never_raise_the_bound_above_the_optimum_of_one() -> None:
    paths = chained([[each % 5, each % 3, each % 7] for each in range(60)])
    for full in (1, 4, 9):
        assert upper_bound(paths, Pools(whole=full, states=3), rounds=20) <= sum(optimum(paths, full))


def test_nothing_seen_before_gives_nothing() -> None:
    assert upper_bound([[1], [2]], Pools(whole=1, states=1)) == 0
    assert upper_bound([], Pools(states=1)) == 0
    assert optimum([], 3) == []


def test_what_is_no_capacity_is_refused() -> None:
    with pytest.raises(InputError, match="from 0 up"):
        optimum([[1]], -1)
    with pytest.raises(InputError, match="from 0 up"):
        Pools(states=-1)
    with pytest.raises(InputError, match="at least one block"):
        Pools(window=1, reach=0)


def test_a_number_stands_for_a_block_and_all_before_it() -> None:
    assert chained([[1, 2], [1, 2], [2, 2]]) == [[0, 1], [0, 1], [2, 3]]


# ---------------------------------------------------------------- what no policy hits of a trace


def composed(page: int, policy: str = "lru", tiers: Sequence[object] = (), **parts: Any) -> Cache:
    """A cache without bytes. ``parts``: by name, a reach and a capacity in tokens or states."""
    buffers = Manifest([Buffer("data", (1,), "float32")])
    return compose(
        None, plugins=[*(Component(name, buffers, reach) for name, (reach, _) in parts.items()), *tiers], policy=policy,
        page_size=page, capacity={name: size for name, (_, size) in parts.items()}, device="meta", debug=False,
    )  # fmt: skip


def random_trace(chance: random.Random, size: int) -> list[LabRequest]:
    """Prompts of few beginnings, in blocks of ``size`` tokens, of which the last may be a part."""
    talks = [[chance.choice((1, 2)), *chance.sample(range(3, 9), 3)] for _ in range(chance.randrange(2, 5))]
    requests, name, talk = list[LabRequest](), "", talks[0]
    for at in range(60):
        if chance.random() < 0.5:
            talk, name = chance.choice(talks), chance.choice(("", "", "other"))
        ids = talk[: chance.randrange(1, 5)]
        length = len(ids) * size - chance.choice((0, 0, 1, size // 2))
        requests.append(LabRequest(at, BlockPrompt(ids, size, length, at), output=chance.randrange(6), namespace=name))
    return requests


@pytest.mark.parametrize("seed", range(24))
def test_no_replay_hits_more_than_the_bound(seed: int) -> None:
    """The pools are so small that the bound of a path of a third of its size would be wrong for some seeds."""
    chance = random.Random(seed)
    size, page = chance.choice(((16, 4), (8, 8), (16, 16), (8, 4)))
    longest = 4 * size + 8
    near = chance.choice((5, 9, 17, 33))
    reaches: dict[str, Any] = {
        "whole": (Path(), longest + chance.choice((0, size))),
        "window": (Window(near) if chance.random() < 0.7 else Sinks(4) | Window(near), 32 + 2 * near + 8 + size),
        "state": (Point(), chance.choice((2, 3, 5))),
    }
    kinds: list[tuple[str, ...]] = [
        ("whole",),
        ("window",),
        ("state",),
        ("whole", "window"),
        ("whole", "window", "state"),
    ]
    parts: dict[str, Any] = {name: reaches[name] for name in chance.choice(kinds)}
    requests = random_trace(chance, size)
    service = chance.choice((None, Service(prefill=100.0, decode=50.0, max_running=4, chunk=32)))
    best = TraceBounds(requests, page).hit_rate(composed(page, "lru", (), **parts), 32)
    for policy in ("lru", "lfu", "slru"):
        outcome = Replay(composed(page, policy, (), **parts), service=service, chunk=32).run(requests)
        assert outcome.refused == 0 and best is not None
        assert outcome.retracted or outcome.hit_rate <= best + 1e-9, (policy, parts)


def test_the_bound_of_a_path_is_the_optimum_and_follows_the_memory() -> None:
    loop = [LabRequest(at, BlockPrompt([at % 4], 16, 17, at)) for at in range(40)]
    rates = [TraceBounds(loop, 16).hit_rate(composed(16, whole=(Path(), size)), 64) for size in (32, 48, 80)]
    assert rates == pytest.approx([hits * 16 / (40 * 17) for hits in (18, 27, 36)])


def test_requests_that_a_cache_cannot_hold_are_in_no_bound() -> None:
    once = LabRequest(0, BlockPrompt([1, 2, 3, 4], 16, 64), output=1)
    short = [LabRequest(at, BlockPrompt([9], 16, 17, at)) for at in (1, 2)]
    bounds = TraceBounds([once, *short, once], 16)
    assert bounds.hit_rate(composed(16, whole=(Path(), 48)), 64) == pytest.approx(16 / 34)
    assert bounds.hit_rate(composed(16, whole=(Path(), 16)), 64) is None


def test_a_window_narrower_than_a_page_takes_a_part_of_it() -> None:
    parts = composed(4, window=(Window(9), 64), state=(Point(), 5)).composition.parts
    assert pools_of(parts, 16, 8) == Pools(window=64 / 8, reach=1, states=5)
    assert pools_of(parts, 4, 8) == Pools(window=64 / 4, reach=2, states=5)
    assert pools_of(parts, 4, 2) == Pools(whole=64 / 4, states=5)  # no prompt is longer than the window


def test_there_is_no_bound_with_a_tier_below_or_for_blocks_of_several_sizes() -> None:
    requests = [LabRequest(at, BlockPrompt([1], 16, 17, at)) for at in range(2)]
    host = HostTier(TierManifest(memory="1MiB"))
    assert TraceBounds(requests, 16).hit_rate(composed(16, tiers=(host,), whole=(Path(), 64)), 64) is None
    mixed = [requests[0], LabRequest(1, BlockPrompt([1], 8, 17))]
    assert TraceBounds(mixed, 8).hit_rate(composed(8, whole=(Path(), 64)), 64) is None


# ---------------------------------------------------------------- the reference values of real traces


def real(name: str) -> pathlib.Path:
    folder = os.environ.get("PREFIXLOOM_TRACES")
    if not folder or not (pathlib.Path(folder) / name).exists():
        pytest.skip(f"the folder PREFIXLOOM_TRACES has no {name}")
    return pathlib.Path(folder) / name


@pytest.mark.slow
@pytest.mark.parametrize(("trace", "size"), [("conversation_trace", 512), ("weka40_dev", 64)])
def test_the_optimum_equals_the_reference_values(trace: str, size: int) -> None:
    """Blocks of all references, a partial last block included, and tokens: a partial block counts its tokens."""
    with gzip.open(real(f"{trace}.jsonl.gz"), "rt") as lines:
        requests = [json.loads(line) for line in lines]
    expected = json.loads(real("reference_values_dev.json").read_text())[trace]["capacity_blocks"]
    paths = [each["hash_ids"] for each in requests]
    lengths = [each["input_length"] for each in requests]
    for name, values in expected.items():
        hits = optimum(paths, sum(map(len, paths)) if name == "inf" else int(name))
        blocks = sum(hits) / sum(map(len, paths))
        tokens = sum(min(hit * size, length) for hit, length in zip(hits, lengths, strict=True)) / sum(lengths)
        assert [round(blocks, 4), round(tokens, 4)] == values["min_prefix"][:2], name


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capacity", [1000, 10_000, 30_000, 50_000])
def test_lru_hits_as_many_blocks_as_the_reference_says(capacity: int) -> None:
    """One path, a page for each block, one request after the other, and every last block taken as a whole one.

    Then least recently used is the reference's ``lru_rev_prefix`` exactly, since a path's tail is refreshed first. Our
    fifo and lfu differ from ``fifo_flat_blk`` and ``lfu_prefix``: the reference counts for each block by itself. A cell
    of our tree counts where a lease of it ends, so an inner block is as old, and was used as often, as when it last was
    an end. ``test_replay`` has the same comparison on small traces.
    """
    trace = read_trace(real("conversation_trace.jsonl.gz"))
    expected = json.loads(real("reference_values_dev.json").read_text())["conversation_trace"]["capacity_blocks"]
    references = 0

    def whole(request: LabRequest) -> LabRequest:
        nonlocal references
        assert isinstance(request.prompt, BlockPrompt)
        ids = request.prompt.ids
        references += len(ids)
        return attrs.evolve(request, prompt=BlockPrompt(ids, trace.block, trace.block * len(ids)), output=0)

    cache = composed(trace.block, path=(Path(), capacity * trace.block))
    outcome = Replay(cache, chunk=trace.block, leave=0, closely=0).run(map(whole, trace))
    assert outcome.refused == 0
    assert round(outcome.hit / trace.block / references, 4) == expected[str(capacity)]["lru_rev_prefix"][0]
