"""The budgets of rows, and how to hold them on a machine other than the one on which they were set.

Budgets are microseconds on one quiet machine. The peers were measured there as well. So this machine's slowdown is
known: the median of how many times slower each peer is here. The median is used because a busy machine slows each peer
differently. Of each side the fastest round counts, because other programs on a machine can only add time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.peers.sides import OURSELVES

OF = ("F", "FSM")
PAGE = 16

Pair = tuple[float, float]
"""The figure of F, and the figure of FSM."""


class Budget(NamedTuple):
    most: Pair
    there: dict[str, Pair]
    """What each peer took on the machine where the budget was set. Empty if the row is not a time."""
    beside: str = ""
    """The beginning of the peers' row, if the slowdown is read from another row."""


def _there(rust: Pair, python: Pair, vllm: Pair | None) -> dict[str, Pair]:
    return {"SGLang Rust": rust, "SGLang Python": python} | ({"vLLM": vllm} if vllm else {})


BUDGETS = {
    "chat turn, encoded keys": Budget((15, 22), _there((60, 90), (159, 261), (688, 1246))),
    "hot match of 1k tokens, us": Budget((1.5, 2), _there((4.3, 4.4), (15, 24), (134, 205))),
    "hot match of 128k tokens, with": Budget(
        (30, 35), _there((101, 80), (194, 196), (17055, 16575)), "hot match of 128k tokens, us"
    ),
    "match of 64 turns x 512, with": Budget(
        (20, 21), _there((30, 31), (401, 417), (4305, 4072)), "match of 64 turns x 512, us"
    ),
    "lock and unlock": Budget((7, 8), _there((12, 13), (187, 191), None)),
    "chunk of 2k": Budget((6, 8), _there((97, 130), (313, 705), (116, 320))),
    "evict 10 leaves": Budget((6, 8), _there((193, 239), (9010, 6278), (13, 12))),
    "evict one leaf of 50k": Budget((2.3, 2.3), _there((265, 265), (43447, 43447), (2.8, 2.8))),
    "bytes per leaf": Budget((800, 1000), {}),
}
"""By the beginning of our row's name."""


def slowdown(rows: dict[str, Any], budget: Budget, row: str, which: int) -> dict[str, float]:
    """How many times slower each peer is here than where the budget was set."""
    beside = next((each for name, each in rows.items() if name.startswith(budget.beside or row)), None)
    sides = {} if beside is None else beside["sides"]
    return {name: sides[name]["least"] / took[which] for name, took in budget.there.items() if name in sides}


def table(results: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line for each budget. A missed budget is in bold type."""
    for result in results:
        if result["comps"] not in OF or result["page"] != PAGE:
            continue
        which = OF.index(result["comps"])
        rows = {row["row"]: row for row in result["rows"]}
        for start, budget in BUDGETS.items():
            name = next((name for name in rows if name.startswith(start)), "")
            times = slowdown(rows, budget, start, which)
            if not name or OURSELVES not in rows[name]["sides"] or (not times and budget.there):
                continue
            here, most = rows[name]["sides"][OURSELVES]["least"], budget.most[which]
            there = here / statistics.median(times.values()) if times else here
            shown = f"{there:.3g}" if there <= most else f"**{there:.3g}**"
            by = " / ".join(f"{time:.2f}" for time in times.values())
            yield [name, result["comps"], f"{most:g}", f"{here:.3g}", by, shown]


HEAD = ["work", "components", "budget", "ours here", "slowdown of each peer here, times", "ours at the budget's speed"]
