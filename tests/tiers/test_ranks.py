"""Ranks stay in step: caches of N ranks decide the same at every call, whatever completes when, and where it fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from prefixloom import CapacityError, Path, Point, Window
from prefixloom.cache.cache import Cache
from prefixloom.cache.sequence import Sequence
from tests.support.helpers import cache_of, part, settle
from tests.support.ranks import Diverged, Rank, run
from tests.support.sampling import slow

PAGE = 4
SETS: dict[str, Callable[[], list[Any]]] = {
    "path": lambda: [part("kv", Path())],
    "path and window": lambda: [part("kv", Path()), part("window", Window(10))],
    "path and state": lambda: [part("kv", Path()), part("state", Point())],
}


def figures(cache: Cache) -> Any:
    """Slots that are free, kept and gone, and the tree's size: what a decision would show in."""
    stats = cache.stats()
    parts = [(name, p.free, p.cached, p.leased, p.evicted) for name, p in sorted(stats.components.items())]
    return parts, stats.nodes, stats.hit_tokens, stats.epoch


class Traffic:
    """Requests of one rank. Those whose content comes from elsewhere wait for it, and are worth what arrived."""

    def __init__(self, rank: Rank, names: list[str], cache: Cache, seed: int) -> None:
        self.rank, self.names, self.cache = rank, names, cache
        self.choice = random.Random(seed)  # the same on all ranks: the calls are the same
        self.open: list[Sequence] = []
        self.arriving: dict[int, tuple[Sequence, int, int]] = {}
        self.hits = self.came = self.short = 0

    def tokens(self) -> list[int]:
        """Prompts that often begin alike."""
        root = self.choice.randrange(5)
        stem = [root * 100 + n for n in range(self.choice.randrange(1, 12) * PAGE)]
        return stem + [self.choice.randrange(1000, 1003) for _ in range(self.choice.randrange(1, 20))]

    def told(self, what: str, *more: Any) -> None:
        slots = [(name, tuple(s.pages(name))) for s in self.open for name in self.names]
        self.rank.decided(what, *more, slots, figures(self.cache))

    def begin(self) -> None:
        tokens = self.tokens()
        plan = self.cache.match(tokens, leave=1)
        sequence = self.cache.open(tokens, leave=1)
        self.hits += sequence.ready
        self.open.append(sequence)
        self.told("open", plan.ready, plan.walked, sequence.ready)
        try:
            self._fill(sequence, len(tokens) - sequence.reserved)
        except CapacityError as error:
            self.open.remove(sequence)
            sequence.abort()
            self.told("short", error.lacking)

    def _fill(self, sequence: Sequence, count: int) -> None:
        if "state" not in self.names and self.choice.random() < 0.6:
            start = sequence.reserved
            sequence.grow(count, arriving=True)
            self.arriving[self.rank.arrivals.start(count)] = (sequence, start, count)
            self.told("arriving")
            return
        end = sequence.reserved + count
        while sequence.reserved < end:  # a step ends at every fourth page: others can resume at its states
            sequence.grow(min(end, sequence.reserved // 16 * 16 + 16) - sequence.reserved)
            with self.cache.step([sequence]) as step:
                step.run_ops()
            sequence.publish()
        self.told("computed", sequence.published)

    def end(self) -> None:
        waiting = {id(sequence) for sequence, *_ in self.arriving.values()}
        ready = [sequence for sequence in self.open if id(sequence) not in waiting]
        if ready:
            sequence = self.choice.choice(ready)
            self.open.remove(sequence)
            sequence.close()
            self.told("close")

    def poll(self) -> None:
        """What arrived is published. A part of it is worth its length to a path, and nothing to a window."""
        self.cache.poll()
        for ticket, amount in self.rank.arrivals.poll().items():
            sequence, start, count = self.arriving.pop(ticket)
            if amount == count or self.names == ["kv"]:
                sequence.commit(start + amount)
                sequence.publish()
            if amount < count:
                self.short += 1
                self.open.remove(sequence)
                sequence.abort()
            self.came += amount == count
            self.told("arrived", ticket, amount)
        self.told("poll")

    def evict(self) -> None:
        self.told("evict", sorted(self.cache.evict(self.choice.randrange(40)).items()))

    def settle(self) -> None:
        while self.arriving:
            self.poll()
        while self.open:
            self.end()
        settle(self.cache)


def program(
    kinds: str, seed: int, operations: int, done: list[Traffic], *, sizes: str = "agreed"
) -> Callable[[Rank], None]:
    def serve(rank: Rank) -> None:
        parts = SETS[kinds]()
        more = 0 if sizes == "alike" else (rank.index + seed) % rank.count
        wished = {p.name: 12 + more if p.name == "state" else 240 + 16 * more for p in parts}
        agreed = rank.consensus.agree_min(wished) if sizes == "agreed" else wished
        rank.consensus.agree_same({"page": str(PAGE), "components": kinds})
        cache = cache_of(*parts, page=PAGE, capacity=agreed, debug=seed % 2 == 0)
        traffic = Traffic(rank, [p.name for p in parts], cache, seed)
        for _ in range(operations):
            drawn = traffic.choice.random()
            if drawn < 0.35 and len(traffic.open) < 6:
                traffic.begin()
            elif drawn < 0.6:
                traffic.end()
            elif drawn < 0.65:
                traffic.evict()
            else:
                traffic.poll()
        traffic.settle()
        done.append(traffic)

    return serve


@pytest.mark.parametrize("count", [slow(2), 3])
@pytest.mark.parametrize("kinds", SETS)
def test_ranks_with_other_delays_failures_and_sizes_never_diverge(kinds: str, count: int) -> None:
    done: list[Traffic] = []
    for seed in range(6):
        ranks = run(program(kinds, seed, 120, done), count, seed)
        assert len({rank.decisions for rank in ranks}) == 1 and ranks[0].decisions > 100
    assert len(done) == 6 * count
    evicted = sum(p.evicted for t in done for p in t.cache.stats().components.values())
    assert evicted > 100 and sum(t.hits for t in done) > 100
    if "state" not in kinds:
        assert sum(t.came for t in done) > 20 and sum(t.short for t in done) > 20


@pytest.mark.parametrize("failing", [0.0, 0.5], ids=["delays", "delays and failures"])
def test_without_agreement_on_what_arrived_they_diverge(failing: float) -> None:
    """The negative control: sizes are the same, and every rank goes by its own clock."""
    for seed in range(4):
        with pytest.raises(Diverged, match=r"decision \d+ \((poll|arrived)\)"):
            own = program("path", seed, 120, [], sizes="alike")
            run(own, 2, seed, agreeing=False, slowest=(0, 9), failing=failing)


def test_without_agreement_on_sizes_they_diverge() -> None:
    with pytest.raises(Diverged, match="rank 1 has"):
        run(program("path", 0, 120, [], sizes="their own"), 2, 0)


def test_where_nothing_differs_no_agreement_is_needed() -> None:
    """So it is the delays, the failures and the sizes that make them diverge above."""
    for seed in range(4):
        done: list[Traffic] = []
        own = program("path", seed, 120, done, sizes="alike")
        run(own, 2, seed, agreeing=False, slowest=(0,), failing=0.0)
        assert len(done) == 2 and all(t.came for t in done)


def test_the_error_of_a_rank_is_told_and_nobody_waits_for_it() -> None:
    def failing(rank: Rank) -> None:
        rank.decided("begin")
        if rank.index == 1:
            raise ValueError("rank 1 is broken")
        rank.decided("end")

    with pytest.raises(ValueError, match="rank 1 is broken"):
        run(failing, 3, 0)
