"""Samples as medians with their spread, compared between two sides, and printed as a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Rows = dict[str, list[float]]
"""By row: samples. A row's name ends with its unit."""
Samples = dict[str, dict[str, Rows]]
"""By side, workload and row."""


def in_turn(sides: Mapping[str, Callable[[], float]], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """Return each side's figures of so many rounds. Each is as often first; the first ``warm`` rounds do not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + warm):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            figure = sides[name]()
            found[name] += [figure] if number >= warm else []
    return found


class Stopwatch:
    """CPU seconds of this thread inside of the calls that it counts. Calls between them count once."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._inside = False

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that makes the call and counts its time."""

        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return call(*args, **options)
            self._inside, begun = True, time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.spent += time.thread_time() - begun
                self._inside = False

        return timed


def spread(samples: list[float]) -> dict[str, float]:
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}


def summary(sides: Samples) -> list[dict[str, Any]]:
    """Return one entry per row: the spread of each side, and ``ratio``, the second side's median over the first's."""
    first, *others = sides.items()
    rows = []
    for workload, by_row in first[1].items():
        for row, samples in by_row.items():
            entry: dict[str, Any] = {"workload": workload, "row": row, first[0]: spread(samples)}
            for label, found in others:
                if other := found.get(workload, {}).get(row):
                    entry[label] = spread(other)
                    entry["ratio"] = entry[label]["median"] / (entry[first[0]]["median"] or 1)
            rows.append(entry)
    return rows


def table(rows: list[dict[str, Any]], sides: list[str]) -> str:
    """Return the summary as text: median (least-most). ``ratio`` is the other commit's median over ours."""
    lines = [f"{'':56}" + "".join(f"{side[:28]:>30}" for side in sides) + ("     ratio" if len(sides) > 1 else "")]
    for row in rows:
        cells = []
        for side in sides:
            each = row.get(side)
            cell = f"{each['median']:.2f} ({each['least']:.2f}-{each['most']:.2f})" if each else "-"
            cells.append(f"{cell:>30}")
        ratio = f"{row['ratio']:10.3f}" if "ratio" in row else ""
        lines.append(f"{row['workload'] + ': ' + row['row']:56}" + "".join(cells) + ratio)
    return "\n".join(lines)
