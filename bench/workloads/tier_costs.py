"""The cost of the tiers below the device for the scheduling thread.

``python -m bench.workloads.tier_costs [--conversations 150] [--requests 1500]``

The first table times the chat turn of ``chat_turn`` on caches with a host tier and on one without. All caches serve the
same turns, and each cache is as often the first as the others. An *idle* tier never copies, because no prefix is hit
often enough; the others copy. The pools lie on the meta device, so a copy costs its bookkeeping only. Figures are
medians of thread CPU time, and their ratio to the cache without a tier.

The second table times ``open``, ``restore`` and ``poll`` with a store that never answers, in turn with a tier without a
store. Figures are the 50th and 99th percentile of wall time, and their ratios.
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

import prefixloom
from bench.engines.ours import NAMES, Prefixloom, installed
from bench.workloads.chat_turn import phases
from bench.workloads.conversations import conversations
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
    """The microseconds of a turn."""
    before = time.thread_time_ns()
    for call in phases(driver, prompt, whole):
        call()
    return (time.thread_time_ns() - before) / 1e3


def print_turns(count: int) -> None:
    turns, total = conversations(count, 10)
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
        bare = statistics.median(spent["none"])
        shown = (
            f"{name} {statistics.median(spent[name]):6.1f} ({statistics.median(spent[name]) / bare:.2f})"
            for name in POLICIES
        )
        print(f"{comps:4} us a turn: without {bare:6.1f}; with a tier:", *shown)


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


def print_stalled(requests: int) -> None:
    turns, _ = conversations(max(2, requests // 10), 10)
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
    for what in ("open", "restore", "poll"):
        cuts = {name: statistics.quantiles(spent[what, name], n=100) for name in caches}
        shown = (f"{name} {cuts[name][49]:7.1f} / {cuts[name][98]:8.1f}" for name in caches)
        ratios = (cuts["stalled"][at] / cuts["without"][at] for at in (49, 98))
        print(f"{what:8} us, 50th / 99th percentile:", *shown, "ratio", " / ".join(f"{ratio:.2f}" for ratio in ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=150)
    parser.add_argument("--requests", type=int, default=1500)
    given = parser.parse_args()
    gc.collect()
    gc.disable()
    print_turns(given.conversations)
    print_stalled(given.requests)


if __name__ == "__main__":
    main()
