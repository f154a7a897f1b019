"""What ``python -m bench`` runs: the scripts of this folder, by name, each giving samples by row.

A row's name ends with its unit. A workload is a function that runs once; whoever compares runs it again and again, in
turn with the other side.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

Rows = dict[str, list[float]]


def chat_turn(conversations: int = 200) -> Rows:
    """A turn of conversations under eviction pressure, by phase, in each composition."""
    import chat_turn as script

    found: Rows = {}
    turns, total = _trace(conversations)
    for comps in ("F", "FS", "FM", "FSM"):
        driver = script.Prefixloom(comps, 16, total * 3 // 10, 3 * conversations, 1024)
        for phase, times in script.timed(driver, turns).items():
            found[f"{comps} {phase}, us"] = [statistics.median(times)]
    return found


def bytecodes(conversations: int = 60) -> Rows:
    """What the interpreter executes for such a turn: the same in every run."""
    import chat_turn as script

    found: Rows = {}
    turns, total = _trace(conversations)
    for comps in ("F", "FS", "FM", "FSM"):
        driver = script.Prefixloom(comps, 16, total * 3 // 10, 3 * conversations, 1024)
        by_phase, _ = script.counted(driver, turns)
        found |= {f"{comps} {phase}, bytecodes": [float(by_phase[phase])] for phase in script.PHASES}
        found[f"{comps} turn, bytecodes"] = [float(by_phase.total())]
    return found


@cache
def _trace(conversations: int) -> tuple[list[tuple[list[int], list[int]]], int]:
    import chat_turn as script

    return script.trace(conversations, 10)


def decode_step() -> Rows:
    """A step of 128 sequences that decode, by the length that each has."""
    import decode_step as script

    found: Rows = {}
    for length in (1024, 131_072):
        _, tables, plain = script.measure(length, 128, 24)
        found[f"{length:,} tokens, with tables, ms"] = [tables]
        found[f"{length:,} tokens, without, ms"] = [plain]
    return found


def scale() -> Rows:
    """A tree of 20,000 leaves: matches, and the calls of requests that must evict."""
    import scale as script

    found: Rows = {}
    few, many = (script.Tree("FSM", leaves) for leaves in (script.FEW, 20_000))
    for kind, row in script.matches(few, many, 500).items():
        found[f"match of {kind}, 1,000 leaves, us"] = [row["few"]]
        found[f"match of {kind}, 20,000 leaves, us"] = [row["many"]]
    for name, row in script.calls(many, 300).items():
        found[f"{name}, us"] = [row["median"]]
    return found


def slot_kernels() -> Rows:
    """Slots that are copied and cleared in batches."""
    import slot_kernels as script

    return {
        f"{case}: {way}, us": [statistics.median(times)]
        for case, ways in script.measure().items()
        for way, times in ways.items()
        if "ours" in way
    }


def host_tier() -> Rows:
    """Copies to the host tier and back, as a share of the speed of one copy."""
    import host_tier as script

    times = script.measure(11)["thread CPU time"]
    whole = statistics.median(times["copy_"])
    return {f"{way}, of copy_": [whole / statistics.median(each)] for way, each in times.items() if way != "copy_"}


def file_tier() -> Rows:
    """The file store against a loop that writes and reads the same bytes."""
    import file_tier as script

    times = {name: statistics.median(each) for name, each in script.measure(256, 64, 3).items()}
    return {f"{kind}, of a plain loop": [times[f"plain {kind}"] / times[f"store {kind}"]] for kind in ("write", "read")}


def engine() -> Rows:
    """The reference engine: what a hit saves, and the share of a step that is not the forward pass."""
    import engine as script

    model = script.ThreeWay("large")
    prefill, step, chunk = script.prefill(model, 1), script.decode(model, 8, 24), script.chunks(model)
    return {
        "prefill with a hit, times as fast": [prefill["faster"]],
        "outside of the forward, decode of 8, %": [100 * step["outside"]],
        "outside of the forward, chunk, %": [100 * chunk["outside"]],
    }


WORKLOADS: dict[str, Callable[[], Rows]] = {
    each.__name__: each
    for each in (chat_turn, bytecodes, decode_step, scale, slot_kernels, host_tier, file_tier, engine)
}
USUAL = ("chat_turn", "bytecodes", "decode_step", "scale")
"""What is run if nothing is named: the cache's own work. The others need minutes, or are of one layer."""
