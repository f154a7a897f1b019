"""Faults at every step of a cache with a host tier: the matrix of write policy, components, page and layout (of both).

Short traffic is run once to count where something can go wrong: every reservation on either tier, every copy, every
hook. Then it is run again for each such point and each fault that can befall it, with the second set of books on.
What is told must be what an oracle of sets says, content must be right, nothing may be left behind.

``python -m tests.random.tier_faults [--every 1]``: all of the matrix; with ``--every`` n each n-th point only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import prefixloom.tiers.host_copies
import prefixloom.tiers.restore
from prefixloom import CapacityError, Component, hookimpl
from prefixloom.cache.cache import Cache
from prefixloom.device.pool import ABSENT
from prefixloom.tiers.host_copies import HostCopies
from tests.support.helpers import every_reach, part, settle
from tests.support.tiers import WRITES, Requests, compute, kept_below, restorable, simulated, tiered, wrong

SETS = {
    "F": ("path",), "S": ("window",), "M": ("point",), "FS": ("path", "window"), "FM": ("path", "point"),
    "SM": ("window", "point"), "FSM": ("path", "window", "point"), "FC": ("path", "chunk"), "FT": ("path", "tail"),
    "FU": ("path", "union"), "FB": ("path", "blocks"), "FH": ("path", "holes"), "FO": ("path", "optional"),
    "two": ("window", "sinks", "point"),
}  # fmt: skip
PAGES, LAYOUTS = (1, 4), ("layer_first", "page_first")
MATRIX = tuple(itertools.product(WRITES, SETS, PAGES, LAYOUTS))
Case = tuple[str, str, int, str]
TURNS = 9


class Injected(RuntimeError):
    pass


class Watched(Component):
    """Offers a fault in each hook about copies."""

    faults: Faults | None = None

    @hookimpl
    def build_hicache_transfers(self, plan: Any, phase: str) -> Any:
        if self.faults is not None:
            self.faults.at("hook")

    @hookimpl
    def commit_hicache_transfer(self, plan: Any, phase: str, outcome: Any) -> Any:
        if self.faults is not None:
            self.faults.at("hook")


class Faults:
    """Counts the points by kind; at number ``at`` of ``kind`` there is the fault ``how``."""

    def __init__(self, kind: str = "", number: int = -1, how: str = "raise") -> None:
        self.kind, self.number, self.how = kind, number, how
        self.seen: Counter[str] = Counter()
        self.counted: Counter[str] = Counter()  # up to the end of the traffic
        self.hit = 0

    def due(self, kind: str) -> bool:
        self.seen[kind] += 1
        if kind == self.kind and self.seen[kind] - 1 == self.number:
            self.hit += 1
            return True
        return False

    def at(self, kind: str) -> None:
        if self.due(kind):
            raise Injected(f"injected in a {kind}")

    @contextlib.contextmanager
    def put(self) -> Iterator[None]:
        copy, take, room = (
            prefixloom.tiers.host_copies.copy_between, HostCopies.take, prefixloom.tiers.restore.make_room,
        )  # fmt: skip

        def between(source: Any, src: Any, target: Any, dst: Any) -> None:
            if self.due("copy"):
                if self.how != "raise":
                    copy(source, src[: len(src) // 2], target, dst[: len(src) // 2])
                raise Injected("injected in a copy")
            copy(source, src, target, dst)

        def taken(copies: Any, lane: Any, count: int) -> Any:
            return None if self.due("take below") else take(copies, lane, count)

        def made(*args: Any) -> None:
            if self.due("make room"):
                raise CapacityError((), "injected")
            room(*args)

        prefixloom.tiers.host_copies.copy_between = between  # type: ignore[assignment]
        prefixloom.tiers.restore.make_room = made  # type: ignore[assignment]
        HostCopies.take = taken  # type: ignore[method-assign]
        try:
            yield
        finally:
            prefixloom.tiers.host_copies.copy_between, prefixloom.tiers.restore.make_room = copy, room
            HostCopies.take = take  # type: ignore[method-assign]


HOWS = {
    "copy": ("raise", "half"),
    "take below": ("none",),
    "make room": ("raise",),
    "hook": ("raise",),
}


def build(case: Case, faults: Faults, debug: bool = True) -> Cache:
    write, comps, page, layout = case
    names = SETS[comps]
    parts = [part(n, every_reach()[n], Watched, **({"checkpoint_every": 8} if n == "point" else {})) for n in names]
    for one in parts:
        one.faults = faults  # type: ignore[attr-defined]
    host = {name: 5 if name == "point" else 64 for name in names}
    return tiered(
        *parts, page=page, tokens=72, slots=6, write=write, hits=1, layout=layout, device_layout=layout,
        host=host, debug=debug,
    )  # fmt: skip


class Drive:
    """The traffic of one run. ``lag``: copies run on simulated streams, so much later (0: at once, in the caller)."""

    def __init__(self, case: Case, faults: Faults, lag: int = 0, debug: bool = True) -> None:
        self.cache = build(case, faults, debug)
        self.names = SETS[case[1]]
        self.faults = faults
        self.requests = Requests(case)
        self.rng = random.Random(str(case))
        self.lag = lag
        self.simulation = simulated(self.cache) if lag else None
        self.told = self.ended = 0
        self.restored = self.loads = self.brought = 0

    def run(self) -> None:
        with self.faults.put():
            for turn in range(TURNS):
                tokens = self.requests.next()
                what = self.rng.random()
                self.request(tokens)
                if what < 0.5:
                    self.cache.evict(self.rng.randrange(8, 72))
                elif what < 0.8:
                    self.cache.evict({self.rng.choice(self.names): 4})
                if self.simulation is not None and turn % self.lag == 0:
                    self.drain()
                self.cache.poll()
        self.finish()

    def request(self, tokens: list[int]) -> None:
        cache, hit = self.cache, self.faults.hit
        plan = cache.match(tokens, leave=1)
        before = {
            b
            for b in restorable(cache, tokens)
            if b <= (len(tokens) - 1) // cache.core.shape.page * cache.core.shape.page
        }
        assert plan.restorable == max(before), (plan.restorable, before)
        try:
            sequence = cache.open(plan)
        except CapacityError:
            return
        with sequence:
            ready, kept = sequence.ready, kept_below(cache, tokens)
            had = {name: listed(sequence, name) for name in kept}
            told = sequence.restore()
            if self.faults.hit == hit and not told.why:
                for name, pages in kept.items():
                    has, size = listed(sequence, name), len(sequence.pages(name))
                    assert has == {page for page in pages if page < size}, (name, has, pages)
                    self.brought += len(has - had[name])
            self.told += told.ready > ready
            self.restored += told.ready - ready
            self.loads += told.ready > ready
            figures = cache.stats().tier
            assert figures is not None
            assert (figures.restored_tokens, figures.restores) == (self.restored, self.loads)
            assert told.ready == sequence.ready >= ready
            assert told.wanted <= plan.restorable, "opening may cost a state"
            assert told.ready in before
            assert sequence.branch == (plan.branch if plan.branch and plan.branch > told.ready else None)
            if told.ready < told.wanted:
                assert told.why
            if self.faults.hit > hit and told.ready < told.wanted and told.why.count("injected") and not self.lag:
                after = {b for b in restorable(cache, tokens) if b < told.wanted}
                assert told.ready <= max(after)
                assert told.ready == max(after) or cache.stats().tier.fallbacks > 1  # type: ignore[union-attr]
            elif self.faults.hit == hit:
                assert told.ready == told.wanted or "did not fit" in told.why
            if self.simulation is not None:
                self.drain()
                cache.poll()
                if not sequence.open:  # its load failed: it is opened again, and computes
                    self.ended += 1
                    return
            with cache.step([sequence]) as step:
                step.run_ops()
            assert wrong(cache, sequence, tokens) == []
            while sequence.reserved < len(tokens):
                try:
                    compute(cache, sequence, tokens, min(len(tokens), sequence.reserved + 8))
                except CapacityError:
                    return
                sequence.publish()

    def drain(self) -> None:
        assert self.simulation is not None
        self.simulation.drain()

    def finish(self) -> None:
        """Everything can still be served, rightly, and nothing is left."""
        cache = self.cache
        self.faults.kind, self.faults.counted = "", Counter(self.faults.seen)
        if self.simulation is not None:
            self.drain()
        cache.poll()
        settle(cache)
        for tokens in self.requests.known[1:]:
            self.request(tokens)
            if self.simulation is not None:
                self.drain()
            cache.poll()
        tier = cache.stats().tier
        assert tier is not None
        if not self.faults.hit:
            assert sum(tier.cached.values()) == tier.backed_up + tier.fetched - tier.evicted
        assert {name: s.leased for name, s in cache.stats().components.items() if s.leased} == {}
        settle(cache)
        self.emptied()

    def emptied(self) -> None:
        cache = self.cache
        cache.flush()
        cache.poll()
        for lane in cache.core.shape.all_lanes:
            assert (lane.pool.free, lane.in_tree, lane.leased) == (lane.pool.capacity, 0, 0), lane.pool.name


def listed(sequence: Any, name: str) -> set[int]:
    """The pages that are in the sequence's table."""
    return {page for page, slot in enumerate(sequence.pages(name)) if slot != ABSENT}


