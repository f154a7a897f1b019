"""The cost of a chat turn for the scheduling thread, phase by phase.

Conversations that share a system prompt take turns in random order. The pools hold three tenths of all their tokens.
Each turn opens its whole history, grows, appends the answer, computes and closes. ``chat_turn`` takes medians of thread
CPU time. ``bytecodes`` counts what the interpreter executes for a turn, which is the same in every run, and with
``functions`` the functions that take the most. A sequence is computed alone (``fill`` and ``commit``), or with
``steps`` in a step, as an engine does.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from bench.engines.ours import InSteps, Prefixloom
from bench.runner.figures import Rows
from bench.workloads.conversations import conversations as served
from prefixloom import Tokens, encode

PHASES = ("open", "grow", "append", "compute", "close")
COMPS = "F,FS,FM,FSM"


def driver_for(comps: str, count: int, total: int, steps: bool) -> Prefixloom:
    return (InSteps if steps else Prefixloom)(comps, 16, total * 3 // 10, 3 * count, 1024)


def phases(driver: Prefixloom, prompt: Tokens, whole: Tokens) -> list[Callable[[], Any]]:
    """Return the calls of a turn. The first one opens the sequence that the others use."""
    found: list[Any] = []
    return [
        lambda: found.append(driver.cache.open(prompt)),
        lambda: found[0].grow(whole.count // driver.page * driver.page - found[0].reserved),
        lambda: found[0].append(whole.part(prompt.count)),
        lambda: driver.compute(found[0]),
        lambda: found[0].close(),
    ]


def chat_turn(comps: str = COMPS, conversations: int = 200, steps: bool = False) -> Rows:
    """Return the median microseconds of each phase, and of a turn."""
    clock = time.thread_time_ns
    found: Rows = {}
    turns, total = served(conversations, 10)
    for letters in comps.split(","):
        driver = driver_for(letters, conversations, total, steps)
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
        found |= {f"{letters} {name}, us": [statistics.median(times)] for name, times in spent.items()}
    return found


def bytecodes(comps: str = COMPS, conversations: int = 60, steps: bool = False, functions: int = 0) -> Rows:
    """Return the bytecodes of each phase, of a turn, and of the functions that take the most."""
    found: Rows = {}
    turns, total = served(conversations, 10)
    for letters in comps.split(","):
        by_phase, by_function = counted(driver_for(letters, conversations, total, steps), turns)
        found |= {f"{letters} {phase}, bytecodes": [float(by_phase[phase])] for phase in PHASES}
        found[f"{letters} turn, bytecodes"] = [float(by_phase.total())]
        for name, count in by_function.most_common(functions):
            found[f"{letters} {name}, bytecodes"] = [float(count)]
    return found


def counted(driver: Prefixloom, turns: Any, every: int = 7) -> tuple[Counter[str], Counter[str]]:
    """Count bytecodes per turn, by phase and by function. When the pools are full, one turn in ``every`` is counted."""
    by_phase: Counter[str] = Counter()
    by_function: Counter[str] = Counter()
    phase = ""

    def follow(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            by_phase[phase] += 1
            by_function[f"{phase}: {frame.f_code.co_qualname}"] += 1
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
