"""``python -m bench``: it measures workloads, also beside another commit, and names what it could not run."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.runner import figures

ROOT = Path(__file__).resolve().parents[2]


def start(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bench", *arguments], cwd=root, capture_output=True, text=True)


def run(root: Path, *arguments: str) -> Any:
    ran = start(root, *arguments)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_every_row_has_a_median_between_its_least_and_its_most() -> None:
    result = run(ROOT, "bytecodes", "--rounds", "2", "--conversations", "20", "--json")
    assert len(result["rows"]) == 24
    for row in result["rows"]:
        here = row["here"]
        assert 0 < here["least"] <= here["median"] <= here["most"], row
    assert result["skipped"] == {}
    readings = result["machine"]
    assert list(readings) == ["loop iteration", "memory access"]
    assert all(len(each) == 3 and min(each) > 0 for each in readings.values())  # before each round, and after the last


@pytest.mark.outside("git")
@pytest.mark.slow
def test_other_commits_are_measured_with_their_own_sources(tmp_path: Path) -> None:
    """One commit executes a hundred more bytecodes to compose, another cannot compose, and a third does not fuse."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "tests")
    for part in ("bench", "core", "plugins", "engine"):
        shutil.copytree(ROOT / part, tree / part, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tree)
    (tree / "bench/workloads/by_name.py").write_text(
        "def bytecodes():\n"
        "    import prefixloom\n"
        "    return {'answer': [float(prefixloom.compose())]}\n"
        "WORKLOADS = USUAL = QUICK = {'bytecodes': f'{__name__}:bytecodes'}\n"
    )
    source = tree / "core/prefixloom/__init__.py"
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false"]

    def commit(tag: str, text: str) -> None:
        source.write_text(text)
        for command in (["add", "-A"], ["commit", "-qm", tag], ["tag", tag]):
            subprocess.run([*git, *command], check=True)

    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    commit("fused", "def compose(fuse=True):\n    return 3 if fuse else 5\n")
    commit("broken", "def compose():\n    raise NotImplementedError('not yet')\n")
    shutil.move(tree / "core", tree / "elsewhere")  # a commit may keep its packages in other folders
    project = tree / "pyproject.toml"
    project.write_text(project.read_text().replace('"core/prefixloom"', '"elsewhere/prefixloom"'))
    source = tree / "elsewhere/prefixloom/__init__.py"
    commit("moved", "def compose():\n    return 2\n")

    def against(*arguments: str) -> Any:
        return run(tree, "bytecodes", "--rounds", "1", "--json", "--against", *arguments)

    (row,) = against("fused")["rows"]
    assert (row["here"]["median"], row["fused"]["median"], row["ratio"]) == (2, 3, 1.5)
    (row,) = against("fused", "--as-written")["rows"]
    assert (row["fused as written"]["median"], row["ratio"]) == (5, 2.5)
    result = against("broken")
    assert result["skipped"] == {"bytecodes, broken": "NotImplementedError: not yet"}
    assert all("ratio" not in row for row in result["rows"])
    (why,) = against("moved", "--as-written")["skipped"].values()
    assert why.startswith("NoFuseOption: prefixloom.compose has no option fuse")
    left = subprocess.run([*git, "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert len(left.splitlines()) == 1


def test_the_ratio_is_the_other_commit_over_ours() -> None:
    sides = {"here": {"work": {"a, us": [1.0, 2.0, 9.0]}}, "old": {"work": {"a, us": [5.0, 4.0, 3.0]}}}
    (row,) = figures.summary(sides)
    assert row["here"] == {"median": 2.0, "least": 1.0, "most": 9.0}
    assert row["ratio"] == 2.0
    assert "2.000" in figures.table([row], list(sides))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nothing"], "no workload nothing"),
        (["--as-written"], "--as-written needs --against REV"),
        pytest.param(["--against", "nothing"], "--against: no commit nothing", marks=pytest.mark.outside("git")),
        (["--tiny"], "need --peers"),
        (["scale", "--leaves"], "no option"),
        (["scale", "--leavs", "3"], "scale has no option leavs; it has comps, leaves, requests, lengths"),
        (["chat_turn", "scale", "--leaves", "3"], "chat_turn has no option leaves"),
        (["--peers", "nobody"], "no side nobody; there are prefixloom"),
        (["--peers", "--rows", "none"], "no rows none; there are chat"),
        (["--peers", "--against", "HEAD"], "--peers cannot be combined"),
        (["--peers", "--pages", "16,x"], "--pages are numbers of tokens such as 1,16, got '16,x'"),
        (["--peers", "--comps", "F,Z"], "no composition Z: write letters of F, S and M"),
        (["--peers", "--read", "nothing.json"], "--read: [Errno 2] No such file"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(arguments: list[str], reason: str) -> None:
    ran = start(ROOT, *arguments)
    assert ran.returncode == 2
    assert reason in ran.stderr


def test_help_for_a_workload_whose_package_is_absent_names_the_package() -> None:
    """A side is a process of its own, which has the packages of the tree on its path. The command has not."""
    hidden = "import sys; sys.modules['prefixloom_vllm'] = None; sys.argv = ['bench', 'vllm_copies', '--help']"
    script = f"{hidden}\nfrom bench.__main__ import main\nmain()"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    assert "vllm_copies needs what is not here" in ran.stderr and "prefixloom_vllm" in ran.stderr


EVERY_WORKLOAD = """
import importlib, inspect
from bench.engines.stand_ins import EngineUnavailable
from bench.workloads.by_name import WORKLOADS
for name, path in WORKLOADS.items():
    module, _, function = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except EngineUnavailable:
        continue  # it needs an engine that is not installed here
    assert inspect.signature(found).return_annotation == "Rows" and function == name, path
"""


def test_every_workload_is_a_function_of_rows_whose_parameters_are_options() -> None:
    """In a process of its own, since stand-ins take the place of packages that other tests look for."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # distributions that are not installed too
    call = [sys.executable, "-c", EVERY_WORKLOAD]
    ran = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_what_a_watcher_calls_exists() -> None:
    from bench.serving.watching import METHODS

    for kind, methods in METHODS.items():
        assert all(callable(getattr(owner, name)) for owner, name in methods()), kind


def test_only_one_module_of_the_workloads_uses_internals_of_prefixloom() -> None:
    for source in sorted((ROOT / "bench").rglob("*.py")):
        public = {"", "storage", "storage.checksum"}
        if source.parent.name == "engines":  # adapters keep the contracts of kit and lab, and ours shows its books
            public |= {"lab.beside.peer", "lab.replay", "testing.foreign.contract", "testing.inside"}
        public |= {"lab", "lab.bounds", "lab.recordings.recording"}
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "prefixloom":
                assert (node.module or "").partition(".")[2] in public, f"{source} imports {node.module}"
