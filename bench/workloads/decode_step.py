"""The cost of a decode step for the scheduling thread. It should not depend on the length of the cached prefix.

For each of the ``lengths``: thread CPU time per step of a batch. In a step every sequence grows by one token, gets the
token appended, and is computed. In every other step, page tables and slots of states are asked for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from bench.runner.figures import Rows
from prefixloom import Buffer, Component, Manifest, Path, Point, Window, compose


def decode_step(lengths: Sequence[int] = (1024, 131_072), sequences: int = 128, steps: int = 24) -> Rows:
    """Return the milliseconds of the first step with tables, and the medians of later steps with and without."""
    found: Rows = {}
    for length in lengths:
        first, tables, plain = measure(length, sequences, steps)
        found[f"{length:,} tokens, first with tables, ms"] = [first]
        found[f"{length:,} tokens, with tables, ms"] = [tables]
        found[f"{length:,} tokens, without, ms"] = [plain]
    return found


def measure(length: int, sequences: int, steps: int) -> tuple[float, float, float]:
    """Return the milliseconds of the first step with tables, and medians of further ones with and without."""
    token = Manifest([Buffer("kv", (1,), "int8")])
    parts = [
        Component("path", token, Path()),
        Component("near", token, Window(1024)),
        Component("state", token, Point()),
    ]
    room = length + sequences * (3 * steps + 64)
    cache = compose(
        None,
        plugins=parts,
        page_size=16,
        debug=False,
        capacity={"path": room, "near": room, "state": 2 * sequences + 2},
    )
    prompt = list(range(length))
    with cache.open(prompt) as first:
        first.grow(length)
        with cache.step([first]) as step:
            step.run_ops()
    batch = [cache.open([*prompt, i]) for i in range(sequences)]
    times: dict[str, list[float]] = {"with": [], "without": []}
    for k in range(2 * steps + 1):
        for sequence in batch:
            if sequence.named == sequence.reserved:
                sequence.append([k])
        before = time.thread_time()
        for sequence in batch:
            sequence.grow(1)
        with cache.step(batch) as step:
            step.run_ops()
            if k % 2 == 0:
                for name in ("path", "near", "state"):
                    step.table(name)
        cache.poll()
        times["without" if k % 2 else "with"].append((time.thread_time() - before) * 1e3)
    for sequence in batch:
        sequence.abort()
    return times["with"][0], statistics.median(times["with"][1:]), statistics.median(times["without"])
