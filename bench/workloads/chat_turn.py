"""The cost of a chat turn for the scheduling thread, phase by phase.

``python -m bench.workloads.chat_turn [--bytecodes] [--steps]``

Conversations that share a system prompt take turns in random order. The pools hold three tenths of all their tokens.
Each turn opens its whole history, grows, appends the answer, computes and closes. The figures are medians of thread CPU
time in microseconds. With ``--bytecodes`` they are the bytecodes that the interpreter executed per turn, which are the
same in every run. A sequence is computed alone (``fill`` and ``commit``), or with ``--steps`` in a step.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from bench.engines.ours import InSteps, Prefixloom
from bench.workloads.conversations import Turn, conversations
from prefixloom import Tokens, encode

PHASES = ("open", "grow", "append", "compute", "close")


def phases(driver: Prefixloom, prompt: Tokens, whole: Tokens) -> list[Callable[[], Any]]:
    """The calls of a turn. The first one opens the sequence that the others use."""
    found: list[Any] = []
    return [
        lambda: found.append(driver.cache.open(prompt)),
        lambda: found[0].grow(whole.count // driver.page * driver.page - found[0].reserved),
        lambda: found[0].append(whole.part(prompt.count)),
        lambda: driver.compute(found[0]),
        lambda: found[0].close(),
    ]


def timed(driver: Prefixloom, turns: list[Turn]) -> dict[str, list[float]]:
    """Microseconds of each phase and of the whole turn, for each turn."""
    clock = time.thread_time_ns
    spent: dict[str, list[float]] = {name: [] for name in (*PHASES, "turn")}
    for prompt, whole in turns:
        calls = phases(driver, encode(prompt), encode(whole))
        marks = [clock()]
        for call in calls:
            call()
            marks.append(clock())
        for name, before, after in zip(PHASES, marks, marks[1:], strict=False):
            spent[name].append((after - before) / 1e3)
        spent["turn"].append((marks[-1] - marks[0]) / 1e3)
    return spent


def counted(driver: Prefixloom, turns: list[Turn], every: int = 7) -> tuple[Counter[str], Counter[str]]:
    """Bytecodes per turn, by phase and by function. When the pools are full, one turn in ``every`` is counted."""
    by_phase: Counter[str] = Counter()
    by_function: Counter[str] = Counter()
    phase = ""

    def follow(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            by_phase[phase] += 1
            by_function[f"{phase:7}{frame.f_code.co_qualname}"] += 1
        return follow

    looked_at = 0
    for number, (prompt, whole) in enumerate(turns):
        watched = number >= len(turns) * 3 // 10 and number % every == 0
        looked_at += watched
        for name, call in zip(PHASES, phases(driver, encode(prompt), encode(whole)), strict=True):
            phase = name
            if watched:
                sys.settrace(follow)
            call()
            sys.settrace(None)
    for counter in (by_phase, by_function):
        for name in counter:
            counter[name] = round(counter[name] / looked_at)
    return by_phase, by_function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comps", nargs="*", default=["F", "FS", "FM", "FSM"])
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--bytecodes", action="store_true")
    parser.add_argument("--steps", action="store_true", help="compute in steps, as an engine does")
    parser.add_argument("--functions", type=int, default=0, help="with --bytecodes: show this many functions")
    given = parser.parse_args()
    turns, total = conversations(given.conversations, 10)
    for comps in given.comps:
        driver = (InSteps if given.steps else Prefixloom)(comps, 16, total * 3 // 10, 3 * given.conversations, 1024)
        gc.collect()
        gc.disable()
        if given.bytecodes:
            by_phase, by_function = counted(driver, turns)
            print(f"{comps:4} bytecodes {by_phase.total():6}  ", *(f"{name} {by_phase[name]:5}" for name in PHASES))
            for name, count in by_function.most_common(given.functions):
                print(f"{count:10} {name}")
        else:
            spent = timed(driver, turns)
            print(f"{comps:4} us", *(f"{name} {statistics.median(each):5.1f}" for name, each in spent.items()))
        gc.enable()


if __name__ == "__main__":
    main()
