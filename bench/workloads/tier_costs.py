"""The cost of the tiers below the device for the scheduling thread.

The first rows time the chat turn of ``chat_turn`` on caches with a host tier and on one without. All caches serve the
same turns, and each cache is as often the first as the others. An *idle* tier never copies, because no prefix is hit
often enough; the others copy. The pools lie on the meta device, so a copy costs its bookkeeping only. Figures are
medians of thread CPU time, and their ratio to the cache without a tier.

The other rows time ``open``, ``restore`` and ``poll`` with a store that never answers, as a multiple of a tier without
a store, in turn: the 50th and 99th percentile of wall time.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import prefixloom
from bench.engines.ours import NAMES, Prefixloom, installed
from bench.runner.figures import Rows
from bench.workloads.chat_turn import phases
from bench.workloads.conversations import conversations as served
from prefixloom import Profile, TierManifest, Tokens, encode
from prefixloom_hicache import GuardLimits, HostTier, MemoryBackend

POLICIES: dict[str, dict[str, Any]] = {
    "idle": {"write": "selective", "hits": 1 << 30},
    "through": {"write": "through"},
    "back": {"write": "back"},
}


class WithTier(Prefixloom):
    """Our driver on a cache with a host tier."""

    def __init__(self, comps: str, page: int, tokens: int, states: int, window: int, policy: str) -> None:
        self.tier = POLICIES[policy]  # type: ignore[misc]  # of this object only
        super().__init__(comps, page, tokens, states, window)


def turn(driver: Prefixloom, prompt: Tokens, whole: Tokens) -> float:
    """Return the microseconds of a turn."""
    before = time.thread_time_ns()
    for call in phases(driver, prompt, whole):
        call()
    return (time.thread_time_ns() - before) / 1e3


def turns_with_tiers(count: int) -> Rows:
    found: Rows = {}
    turns, total = served(count, 10)
    for comps in ("F", "FS", "FM", "FSM"):
        sizes = comps, 16, total * 3 // 10, 3 * count, 1024
        drivers = {"none": Prefixloom(*sizes), **{policy: WithTier(*sizes, policy) for policy in POLICIES}}
        spent: dict[str, list[float]] = {name: [] for name in drivers}
        names = list(drivers)
        for number, (prompt, whole) in enumerate(turns):
            asked, all_of_it = encode(prompt), encode(whole)
            first = number % len(names)  # the later ones find the prompt in the processor's caches
            for name in names[first:] + names[:first]:
                spent[name].append(turn(drivers[name], asked, all_of_it))
        bare = statistics.median(spent.pop("none"))
        found[f"{comps} turn without a tier, us"] = [bare]
        for name, times in spent.items():
            found[f"{comps} turn, {name}, of without"] = [statistics.median(times) / bare]
    return found


class StalledStore(MemoryBackend):
    """A store whose calls never return."""

    def _never(self, *_: Any) -> Any:
        threading.Event().wait()

    get = put = exists = _never


def with_store(stalled: bool) -> prefixloom.Cache:
    host = HostTier(
        TierManifest(capacity=1 << 16),
        identity={"model": "m", "weights": "1"},
        fetch="timeout",
        limits=GuardLimits(deadline=0.05),
    )
    cache = prefixloom.compose(
        Profile([installed(letter, 1024) for letter in "FSM"]), plugins=[host], page_size=16, device="meta",
        capacity={NAMES["F"]: 1 << 15, NAMES["S"]: 1 << 15, NAMES["M"]: 64},
    )  # fmt: skip
    if stalled:
        host.attach(StalledStore(capacity=1 << 20))
        cache.poll()
    return cache


def stalled(requests: int) -> Rows:
    turns, _ = served(max(2, requests // 10), 10)
    caches = {"without": with_store(False), "stalled": with_store(True)}
    spent: dict[tuple[str, str], list[float]] = {}

    def timed(name: str, what: str, call: Callable[[], Any]) -> Any:
        before = time.perf_counter_ns()
        found = call()
        spent.setdefault((what, name), []).append((time.perf_counter_ns() - before) / 1e3)
        return found

    for prompt, _ in turns[:requests]:
        tokens = encode(prompt)
        for name, cache in caches.items():
            sequence = timed(name, "open", partial(cache.open, tokens, leave=1))
            timed(name, "restore", sequence.restore)
            sequence.grow(sequence.named - sequence.reserved)
            with cache.step([sequence]) as step:
                step.run_ops()
            sequence.close()
            timed(name, "poll", cache.poll)
    found: Rows = {}
    for what in ("open", "restore", "poll"):
        without, slow = (statistics.quantiles(spent[what, name], n=100) for name in caches)
        for part, at in (("median", 49), ("99%", 98)):
            found[f"{what}, {part}, without a store, us"] = [without[at]]
            found[f"{what}, {part}, of a store that stalls, times"] = [slow[at] / without[at]]
    return found


def tier_costs(conversations: int = 150, requests: int = 1500) -> Rows:
    return turns_with_tiers(conversations) | stalled(requests)
