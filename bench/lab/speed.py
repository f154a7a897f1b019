"""How fast the lab replays, and with how much memory, by the number of requests.

``python -m bench.lab.speed conversation_trace.jsonl.gz [--requests 1500 3000 6000 12000]``

A trace through a composition of full attention, a window and states, in pages of 16 tokens and 40 GiB of pools, by the
default service. Without a trace, synthetic conversations of 512 tokens, of 200 users. ``--memory`` says how large the
pools are. Each replay has a process of its own. Its figures are CPU seconds, requests a minute of CPU time, and the
most memory of the process beyond that before the replay.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

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


def measured(trace: str | None, count: int, memory: str) -> tuple[int, int, float, int, float]:
    """Requests, tokens of their prompts, CPU seconds, kilobytes, and the computed multiple of the ideal."""
    replay = Setup(MODEL, memory=memory, service=Service()).driver("")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    outcome = replay.run(asked(trace, count))
    seconds = time.process_time() - begun
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return outcome.requests, outcome.prompt, seconds, most - before, outcome.multiple


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--requests", type=int, nargs="+", default=[1500, 3000, 6000, 12000])
    parser.add_argument("--memory", default="40GiB")
    args = parser.parse_args()
    for count in args.requests:
        with get_context("spawn").Pool(1) as process:
            requests, tokens, seconds, size, multiple = process.apply(measured, (args.trace, count, args.memory))
        page = 1e6 * seconds / (tokens / 16)
        print(
            f"{requests:9,} requests, {tokens:13,} tokens: {seconds:7.1f} s, {60 * requests / seconds:7,.0f} a minute, "
            f"{page:.2f} us a page of the prompts, {size / 1024:,.0f} MiB, {multiple:.3f} x ideal",
            flush=True,
        )


if __name__ == "__main__":
    main()
