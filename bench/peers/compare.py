"""Who is how far ahead: runs the rows on every side in turn, and says what came of it against the bar.

Each side is a process of its own; in every round each does each group of rows once, in an order that alternates. A
row's figure is the median over the rounds of each round's median, its spread the least and the most of these; a ratio
is taken round by round, so that what slows a round slows both.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from machine import Looks, Machine
from sides import HERE, Ended, Side, register

from peers import NOT_THE_SAME, OURS

AHEAD = {
    "chat turn, encoded keys": 3.0,
    "chat turn, token lists": 2.0,
    **dict.fromkeys(("hot match", "match of", "lock and unlock", "chunk of", "evict", "bytes per leaf"), 1.0),
}
"""By how a row begins: so many times ahead of the fastest peer that does the same work is the bar."""

AT_MOST = {"the last quarter of chunks": 1.3, "evict one leaf of the most": 1.3}
"""Rows that are a ratio themselves: a cost that does not depend on what is there."""

SAME = {"tokens that hit": 0.01}
"""Rows in which sides must agree, or they did not do the same work: by so much at most they may differ."""

LARGE = {"evict", "leaves"}
"""Groups that fill large trees first: they get half of the rounds."""

Found = dict[str, dict[str, list[float]]]
"""By row and side: a figure for each round."""


def begins(row: str, table: dict[str, Any]) -> Any:
    """What a table says of a row; the longest beginning counts."""
    found = [each for each in table if row.startswith(each)]
    return table[max(found, key=len)] if found else None


class Sides:
    """The processes of the sides, which live as long as the comparison.

    What fills large trees has one of its own on each side, where nothing is left of other groups.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.scratch = register(HERE.parent, Path(stack.enter_context(tempfile.TemporaryDirectory())) / "here")
        self.running: dict[tuple[str, bool], Side] = {}
        stack.callback(lambda: [side.close() for side in self.running.values()])

    def run(self, side: str, **arguments: Any) -> dict[str, Any]:
        which = side, arguments["group"] in LARGE
        if which not in self.running:
            self.running[which] = Side(HERE.parent, self.scratch)
        try:
            return self.running[which].run("beside peers", side=side, **arguments)
        except Ended as error:
            del self.running[which]
            return {"skipped": str(error)}


def measure(
    running: Sides, machine: Machine, sides: list[str], groups: list[str], rounds: int, **composition: Any
) -> tuple[Found, dict[str, str]]:
    """The figures of one composition, and which sides were left out of what, and why."""
    found: Found = {}
    skipped: dict[str, str] = {}
    for group in groups:
        for number in range(max(1, rounds // 2) if group in LARGE else rounds):
            machine.look()
            for side in sides if number % 2 == 0 else sides[::-1]:
                if side in skipped or f"{side}, {group}" in skipped:
                    continue
                print(f"{composition['comps']}/{composition['page']} {group} {number + 1}: {side}", file=sys.stderr)
                answer = running.run(side, group=group, **composition)
                if why := answer.get("skipped"):
                    missing, _, rest = why.partition("Missing: ")
                    skipped[side if rest and not missing else f"{side}, {group}"] = rest or why
                for row, samples in answer.get("rows", {}).items():
                    figure = min(samples) if row.startswith("worst") else statistics.median(samples)
                    found.setdefault(row, {}).setdefault(side, []).append(figure)
    return found, skipped


def spread(figures: list[float]) -> dict[str, float]:
    return {"median": statistics.median(figures), "least": min(figures), "most": max(figures)}


def judged(row: str, by_side: dict[str, list[float]]) -> dict[str, Any]:
    """A row as it is told: each side's figure, and how far ours are ahead of the fastest peer with the same work."""
    figures = {side: spread(each) for side, each in by_side.items()}
    if row.startswith("worst"):  # other work on the machine only adds
        figures = {side: {**each, "median": each["least"]} for side, each in figures.items()}
    apart = {side: why for side in figures if (why := begins(row, NOT_THE_SAME.get(side, {})))}
    told: dict[str, Any] = {"row": row, "sides": figures, "not the same work": apart}
    most, differ = begins(row, AT_MOST), begins(row, SAME)
    peers = [side for side in figures if side not in OURS and side not in apart]
    ours = [side for side in figures if side in OURS]
    if most is not None:
        told |= {"at most": most, "met": {side: figures[side]["median"] <= most for side in ours}}
    elif differ is not None:
        told["differ by"] = {
            f"{side}, {peer}": figures[side]["median"] / figures[peer]["median"] - 1 for side in ours for peer in peers
        }
        told |= {"at most": differ, "met": {pair: abs(by) <= differ for pair, by in told["differ by"].items()}}
    elif peers:
        told["against"] = against = min(peers, key=lambda side: figures[side]["median"])
        told["bar"] = bar = begins(row, AHEAD)
        told["ahead"] = {side: _ahead(row, by_side[side], by_side[against]) for side in ours}
        if bar is not None:
            told["met"] = {side: each["median"] >= bar for side, each in told["ahead"].items()}
    return told


def _ahead(row: str, ours: list[float], theirs: list[float]) -> dict[str, float]:
    if row.startswith("worst"):
        return spread([min(theirs) / (min(ours) or 1)])
    return spread([their / (our or 1) for our, their in zip(ours, theirs, strict=False)])


def compare(
    sides: list[str], groups: list[str], comps: list[str], pages: list[int], rounds: int, sizes: dict[str, Any]
) -> dict[str, Any]:
    """All that is told, as JSON has it."""
    machine = Machine()
    told: dict[str, Any] = {"rounds": rounds, "results": [], "skipped": {}, "machine": machine.looks}
    with ExitStack() as stack:
        running = Sides(stack)
        for letters, page in product(comps, pages):
            found, skipped = measure(running, machine, sides, groups, rounds, comps=letters, page=page, sizes=sizes)
            rows = [judged(row, by_side) for row, by_side in found.items()]
            told["results"].append({"comps": letters, "page": page, "rows": rows})
            told["skipped"] |= {f"{letters}/{page}, {side}": why for side, why in skipped.items()}
    machine.look()
    return told


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What several runs told as one; a row that was measured again stands for the one before."""
    by_composition: dict[tuple[str, int], dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    looks: Looks = {}
    for told in runs:
        skipped |= told["skipped"]
        for name, figures in told.get("machine", {}).items():
            looks.setdefault(name, []).extend(figures)
        for result in told["results"]:
            rows = by_composition.setdefault((result["comps"], result["page"]), {})
            rows |= {row["row"]: row for row in result["rows"]}
    results = [
        {"comps": comps, "page": page, "rows": list(rows.values())} for (comps, page), rows in by_composition.items()
    ]
    return {"results": results, "skipped": skipped, "machine": looks}
