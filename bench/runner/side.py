"""Processes that measure. Each imports the prefixloom of one source tree, and this checkout's benchmarks.

A source tree may be another commit: its folders and its plugins are read from its own ``pyproject.toml``.
"""

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

ROOT = Path(__file__).resolve().parents[2]
"""This checkout."""


class SideProcessEnded(RuntimeError):
    """The process that measures has ended without an answer."""


class SideProcess:
    """A process that measures the prefixloom of ``tree``.

    Its import path begins with the tree's packages; the entries of ``PYTHONPATH`` follow. ``scratch`` is an empty
    folder for files about the tree's plugins. ``as_written`` composes every cache with ``fuse=False``.
    """

    def __init__(self, tree: Path, scratch: Path, *, as_written: bool = False) -> None:
        project = _project(tree)
        register(project["project"], scratch)
        paths = [scratch, *sources_of(tree), ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.runner.worker", *["--as-written"] * as_written],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        )

    def run(self, function: str, *, collector: bool = False, **arguments: Any) -> dict[str, Any]:
        """Call ``module:function`` there. The answer has either ``rows``, or ``skipped`` with the reason.

        Without ``collector``, the garbage collector does not run meanwhile.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(json.dumps([function, collector, arguments]), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise SideProcessEnded(f"the process that measures ended with {self.process.wait()} in {function}")
        return dict(json.loads(answer))

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def is_commit(revision: str) -> bool:
    """Return whether this checkout has a commit of that name."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--quiet", "--verify", "--end-of-options", f"{revision}^{{commit}}"]
    return subprocess.run(git, stdout=subprocess.DEVNULL).returncode == 0


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Check out another commit into a temporary folder, which is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def sources_of(tree: Path) -> list[Path]:
    """Return the folders in which the packages of a tree's distributions lie."""
    found: dict[Path, None] = {}
    for folder in (
        tree,
        *(each.parent for place in ("*", "plugins/*") for each in tree.glob(f"{place}/pyproject.toml")),
    ):
        for package in _project(folder)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            found[(folder / package).parent] = None
    return list(found)


def _project(tree: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads((tree / "pyproject.toml").read_text())


def register(project: dict[str, Any], scratch: Path) -> None:
    """Write what an installation would write about the plugins, so that these are found before installed ones."""
    info = scratch / f"prefixloom-{project['version']}.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: prefixloom\nVersion: {project['version']}\n")
    points = project["entry-points"]["prefixloom"]
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    info.joinpath("entry_points.txt").write_text(f"[prefixloom]\n{lines}")
