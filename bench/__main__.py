"""``python -m bench``: our own workloads, with medians and spread; against another commit, or beside the peers.

``python -m bench [WORKLOAD ...] [--rounds 5] [--against REV] [--json]``
``python -m bench --peers [SIDE ...] [--comps F,FS,FM,FSM] [--pages 1,16,64] [--rows GROUP,...] [--rounds 3] [--json]``

Each side is a process of its own and runs each workload in every round, in turn, so that what disturbs one disturbs the
other. The other commit is checked out into a temporary folder; both run this checkout's scripts. Compare medians in
one run, and look at the spread: what lies within it is no difference.

Beside the peers, the sides are ours (the installed plugins; in steps; with a host tier that is idle; with a
stranger's components) and those of SGLang and vLLM that can be imported; see peers/ and docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from machine import Machine, in_words  # noqa: E402  # the scripts import one another by their names
from sides import Side, checkout, register  # noqa: E402
from workloads import USUAL, WORKLOADS, Rows  # noqa: E402

Sides = dict[str, dict[str, Rows]]
"""By side and workload: the samples of each row."""


def measure(names: list[str], rounds: int, against: str | None, machine: Machine) -> tuple[Sides, dict[str, str]]:
    """The samples, and what was skipped and why."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trees = {"here": HERE.parent}
        if against is not None:
            trees[against] = stack.enter_context(checkout(against))
        sides = {}
        for number, (label, tree) in enumerate(trees.items()):
            sides[label] = Side(tree, register(tree, scratch / str(number)))
            stack.callback(sides[label].close)
        found: Sides = {label: {} for label in sides}
        skipped: dict[str, str] = {}
        for number in range(rounds):
            machine.look()
            for name in names:
                order = list(sides.items())
                for label, side in order if number % 2 == 0 else order[::-1]:
                    if f"{name}, {label}" in skipped:
                        continue
                    answer = side.run(name)
                    if "skipped" in answer:
                        skipped[f"{name}, {label}"] = answer["skipped"]
                    for row, samples in answer.get("rows", {}).items():
                        found[label].setdefault(name, {}).setdefault(row, []).extend(samples)
        machine.look()
    return found, skipped


def summary(sides: Sides) -> list[dict[str, Any]]:
    """A row each: the median and the spread of each side, and how the second compares with the first."""
    first, *others = sides.items()
    rows = []
    for workload, by_row in first[1].items():
        for row, samples in by_row.items():
            told: dict[str, Any] = {"workload": workload, "row": row, first[0]: spread(samples)}
            for label, found in others:
                if other := found.get(workload, {}).get(row):
                    told[label] = spread(other)
                    told["ratio"] = told[label]["median"] / (told[first[0]]["median"] or 1)
            rows.append(told)
    return rows


def spread(samples: list[float]) -> dict[str, float]:
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}


def table(rows: list[dict[str, Any]], sides: list[str]) -> str:
    """As text. ``ratio``: the other commit's median over ours."""
    lines = [f"{'':56}" + "".join(f"{side[:20]:>30}" for side in sides) + ("     ratio" if len(sides) > 1 else "")]
    for row in rows:
        cells = []
        for side in sides:
            each = row.get(side)
            told = f"{each['median']:.2f} ({each['least']:.2f}-{each['most']:.2f})" if each else "-"
            cells.append(f"{told:>30}")
        ratio = f"{row['ratio']:10.3f}" if "ratio" in row else ""
        lines.append(f"{row['workload'] + ': ' + row['row']:56}" + "".join(cells) + ratio)
    return "\n".join(lines)


def beside_peers(given: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The comparison, or one that was saved, as text."""
    from peers import SIDES, rows, tables
    from peers.compare import compare, merged

    if given.read:
        told = merged([json.loads(path.read_text()) for path in given.read])
    else:
        sides = given.peers or list(SIDES)
        groups = given.rows.split(",") if given.rows else list(rows.GROUPS)
        if unknown := [side for side in sides if side not in SIDES and ":" not in side]:
            parser.error(f"no side {', '.join(unknown)}; there are {', '.join(SIDES)}, and module:Class")
        if unknown := set(groups) - set(rows.GROUPS):
            parser.error(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(rows.GROUPS)}")
        sizes = asdict(rows.TINY) if given.tiny else {}
        pages = [int(page) for page in given.pages.split(",")]
        told = compare(sides, groups, given.comps.split(","), pages, given.rounds or 3, sizes)
    if given.json:
        return json.dumps(told, indent=1)
    if given.markdown is None:
        return tables.terminal(told)
    if given.markdown != Path("-"):
        tables.into(given.markdown, tables.markdown(told))
        return f"written into {given.markdown}"
    return tables.markdown(told)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, help="5; beside the peers 3")
    parser.add_argument("--against", metavar="REV", help="another commit")
    parser.add_argument("--json", action="store_true")
    beside = parser.add_argument_group("beside the peers")
    beside.add_argument("--peers", nargs="*", metavar="SIDE", help="all sides, or these, by name or as module:Class")
    beside.add_argument("--comps", default="F,FS,FM,FSM", help="F full attention, S a window, M a recurrent state")
    beside.add_argument("--pages", default="1,16,64")
    beside.add_argument("--rows", help="groups of rows; all, if none are given")
    beside.add_argument("--tiny", action="store_true", help="sizes that only show that all of it runs")
    beside.add_argument("--read", nargs="*", type=Path, metavar="FILE", help="measure nothing; tell what --json saved")
    beside.add_argument(
        "--markdown",
        nargs="?",
        const=Path("-"),
        type=Path,
        metavar="FILE",
        help="as tables; FILE: in place of those that it has",
    )
    given = parser.parse_args()
    if given.rounds is not None and given.rounds < 1:
        parser.error("--rounds takes a number from 1 up")
    if given.peers is not None:
        if given.workloads or given.against:
            parser.error("--peers goes with neither workloads nor --against")
        print(beside_peers(given, parser))
        return 0
    if unknown := set(given.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    rounds = given.rounds or 5
    machine = Machine()
    sides, skipped = measure(given.workloads or list(USUAL), rounds, given.against, machine)
    told: dict[str, Any] = {"rounds": rounds, "rows": summary(sides), "skipped": skipped, "machine": machine.looks}
    if given.json:
        print(json.dumps(told, indent=2))
        return 0
    print(table(told["rows"], list(sides)))
    for name, why in skipped.items():
        print(f"skipped: {name}: {why}")
    print(in_words(machine.looks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
