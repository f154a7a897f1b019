"""Runs the rows on every side in turn, and judges each row against its bar.

Each side is a process of its own. In every round each side does each group of rows once, in alternating order. A row's
figure is the median over the rounds of each round's median; its spread is the least and the most of these. A ratio is
taken round by round, so that a disturbance in one round hits both sides of it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from bench.peers.sides import NOT_THE_SAME, OURS
from bench.runner.figures import spread
from bench.runner.machine import MachineSpeed, Readings
from bench.runner.side import ROOT, SideProcess, SideProcessEnded

AHEAD = {
    "chat turn, encoded keys": 3.0,
    "chat turn, token lists": 2.0,
    **dict.fromkeys(("hot match", "match of", "lock and unlock", "chunk of", "evict", "bytes per leaf"), 1.0),
}
"""The bar, by the beginning of a row's name: how many times ahead of the fastest peer with the same work we must be."""

AT_MOST = {"the last quarter of chunks": 1.3, "evict one leaf of the most": 1.3}
"""Rows that are ratios themselves: they show that a cost does not depend on the amount of cached data."""

SAME = {"tokens that hit": 0.01}
"""Rows in which the sides must agree up to this share. Otherwise they did not do the same work."""

LARGE = {"evict", "leaves"}
"""Groups that first fill large trees. They get half of the rounds."""

Found = dict[str, dict[str, list[float]]]
"""By row and side: one figure per round."""


def begins(row: str, table: dict[str, Any]) -> Any:
    """Return the entry of a table whose key is the longest beginning of the row's name."""
    found = [each for each in table if row.startswith(each)]
    return table[max(found, key=len)] if found else None


class RunningSides:
    """The processes of the sides. They live as long as the comparison.

    Groups that fill large trees have a second process on each side, which no other group has used.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.started = 0
        self.running: dict[tuple[str, bool], SideProcess] = {}
        stack.callback(lambda: [side.close() for side in self.running.values()])

    def run(self, side: str, **arguments: Any) -> dict[str, Any]:
        which = side, arguments["group"] in LARGE
        if which not in self.running:
            self.running[which] = SideProcess(ROOT, self.scratch / str(self.started))
            self.started += 1
        try:
            return self.running[which].run("bench.peers.rows:measure", side=side, **arguments)
        except SideProcessEnded as error:
            del self.running[which]
            return {"skipped": str(error), "error": ""}


def measure(
    running: RunningSides, speed: MachineSpeed, sides: list[str], groups: list[str], rounds: int, **composition: Any
) -> tuple[Found, dict[str, str]]:
    """Return the figures of one composition; and which sides skipped which group, with the reason."""
    found: Found = {}
    skipped: dict[str, str] = {}
    for group in groups:
        for number in range(max(1, rounds // 2) if group in LARGE else rounds):
            speed.read()
            for side in sides if number % 2 == 0 else sides[::-1]:
                if side in skipped or f"{side}, {group}" in skipped:
                    continue
                print(f"{composition['comps']}/{composition['page']} {group} {number + 1}: {side}", file=sys.stderr)
                answer = running.run(side, group=group, **composition)
                if why := answer.get("skipped"):
                    unavailable = answer["error"] == "EngineUnavailable"
                    reason = why if unavailable or not answer["error"] else f"{answer['error']}: {why}"
                    skipped[side if unavailable else f"{side}, {group}"] = reason
                for row, samples in answer.get("rows", {}).items():
                    figure = min(samples) if row.startswith("worst") else statistics.median(samples)
                    found.setdefault(row, {}).setdefault(side, []).append(figure)
    return found, skipped


def judged(row: str, by_side: dict[str, list[float]]) -> dict[str, Any]:
    """Return a row with its verdict: each side's figure, and how far ours are ahead of the fastest comparable peer."""
    figures = {side: spread(each) for side, each in by_side.items()}
    if row.startswith("worst"):  # other programs on the machine can only add time
        figures = {side: {**each, "median": each["least"]} for side, each in figures.items()}
    apart = {side: why for side in figures if (why := begins(row, NOT_THE_SAME.get(side, {})))}
    verdict: dict[str, Any] = {"row": row, "sides": figures, "not the same work": apart}
    most, differ = begins(row, AT_MOST), begins(row, SAME)
    peers = [side for side in figures if side not in OURS and side not in apart]
    ours = [side for side in figures if side in OURS]
    if most is not None:
        verdict |= {"at most": most, "met": {side: figures[side]["median"] <= most for side in ours}}
    elif differ is not None:
        verdict["differ by"] = {
            f"{side}, {peer}": figures[side]["median"] / figures[peer]["median"] - 1 for side in ours for peer in peers
        }
        verdict |= {"at most": differ, "met": {pair: abs(by) <= differ for pair, by in verdict["differ by"].items()}}
    elif peers:
        verdict["against"] = against = min(peers, key=lambda side: figures[side]["median"])
        verdict["bar"] = bar = begins(row, AHEAD)
        verdict["ahead"] = {side: _ahead(row, by_side[side], by_side[against]) for side in ours}
        if bar is not None:
            verdict["met"] = {side: each["median"] >= bar for side, each in verdict["ahead"].items()}
    return verdict


def _ahead(row: str, ours: list[float], theirs: list[float]) -> dict[str, float]:
    if row.startswith("worst"):
        return spread([min(theirs) / (min(ours) or 1)])
    return spread([their / (our or 1) for our, their in zip(ours, theirs, strict=False)])


def compare(
    sides: list[str], groups: list[str], comps: list[str], pages: list[int], rounds: int, sizes: dict[str, Any]
) -> dict[str, Any]:
    """Return the whole comparison, in the form that is saved as JSON."""
    speed = MachineSpeed()
    whole: dict[str, Any] = {"rounds": rounds, "results": [], "skipped": {}, "machine": speed.readings}
    with ExitStack() as stack:
        running = RunningSides(stack)
        for letters, page in product(comps, pages):
            found, skipped = measure(running, speed, sides, groups, rounds, comps=letters, page=page, sizes=sizes)
            rows = [judged(row, by_side) for row, by_side in found.items()]
            whole["results"].append({"comps": letters, "page": page, "rows": rows})
            whole["skipped"] |= {f"{letters}/{page}, {side}": why for side, why in skipped.items()}
    speed.read()
    return whole


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return several runs as one. A row that was measured again replaces the earlier one."""
    by_composition: dict[tuple[str, int], dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    readings: Readings = {}
    for run in runs:
        skipped |= run["skipped"]
        for name, figures in run.get("machine", {}).items():
            readings.setdefault(name, []).extend(figures)
        for result in run["results"]:
            rows = by_composition.setdefault((result["comps"], result["page"]), {})
            rows |= {row["row"]: row for row in result["rows"]}
    results = [
        {"comps": comps, "page": page, "rows": list(rows.values())} for (comps, page), rows in by_composition.items()
    ]
    return {"results": results, "skipped": skipped, "machine": readings}
