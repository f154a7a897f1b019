"""How fast a decode process decodes beside a prefill process that hangs or is dead, against an engine alone.

The three serve the same requests in one process, step by step in turn, so that whatever else the machine does falls on
all of them alike. Medians of the rounds' ratios.

``OMP_NUM_THREADS=1 python -m tests.random.hung_peer --rounds 7``
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import time
from typing import Any

import torch

from prefixloom_engine import Engine, Request
from prefixloom_engine.disaggregation import DecodeEngine
from tests.support.engines import cache_for, connected, model, prompt
from tests.support.processes import spoken

ROWS, TOKENS = 16, 200


def seconds_of_steps() -> dict[str, float]:
    """How long the steps of each took, until all had answered."""
    requests = [Request(prompt(n, 40), TOKENS) for n in range(ROWS)]
    engines = [Engine(model(), cache_for(model(), debug=False)) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        process, address = stack.enter_context(spoken("prefill_process"))
        hung = stack.enter_context(connected(engines[0], address, patience=600))
        process.send_signal(signal.SIGSTOP)
        assert hung.add(Request(prompt(99, 150), 4)).answer is None
        dead = stack.enter_context(DecodeEngine(engines[1], "tcp://127.0.0.1:9"))
        alone = stack.enter_context(engines[2])
        runs: dict[str, Any] = {"alone": alone, "dead": dead, "hung": hung}
        asked = {name: [each.add(request) for request in requests] for name, each in runs.items()}
        spent = dict.fromkeys(runs, 0.0)
        names, turn = list(runs), 0
        while not all(each.done for pending in asked.values() for each in pending):
            turn += 1
            for name in (*names[turn % 3 :], *names[: turn % 3]):
                if not all(each.done for each in asked[name]):
                    begun = time.perf_counter()
                    runs[name].step()
                    spent[name] += time.perf_counter() - begun
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    found = [seconds_of_steps() for _ in range(rounds)]
    for name in found[0]:
        rates = [ROWS * TOKENS / each[name] for each in found]
        ratios = [each["alone"] / each[name] for each in found]
        spread = f"{min(ratios):.3f}-{max(ratios):.3f}"
        print(f"{name}: {statistics.median(rates):.0f} tokens/s, {statistics.median(ratios):.3f} of alone ({spread})")


if __name__ == "__main__":
    main()
