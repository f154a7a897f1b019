"""A trace through SGLang's scheduler calls and pools, with SGLang's own prefix cache and with ours, at equal memory.

``python -m bench.peers.sglang_trace TRACE [--letters FS] [--requests 1000] [--tokens 512000] [--page 1] [--events]``

The sides take turns in one process, a few requests each, so that both see the same machine. Time is CPU time of the
thread. "Whole" is all that the scheduler does for a request: its queue, admission, batches, slots, results and its
cache. "Cache" is the part inside of the cache's methods. There is no model: a pass computes nothing, and answers are
cut to ``--answer`` tokens.

With ``--events`` each cache runs twice, with KV events and without. "Taking events" is what the scheduler's thread
spends in ``take_events``, once in a step. SGLang's own cache also works for events where it inserts and evicts, and
that shows in "whole" and in "cache". Messages are neither encoded nor sent.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from prefixloom.lab import read_trace

METHODS = (
    "match_prefix", "touch_prefix", "inc_lock_ref", "dec_lock_ref", "lock", "unlock", "checkpoint", "on_release",
    "evict", "evict_for_alloc", "path_device_indices", "prefix_device_indices", "evictable_size", "full_evictable_size",
    "swa_evictable_size", "mamba_evictable_size", "swa_retain_floor",
)  # fmt: skip
"""What SGLang's scheduler calls of its cache."""


Asked = tuple[list[int], int]
"""The tokens of a prompt, and how many its answer has."""


class Stopwatch:
    """CPU time in the outermost of the calls that it counts."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._depth = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return call(*args, **kwargs)
            self._depth = 1
            begun = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent += time.thread_time() - begun
                self._depth = 0

        return timed


class TimedSide:
    """One cache in SGLang's scheduler."""

    def __init__(self, name: str, scheduler: Any, inside: bool, with_events: bool) -> None:
        self.name = name
        self.scheduler = scheduler
        self.asked = 0
        self.whole = 0.0
        self.cache = Stopwatch()
        self.events = Stopwatch()
        self.longest_step = 0.0
        """Seconds of the step that took the longest."""
        self.announced = 0
        """Blocks in the events that were taken."""
        self._take = self.events.around(scheduler.cache.take_events) if with_events else None
        if inside:
            for method in METHODS:
                if hasattr(scheduler.cache, method):
                    setattr(scheduler.cache, method, self.cache.around(getattr(scheduler.cache, method)))

    def serve(self, requests: list[Asked], answer: int) -> None:
        for number, (tokens, output) in enumerate(requests):
            self.scheduler.submit(tokens, list(range(number, number + min(answer, output))))
            self.asked += len(tokens)
        while self.scheduler.busy:
            begun = time.thread_time()
            moved = self.scheduler.iterate()
            taken = self._take() if self._take is not None else ()
            spent = time.thread_time() - begun
            self.whole += spent
            self.longest_step = max(self.longest_step, spent)
            self.announced += sum(len(event.block_hashes) for event in taken if hasattr(event, "block_hashes"))
            assert moved or not self.scheduler.busy, f"{self.name}: the scheduler stands still"

    @property
    def hit(self) -> int:
        return sum(self.scheduler.hits.values())


def sides(told: argparse.Namespace, longest: int) -> Iterator[TimedSide]:
    from bench.engines.sglang import SGLangCache
    from bench.engines.sglang_loop import Scheduling
    from bench.engines.sglang_variants import OurCacheInSGLang
    from prefixloom_sglang.cache import PrefixloomCache

    members = {
        "chunk": told.chunk, "longest": longest + 64, "window_share": told.window_share, "ratio": 0.3,
        "requests_at_once": told.running, "track_interval": 256,
    }  # fmt: skip
    bases: dict[str, tuple[Any, dict[str, Any]]] = {
        "prefixloom": (OurCacheInSGLang, {"cache_class": PrefixloomCache}),
        "SGLang": (SGLangCache, {"core": "python"}),
        "SGLang Rust": (SGLangCache, {"core": "rust"}),
    }
    for name in told.sides.split(","):
        base, more = bases[name.strip()]
        for with_events in (False, True) if told.events else (False,):
            parameters = {"enable_kv_cache_events": with_events}
            made = type("Made", (Scheduling, base), members | more | {"parameters": parameters})
            scheduler = made(told.letters, told.page, told.tokens, told.states, told.window)
            called = f"{name.strip()}, events" if with_events else name.strip()
            yield TimedSide(called, scheduler, not told.whole_only, with_events)


def batches(requests: list[Asked], size: int) -> Iterator[list[Asked]]:
    left = iter(requests)
    while batch := list(islice(left, size)):
        yield batch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--letters", default="F", help="F full attention, S windows, M states")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=512_000, help="slots of full attention")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--window-share", type=float, default=0.2, help="slots of windows for each of full attention")
    parser.add_argument("--states", type=int, default=400)
    parser.add_argument("--page", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--answer", type=int, default=8, help="the most tokens of an answer")
    parser.add_argument("--turn", type=int, default=16, help="requests that a side serves before the other does")
    parser.add_argument(
        "--sides", default="prefixloom,SGLang", help='of "prefixloom", "SGLang" (its tree in Python), "SGLang Rust"'
    )
    parser.add_argument("--whole-only", action="store_true", help="do not look at the time in the cache's methods")
    parser.add_argument("--events", action="store_true", help="each side also with KV events")
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args()
    asked = read_trace(told.trace, limit=told.requests)
    requests = [
        (each.prompt.tokens().tolist(), max(1, each.output)) for each in asked if each.prompt.count < told.tokens // 2
    ]
    longest = max(len(tokens) for tokens, _ in requests) + told.answer
    made = [*sides(told, longest)]
    gc.collect()
    gc.freeze()  # what was imported is not looked at again
    for number, batch in enumerate(batches(requests, told.turn)):
        for side in made if number % 2 else reversed(made):
            side.serve(batch, told.answer)
    rows = [
        {
            "side": side.name, "hit": side.hit, "asked": side.asked, "retractions": side.scheduler.retractions,
            "whole_us": 1e6 * side.whole / len(requests), "cache_us": 1e6 * side.cache.spent / len(requests),
            "events_us": 1e6 * side.events.spent / len(requests), "announced": side.announced / len(requests),
            "longest_step_ms": 1e3 * side.longest_step,
        }
        for side in made
    ]  # fmt: skip
    print(json.dumps(rows, indent=2) if told.json else text(rows, len(requests)))
    return 0


def text(rows: list[dict[str, Any]], count: int) -> str:
    with_events = any(row["announced"] for row in rows)
    more = " taking events, us a request | blocks in them | longest step, ms |" if with_events else ""
    lines = [f"{count} requests"]
    lines.append(f"| side | tokens that hit | of all | scheduler, us a request | cache, us a request |{more}")
    lines.append("|---" * (8 if with_events else 5) + "|")
    for row in rows:
        share = row["hit"] / row["asked"]
        line = f"| {row['side']} | {row['hit']:,} | {share:.1%} | {row['whole_us']:,.0f} | {row['cache_us']:,.0f} |"
        if with_events:
            line += f" {row['events_us']:,.0f} | {row['announced']:,.1f} | {row['longest_step_ms']:,.1f} |"
        lines.append(line)
    first = rows[0]
    for row in rows[1:]:
        times = [f"{first[each] / row[each]:.2f}" for each in ("whole_us", "cache_us") if row[each]]
        lines.append(
            f"{first['side']} beside {row['side']}: {first['hit'] / max(1, row['hit']):.3f} of the hits, "
            f"{' and '.join(times)} of the time"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
