"""``python -m bench``: our own workloads, with medians and spread; against another commit, or beside the peers.

``python -m bench [WORKLOAD ...] [--rounds 5] [--against REV] [--peers] [--json]``

Each side is a process of its own and runs each workload in every round, in turn, so that what disturbs one disturbs the
other. The other commit is checked out into a temporary folder; both run this checkout's scripts. Compare medians in
one run, and look at the spread: what lies within it is no difference.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from workloads import USUAL, WORKLOADS, Rows  # noqa: E402  # the scripts import one another by their names

PARTS = ("core", "plugins/full", "plugins/swa", "plugins/mamba", "plugins/hicache", "engine")
Sides = dict[str, dict[str, Rows]]
"""By side and workload: the samples of each row."""


class Side:
    """A process that measures the prefixloom of one folder."""

    def __init__(self, tree: Path, scratch: Path) -> None:
        paths = [scratch, *(tree / part for part in PARTS), HERE]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        )

    def run(self, workload: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(workload, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process that measures ended with {self.process.wait()} in {workload}")
        return dict(json.loads(answer))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Another commit in a temporary folder."""
    root = HERE.parent
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(root), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def register(tree: Path, scratch: Path) -> Path:
    """What an installation of ``tree`` would tell of its plugins, so that it is found before any that is installed."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    info = scratch / f"prefixloom-{project['version']}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: prefixloom\nVersion: {project['version']}\n")
    points = project["entry-points"]["prefixloom"]
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    info.joinpath("entry_points.txt").write_text(f"[prefixloom]\n{lines}")
    return scratch


def measure(names: list[str], rounds: int, against: str | None) -> tuple[Sides, dict[str, str]]:
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
    return found, skipped


def peers(rounds: int, scratch: Path) -> tuple[dict[str, float], str]:
    """Medians of the harness of the peers, if it can be imported with what it drives; or why not."""
    missing = [name for name in ("peer_bench", "sgl_driver") if importlib.util.find_spec(name) is None]
    if missing:
        return {}, f"{' and '.join(missing)} cannot be imported: see docs/performance.md"
    out = scratch / "peers.json"
    drivers = [f"--driver={name}" for name in ("sgl-rust", "sgl-python", "vllm", "peer_driver:Sequences")]
    command = [sys.executable, "-m", "peer_bench", "--clock=cpu", "--pages=16", "--work=c", f"--reps={rounds}"]
    ran = subprocess.run([*command, *drivers, f"--out={out}"], capture_output=True, text=True)
    if ran.returncode or not out.exists():
        return {}, f"the harness ended with {ran.returncode}: {ran.stderr.strip()[-300:]}"
    return {row: us for row, us in json.loads(out.read_text()).items() if row.endswith(("turn", "hit_tokens_k"))}, ""


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


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", metavar="REV", help="another commit")
    parser.add_argument("--peers", action="store_true", help="the chat turn beside SGLang and vLLM, where importable")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    if given.rounds < 1:
        parser.error("--rounds takes a number from 1 up")
    sides, skipped = measure(given.workloads or list(USUAL), given.rounds, given.against)
    told: dict[str, Any] = {"rounds": given.rounds, "rows": summary(sides), "skipped": skipped}
    if given.peers:
        with tempfile.TemporaryDirectory() as scratch:
            told["peers"], why = peers(given.rounds, Path(scratch))
        if why:
            skipped["peers"] = why
    if given.json:
        print(json.dumps(told, indent=2))
        return 0
    print(table(told["rows"], list(sides)))
    for row, us in told.get("peers", {}).items():
        print(f"peers: {row:50} {us:.1f}")
    for name, why in skipped.items():
        print(f"skipped: {name}: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
