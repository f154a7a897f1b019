"""How fast the lab replays, and with how much memory, by the number of requests.

A trace through a composition of full attention, a window and states, in pages of 16 tokens and 40 GiB of pools, by the
default service. Without a trace, synthetic conversations of 512 tokens, of 200 users. Each replay has a process of its
own. Its figures are CPU seconds, requests a minute of CPU time, and the most memory of the process beyond that before
the replay.
"""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path

from bench.runner.figures import Rows
from prefixloom import ComponentSpec, Profile, Traffic
from prefixloom.lab import LabRequest, Service, Setup, SyntheticTrace, read_trace

ROW = {"kv_heads": 2, "k_dim": 128, "v_dim": 128, "dtype": "bfloat16"}
MODEL = Profile(
    [
        ComponentSpec("full", options={"layers": [2], **ROW}),
        ComponentSpec("swa", options={"layers": [1], "window": 1024, **ROW}),
        ComponentSpec("mamba", options={"conv": [4096, 4], "recurrent": [32, 128, 128]}),
    ],
    page_size=16,
)
SHORT = Traffic(prompt=512, output=64, shared=0.3)


def asked(trace: str | None, count: int) -> Iterator[LabRequest]:
    if trace is None:
        return iter(SyntheticTrace(SHORT, users=200, requests=count, think=20.0))
    return itertools.islice(iter(read_trace(Path(trace))), count)


def measured(trace: str | None, count: int, memory: str) -> Rows:
    replay = Setup(MODEL, memory=memory, service=Service()).driver("")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    outcome = replay.run(asked(trace, count))
    seconds = time.process_time() - begun
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "tokens of prompts, millions": [outcome.prompt / 1e6], "seconds": [seconds], "MiB": [(most - before) / 1024],
        "requests a minute": [60 * outcome.requests / seconds], "x ideal": [outcome.multiple],
    }  # fmt: skip


def replay_speed(
    trace: str | None = None, requests: Sequence[int] = (1500, 3000, 6000, 12000), memory: str = "40GiB"
) -> Rows:
    found: Rows = {}
    for count in requests:
        with get_context("spawn").Pool(1) as process:
            rows = process.apply(measured, (trace, count, memory))
        found |= {f"{count:,} requests, {row}": each for row, each in rows.items()}
    return found
