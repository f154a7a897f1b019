"""``python -m bench``: our own workloads, also beside another commit; or one comparison with the peers.

``python -m bench [WORKLOAD ...] [--rounds 5] [--against REV [--as-written]] [--json]``
``python -m bench --peers [SIDE ...] [--comps F,FS,FM,FSM] [--pages 1,16,64] [--rows GROUP,...] [--rounds 3] [--json]``

Each side is a process of its own. The sides take turns in every round, so that a disturbance of the machine hits both.
The other commit is checked out into a temporary folder; both sides run this checkout's benchmarks. With --as-written,
the other commit composes its caches with fuse=False: it then runs its sources as they are written. Compare medians only
within one run, and look at the spread: a difference smaller than the spread is none.

Beside the peers, the sides are ours (the installed plugins; in steps; with an idle host tier; with foreign components)
and those of SGLang and vLLM that can be imported. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.peers import rows, tables
from bench.peers.compare import compare, merged
from bench.peers.sides import SIDES
from bench.runner.figures import Samples, summary, table
from bench.runner.machine import MachineSpeed, describe
from bench.runner.side import ROOT, SideProcess, checkout
from bench.workloads.by_name import USUAL, WORKLOADS, path_of


def measure(
    names: list[str], rounds: int, against: str | None, as_written: bool, speed: MachineSpeed
) -> tuple[Samples, dict[str, str]]:
    """The samples of each side; and what was skipped, with the reason."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {"here": SideProcess(ROOT, scratch / "here")}
        stack.callback(sides["here"].close)
        if against is not None:
            tree = stack.enter_context(checkout(against))
            other = SideProcess(tree, scratch / "other", as_written=as_written)
            sides[f"{against} as written" if as_written else against] = other
            stack.callback(other.close)
        found: Samples = {label: {} for label in sides}
        skipped: dict[str, str] = {}
        for number in range(rounds):
            speed.read()
            for name in names:
                order = list(sides.items())
                for label, side in order if number % 2 == 0 else order[::-1]:
                    if f"{name}, {label}" in skipped:
                        continue
                    answer = side.run(path_of(name))
                    if "skipped" in answer:
                        skipped[f"{name}, {label}"] = f"{answer['error']}: {answer['skipped']}"
                    for row, samples in answer.get("rows", {}).items():
                        found[label].setdefault(name, {}).setdefault(row, []).extend(samples)
        speed.read()
    return found, skipped


def beside_peers(given: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The comparison as text: a new one, or one that was saved."""
    if given.read:
        result = merged([json.loads(path.read_text()) for path in given.read])
    else:
        sides = given.peers or list(SIDES)
        groups = given.rows.split(",") if given.rows else list(rows.GROUPS)
        if unknown := [side for side in sides if side not in SIDES and ":" not in side]:
            parser.error(f"no side {', '.join(unknown)}; there are {', '.join(SIDES)}, and module:Class")
        if unknown := set(groups) - set(rows.GROUPS):
            parser.error(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(rows.GROUPS)}")
        sizes = asdict(rows.TINY) if given.tiny else {}
        pages = [int(page) for page in given.pages.split(",")]
        result = compare(sides, groups, given.comps.split(","), pages, given.rounds or 3, sizes)
    if given.json:
        return json.dumps(result, indent=1)
    if given.markdown is None:
        return tables.terminal(result)
    if given.markdown != Path("-"):
        tables.write_into(given.markdown, tables.markdown(result))
        return f"written into {given.markdown}"
    return tables.markdown(result)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"any of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, help="default: 5; beside the peers 3")
    parser.add_argument("--against", metavar="REV", help="measure this commit as well")
    parser.add_argument("--as-written", action="store_true", help="compose the caches of REV with fuse=False")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    beside = parser.add_argument_group("beside the peers")
    beside.add_argument("--peers", nargs="*", metavar="SIDE", help="all sides, or these: names, or module:Class")
    beside.add_argument("--comps", default="F,FS,FM,FSM", help="F full attention, S a window, M a recurrent state")
    beside.add_argument("--pages", default="1,16,64", help="tokens of a page")
    beside.add_argument("--rows", help="groups of rows (default: all)")
    beside.add_argument("--tiny", action="store_true", help="small sizes: they only show that everything runs")
    beside.add_argument(
        "--read", nargs="*", type=Path, metavar="FILE", help="measure nothing; read what --json printed"
    )
    beside.add_argument(
        "--markdown",
        nargs="?",
        const=Path("-"),
        type=Path,
        metavar="FILE",
        help="print Markdown tables; with FILE, replace the tables in that file",
    )
    return parser


def main() -> int:
    parser = arguments()
    given = parser.parse_args()
    if given.rounds is not None and given.rounds < 1:
        parser.error("--rounds must be at least 1")
    if given.as_written and given.against is None:
        parser.error("--as-written needs --against REV")
    if given.peers is not None:
        if given.workloads or given.against:
            parser.error("--peers cannot be combined with workloads or --against")
        print(beside_peers(given, parser))
        return 0
    if unknown := set(given.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    rounds = given.rounds or 5
    speed = MachineSpeed()
    sides, skipped = measure(given.workloads or list(USUAL), rounds, given.against, given.as_written, speed)
    result: dict[str, Any] = {
        "rounds": rounds, "rows": summary(sides), "skipped": skipped, "machine": speed.readings
    }  # fmt: skip
    if given.json:
        print(json.dumps(result, indent=2))
        return 0
    print(table(result["rows"], list(sides)))
    for name, why in skipped.items():
        print(f"skipped: {name}: {why}")
    print(describe(speed.readings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
