"""The wheel: what it has to carry beside the code."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.places import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_every_package_of_the_wheel_says_that_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else mypy takes every name of the package for Any."""
    backend = pytest.importorskip("hatchling.build", reason="the build backend")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = [Path(path).name for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / backend.build_wheel(str(tmp_path))) as wheel:
        carried = set(wheel.namelist())
    assert packages and all(f"{package}/__init__.py" in carried for package in packages)
    assert [package for package in packages if f"{package}/py.typed" not in carried] == []
