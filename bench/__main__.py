"""``python -m bench``: our own workloads, also beside another commit; or one comparison with the peers.

``python -m bench [WORKLOAD ...] [--rounds 5] [--against REV [--as-written]] [--json] [--OPTION VALUE ...]``
``python -m bench WORKLOAD --help``
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
import ast
import inspect
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
from bench.runner.side import ROOT, SideProcess, checkout, is_commit
from bench.runner.worker import function_of
from bench.workloads.by_name import QUICK, USUAL, WORKLOADS


def measure(given: argparse.Namespace, options: dict[str, Any], speed: MachineSpeed) -> tuple[Samples, dict[str, str]]:
    """Return the samples of each side; and what was skipped, with the reason."""
    names = given.workloads or list(USUAL)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {"here": SideProcess(ROOT, scratch / "here")}
        stack.callback(sides["here"].close)
        if given.against is not None:
            tree = stack.enter_context(checkout(given.against))
            other = SideProcess(tree, scratch / "other", as_written=given.as_written)
            sides[f"{given.against} as written" if given.as_written else given.against] = other
            stack.callback(other.close)
        found: Samples = {label: {} for label in sides}
        skipped: dict[str, str] = {}
        for number in range(rounds_of(given)):
            speed.read()
            for name in names:
                order = list(sides.items())
                for label, side in order if number % 2 == 0 else order[::-1]:
                    if f"{name}, {label}" in skipped:
                        continue
                    answer = side.run(WORKLOADS[name], collector=name not in QUICK, **options)
                    if "skipped" in answer:
                        skipped[f"{name}, {label}"] = f"{answer['error']}: {answer['skipped']}"
                    for row, samples in answer.get("rows", {}).items():
                        found[label].setdefault(name, {}).setdefault(row, []).extend(samples)
        speed.read()
    return found, skipped


def rounds_of(given: argparse.Namespace) -> int:
    return given.rounds or (5 if set(given.workloads) <= set(QUICK) else 1)


def options_of(given: argparse.Namespace, left: list[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the options of workloads: ``--leaves 1000`` is ``leaves=1000``, and ``--comps F,FS`` a text."""
    found: dict[str, Any] = {}
    if given.peers is None:  # options that the comparison has as well
        left += [
            each for name in ("comps", "pages") if (value := getattr(given, name)) for each in (f"--{name}", value)
        ]
    for name, value in zip(left[::2], [*left[1::2], None], strict=False):
        if not name.startswith("--") or value is None:
            parser.error(f"{name} is no option with a value")
        try:
            found[name[2:].replace("-", "_")] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name[2:].replace("-", "_")] = value
    return found


def check_options(names: list[str], options: dict[str, Any], parser: argparse.ArgumentParser) -> None:
    """Refuse an option that a workload has not. What cannot be imported here says so where it is measured."""
    for name in names:
        try:
            known = inspect.signature(function_of(WORKLOADS[name])).parameters
        except ImportError:
            continue
        if unknown := options.keys() - known.keys():
            parser.error(f"{name} has no option {', '.join(sorted(unknown))}; it has {', '.join(known)}")


def beside_peers(given: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Return the comparison as text: a new one, or one that was saved."""
    if given.read:
        try:
            result = merged([json.loads(path.read_text()) for path in given.read])
        except (OSError, ValueError) as error:
            parser.error(f"--read: {error}")
    else:
        sides = given.peers or list(SIDES)
        groups = given.rows.split(",") if given.rows else list(rows.GROUPS)
        if unknown := [side for side in sides if side not in SIDES and ":" not in side]:
            parser.error(f"no side {', '.join(unknown)}; there are {', '.join(SIDES)}, and module:Class")
        if unknown := set(groups) - set(rows.GROUPS):
            parser.error(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(rows.GROUPS)}")
        sizes = asdict(rows.TINY) if given.tiny else {}
        comps, pages = (given.comps or "F,FS,FM,FSM").split(","), (given.pages or "1,16,64").split(",")
        if unknown := [each for each in comps if not each or set(each) - set("FSM")]:
            parser.error(f"no composition {', '.join(unknown)}: write letters of F, S and M")
        if not all(page.isdecimal() and int(page) for page in pages):
            parser.error(f"--pages are numbers of tokens such as 1,16, got {given.pages!r}")
        result = compare(sides, groups, comps, list(map(int, pages)), given.rounds or 3, sizes)
    if given.json:
        return json.dumps(result, indent=1)
    if given.markdown is not None:
        tables.write_into(given.markdown, tables.markdown(result))
        return f"written into {given.markdown}"
    return tables.markdown(result)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"any of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, help="default: 5; beside the peers 3; 1 of what takes minutes")
    parser.add_argument("--against", metavar="REV", help="measure this commit as well")
    parser.add_argument("--as-written", action="store_true", help="compose the caches of REV with fuse=False")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    beside = parser.add_argument_group("beside the peers")
    beside.add_argument("--peers", nargs="*", metavar="SIDE", help="all sides, or these: names, or module:Class")
    beside.add_argument("--comps", help="of F, a window S and a recurrent state M (default: F,FS,FM,FSM)")
    beside.add_argument("--pages", help="tokens of a page (default: 1,16,64)")
    beside.add_argument("--rows", help="groups of rows (default: all)")
    beside.add_argument("--tiny", action="store_true", help="small sizes: they only show that everything runs")
    beside.add_argument(
        "--read", nargs="*", type=Path, metavar="FILE", help="measure nothing; read what --json printed"
    )
    beside.add_argument("--markdown", type=Path, metavar="FILE", help="replace the tables in this file")
    return parser


def main() -> int:
    parser = arguments()
    if len(sys.argv) == 3 and sys.argv[1] in WORKLOADS and sys.argv[2] in ("-h", "--help"):
        try:
            function = function_of(WORKLOADS[sys.argv[1]])
        except ImportError as error:
            parser.error(f"{sys.argv[1]} needs what is not here: {error}")
        print(f"{sys.argv[1]}{inspect.signature(function)}\n\n{inspect.getdoc(inspect.getmodule(function))}")
        return 0
    given, left = parser.parse_known_args()
    options = options_of(given, left, parser)
    if given.rounds is not None and given.rounds < 1:
        parser.error("--rounds must be at least 1")
    if given.as_written and given.against is None:
        parser.error("--as-written needs --against REV")
    if given.peers is None and (given.read or given.rows or given.tiny or given.markdown):
        parser.error("--rows, --tiny, --read and --markdown need --peers")
    if given.peers is not None:
        if given.workloads or given.against or options:
            parser.error("--peers cannot be combined with workloads, their options or --against")
        print(beside_peers(given, parser))
        return 0
    if unknown := set(given.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    if given.against is not None and not is_commit(given.against):
        parser.error(f"--against: no commit {given.against}")
    if options:
        check_options(given.workloads or list(USUAL), options, parser)
    speed = MachineSpeed()
    sides, skipped = measure(given, options, speed)
    result: dict[str, Any] = {
        "rounds": rounds_of(given), "rows": summary(sides), "skipped": skipped, "machine": speed.readings
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
