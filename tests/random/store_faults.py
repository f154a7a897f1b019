"""Faults at every step of a store behind a host tier: each call of a backend fails, lies, is late, or never returns.

A writing cache fills a store and another one reads from it, first without a fault, to count the calls, then again for
each call and each thing that can befall it. Content must be right, what is told must be what an oracle says is there,
and in the end nothing is pinned, open or owned by nobody, and all of it can still be served.

``python -m tests.random.store_faults [--jobs 4]``: every fault of the matrix, some 23,000, in about 17 minutes on
two cores; most of it is waiting for what never comes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

import prefixloom.tiers.host_copies
from prefixloom import TierManifest
from prefixloom.cache.cache import Cache
from prefixloom.storage import Miss, Refused
from prefixloom.testing.inside.backdoor import tier, tier_lanes
from prefixloom_hicache import GuardLimits, HostTier, MemoryBackend
from prefixloom_hicache.guards import BreakerLimits
from tests.support.helpers import every_reach, part, settle
from tests.support.tiers import Requests, compute, restorable, wrong

SETS = {
    "F": ("path",), "S": ("window",), "FS": ("path", "window"), "FM": ("path", "point"),
    "FSM": ("path", "window", "point"), "FU": ("path", "union"), "FH": ("path", "holes"),
}  # fmt: skip
FETCHES, KEEPS = ("wait", "timeout", "best_effort"), ("through", "selective", "back")
MATRIX = tuple(itertools.product(SETS, (1, 4), FETCHES, KEEPS))
Case = tuple[str, int, str, str]
HOWS = ("raises", "io", "nonsense", "swapped", "late", "never")
DEADLINE = 0.03
TURNS = 5


class Faulty(MemoryBackend):
    """Call number ``number`` of all goes wrong in the way ``how``."""

    def __init__(self, number: int = -1, how: str = "") -> None:
        super().__init__(capacity=1 << 22)
        self.number, self.how = number, how
        self.calls = self.hit = 0
        self.kinds: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.let_go = threading.Event()

    def _asked(self, kind: str, what: Any, answer: Any) -> Any:
        self.kinds[kind] += 1
        self.calls += 1
        if self.calls - 1 != self.number:
            return answer(what)
        self.hit += 1
        if self.how == "raises":
            raise RuntimeError("injected")
        if self.how == "io":
            miss = {"get": Miss, "put": Refused}.get(kind)
            return tuple(False if miss is None else miss(getattr(one, "key", one), "io") for one in what)
        if self.how == "nonsense":
            return (None,) * (len(what) - 1)
        if self.how == "swapped":
            return tuple(reversed(answer(what)))
        if self.how == "never":
            self.let_go.wait(20)
        else:
            time.sleep(2 * DEADLINE)
        return answer(what)

    def get(self, keys: Any, into: Any = None) -> Any:
        self.bytes["get"] += sum(map(len, into or ()))
        return self._asked("get", keys, super().get)

    def put(self, records: Any) -> Any:
        self.bytes["put"] += sum(len(record.payload) for record in records)
        return self._asked("put", records, super().put)

    def exists(self, keys: Any) -> Any:
        return self._asked("exists", keys, super().exists)


whole = prefixloom.tiers.host_copies.copy_between


def slowly(*given: Any) -> None:
    time.sleep(0.0005)
    whole(*given)


class Drive:
    """The traffic of one run over ``store``: caches of two processes, one after the other.

    The host has room for ``host`` tokens: for the longest prompt and hardly more, or for less.
    """

    def __init__(self, case: Case, store: Faulty, host: int = 84) -> None:
        self.case, self.store, self.host = case, store, host
        self.requests = Requests(case)
        self.rng = random.Random(str(case))
        self.told = self.restored = 0
        self.asked: Counter[str] = Counter()
        """Bytes for which the store's limits were asked."""
        self.served: list[list[int]] = []
        """Prompts of which the store should have all, since an earlier process wrote it."""

    def process(self) -> Cache:
        from tests.support.helpers import cache_of

        comps, page, fetch, keep = self.case
        names = SETS[comps]
        parts = [part(n, every_reach()[n], **({"checkpoint_every": 8} if n == "point" else {})) for n in names]
        host = {name: 8 if name == "point" else self.host for name in names}
        patience = DEADLINE if self.store.how else 20.0  # without a fault, nothing is late for want of a processor
        tier = HostTier(
            TierManifest(capacity=host, write="through", overlap=page > 1), identity={"model": "m", "weights": "1"},
            keep=keep, fetch=fetch,  # type: ignore[arg-type]
            fetch_base=patience / 2, limits=GuardLimits(deadline=patience, breaker=BreakerLimits(pause=0.01)),
        )  # fmt: skip
        cache = cache_of(*parts, tier, page=page, tokens=96, slots=8)
        tier.attach(self.store)
        assert tier.store is not None
        honest = tier.store.ask

        def ask(run: Any, instead: Any, *, writes: bool = False, size: int = 0, **others: Any) -> Any:
            self.asked["put" if writes else "get"] += size
            return honest(run, instead, writes=writes, size=size, **others)

        tier.store.ask = ask  # type: ignore[method-assign]
        cache.poll()
        return cache

    @contextlib.contextmanager
    def in_small_parts(self) -> Iterator[None]:
        """What is asked for, read and written at a time is little, so that what a prompt needs takes many calls. Or
        copies run beside the scheduler, and take their time.
        """
        few = {"store_reads.LOOK": 3, "store_reads.SLICE": 900, "pieces.SLICE": 900, "pieces.READ": 4,
               "store_writes.PER_POLL": 5, "store_writes.PER_CALL": 2}  # fmt: skip
        with contextlib.ExitStack() as patched:
            for name, count in few.items() if self.case[1] == 1 else ():
                patched.enter_context(mock.patch(f"prefixloom.tiers.{name}", count))
            if self.case[1] > 1:
                patched.enter_context(mock.patch("prefixloom.tiers.host_copies.copy_between", slowly))
            yield

    def run(self) -> None:
        with self.in_small_parts():
            self.serve_and_serve_again()

    def serve_and_serve_again(self) -> None:
        try:
            for _ in range(2):
                cache = self.process()
                known = self.requests.known[1:]
                for turn in range(TURNS):
                    self.request(cache, known[turn] if turn < len(known) and turn % 2 else self.requests.next())
                    if self.rng.random() < 0.4:
                        cache.evict(self.rng.randrange(8, 72))
                self.finish(cache)
                self.served, self.restored = [*self.requests.known[1:]], 0
        finally:
            self.store.let_go.set()

    def request(self, cache: Cache, tokens: list[int]) -> None:
        with cache.open(tokens, leave=1) as sequence:
            ready = sequence.ready
            told = sequence.restore()
            end = time.monotonic() + 5
            while not told.over:
                assert time.monotonic() < end, f"it is never over: {told}"
                cache.poll()
                time.sleep(0.0002)
            assert told.ready == sequence.ready
            assert told.ready in restorable(cache, tokens), told
            assert told.ready == told.wanted or told.why, told
            assert self.store.how or "Error" not in told.why, told
            self.told += told.ready
            self.restored += told.ready - ready
            tier = cache.stats().tier
            assert tier is not None and tier.restored_tokens == self.restored, (tier, self.restored)
            if tokens in self.served and not self.store.how and self.has_all:
                page = self.case[1]
                assert told.ready == told.wanted == (len(tokens) - 1) // page * page, told
            with cache.step([sequence]) as step:
                step.run_ops()
            assert wrong(cache, sequence, tokens) == []
            while sequence.reserved < len(tokens):
                compute(cache, sequence, tokens, min(len(tokens), sequence.reserved + 8))
                sequence.publish()
        cache.poll()

    @property
    def has_all(self) -> bool:
        """Whether the store gets all of a prompt that is computed, and a later process waits for it."""
        comps, _, fetch, keep = self.case
        return keep == "through" and fetch == "wait" and comps in ("F", "S", "FS") and self.host >= 84

    def finish(self, cache: Cache) -> None:
        """What never came back by now is let go, and nothing is left."""
        store = tier(cache)
        end = time.monotonic() + 5
        hung = self.store.how == "never" and self.store.hit and not self.store.let_go.is_set()
        while store.reads.fetches or store.writes.calls or store.writes.queue or store.store.follows:
            assert time.monotonic() < end, "something of the store is never over"
            cache.poll()
            time.sleep(0.0002)
        assert hung or not store.store.completions.waiting
        assert not any(lane.leased for lane in tier_lanes(cache))
        settle(cache)
        assert store.writes.handed == store.writes.stored + store.writes.refused
        told = cache.stats().tier
        assert told is not None
        assert (told.stored, told.refused, told.to_store) == (store.writes.stored, store.writes.refused, 0)
        if not self.store.how:
            assert sum(told.cached.values()) == told.backed_up + told.fetched - told.evicted
            assert not told.failed
            assert not told.refused or (self.case[1] > 1 and self.case[3] == "back"), "what is copied down cannot go on"
            assert self.asked == self.store.bytes
        cache.flush()
        cache.poll()
        for lane in cache.core.shape.all_lanes:
            assert (lane.pool.free, lane.in_tree, lane.leased) == (lane.pool.capacity, 0, 0), lane.pool.name
        store.store.component.store = None  # as detach does, but the backend stays open for the next


def faults_of(case: Case, some: int = 0) -> Counter[str]:
    """Run ``case`` with each fault, or with so many of them; how many of each kind there were."""
    quiet = Faulty()
    Drive(case, quiet).run()
    found = [(number, how) for number in range(quiet.calls) for how in HOWS]
    random.Random(str(case)).shuffle(found)
    counts: Counter[str] = Counter()
    for number, how in found[:some] if some else found:
        store = Faulty(number, how)
        try:
            Drive(case, store).run()
        except BaseException as error:
            error.add_note(f"case {case}, call {number} {how}")
            raise
        counts[how] += store.hit
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, help="processes that share the cases")
    begun, counts = time.monotonic(), Counter[str]()
    quietly = partial(logging.disable, logging.WARNING)
    with ProcessPoolExecutor(parser.parse_args().jobs, get_context("spawn"), quietly) as jobs:
        for number, found in enumerate(jobs.map(faults_of, MATRIX), 1):
            counts += found
            print(f"{number} of {len(MATRIX)} cases, {counts.total()} faults", file=sys.stderr, flush=True)
    print(f"{len(MATRIX)} cases, {time.monotonic() - begun:.0f} s: {dict(counts)}")


if __name__ == "__main__":
    main()
