"""prefixloom new-component: what it writes installs, is found, and passes the kit; what cannot be is refused."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from prefixloom.cli import main
from prefixloom.contract.hookspecs import API_VERSION
from prefixloom.testing import LAWS, ComponentCase, report_on


def written(name: str, into: Path) -> Path:
    assert main(["new-component", name, "--into", str(into)]) == 0
    return into / f"prefixloom-{name.replace('_', '-')}"


def loaded(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_what_is_written_keeps_every_law_that_needs_no_traffic_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written("far_off", tmp_path)
    module = loaded(folder / "prefixloom_far_off" / "__init__.py", "prefixloom_far_off", monkeypatch)
    options = {"name": "far_off", "sinks": 4, "window": 64, "layers": 1}
    case = ComponentCase(module.prefixloom_component().make, module.prefixloom_truth(options), effort=1)
    cheap = [law for law in LAWS if "fault" not in law.__name__ and "schedule" not in law.__name__]
    report = report_on(case, cheap)
    assert [(verdict.law, verdict.told) for verdict in report.broken] == []
    assert module.prefixloom_component().kind == "far_off"
    assert report.believed == (), "prefixloom_truth says all that there is to say of the layers"
    assert report.wasteful == ()
    assert module.prefixloom_api == API_VERSION
    told = "".join(path.read_text() for path in folder.rglob("*.*") if path.is_file())
    assert not re.search("(?<![a-z])ring(?![a-z])|RingComponent", told), "no name of the template is left"


def run(python: Path, *arguments: str, cwd: Path, path: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    call = [str(python), *arguments]
    return subprocess.run(call, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_it_installs_into_an_environment_and_its_own_tests_and_the_command_pass(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the build backend; the extra 'test' brings it")
    pytest.importorskip("pip", reason="it installs")
    folder = written("ring", tmp_path)
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    here = [entry for entry in sys.path if entry]
    site = tmp_path / "env" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    done = run(python, "-m", "pip", "install", *options, str(folder), cwd=tmp_path, path=here)
    assert done.returncode == 0, done.stderr
    assert (site / "prefixloom_ring" / "__init__.py").is_file()
    plugin = ["-p", "prefixloom.testing.pytest_plugin"]
    some = [*plugin, "-k", "law_no_slot"]  # that it keeps the others, the test above says
    done = run(python, "-m", "pytest", "-q", *some, str(folder / "tests"), cwd=folder / "tests", path=here)
    assert done.returncode == 0 and "passed" in done.stdout and "failed" not in done.stdout, done.stdout + done.stderr
    command = "import sys; from prefixloom.cli import main; sys.exit(main(['components']))"
    done = run(python, "-c", command, cwd=tmp_path, path=here)
    assert "prefixloom-ring" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Ring", "a component's kind is a lower-case word such as ring_kv, got 'Ring'"),
        ("class", "a lower-case word"),
        ("a-b", "a lower-case word"),
        ("ring_", "a lower-case word"),
        ("a__b", "a lower-case word"),
        ("full", "a package 'prefixloom_full' is installed already; give another name"),
        ("x" * 300, "cannot be written: File name too long\n"),
    ],
)
def test_a_name_that_cannot_be_is_refused_in_one_line_and_nothing_is_written(
    name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-component", name, "--into", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_it_prints_brings_pytest_along_and_runs_the_one_that_it_brought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An environment that has only prefixloom has no pytest; a bare ``pytest`` is then another environment's."""
    folder = written("path", tmp_path)
    out = capsys.readouterr().out
    assert f"pip install -e '{folder}[test]'\n" in out
    assert f"python -m pytest {folder}\n" in out
    assert "pip install -e '.[test]' && prefixloom conformance path && python -m pytest\n" in (
        folder / "README.md"
    ).read_text(encoding="utf-8")
    assert '\ntest = ["prefixloom[testing]"]\n' in (folder / "pyproject.toml").read_text(encoding="utf-8")


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written("path", tmp_path)
    assert main(["new-component", "path", "--into", str(tmp_path)]) == 2
    assert "exists; give another name, or another folder with --into" in capsys.readouterr().err


def test_where_nothing_can_be_written_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["new-component", "path", "--into", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == (
        f"prefixloom: {tmp_path / 'file' / 'prefixloom-path'} cannot be written: Not a directory\n"
    )
