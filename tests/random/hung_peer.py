"""How fast a decode process decodes beside a prefill process that hangs or is dead, against its engine alone.

Of one decode process every other step is a step of its engine alone. So both have the same rows, memory and machine,
and what differs is what the decode process does with its peer. Medians of the steps' times, and
of the rounds' ratios.

``OMP_NUM_THREADS=1 python -m tests.random.hung_peer --rounds 7``
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import time

import torch

from prefixloom_engine import Engine, Request
from prefixloom_engine.disaggregation import DecodeEngine
from tests.support.engines import cache_for, connected, model, prompt
from tests.support.processes import spoken

ROWS, TOKENS = 16, 200


def ratio_of_steps(front: DecodeEngine) -> float:
    """The tokens per second of ``front``, as a part of those of its engine alone."""
    pending = [front.add(Request(prompt(n, 40), TOKENS, stops=())) for n in range(ROWS)]
    spent: dict[bool, list[float]] = {True: [], False: []}
    while not all(each.done for each in pending):
        alone = len(spent[True]) == len(spent[False])
        begun = time.perf_counter()
        front.engine.step() if alone else front.step()
        spent[alone].append(time.perf_counter() - begun)
    return statistics.median(spent[True]) / statistics.median(spent[False])


def ratios() -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        process, address = stack.enter_context(spoken("prefill_process"))
        hung = stack.enter_context(connected(Engine(model(), cache_for(model(), debug=False)), address, patience=600))
        process.send_signal(signal.SIGSTOP)
        hung.add(Request(prompt(99, 150), 4))
        assert hung.awaited == 1
        dead = stack.enter_context(DecodeEngine(Engine(model(), cache_for(model(), debug=False)), "tcp://127.0.0.1:9"))
        return {"dead": ratio_of_steps(dead), "hung": ratio_of_steps(hung)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    found = [ratios() for _ in range(rounds)]
    for name in found[0]:
        each = sorted(round_[name] for round_ in found)
        print(f"{name}: {statistics.median(each):.3f} of alone ({each[0]:.3f}-{each[-1]:.3f})")


if __name__ == "__main__":
    main()
