"""How fast a decode process decodes beside a prefill process that hangs, is dead, or is not asked: tokens a second.

The same requests in turn, several rounds; medians, and their ratio to the engine alone.

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


def rate(peer: str) -> float:
    """Tokens a second of 16 requests beside this ``peer``: alone, dead or hung."""
    requests = [Request(prompt(n, 40), 200) for n in range(16)]
    engine = Engine(model(), cache_for(model(), debug=False))
    with contextlib.ExitStack() as stack:
        if peer == "hung":
            process, address = stack.enter_context(spoken("prefill_process"))
            decode = stack.enter_context(connected(engine, address, patience=600))
            process.send_signal(signal.SIGSTOP)
            assert decode.add(Request(prompt(99, 150), 4)).answer is None
        elif peer == "dead":
            decode = stack.enter_context(DecodeEngine(engine, "tcp://127.0.0.1:9"))
        else:
            stack.enter_context(engine)
        add, step = (engine.add, engine.step) if peer == "alone" else (decode.add, decode.step)
        pending = [add(request) for request in requests]
        step()
        begun = time.perf_counter()
        while not all(each.done for each in pending):
            step()
        return 16 * 200 / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rates: dict[str, list[float]] = {"alone": [], "dead": [], "hung": []}
    for _ in range(rounds):
        for peer, found in rates.items():
            found.append(rate(peer))
    alone = statistics.median(rates["alone"])
    for peer, found in rates.items():
        median = statistics.median(found)
        print(f"{peer}: {median:.0f} tokens/s ({min(found):.0f}-{max(found):.0f}), {median / alone:.3f} of alone")


if __name__ == "__main__":
    main()