def faults_of(case: Case, lag: int, every: int = 1, some: int = 0) -> Counter[str]:
    """Run ``case`` with each ``every``-th fault, or with so many as ``some`` says; how many of each kind there were."""
    quiet = Faults()
    Drive(case, quiet, lag).run()
    found = [
        (kind, number, how)
        for kind, count in sorted(quiet.counted.items())
        for number in range(count)
        for how in HOWS[kind]
    ]
    random.Random(str(case)).shuffle(found)
    counts: Counter[str] = Counter()
    for kind, number, how in found[:some] if some else found[::every]:
        faults = Faults(kind, number, how)
        try:
            Drive(case, faults, lag).run()
        except BaseException as error:
            error.add_note(f"case {case}, lag {lag}, fault {how} in {kind} {number}")
            raise
        counts[f"{kind}: {how}"] += faults.hit
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--lag", type=int, nargs="*", default=[0, 1, 3])
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # of every fault that is put in
    for lag in given.lag:
        begun, counts = time.monotonic(), Counter[str]()
        for case in MATRIX:
            counts += faults_of(case, lag, given.every)
        told = ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))
        print(
            f"lag {lag}, {len(MATRIX)} cases, {time.monotonic() - begun:.0f} s: {sum(counts.values())} faults: {told}"
        )
    print("the books were right after each, and nothing was left")


if __name__ == "__main__":
    sys.exit(main())
