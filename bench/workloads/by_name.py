"""The workloads of ``python -m bench``, by name. Each returns samples by row; a row's name ends with its unit.

A workload is a function that does its work once. The caller runs it again in every round, in turn with the other side.
Workloads run in processes that measure; only there is prefixloom imported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from bench.runner.figures import Rows
from bench.workloads.conversations import conversations

COMPOSITIONS = ("F", "FS", "FM", "FSM")


def chat_turn(count: int = 200) -> Rows:
    """A turn of conversations under eviction pressure: each phase, in each composition."""
    from bench.workloads import chat_turn as script

    found: Rows = {}
    turns, total = conversations(count, 10)
    for comps in COMPOSITIONS:
        driver = script.Prefixloom(comps, 16, total * 3 // 10, 3 * count, 1024)
        for phase, times in script.timed(driver, turns).items():
            found[f"{comps} {phase}, us"] = [statistics.median(times)]
    return found


def bytecodes(count: int = 60) -> Rows:
    """The bytecodes that the interpreter executes for such a turn. They are the same in every run."""
    from bench.workloads import chat_turn as script

    found: Rows = {}
    turns, total = conversations(count, 10)
    for comps in COMPOSITIONS:
        driver = script.Prefixloom(comps, 16, total * 3 // 10, 3 * count, 1024)
        by_phase, _ = script.counted(driver, turns)
        found |= {f"{comps} {phase}, bytecodes": [float(by_phase[phase])] for phase in script.PHASES}
        found[f"{comps} turn, bytecodes"] = [float(by_phase.total())]
    return found


def decode_step() -> Rows:
    """A decode step of 128 sequences, for two lengths of the sequences."""
    from bench.workloads import decode_step as script

    found: Rows = {}
    for length in (1024, 131_072):
        _, tables, plain = script.measure(length, 128, 24)
        found[f"{length:,} tokens, with tables, ms"] = [tables]
        found[f"{length:,} tokens, without, ms"] = [plain]
    return found


def scale() -> Rows:
    """Matches in a tree of 20,000 leaves, and the calls of requests that must evict."""
    from bench.workloads import scale as script

    found: Rows = {}
    few, many = (script.FilledTree("FSM", leaves) for leaves in (script.FEW, 20_000))
    for kind, row in script.matches(few, many, 500).items():
        found[f"match of {kind}, 1,000 leaves, us"] = [row["few"]]
        found[f"match of {kind}, 20,000 leaves, us"] = [row["many"]]
    for name, row in script.calls(many, 300).items():
        found[f"{name}, us"] = [row["median"]]
    return found


def host_tier() -> Rows:
    """Copies to the host tier and back, as a share of the speed of one large copy."""
    from bench.workloads import host_tier as script

    times = script.measure(11, 6)["thread CPU time"]
    whole = statistics.median(times["copy_"])
    return {f"{way}, of copy_": [whole / statistics.median(each)] for way, each in times.items() if way != "copy_"}


def reaches() -> Rows:
    """Unions of reaches and reaches in plain Python, as a ratio to built-in ones of the same shape."""
    from bench.workloads import reaches as script

    return {
        f"{name}: {work}, times": [one / other]
        for name, (reach, beside, _) in script.PAIRS.items()
        for work, (one, other) in script.measure((reach, beside), 30).items()
    }


def file_tier() -> Rows:
    """The file store, as a share of the speed of a loop that writes and reads the same bytes."""
    from bench.workloads import file_tier as script

    times = {name: statistics.median(each) for name, each in script.measure(256, 64, 3).items()}
    return {f"{kind}, of a plain loop": [times[f"plain {kind}"] / times[f"store {kind}"]] for kind in ("write", "read")}


def engine() -> Rows:
    """The reference engine: how much a hit saves, and the share of a step that is not the forward pass."""
    from bench.workloads import engine as script

    model = script.ThreeWay("large")
    prefill, step, chunk = script.prefill(model, 1), script.decode(model, 8, 24), script.chunks(model)
    return {
        "prefill with a hit, times as fast": [prefill["faster"]],
        "outside of the forward, decode of 8, %": [100 * step["outside"]],
        "outside of the forward, chunk, %": [100 * chunk["outside"]],
    }


WORKLOADS: dict[str, Callable[[], Rows]] = {
    each.__name__: each for each in (chat_turn, bytecodes, decode_step, scale, reaches, host_tier, file_tier, engine)
}
USUAL = ("chat_turn", "bytecodes", "decode_step", "scale")
"""Run if no workload is named: the cache's own work. The others need minutes, or measure one layer."""


def path_of(name: str) -> str:
    """The workload as a process that measures is given it."""
    return f"{__name__}:{WORKLOADS[name].__name__}"
