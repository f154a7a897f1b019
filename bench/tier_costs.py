"""What the tiers below the device cost the scheduling thread: ``python bench/tier_costs.py [--turns N]``.

First the chat turn of ``chat_turn.py`` over a cache with a host tier against one without, the same turns on all, each
first in its turn: *idle* (composed, and nothing is ever hit often enough to be copied), and copying. The pools lie on
the meta device, so copies cost their bookkeeping alone. Thread CPU time, medians of turns; the ratio is that of the
medians.

Then ``open``, ``restore`` and ``poll`` with a store that never answers, against a tier without a store, alternately, in
wall time: 50th and 99th percentile, and the ratio of these.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from chat_turn import phases, trace
from peers.drive_prefixloom import NAMES, Prefixloom, installed

import prefixloom
from prefixloom import Profile, TierManifest, Tokens, encode
from prefixloom_hicache import GuardLimits, HostTier, MemoryBackend

POLICIES: dict[str, dict[str, Any]] = {
    "idle": {"write": "selective", "hits": 1 << 30},
    "through": {"write": "through"},
    "back": {"write": "back"},
}


class Tiered(Prefixloom):
    """The same driver over a cache that has a tier as well."""

    def __init__(self, comps: str, page: int, tokens: int, states: int, window: int, policy: str) -> None:
        self.tier = POLICIES[policy]  # type: ignore[misc]  # for one of them, not for all
        super().__init__(comps, page, tokens, states, window)


def turn(driver: Prefixloom, prompt: Tokens, whole: Tokens) -> float:
    begun = time.thread_time_ns()
    for call in phases(driver, prompt, whole):
        call()
    return (time.thread_time_ns() - begun) / 1e3


def turns_of(conversations: int) -> None:
    turns, total = trace(conversations, 10)
    for comps in ("F", "FS", "FM", "FSM"):
        sizes = comps, 16, total * 3 // 10, 3 * conversations, 1024
        drivers = {"none": Prefixloom(*sizes), **{policy: Tiered(*sizes, policy) for policy in POLICIES}}
        spent: dict[str, list[float]] = {name: [] for name in drivers}
        names = list(drivers)
        for number, (prompt, whole) in enumerate(turns):
            asked, all_of_it = encode(prompt), encode(whole)
            first = number % len(names)  # who comes later finds the prompt in the processor's caches
            for name in names[first:] + names[:first]:
                spent[name].append(turn(drivers[name], asked, all_of_it))
        bare = statistics.median(spent["none"])
        told = (
            f"{name} {statistics.median(spent[name]):6.1f} ({statistics.median(spent[name]) / bare:.2f})"
            for name in POLICIES
        )
        print(f"{comps:4} us a turn: without {bare:6.1f}; with a tier:", *told)


class Stalled(MemoryBackend):
    """No call ever comes back."""

    def _never(self, *_: Any) -> Any:
        threading.Event().wait()

    get = put = exists = _never


def composed(stalled: bool) -> prefixloom.Cache:
    host = HostTier(
        TierManifest(capacity=1 << 16), identity={"model": "m"}, fetch="timeout", limits=GuardLimits(deadline=0.05)
    )
    cache = prefixloom.compose(
        Profile([installed(letter, 1024) for letter in "FSM"]), plugins=[host], page_size=16, device="meta",
        capacity={NAMES["F"]: 1 << 15, NAMES["S"]: 1 << 15, NAMES["M"]: 64},
    )  # fmt: skip
    if stalled:
        host.attach(Stalled(capacity=1 << 20))
        cache.poll()
    return cache


def stalled_of(requests: int) -> None:
    turns, _ = trace(max(2, requests // 10), 10)
    caches = {"without": composed(False), "stalled": composed(True)}
    spent: dict[tuple[str, str], list[float]] = {}

    def timed(name: str, what: str, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter_ns()
        found = call()
        spent.setdefault((what, name), []).append((time.perf_counter_ns() - begun) / 1e3)
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
    for what in ("open", "restore", "poll"):
        cuts = {name: statistics.quantiles(spent[what, name], n=100) for name in caches}
        told = (f"{name} {cuts[name][49]:7.1f} / {cuts[name][98]:8.1f}" for name in caches)
        ratios = (cuts["stalled"][at] / cuts["without"][at] for at in (49, 98))
        print(f"{what:8} us, 50th / 99th percentile:", *told, "ratio", " / ".join(f"{ratio:.2f}" for ratio in ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=150)
    parser.add_argument("--requests", type=int, default=1500)
    given = parser.parse_args()
    gc.collect()
    gc.disable()
    turns_of(given.conversations)
    stalled_of(given.requests)


if __name__ == "__main__":
    main()
