"""``python -m bench``: it measures what it says, beside another commit, and tells what it could not run."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module("bench.__main__")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("bench", "workloads", "sides", "machine")]:
        del sys.modules[name]


def run(root: Path, *arguments: str) -> Any:
    ran = subprocess.run([sys.executable, "-m", "bench", *arguments], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_every_row_has_a_median_between_its_least_and_its_most() -> None:
    told = run(ROOT, "slot_kernels", "--rounds", "2", "--json")
    assert len(told["rows"]) == 10
    for row in told["rows"]:
        here = row["here"]
        assert 0 < here["least"] <= here["median"] <= here["most"], row
    assert told["skipped"] == {}
    looks = told["machine"]
    assert list(looks) == ["a turn of a loop", "a hop in memory"]
    assert all(len(each) == 3 and min(each) > 0 for each in looks.values())  # before each round, and after the last


def test_two_commits_are_measured_each_with_its_own_sources(tmp_path: Path) -> None:
    """The second commit takes a hundred bytecodes less to name tokens, and the third cannot do it at all."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "tests")
    for part in ("bench", "core", "plugins", "engine"):
        shutil.copytree(ROOT / part, tree / part, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tree)
    source = tree / "core/prefixloom/sequence.py"
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]

    def commit(tag: str, text: str) -> None:
        source.write_text(text)
        for command in (["add", "-A"], ["commit", "-qm", tag], ["tag", tag]):
            subprocess.run([*git, *command], check=True)

    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    plain = source.read_text()
    naming = '        """Name the tokens that follow the named ones."""\n'
    assert naming in plain
    commit("slow", plain.replace(naming, naming + "        for _ in range(100): pass\n"))
    commit("broken", plain.replace(naming, naming + "        raise NotImplementedError('not yet')\n"))
    source.write_text(plain)

    told = run(tree, "bytecodes", "--rounds", "1", "--against", "slow", "--json")
    rows = {row["row"]: row for row in told["rows"]}
    append = rows["F append, bytecodes"]
    assert append["slow"]["median"] > append["here"]["median"] + 100
    assert append["ratio"] > 2
    assert rows["F close, bytecodes"]["ratio"] == 1

    told = run(tree, "bytecodes", "--rounds", "1", "--against", "broken", "--json")
    assert told["skipped"] == {"bytecodes, broken": "NotImplementedError: not yet"}
    assert all("ratio" not in row for row in told["rows"])
    left = subprocess.run([*git, "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert len(left.splitlines()) == 1


def test_the_ratio_is_the_other_commit_over_ours(bench: ModuleType) -> None:
    sides = {"here": {"work": {"a, us": [1.0, 2.0, 9.0]}}, "old": {"work": {"a, us": [5.0, 4.0, 3.0]}}}
    (row,) = bench.summary(sides)
    assert row["here"] == {"median": 2.0, "least": 1.0, "most": 9.0}
    assert row["ratio"] == 2.0
    assert "2.000" in bench.table([row], list(sides))


def test_an_unknown_workload_is_refused_before_anything_runs() -> None:
    ran = subprocess.run([sys.executable, "-m", "bench", "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "no workload nothing" in ran.stderr
