"""Ranks with a host tier and stores of their own: each answers when and what it likes, and all decide the same."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from prefixloom import Path, Point, TierManifest, Window
from prefixloom.storage import Miss
from prefixloom.testing.inside.backdoor import copies
from prefixloom_hicache import GuardLimits, HostTier, MemoryBackend
from tests.support.helpers import PAGE, cache_of, part, settle
from tests.support.ranks import Diverged, Rank, run
from tests.support.sampling import sampled

SETS: dict[str, Any] = {
    "F": lambda: [part("kv", Path())],
    "FS": lambda: [part("kv", Path()), part("near", Window(10))],
    "FM": lambda: [part("kv", Path()), part("state", Point())],
}


class Moody(MemoryBackend):
    """A rank's store: slow, forgetful and unsure in its own way."""

    def __init__(self, seed: int) -> None:
        super().__init__(capacity=1 << 20)
        self.mood = random.Random(seed)

    def get(self, keys: Any, into: Any = None) -> Any:
        time.sleep(0.002 * self.mood.random() if self.mood.random() < 0.9 else 0.06)
        return tuple(
            Miss(key, "io") if self.mood.random() < 0.03 else answer
            for key, answer in zip(keys, super().get(keys), strict=True)
        )

    def exists(self, keys: Any) -> Any:
        time.sleep(0.002 * self.mood.random())
        return tuple(there and self.mood.random() > 0.02 for there in super().exists(keys))

    def put(self, records: Any) -> Any:
        time.sleep(0.003 * self.mood.random())
        return super().put([record for record in records if self.mood.random() > 0.05]) or ()


def figures(cache: Any) -> Any:
    stats = cache.stats()
    tier = copies(cache)
    parts = [(name, p.free, p.cached, p.leased, p.evicted) for name, p in sorted(stats.components.items())]
    host = [(lane.pool.free, lane.in_tree, lane.leased) for lane in tier.lanes]
    return parts, host, stats.nodes, stats.epoch, tier.evicted, tier.restored_tokens, tier.fetched


def program(rank: Rank, comps: str, write: str, done: list[int]) -> None:
    capacity = rank.consensus.agree_min({"host": 40 * PAGE + rank.index * 16})["host"]
    sizes = {part.name: 4 if part.name == "state" else capacity for part in SETS[comps]()}
    tier = HostTier(
        TierManifest(capacity=sizes, write=write),  # type: ignore[arg-type]
        identity={"model": "m", "weights": "1", "shards": {"tensor": (rank.index, rank.count)}},
        fetch="timeout" if rank.index % 2 else "wait", fetch_base=0.05, fetch_per_page=0.0,
        limits=GuardLimits(deadline=5.0), consensus=rank.consensus,
    )  # fmt: skip
    cache = cache_of(*SETS[comps](), tier, tokens=160, slots=6)
    tier.attach(Moody(rank.index))
    choice = random.Random(f"{comps} {write}")  # the same on all ranks: the calls are the same
    running: list[Any] = []
    for _ in range(120):
        stem = choice.randrange(4) * 100
        tokens = [*range(stem, stem + choice.randrange(8, 56))]
        sequence = cache.open(tokens, leave=1)
        told = sequence.restore()
        rank.decided("open", sequence.ready)
        for _ in range(choice.randrange(8)):
            cache.poll()
            time.sleep(0.001)
        rank.decided("polled", sequence.ready, told.ready)
        end = len(tokens)
        while sequence.reserved < end:
            sequence.grow(min(end, sequence.reserved // 16 * 16 + 16) - sequence.reserved)
            with cache.step([sequence]) as step:
                step.run_ops()
            sequence.publish()
        running.append(sequence)
        if len(running) > 1:
            running.pop(choice.randrange(2)).close()
        if choice.random() < 0.2:
            cache.evict(choice.randrange(60))
        rank.decided("served", figures(cache))
    for sequence in running:
        sequence.close()
    cache.poll()
    done.append(copies(cache).fetched)
    rank.decided("end", figures(cache))
    settle(cache)


@pytest.mark.parametrize("write", ["through", "back"])
@pytest.mark.parametrize("comps", sampled(SETS, 2))
def test_whatever_their_stores_do_ranks_decide_the_same(comps: str, write: str) -> None:
    done: list[int] = []
    for _ in range(5):  # a busy machine may run out of the time that a fetch has
        done.clear()
        run(lambda rank: program(rank, comps, write, done), 3, seed=1)
        assert len(set(done)) == 1, done
        if done[0]:
            return
    raise AssertionError("nothing was ever fetched")


def test_without_agreement_they_come_apart() -> None:
    with pytest.raises(Diverged):
        for seed in range(3):
            run(lambda rank: program(rank, "FS", "through", []), 3, seed=seed, agreeing=False)
