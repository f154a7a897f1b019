"""The optimum and the upper bound, held to exhaustive search and to the reference values of real traces."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pathlib
import random
from collections.abc import Iterator

import pytest

from prefixloom import InputError
from prefixloom.lab.bounds import Pools, chained, optimum, upper_bound

Kept = tuple[frozenset[int], ...]


def subsets(items: frozenset[int], most: int) -> Iterator[frozenset[int]]:
    for count in range(min(most, len(items)) + 1):
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
    for seed in range(30):
        chance = random.Random(seed)
        pools = Pools(
            whole=chance.choice((None, 1, 2, 3)),
            window=chance.choice((None, 1, 2)),
            reach=chance.choice((1, 2)),
            states=chance.choice((None, 1, 2)),
        )
        paths = short_trace(seed, 4)
        best, bound = best_of_all(paths, pools), upper_bound(paths, pools, rounds=200).blocks
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
        assert best <= upper_bound(paths, Pools(states=capacity), rounds=400).blocks + 1e-6 < best * 1.05 + 1


def test_more_pools_never_raise_the_bound_above_the_optimum_of_one() -> None:
    paths = chained([[each % 5, each % 3, each % 7] for each in range(60)])
    for full in (1, 4, 9):
        assert upper_bound(paths, Pools(whole=full, states=3), rounds=20).blocks <= sum(optimum(paths, full))


def test_nothing_seen_before_gives_nothing() -> None:
    assert upper_bound([[1], [2]], Pools(whole=1, states=1)).blocks == 0
    assert upper_bound([], Pools(states=1)).blocks == 0
    assert optimum([], 3) == []


def test_what_is_no_capacity_is_refused() -> None:
    with pytest.raises(InputError, match="from 0 up"):
        optimum([[1]], -1)
    with pytest.raises(InputError, match="from 0 up"):
        Pools(states=-1)
    with pytest.raises(InputError, match="at least one block"):
        Pools(window=1, reach=0)


def test_paths_of_two_namespaces_share_nothing() -> None:
    assert chained([[1, 2], [1, 2], [2, 2]]) == [[0, 1], [0, 1], [2, 3]]
    assert chained([[1], [1]], namespaces=["a", "b"]) == [[0], [1]]


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
