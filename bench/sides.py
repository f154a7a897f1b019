"""Processes that measure, each with imports of its own: the prefixloom of one folder, or a peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = ("core", "plugins/full", "plugins/swa", "plugins/mamba", "plugins/hicache", "engine")


class Ended(RuntimeError):
    """The process that measures is gone."""


class Side:
    """A process that measures the prefixloom of one folder. What the path has besides is there for it as well."""

    def __init__(self, tree: Path, scratch: Path) -> None:
        paths = [scratch, *(tree / part for part in PARTS), HERE, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        )

    def run(self, workload: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(json.dumps([workload, arguments]), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise Ended(f"the process that measures ended with {self.process.wait()} in {workload}")
        return dict(json.loads(answer))

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


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
