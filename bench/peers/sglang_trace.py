"""A trace through SGLang's scheduler calls and pools, with SGLang's own prefix cache and with ours, at equal memory.

The sides take turns in one process, ``turn`` requests each, so that both see the same machine. Time is CPU time of the
thread for a request. "Scheduler" is all that the scheduler does for it: its queue, admission, batches, slots, results
and its cache. "Cache" is the part inside of the cache's methods. There is no model: a pass computes nothing, and
answers are cut to ``answer`` tokens. ``sides`` are of "prefixloom", "SGLang" (its tree in Python) and "SGLang Rust".

With ``events`` each cache runs twice, with KV events and without. "Taking events" is what the scheduler's thread spends
in ``take_events``, once in a step. SGLang's own cache also works for events where it inserts and evicts, and that shows
in the other figures. Messages are neither encoded nor sent.
"""

from __future__ import annotations

import gc
import os
import time
from typing import Any

from bench.engines.sglang import SGLangCache, torch
from bench.engines.sglang_loop import Scheduling
from bench.engines.sglang_variants import OurCacheInSGLang
from bench.runner.figures import Rows, Stopwatch
from prefixloom.lab import read_trace
from prefixloom_sglang.cache import PrefixloomCache

METHODS = (
    "match_prefix", "touch_prefix", "inc_lock_ref", "dec_lock_ref", "lock", "unlock", "checkpoint", "on_release",
    "evict", "evict_for_alloc", "path_device_indices", "prefix_device_indices", "evictable_size", "full_evictable_size",
    "swa_evictable_size", "mamba_evictable_size", "swa_retain_floor",
)  # fmt: skip
"""What SGLang's scheduler calls of its cache."""


Asked = tuple[list[int], int]
"""The tokens of a prompt, and how many its answer has."""


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


BASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "prefixloom": (OurCacheInSGLang, {"cache_class": PrefixloomCache}),
    "SGLang": (SGLangCache, {"core": "python"}),
    "SGLang Rust": (SGLangCache, {"core": "rust"}),
}


def sglang_trace(
    trace: str, letters: str = "F", requests: int = 1000, tokens: int = 512_000, window: int = 1024,
    window_share: float = 0.2, states: int = 400, page: int = 1, chunk: int = 8192, running: int = 16, answer: int = 8,
    turn: int = 16, sides: str = "prefixloom,SGLang", events: bool = False, whole_only: bool = False,
) -> Rows:  # fmt: skip
    torch.set_num_threads(os.cpu_count() or 1)  # as SGLang has it
    asked = [
        (each.prompt.tokens().tolist(), max(1, each.output))
        for each in read_trace(trace, limit=requests)
        if each.prompt.count < tokens // 2
    ]
    members = {
        "chunk": chunk, "longest": max(len(each) for each, _ in asked) + answer + 64, "window_share": window_share,
        "ratio": 0.3, "requests_at_once": running, "track_interval": 256,
    }  # fmt: skip
    made = []
    for name in sides.split(","):
        base, more = BASES[name.strip()]
        for with_events in (False, True) if events else (False,):
            parameters = {"enable_kv_cache_events": with_events}
            kind = type("Made", (Scheduling, base), members | more | {"parameters": parameters})
            called = f"{name.strip()}, events" if with_events else name.strip()
            scheduler = kind(letters, page, tokens, states, window)
            made.append(TimedSide(called, scheduler, not whole_only, with_events))
    gc.collect()
    gc.freeze()  # what was imported is not looked at again
    for number, at in enumerate(range(0, len(asked), turn)):
        for side in made if number % 2 else reversed(made):
            side.serve(asked[at : at + turn], answer)
    found: Rows = {}
    for side in made:
        rows = {
            "tokens that hit, %": 100 * side.hit / side.asked, "tokens that hit": side.hit,
            "retractions": side.scheduler.retractions, "scheduler, us a request": 1e6 * side.whole / len(asked),
            "cache, us a request": 1e6 * side.cache.spent / len(asked),
            "longest step, ms": 1e3 * side.longest_step,
        }  # fmt: skip
        if side.announced:
            rows |= {"taking events, us a request": 1e6 * side.events.spent / len(asked)}
            rows |= {"blocks announced, of a request": side.announced / len(asked)}
        found |= {f"{side.name}: {row}": [float(figure)] for row, figure in rows.items()}
    first = made[0]
    for side in made[1:]:
        found[f"{first.name} over {side.name}: hits"] = [first.hit / max(1, side.hit)]
        found[f"{first.name} over {side.name}: scheduler's time"] = [first.whole / side.whole]
        if side.cache.spent:
            found[f"{first.name} over {side.name}: cache's time"] = [first.cache.spent / side.cache.spent]
    return found
